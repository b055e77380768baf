"""Differentiable ops of every shape, made with customops or with torch.library, and what each of them computes.

An op is defined by a function that takes a `Maker`, and returns a `Program`: a function of tensors that calls the op,
and the same one in plain torch operations, whose derivatives are torch's own. Kernels are plain torch, too; autograd
does not look into them, and the formulas are written by hand.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from customops import Registry

Fn = Callable[..., Any]


class Program(NamedTuple):
    """Two functions of the same tensors, which return a tensor or a tuple of them."""

    op: Fn
    reference: Fn
    #: The shapes of the tensors.
    shapes: tuple[tuple[int, ...], ...] = ((3,), (3,))

    def inputs(self, batch: tuple[int, ...] = ()) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(1)
        return tuple(0.5 + torch.rand(*batch, *shape, dtype=torch.double, generator=generator) for shape in self.shapes)


class Maker:
    """Defines ops with customops. Rules that say the same to both libraries go by the names they have there."""

    def __init__(self, registry: Registry, namespace: str) -> None:
        self.registry, self.namespace = registry, namespace

    def __call__(
        self,
        kernel: Fn,
        *,
        backward: Fn | None = None,
        jvp: Fn | None = None,
        setup_context: Fn | None = None,
        again: Fn | None = None,
        fake: Fn | None = None,
        vmap: str | Fn | None = None,
        options: dict[str, Any] | None = None,
        **definition: Any,
    ) -> Any:
        """Define an op.

        Args:
            kernel: named as the op is.
            again: a function to be derived, for ops whose kernel is none.
            options: of register_autograd and register_jvp.
            **definition: options of custom_op.
        """
        op = self.define(kernel, {"mutates_args": (), **definition})
        if fake is not None:
            op.register_fake(fake)
        if backward is not None:
            self.differentiate(op, backward, jvp, setup_context, again or kernel, options or {})
        if vmap is not None:
            self.batch(op, vmap)
        return op

    def define(self, kernel: Fn, definition: dict[str, Any]) -> Any:
        return self.registry.custom_op(f"{self.namespace}::{kernel.__name__}", kernel, **definition)

    def differentiate(
        self, op: Any, backward: Fn, jvp: Fn | None, setup_context: Fn | None, again: Fn, options: dict[str, Any]
    ) -> None:
        op.register_autograd(backward, setup_context=setup_context, **options)
        if jvp is not None:
            op.register_jvp(jvp, setup_context=setup_context, **options)

    def batch(self, op: Any, vmap: str | Fn) -> None:
        op.register_vmap(vmap if isinstance(vmap, str) else functools.partial(vmap, op))


class MakerFromFunctions(Maker):
    """Defines ops with customops, and leaves their formulas to `register_autograd_from`."""

    def differentiate(
        self, op: Any, backward: Fn, jvp: Fn | None, setup_context: Fn | None, again: Fn, options: dict[str, Any]
    ) -> None:
        op.register_autograd_from(again)


class TorchMaker(Maker):
    """Defines ops with torch.library, which has no rule for forward mode, and none of the options.

    That a result has no gradient can be said in setup_context there.
    """

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace

    def define(self, kernel: Fn, definition: dict[str, Any]) -> Any:
        known = {key: value for key, value in definition.items() if key not in ("differentiable", "nondiff_args")}
        op = torch.library.custom_op(f"{self.namespace}::{kernel.__name__}", kernel, **known)
        self.flags = definition.get("differentiable", True)
        if self.flags is False:
            self.differentiate(op, lambda ctx, grad: None, None, None, kernel, {})
        return op

    def differentiate(
        self, op: Any, backward: Fn, jvp: Fn | None, setup_context: Fn | None, again: Fn, options: dict[str, Any]
    ) -> None:
        if self.flags is not True:
            setup_context = functools.partial(set_up_flags, self.flags, setup_context)
        op.register_autograd(backward, setup_context=setup_context)

    def batch(self, op: Any, vmap: str | Fn) -> None:
        """Without a rule torch calls the op once for each element, as "sequential" does."""
        if vmap != "sequential":
            op.register_vmap(functools.partial(in_front if isinstance(vmap, str) else vmap, op))


def set_up_flags(flags: Any, setup_context: Fn | None, ctx: Any, inputs: Any, output: Any) -> None:
    outputs = output if isinstance(output, tuple) else (output,)
    flags = (flags,) * len(outputs) if isinstance(flags, bool) else flags
    ctx.mark_non_differentiable(*(each for each, flag in zip(outputs, flags, strict=True) if not flag))
    if setup_context is not None:
        setup_context(ctx, inputs, output)


def in_front(op: Any, info: Any, in_dims: tuple[Any, ...], *args: Any, **kwargs: Any) -> Any:
    """The batching rule of an op for any leading dimensions."""

    def move(value: Any, dim: Any) -> Any:
        if isinstance(value, list):
            return [move(*pair) for pair in zip(value, dim, strict=True)]
        if dim is not None:
            return value.movedim(dim, 0)
        return value.expand(info.batch_size, *value.shape) if isinstance(value, Tensor) else value

    result = op(*map(move, args, in_dims), **kwargs)
    return result, tree_map(lambda x: 0 if isinstance(x, Tensor) else None, result)


def save(ctx: Any, *tensors: Tensor | None) -> None:
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)


def save_all(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    save(ctx, *inputs)


def like_first(*args: Any, **kwargs: Any) -> Tensor:
    """The fake of most of them."""
    first = args[0]
    return torch.empty_like(first[0] if isinstance(first, list) else first)


def total(values: Sequence[Tensor]) -> Tensor:
    return functools.reduce(torch.add, values)


# What goes in ---------------------------------------------------------------------------------------------------


def one(make: Maker) -> Program:
    """One tensor"""

    def cube(x: Tensor) -> Tensor:
        return x * x * x

    def change(ctx: Any, change: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x * x * change

    op = make(
        cube,
        backward=change,
        jvp=change,
        setup_context=save_all,
        fake=lambda x: torch.empty_like(x),
        vmap="expand_dims",
    )
    return Program(op, cube, ((3,),))


def two(make: Maker) -> Program:
    """Two tensors"""

    def wave(x: Tensor, y: Tensor) -> Tensor:
        return x * y.sin()

    def backward(ctx: Any, grad: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return grad * y.sin(), grad * x * y.cos()

    def jvp(ctx: Any, x_tangent: Tensor, y_tangent: Tensor) -> Tensor:
        x, y = ctx.saved_tensors
        return x_tangent * y.sin() + x * y.cos() * y_tangent

    op = make(wave, backward=backward, jvp=jvp, setup_context=save_all, fake=like_first, vmap="broadcast_all")
    return Program(op, wave)


def four(make: Maker) -> Program:
    """Four tensors, and a batching rule of its own"""

    def blend(x: Tensor, y: Tensor, z: Tensor, w: Tensor) -> Tensor:
        return x * y + z * w * w

    def backward(ctx: Any, grad: Tensor) -> Any:
        x, y, z, w = ctx.saved_tensors
        return grad * y, grad * x, grad * w * w, grad * 2 * z * w

    def jvp(ctx: Any, tx: Tensor, ty: Tensor, tz: Tensor, tw: Tensor) -> Tensor:
        x, y, z, w = ctx.saved_tensors
        return tx * y + x * ty + tz * w * w + 2 * z * w * tw

    op = make(blend, backward=backward, jvp=jvp, setup_context=save_all, fake=like_first, vmap=in_front)
    return Program(op, blend, ((3,),) * 4)


def scalars(make: Maker) -> Program:
    """Numbers with defaults, and no batching rule"""

    def power(x: Tensor, n: int = 3, by: float = 2.0, flip: bool = False) -> Tensor:
        return (-by if flip else by) * x**n

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.n, by, flip = inputs
        ctx.by = -by if flip else by
        save(ctx, x)

    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.by * ctx.n * ctx.saved_tensors[0] ** (ctx.n - 1), None, None, None

    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return tangent * ctx.by * ctx.n * ctx.saved_tensors[0] ** (ctx.n - 1)  # type: ignore[no-any-return]

    op = make(power, backward=backward, jvp=jvp, setup_context=setup_context, fake=like_first)
    return Program(lambda x, y: op(x) + op(y, 4, flip=True), lambda x, y: power(x) + power(y, 4, flip=True))


def broadcast(make: Maker) -> Program:
    """Two tensors that are broadcast"""

    def spread(x: Tensor, y: Tensor) -> Tensor:
        return x * y.exp()

    def backward(ctx: Any, grad: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return (grad * y.exp()).sum_to_size(x.shape), (grad * x * y.exp()).sum_to_size(y.shape)

    def jvp(ctx: Any, x_tangent: Tensor, y_tangent: Tensor) -> Tensor:
        x, y = ctx.saved_tensors
        return x_tangent * y.exp() + x * y.exp() * y_tangent

    op = make(
        spread,
        backward=backward,
        jvp=jvp,
        setup_context=save_all,
        fake=lambda x, y: x.new_empty(torch.broadcast_shapes(x.shape, y.shape)),
        vmap="sequential",
    )
    return Program(op, spread, ((2, 1), (3,)))


def complex_numbers(make: Maker) -> Program:
    """A complex tensor and a real one"""

    def rotate(z: Tensor, w: Tensor) -> Tensor:
        return z * z * w

    def backward(ctx: Any, grad: Tensor) -> Any:
        z, w = ctx.saved_tensors
        return grad * (2 * z * w).conj(), (grad * (z * z).conj()).real

    def jvp(ctx: Any, z_tangent: Tensor, w_tangent: Tensor) -> Tensor:
        z, w = ctx.saved_tensors
        return 2 * z * w * z_tangent + z * z * w_tangent

    op = make(rotate, backward=backward, jvp=jvp, setup_context=save_all, fake=like_first, vmap="broadcast_all")

    def call(fn: Fn, x: Tensor, y: Tensor) -> Tensor:
        return torch.view_as_real(fn(torch.complex(x, y), y))

    return Program(functools.partial(call, op), functools.partial(call, rotate))


def index(make: Maker) -> Program:
    """A tensor, and one of integers"""

    def pick(x: Tensor, at: Tensor) -> Tensor:
        return x.gather(-1, at).exp()

    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        save(ctx, *inputs, output)

    def backward(ctx: Any, grad: Tensor) -> Any:
        x, at, output = ctx.saved_tensors
        return torch.zeros_like(x).scatter_add(-1, at, grad * output), None

    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        _, at, output = ctx.saved_tensors
        return tangent.gather(-1, at) * output  # type: ignore[no-any-return]

    op = make(pick, backward=backward, jvp=jvp, setup_context=setup_context, fake=like_first, vmap="broadcast_all")

    def call(fn: Fn, x: Tensor) -> Tensor:
        return fn(x, torch.arange(3) // 2 * 2)

    return Program(functools.partial(call, op), functools.partial(call, pick), ((3,),))


def tensor_list(make: Maker) -> Program:
    """A list"""

    def chain(xs: list[Tensor]) -> Tensor:
        return total([x**2 * (i + 1) for i, x in enumerate(xs)])

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        save(ctx, *inputs[0])

    def backward(ctx: Any, grad: Tensor) -> Any:
        return [grad * 2 * x * (i + 1) for i, x in enumerate(ctx.saved_tensors)]

    def jvp(ctx: Any, tangents: list[Tensor]) -> Tensor:
        return total([2 * x * t * (i + 1) for i, (x, t) in enumerate(zip(ctx.saved_tensors, tangents, strict=True))])

    op = make(chain, backward=backward, jvp=jvp, setup_context=setup_context, fake=like_first, vmap="broadcast_all")
    return Program(lambda *xs: op(list(xs)), lambda *xs: chain(list(xs)), ((3,),) * 3)


def two_lists(make: Maker) -> Program:
    """Two lists and a tensor"""

    def dot(xs: list[Tensor], ys: list[Tensor], z: Tensor) -> Tensor:
        return total([x * y.exp() for x, y in zip(xs, ys, strict=True)]) * z

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        xs, ys, z = inputs
        save(ctx, *xs, *ys, z)

    def split(ctx: Any) -> Any:
        *both, z = ctx.saved_tensors
        half = len(both) // 2
        return both[:half], both[half:], z

    def backward(ctx: Any, grad: Tensor) -> Any:
        xs, ys, z = split(ctx)
        of_xs = [grad * z * y.exp() for y in ys]
        return of_xs, [g * x for g, x in zip(of_xs, xs, strict=True)], grad * dot(xs, ys, torch.ones_like(z))

    def jvp(ctx: Any, x_tangents: list[Tensor], y_tangents: list[Tensor], z_tangent: Tensor) -> Tensor:
        xs, ys, z = split(ctx)
        terms = zip(xs, ys, x_tangents, y_tangents, strict=True)
        change = total([(tx + x * ty) * y.exp() for x, y, tx, ty in terms])
        return change * z + dot(xs, ys, torch.ones_like(z)) * z_tangent

    op = make(
        dot,
        backward=backward,
        jvp=jvp,
        setup_context=setup_context,
        fake=lambda xs, ys, z: torch.empty_like(z),
        vmap="expand_dims",
    )

    def call(fn: Fn, x: Tensor, y: Tensor) -> Tensor:
        return fn([x, y], [y, x * x], y)

    return Program(functools.partial(call, op), functools.partial(call, dot))


def optional(make: Maker) -> Program:
    """An optional tensor, given and left out"""

    def shift(x: Tensor, bias: Optional[Tensor] = None, by: float = 2.0) -> Tensor:
        return x.exp() * by if bias is None else x.exp() * bias * by

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, bias, ctx.by = inputs
        save(ctx, x, bias)

    def backward(ctx: Any, grad: Tensor) -> Any:
        x, bias = ctx.saved_tensors
        outer = grad * x.exp() * ctx.by
        return (outer, None, None) if bias is None else (outer * bias, outer, None)

    def jvp(ctx: Any, x_tangent: Tensor, bias_tangent: Optional[Tensor], _: None) -> Tensor:
        x, bias = ctx.saved_tensors
        change = x_tangent if bias is None else x_tangent * bias + bias_tangent
        return change * x.exp() * ctx.by  # type: ignore[no-any-return]

    op = make(shift, backward=backward, jvp=jvp, setup_context=setup_context, fake=like_first, vmap="broadcast_all")

    def call(fn: Fn, x: Tensor, y: Tensor) -> Tensor:
        return fn(x) + fn(x, None, 3.0) + fn(x, y) + fn(x, bias=y, by=4.0)

    return Program(functools.partial(call, op), functools.partial(call, shift))


def list_with_none(make: Maker) -> Program:
    """A list in which some are None"""

    def gaps(xs: list[Optional[Tensor]], y: Tensor) -> Tensor:
        return total([x * x * y for x in xs if x is not None])

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        xs, y = inputs
        save(ctx, y, *xs)

    def backward(ctx: Any, grad: Tensor) -> Any:
        y, *xs = ctx.saved_tensors
        squares = total([x * x for x in xs if x is not None])
        return [None if x is None else grad * 2 * x * y for x in xs], grad * squares

    def jvp(ctx: Any, tangents: list[Optional[Tensor]], y_tangent: Tensor) -> Tensor:
        y, *xs = ctx.saved_tensors
        pairs = [(x, t) for x, t in zip(xs, tangents, strict=True) if x is not None]
        return total([2 * x * t * y + x * x * y_tangent for x, t in pairs])

    op = make(
        gaps,
        backward=backward,
        jvp=jvp,
        setup_context=setup_context,
        fake=lambda xs, y: torch.empty_like(y),
        vmap="sequential",
    )

    def call(fn: Fn, x: Tensor, y: Tensor) -> Tensor:
        return fn([x, None, y], y)

    return Program(functools.partial(call, op), functools.partial(call, gaps))


def keyword(make: Maker) -> Program:
    """A tensor that is keyword-only"""

    def masked(x: Tensor, *, weight: Tensor) -> Tensor:
        return x * x * weight.exp()

    def setup_context(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
        save(ctx, *inputs, keyword_only_inputs["weight"])

    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return 2 * grad * x * weight.exp(), grad * x * x * weight.exp()

    def jvp(ctx: Any, x_tangent: Tensor, weight_tangent: Tensor) -> Tensor:
        x, weight = ctx.saved_tensors
        return (2 * x * x_tangent + x * x * weight_tangent) * weight.exp()  # type: ignore[no-any-return]

    op = make(masked, backward=backward, jvp=jvp, setup_context=setup_context, fake=like_first, vmap="broadcast_all")
    return Program(lambda x, y: op(x, weight=y), lambda x, y: masked(x, weight=y))


def keyword_list(make: Maker) -> Program:
    """A list that is keyword-only"""

    def sum_of(x: Tensor, *, others: list[Tensor]) -> Tensor:
        return total([x * other * other for other in others])

    def setup_context(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
        save(ctx, *inputs, *keyword_only_inputs["others"])

    def backward(ctx: Any, grad: Tensor) -> Any:
        x, *others = ctx.saved_tensors
        return grad * total([other * other for other in others]), [2 * grad * x * other for other in others]

    def jvp(ctx: Any, x_tangent: Tensor, tangents: list[Tensor]) -> Tensor:
        x, *others = ctx.saved_tensors
        return total([x_tangent * o * o + 2 * x * o * t for o, t in zip(others, tangents, strict=True)])

    op = make(sum_of, backward=backward, jvp=jvp, setup_context=setup_context, fake=like_first, vmap="sequential")
    return Program(lambda x, y: op(x, others=[y, x]), lambda x, y: sum_of(x, others=[y, x]))


def keyword_optional(make: Maker) -> Program:
    """Optional tensors that are keyword-only; a backward that returns a dict"""

    def norm(x: Tensor, *, weight: Optional[Tensor] = None, bias: Optional[Tensor] = None) -> Tensor:
        result = x * x if weight is None else x * x * weight
        return result if bias is None else result + bias * bias

    def setup_context(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
        save(ctx, *inputs, keyword_only_inputs["weight"], keyword_only_inputs["bias"])

    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, bias = ctx.saved_tensors
        gradients = {"x": 2 * grad * x if weight is None else 2 * grad * x * weight}
        if weight is not None:
            gradients["weight"] = grad * x * x
        if bias is not None:
            gradients["bias"] = 2 * grad * bias
        return gradients

    def jvp(ctx: Any, x_tangent: Tensor, weight_tangent: Optional[Tensor], bias_tangent: Optional[Tensor]) -> Tensor:
        x, weight, bias = ctx.saved_tensors
        change = 2 * x * x_tangent
        if weight is not None:
            change = change * weight + x * x * weight_tangent
        return change if bias is None else change + 2 * bias * bias_tangent  # type: ignore[no-any-return]

    op = make(norm, backward=backward, jvp=jvp, setup_context=setup_context, fake=like_first, vmap="broadcast_all")

    def call(fn: Fn, x: Tensor, y: Tensor) -> Tensor:
        return fn(x) + fn(x, weight=y) + fn(y, bias=x) + fn(x, bias=y, weight=x)

    return Program(functools.partial(call, op), functools.partial(call, norm))


def keyword_scalar(make: Maker) -> Program:
    """Numbers that are keyword-only"""

    def scaled(x: Tensor, y: Tensor, *, by: float = 2.0, n: int) -> Tensor:
        return x**n * y * by

    def setup_context(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
        save(ctx, *inputs)
        ctx.by, ctx.n = keyword_only_inputs["by"], keyword_only_inputs["n"]

    def backward(ctx: Any, grad: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return grad * ctx.n * x ** (ctx.n - 1) * y * ctx.by, grad * x**ctx.n * ctx.by

    def jvp(ctx: Any, x_tangent: Tensor, y_tangent: Tensor) -> Tensor:
        x, y = ctx.saved_tensors
        return (ctx.n * x ** (ctx.n - 1) * x_tangent * y + x**ctx.n * y_tangent) * ctx.by  # type: ignore[no-any-return]

    op = make(scaled, backward=backward, jvp=jvp, setup_context=setup_context, fake=like_first, vmap="broadcast_all")

    def call(fn: Fn, x: Tensor, y: Tensor) -> Tensor:
        return fn(x, y, n=3) + fn(y, x, n=2, by=0.5)

    return Program(functools.partial(call, op), functools.partial(call, scaled))


def linear(make: Maker) -> Program:
    """Matrices, an optional bias"""

    def affine(x: Tensor, weight: Tensor, bias: Optional[Tensor] = None) -> Tensor:
        product = x @ weight.transpose(-1, -2)
        return product if bias is None else product + bias.unsqueeze(-2)

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        save(ctx, *inputs[:2])
        ctx.has_bias = inputs[2] is not None

    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        of_x = grad @ weight if ctx.needs_input_grad[0] else None
        of_bias = grad.sum(-2) if ctx.has_bias else None
        return of_x, grad.transpose(-1, -2) @ x if ctx.needs_input_grad[1] else None, of_bias

    def jvp(ctx: Any, x_tangent: Tensor, weight_tangent: Tensor, bias_tangent: Optional[Tensor]) -> Tensor:
        x, weight = ctx.saved_tensors
        change = affine(x_tangent, weight) + affine(x, weight_tangent)
        return change if bias_tangent is None else change + bias_tangent.unsqueeze(-2)

    op = make(
        affine,
        backward=backward,
        jvp=jvp,
        setup_context=setup_context,
        fake=lambda x, weight, bias=None: x.new_empty(*x.shape[:-1], weight.shape[-2]),
        vmap="broadcast_all",
    )

    def call(fn: Fn, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return fn(fn(x, weight, bias).sin(), weight[..., :2, :2])

    return Program(functools.partial(call, op), functools.partial(call, affine), ((2, 3), (2, 3), (2,)))


# What comes out -------------------------------------------------------------------------------------------------


def two_results(make: Maker) -> Program:
    """Two results"""

    def polar(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x * y.cos(), x * y.sin()

    def backward(ctx: Any, first: Tensor, second: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return first * y.cos() + second * y.sin(), x * (second * y.cos() - first * y.sin())

    def jvp(ctx: Any, x_tangent: Tensor, y_tangent: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return (
            x_tangent * y.cos() - x * y.sin() * y_tangent,
            x_tangent * y.sin() + x * y.cos() * y_tangent,
        )

    op = make(
        polar,
        backward=backward,
        jvp=jvp,
        setup_context=save_all,
        fake=lambda x, y: (torch.empty_like(x), torch.empty_like(x)),
        vmap="broadcast_all",
    )
    return Program(op, polar)


def four_results(make: Maker) -> Program:
    """Four results, two of which are used; None stands for the gradients of the others"""

    def powers(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return x * 1, x**2, x**3, x**4

    def backward(ctx: Any, *grads: Optional[Tensor]) -> Any:
        (x,) = ctx.saved_tensors
        terms = [grad * n * x ** (n - 1) for n, grad in enumerate(grads, 1) if grad is not None]
        return total(terms) if terms else None

    def jvp(ctx: Any, tangent: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return tuple(tangent * n * x ** (n - 1) for n in (1, 2, 3, 4))

    op = make(
        powers,
        backward=backward,
        jvp=jvp,
        setup_context=save_all,
        fake=lambda x: tuple(torch.empty_like(x) for _ in range(4)),
        vmap="sequential",
        options={"materialize_grads": False},
    )

    def call(fn: Fn, x: Tensor) -> Any:
        _, square, _, fourth = fn(x)
        return square, fourth

    return Program(functools.partial(call, op), functools.partial(call, powers), ((3,),))


def list_result(make: Maker) -> Program:
    """A list of results"""

    def fan(x: Tensor, y: Tensor, n: int = 2) -> list[Tensor]:
        return [x ** (i + 1) * y for i in range(n)]

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        save(ctx, *inputs[:2])
        ctx.n = inputs[2]

    def backward(ctx: Any, grads: list[Tensor]) -> Any:
        x, y = ctx.saved_tensors
        of_x = total([grad * (i + 1) * x**i * y for i, grad in enumerate(grads)])
        return of_x, total([grad * x ** (i + 1) for i, grad in enumerate(grads)]), None

    def jvp(ctx: Any, x_tangent: Tensor, y_tangent: Tensor, _: None) -> list[Tensor]:
        x, y = ctx.saved_tensors
        return [(i + 1) * x**i * y * x_tangent + x ** (i + 1) * y_tangent for i in range(ctx.n)]

    op = make(
        fan,
        backward=backward,
        jvp=jvp,
        setup_context=setup_context,
        fake=lambda x, y, n=2: [torch.empty_like(x) for _ in range(n)],
        vmap="broadcast_all",
    )

    def call(fn: Fn, x: Tensor, y: Tensor) -> Any:
        return fn(x, y, 3)[2], fn(y, x, 1)[0]

    return Program(functools.partial(call, op), functools.partial(call, fan))


def mixed_results(make: Maker) -> Program:
    """A result, its order (integers), a number"""

    def ranked(x: Tensor, n: int) -> tuple[Tensor, Tensor, int]:
        return x**n, x.argsort(-1), n

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        save(ctx, inputs[0])
        ctx.n = output[2]

    def backward(ctx: Any, grad: Tensor, of_order: None, of_number: None) -> Any:
        return grad * ctx.n * ctx.saved_tensors[0] ** (ctx.n - 1), None

    def jvp(ctx: Any, tangent: Tensor, _: None) -> Any:
        return tangent * ctx.n * ctx.saved_tensors[0] ** (ctx.n - 1), None, None

    op = make(
        ranked,
        backward=backward,
        jvp=jvp,
        setup_context=setup_context,
        fake=lambda x, n: (torch.empty_like(x), torch.empty_like(x, dtype=torch.int64), n),
        vmap=in_front,
    )

    def call(fn: Fn, x: Tensor) -> Tensor:
        power, order, n = fn(x, 3)
        return power.gather(-1, order) * n

    return Program(functools.partial(call, op), functools.partial(call, ranked), ((3,),))


def list_and_tensor(make: Maker) -> Program:
    """A list and a tensor as results"""

    def split(x: Tensor, y: Tensor) -> tuple[list[Tensor], Tensor]:
        return [x * y, x * x], (x + y).exp()

    def backward(ctx: Any, grads: list[Tensor], grad: Tensor) -> Any:
        x, y = ctx.saved_tensors
        outer = grad * (x + y).exp()
        return grads[0] * y + grads[1] * 2 * x + outer, grads[0] * x + outer

    def jvp(ctx: Any, x_tangent: Tensor, y_tangent: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return [x_tangent * y + x * y_tangent, 2 * x * x_tangent], (x + y).exp() * (x_tangent + y_tangent)

    op = make(
        split,
        backward=backward,
        jvp=jvp,
        setup_context=save_all,
        fake=lambda x, y: ([torch.empty_like(x), torch.empty_like(x)], torch.empty_like(x)),
        vmap="broadcast_all",
    )

    def call(fn: Fn, x: Tensor, y: Tensor) -> Any:
        (first, second), last = fn(x, y)
        return first * second, last

    return Program(functools.partial(call, op), functools.partial(call, split))


def view(make: Maker) -> Program:
    """A view"""

    def tail(x: Tensor) -> Tensor:
        return x[..., 1:]

    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(grad[..., :1]), grad], -1)

    op = make(tail, backward=backward, fake=tail, vmap=in_front, schema="(Tensor(a) x) -> Tensor(a)")

    def call(fn: Fn, x: Tensor) -> Tensor:
        return fn(x * x) ** 2

    return Program(functools.partial(call, op), functools.partial(call, tail), ((3,),))


# What is not differentiable -------------------------------------------------------------------------------------


def nondiff_args(make: Maker) -> Program:
    """An argument without a gradient"""

    def gate(x: Tensor, by: Tensor) -> Tensor:
        return x * x * by

    def backward(ctx: Any, grad: Tensor) -> Any:
        x, by = ctx.saved_tensors
        return 2 * grad * x * by.detach(), None

    def jvp(ctx: Any, x_tangent: Tensor, by_tangent: None) -> Tensor:
        x, by = ctx.saved_tensors
        return 2 * x * by.detach() * x_tangent  # type: ignore[no-any-return]

    op = make(
        gate,
        backward=backward,
        jvp=jvp,
        setup_context=save_all,
        fake=like_first,
        vmap="broadcast_all",
        again=lambda x, by: x * x * by.detach(),
        nondiff_args="by",
    )
    return Program(lambda x, y: op(x, y) * y, lambda x, y: gate(x, y.detach()) * y)


def not_differentiable(make: Maker) -> Program:
    """An op without gradients"""

    def level(x: Tensor) -> Tensor:
        return (x * 4).round() + x.sin()

    op = make(level, fake=like_first, vmap="expand_dims", differentiable=False)
    return Program(lambda x: op(x) * x * x, lambda x: level(x).detach() * x * x, ((3,),))


def flags(make: Maker) -> Program:
    """Two results, one without a gradient"""

    def normal(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin(), x.exp()

    def backward(ctx: Any, grad: Tensor, of_scale: None) -> Tensor:
        return grad * ctx.saved_tensors[0].cos()

    def jvp(ctx: Any, tangent: Tensor) -> Any:
        return tangent * ctx.saved_tensors[0].cos(), None

    op = make(
        normal,
        backward=backward,
        jvp=jvp,
        setup_context=save_all,
        fake=lambda x: (torch.empty_like(x), torch.empty_like(x)),
        vmap="broadcast_all",
        differentiable=(True, False),
    )

    def call(x: Tensor) -> Tensor:
        value, scale = op(x)
        return value * scale

    return Program(call, lambda x: x.sin() * x.exp().detach(), ((3,),))


# What is written ------------------------------------------------------------------------------------------------


def counter(make: Maker) -> Program:
    """A counter is written, the rest is differentiable"""

    def counted(x: Tensor, y: Tensor, calls: Tensor) -> Tensor:
        calls.add_(1)
        return x * y * y

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        save(ctx, *inputs[:2])

    def backward(ctx: Any, grad: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return grad * y * y, grad * 2 * x * y, None

    def jvp(ctx: Any, x_tangent: Tensor, y_tangent: Tensor, _: None) -> Tensor:
        x, y = ctx.saved_tensors
        return x_tangent * y * y + 2 * x * y * y_tangent

    def batch(op: Any, info: Any, in_dims: Any, x: Tensor, y: Tensor, calls: Tensor) -> Any:
        """Counted once for the whole batch."""
        (x, y), dims = torch.broadcast_tensors(x.movedim(in_dims[0], 0), y.movedim(in_dims[1], 0)), 0
        return op(x, y, calls), dims

    op = make(
        counted,
        backward=backward,
        jvp=jvp,
        setup_context=setup_context,
        fake=like_first,
        vmap=batch,
        again=lambda x, y, calls: x * y * y,
        mutates_args={"calls"},
    )

    def call(x: Tensor, y: Tensor) -> Tensor:
        calls = torch.zeros((), dtype=torch.int64)
        first = op(x, y, calls)
        return first + op(x, y, calls) * calls

    return Program(call, lambda x, y: 3 * x * y * y)


def cache(make: Maker) -> Program:
    """A cache of floats is written, and read"""

    def attend(x: Tensor, rows: Tensor, at: int) -> Tensor:
        rows.select(-2, at).copy_(x)
        return rows.narrow(-2, 0, at + 1).square().sum(-2)

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        save(ctx, inputs[0])

    def backward(ctx: Any, grad: Tensor) -> Any:
        return 2 * grad * ctx.saved_tensors[0], None, None

    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        return 2 * ctx.saved_tensors[0] * tangent  # type: ignore[no-any-return]

    op = make(
        attend,
        backward=backward,
        jvp=jvp,
        setup_context=setup_context,
        fake=like_first,
        vmap="sequential",
        again=lambda x, rows, at: rows.narrow(-2, 0, at).square().sum(-2).detach() + x * x,
        mutates_args={"rows"},
        nondiff_args="rows",
    )

    def call(x: Tensor, y: Tensor) -> Tensor:
        rows = torch.ones_like(torch.stack([x, y], -2))
        return op(x, rows, 0) * op(y, rows, 1)

    return Program(call, lambda x, y: x * x * (x.detach().square() + y * y))


def in_place(make: Maker) -> Program:
    """In place"""

    def grow_(x: Tensor, y: Tensor) -> Tensor:
        return x.mul_(y.exp())

    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        save(ctx, inputs[1], output)

    def backward(ctx: Any, grad: Tensor) -> Any:
        y, output = ctx.saved_tensors
        return grad * y.exp(), grad * output

    def jvp(ctx: Any, x_tangent: Tensor, y_tangent: Tensor) -> Tensor:
        y, output = ctx.saved_tensors
        return x_tangent * y.exp() + output * y_tangent

    op = make(
        grow_,
        backward=backward,
        jvp=jvp,
        setup_context=setup_context,
        vmap="broadcast_all",
        again=lambda x, y: x * y.exp(),
        mutates_args={"x"},
        tags=torch.Tag.inplace,
    )
    return Program(lambda x, y: op(x * 1, y), lambda x, y: x * y.exp())


def in_place_original(make: Maker) -> Program:
    """In place, with the value from before the write"""

    def square_(x: Tensor) -> Tensor:
        return x.mul_(x)

    def change(ctx: Any, change: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * change  # type: ignore[no-any-return]

    op = make(
        square_,
        backward=change,
        jvp=change,
        setup_context=save_all,
        vmap="sequential",
        again=lambda x: x * x,
        options={"originals": "x"},
        mutates_args={"x"},
        tags=torch.Tag.inplace,
    )

    def call(fn: Fn, x: Tensor) -> Tensor:
        y = x.sin()
        fn(y)
        return y * x

    return Program(functools.partial(call, op), lambda x: x.sin() ** 2 * x, ((3,),))


def buffer(make: Maker) -> Program:
    """A buffer for the result; nothing is returned"""

    def fill(x: Tensor, y: Tensor, out: Tensor) -> None:
        out.copy_(x * y * y)

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        save(ctx, *inputs[:2])

    def backward(ctx: Any, grad: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return grad * y * y, grad * 2 * x * y, torch.zeros_like(grad)

    def jvp(ctx: Any, x_tangent: Tensor, y_tangent: Tensor, _: Any) -> Tensor:
        x, y = ctx.saved_tensors
        return x_tangent * y * y + 2 * x * y * y_tangent

    op = make(
        fill,
        backward=backward,
        jvp=jvp,
        setup_context=setup_context,
        vmap="broadcast_all",
        fake=lambda x, y, out: None,
        again=lambda x, y, out: x * y * y,
        mutates_args={"out"},
    )

    def call(x: Tensor, y: Tensor) -> Tensor:
        out = torch.empty_like(x)
        op(x, y, out)
        return out * x

    return Program(call, lambda x, y: x * x * y * y)


def accumulate(make: Maker) -> Program:
    """Something is added to a buffer with a history, and something returned: `grads_of`"""

    def gather_into(x: Tensor, out: Tensor, by: float = 2.0) -> Tensor:
        out.add_(x * x * by)
        return x.exp()

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        save(ctx, inputs[0], output)
        ctx.by = inputs[2]

    def backward(ctx: Any, grad: Tensor, of_out: Tensor) -> Any:
        x, output = ctx.saved_tensors
        return grad * output + of_out * 2 * x * ctx.by, of_out, None

    def jvp(ctx: Any, x_tangent: Tensor, out_tangent: Tensor, _: None) -> Any:
        x, output = ctx.saved_tensors
        return output * x_tangent, out_tangent + 2 * x * ctx.by * x_tangent

    op = make(
        gather_into,
        backward=backward,
        jvp=jvp,
        setup_context=setup_context,
        vmap="broadcast_all",
        fake=like_first,
        options={"grads_of": "out"},
        mutates_args={"out"},
    )

    def call(fn: Fn, x: Tensor, y: Tensor) -> Any:
        out = y * y
        result = fn(x, out)
        return result * y, out * out

    return Program(functools.partial(call, op), functools.partial(call, gather_into))


def buffers(make: Maker) -> Program:
    """A list is written; nothing is returned"""

    def scale_all(xs: list[Tensor], by: Tensor) -> None:
        for x in xs:
            x.mul_(by)

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        xs, by = inputs
        save(ctx, by, *xs)

    def backward(ctx: Any, grads: list[Tensor]) -> Any:
        by, *originals = ctx.saved_tensors
        return [grad * by for grad in grads], total([grad * x for grad, x in zip(grads, originals, strict=True)])

    def jvp(ctx: Any, tangents: list[Tensor], by_tangent: Tensor) -> Any:
        by, *originals = ctx.saved_tensors
        return ([t * by + x * by_tangent for t, x in zip(tangents, originals, strict=True)],)

    op = make(
        scale_all,
        backward=backward,
        jvp=jvp,
        setup_context=setup_context,
        fake=lambda xs, by: None,
        vmap="sequential",
        again=lambda xs, by: [x * by for x in xs],
        options={"originals": "xs"},
        mutates_args={"xs"},
    )

    def call(fn: Fn, x: Tensor, y: Tensor) -> Any:
        xs = [x * x, y.sin()]
        fn(xs, y)
        return tuple(xs)

    return Program(functools.partial(call, op), functools.partial(call, scale_all))


def keyword_buffer(make: Maker) -> Program:
    """A buffer that is keyword-only, beside a tensor that is"""

    def store(x: Tensor, *, weight: Tensor, out: Tensor) -> None:
        out.copy_(x.exp() * weight)

    def setup_context(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
        save(ctx, *inputs, keyword_only_inputs["weight"])

    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return {"x": grad * x.exp() * weight, "weight": grad * x.exp(), "out": torch.zeros_like(grad)}

    def jvp(ctx: Any, x_tangent: Tensor, weight_tangent: Tensor, _: Any) -> Tensor:
        x, weight = ctx.saved_tensors
        return x.exp() * (weight * x_tangent + weight_tangent)  # type: ignore[no-any-return]

    op = make(
        store,
        backward=backward,
        jvp=jvp,
        setup_context=setup_context,
        fake=lambda x, *, weight, out: None,
        vmap="broadcast_all",
        again=lambda x, *, weight, out: x.exp() * weight,
        mutates_args={"out"},
    )

    def call(x: Tensor, y: Tensor) -> Tensor:
        out = torch.empty_like(x)
        op(x, weight=y, out=out)
        return out * out

    return Program(call, lambda x, y: (x.exp() * y) ** 2)


def everything(make: Maker) -> Program:
    """All of it: lists, optional, keyword-only, defaults, several results"""

    def blocks(
        x: Tensor,
        xs: list[Tensor],
        bias: Optional[Tensor] = None,
        n: int = 2,
        *,
        weight: Tensor,
        others: list[Tensor],
        shift: Optional[Tensor] = None,
        by: float = 1.0,
    ) -> tuple[Tensor, list[Tensor], int]:
        first = x**n * by + total(xs) * weight
        if bias is not None:
            first = first * bias
        rest = [other * weight for other in others]
        return first, rest if shift is None else [each + shift * shift for each in rest], n

    def setup_context(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
        x, xs, bias, ctx.n = inputs
        weight, others, shift, ctx.by = (keyword_only_inputs[key] for key in ("weight", "others", "shift", "by"))
        ctx.lengths = len(xs), len(others)
        save(ctx, x, bias, weight, shift, *xs, *others)

    def values(ctx: Any) -> Any:
        x, bias, weight, shift, *lists = ctx.saved_tensors
        return x, bias, weight, shift, lists[: ctx.lengths[0]], lists[ctx.lengths[0] :]

    def backward(ctx: Any, grad: Tensor, grads: list[Tensor], _: None) -> Any:
        x, bias, weight, shift, xs, others = values(ctx)
        inner = grad if bias is None else grad * bias
        found = {
            "x": inner * ctx.n * x ** (ctx.n - 1) * ctx.by,
            "xs": [inner * weight for _ in xs],
            "weight": inner * total(xs) + total([g * other for g, other in zip(grads, others, strict=True)]),
            "others": [g * weight for g in grads],
        }
        if bias is not None:
            found["bias"] = grad * (x**ctx.n * ctx.by + total(xs) * weight)
        if shift is not None:
            found["shift"] = 2 * shift * total(grads)
        return found

    def jvp(ctx: Any, tx: Tensor, txs: Any, tbias: Any, _: None, tweight: Tensor, tothers: Any, tshift: Any) -> Any:
        x, bias, weight, shift, xs, others = values(ctx)
        first = ctx.n * x ** (ctx.n - 1) * ctx.by * tx + total(txs) * weight + total(xs) * tweight
        if bias is not None:
            first = first * bias + (x**ctx.n * ctx.by + total(xs) * weight) * tbias
        rest = [t * weight + other * tweight for t, other in zip(tothers, others, strict=True)]
        return first, rest if shift is None else [each + 2 * shift * tshift for each in rest], None

    op = make(
        blocks,
        backward=backward,
        jvp=jvp,
        setup_context=setup_context,
        fake=lambda x, xs, bias, n, *, weight, others, shift, by: (
            torch.empty_like(x),
            [torch.empty_like(x) for _ in others],
            n,
        ),
        vmap="sequential",
    )

    def call(fn: Fn, x: Tensor, y: Tensor, z: Tensor) -> Any:
        first, (second, third), n = fn(x, [y, z], weight=z, others=[x, y])
        fourth, fifth, _ = fn(y, [x], z, 3, others=[z], weight=x, shift=y, by=0.5)
        return first * n, second * third, fourth * fifth[0]

    return Program(functools.partial(call, op), functools.partial(call, blocks), ((3,),) * 3)


SHAPES: list[Callable[[Maker], Program]] = [
    one,
    two,
    four,
    scalars,
    broadcast,
    complex_numbers,
    index,
    tensor_list,
    two_lists,
    optional,
    list_with_none,
    keyword,
    keyword_list,
    keyword_optional,
    keyword_scalar,
    linear,
    two_results,
    four_results,
    list_result,
    mixed_results,
    list_and_tensor,
    view,
    nondiff_args,
    not_differentiable,
    flags,
    counter,
    cache,
    in_place,
    in_place_original,
    buffer,
    accumulate,
    buffers,
    keyword_buffer,
    everything,
]
