"""Ops that write to their arguments."""

from __future__ import annotations

import functools
from typing import Any, Optional

import torch
from products.gradient_ops.maker import (
    Fn,
    Maker,
    Program,
    like_first,
    save,
    save_all,
    total,
)
from torch import Tensor

from customops import Tag


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
        again=lambda x, y, calls: (x * y * y, calls + 1),
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
        again=lambda x, rows, at: (
            rows.narrow(-2, 0, at).square().sum(-2).detach() + x * x,
            rows.detach().select_scatter(x.detach(), -2, at),
        ),
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
        tags=Tag.inplace,
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
        tags=Tag.inplace,
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
