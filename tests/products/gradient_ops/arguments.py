"""Ops that differ in what goes in."""

from __future__ import annotations

import functools
from typing import Any, Optional

import torch
from products.gradient_ops.maker import (
    Fn,
    Maker,
    Program,
    in_front,
    like_first,
    save,
    save_all,
    total,
)
from torch import Tensor


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
