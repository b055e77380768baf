"""Ops that differ in what comes out, and in what is not differentiable."""

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
