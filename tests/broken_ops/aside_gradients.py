"""Gradients that are wrong at second order, for lists of tensors, and for complex inputs."""

from __future__ import annotations

import cmath
import math
from contextlib import nullcontext
from typing import Any

import torch
from broken_ops.aside_parts import COMPLEX, FLOATS, library, overload, packed, require, require_same_dtype
from broken_ops.corpus import fault
from torch import Tensor

from customops import custom_op

SECOND = "the second derivative misses a term"
LISTS = "the gradients of a list are misaligned"
CONJUGATE = "the gradient of a complex input is not conjugated"


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """A random tensor that requires grad."""
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


@fault(
    kind=SECOND,
    note="Backward detaches what it saved. The first derivative is right, the second one has no history.",
    sample=lambda: (leaf(3, 4),),
)
def aside_detached_cube(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        require(x, FLOATS)
        return packed(x * x * x)

    @op.register_fake
    def _(x):
        require(x, FLOATS)
        return x.new_empty(x.shape)

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        if broken:
            x = x.detach()
        return grad * 3 * x * x

    op.register_autograd(backward, setup_context=setup_context)
    return op


@fault(
    kind=SECOND,
    note="Backward computes tanh with grad mode off. Second derivatives by x are wrong.",
    sample=lambda: (leaf(3, 4), leaf(4)),
)
def aside_gated_tanh(name: str, broken: bool) -> Any:
    def check(x: Tensor, weight: Tensor) -> None:
        require(x, FLOATS)
        require_same_dtype(x, weight)

    @custom_op(name, mutates_args=())
    def op(x: Tensor, weight: Tensor) -> Tensor:
        check(x, weight)
        return packed(x.tanh() * weight)

    @op.register_fake
    def _(x, weight):
        check(x, weight)
        return x.new_empty(torch.broadcast_shapes(x.shape, weight.shape))

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        with torch.no_grad() if broken else nullcontext():
            t = x.tanh()
        return grad * weight * (1 - t * t), grad * t

    op.register_autograd(backward, setup_context=setup_context)
    return op


@fault(
    kind=SECOND,
    note="The slope is computed in setup_context, where nothing is recorded. The second derivative is zero.",
    sample=lambda: (leaf(6),),
)
def aside_log_cosh(name: str, broken: bool) -> Any:
    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        require(x, FLOATS)
        return packed(x.abs() + torch.nn.functional.softplus(-2 * x.abs()) - math.log(2))

    @op.register_fake
    def _(x):
        require(x, FLOATS)
        return x.new_empty(x.shape)

    def setup_context(ctx, inputs, output):
        (x,) = inputs
        ctx.save_for_backward(x.tanh() if broken else x)

    def backward(ctx, grad):
        (saved,) = ctx.saved_tensors
        return grad * (saved if broken else saved.tanh())

    op.register_autograd(backward, setup_context=setup_context)
    return op


@fault(
    kind=LISTS,
    note="The saved members are those that require grad, the weights are all. It shows when the first member does not.",
    sample=lambda: ([leaf(3), leaf(3)], [1.0, 0.5]),
)
def aside_weighted_squares(name: str, broken: bool) -> Any:
    def check(xs: list[Tensor], weights: list[float]) -> None:
        if not xs or len(xs) != len(weights) or any(x.shape != xs[0].shape for x in xs):
            raise ValueError("expected tensors of one shape, one at least, and a weight for each")
        require(xs[0], FLOATS)
        require_same_dtype(*xs)

    @custom_op(name, mutates_args=())
    def op(xs: list[Tensor], weights: list[float]) -> Tensor:
        check(xs, weights)
        total = torch.zeros(xs[0].shape, dtype=xs[0].dtype, device=xs[0].device)
        for x, weight in zip(xs, weights, strict=True):
            total += x * x * weight
        return total

    @op.register_fake
    def _(xs, weights):
        check(xs, weights)
        return xs[0].new_empty(xs[0].shape)

    def setup_context(ctx, inputs, output):
        xs, weights = inputs
        ctx.needed = [i for i, need in enumerate(ctx.needs_input_grad[0]) if need]
        ctx.count = len(xs)
        ctx.weights = list(weights) if broken else [weights[i] for i in ctx.needed]
        ctx.save_for_backward(*[xs[i] for i in ctx.needed])

    def backward(ctx, grad):
        grads: list[Tensor | None] = [None] * ctx.count
        for i, x, weight in zip(ctx.needed, ctx.saved_tensors, ctx.weights, strict=False):
            grads[i] = grad * 2 * x * weight
        return grads, None

    op.register_autograd(backward, setup_context=setup_context)
    return op


@fault(
    kind=LISTS,
    note="Backward finds the part of a member by its identity. One tensor given twice gets its last part twice.",
    sample=lambda: ([leaf(2, 3), leaf(2, 3)],),
)
def aside_ranked_stack(name: str, broken: bool) -> Any:
    def check(xs: list[Tensor]) -> None:
        if not xs or any(x.shape != xs[0].shape for x in xs):
            raise ValueError("expected tensors of one shape, one at least")
        require(xs[0], FLOATS)
        require_same_dtype(*xs)

    @custom_op(name, mutates_args=())
    def op(xs: list[Tensor]) -> Tensor:
        check(xs)
        return packed(torch.stack([x * (i + 1) for i, x in enumerate(xs)]))

    @op.register_fake
    def _(xs):
        check(xs)
        return xs[0].new_empty(len(xs), *xs[0].shape)

    def setup_context(ctx, inputs, output):
        (xs,) = inputs
        slots = {id(x): i for i, x in enumerate(xs)}
        ctx.slots = [slots[id(x)] if broken else i for i, x in enumerate(xs)]

    def backward(ctx, grad):
        parts = [part * (i + 1) for i, part in enumerate(grad.unbind(0))]
        return [parts[slot] for slot in ctx.slots]

    op.register_autograd(backward, setup_context=setup_context)
    return op


@fault(
    kind=LISTS,
    note="Backward does not step over the rows of a member that needs no gradient. The members behind it get its rows.",
    sample=lambda: ([leaf(2, 3), leaf(4, 3)], 2.0),
)
def aside_scaled_rows(name: str, broken: bool) -> Any:
    def check(xs: list[Tensor]) -> None:
        if not xs or any(x.dim() == 0 or x.shape[1:] != xs[0].shape[1:] for x in xs):
            raise ValueError("expected tensors of rows of one shape, one at least")
        require(xs[0], FLOATS)
        require_same_dtype(*xs)

    @torch.library.custom_op(name, mutates_args=())
    def op(xs: list[Tensor], scale: float = 1.0) -> Tensor:
        check(xs)
        out = torch.empty(sum(len(x) for x in xs), *xs[0].shape[1:], dtype=xs[0].dtype, device=xs[0].device)
        start = 0
        for x in xs:
            out[start : start + len(x)] = x * scale
            start += len(x)
        return out

    @op.register_fake
    def _(xs, scale=1.0):
        check(xs)
        return xs[0].new_empty(sum(x.shape[0] for x in xs), *xs[0].shape[1:])

    def setup_context(ctx, inputs, output):
        xs, ctx.scale = inputs
        ctx.rows = [x.shape[0] for x in xs]

    def backward(ctx, grad):
        grads: list[Tensor | None] = []
        start = 0
        for rows, need in zip(ctx.rows, ctx.needs_input_grad[0], strict=True):
            if need:
                grads.append(grad.narrow(0, start, rows) * ctx.scale)
                start += rows
            else:
                grads.append(None)
                start += 0 if broken else rows
        return grads, None

    op.register_autograd(backward, setup_context=setup_context)
    return op


@fault(
    kind=CONJUGATE,
    note="Backward multiplies by the other factor as it is. It shows for factors with an imaginary part.",
    sample=lambda: (leaf(3, dtype=torch.complex128), leaf(3, dtype=torch.complex128)),
)
def aside_complex_product(name: str, broken: bool) -> Any:
    def check(x: Tensor, y: Tensor) -> None:
        require(x, FLOATS + COMPLEX)
        require(y, FLOATS + COMPLEX)

    @custom_op(name, mutates_args=())
    def op(x: Tensor, y: Tensor) -> Tensor:
        check(x, y)
        return packed(x * y)

    @op.register_fake
    def _(x, y):
        check(x, y)
        return x.new_empty(torch.broadcast_shapes(x.shape, y.shape), dtype=torch.result_type(x, y))

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return (grad * y, grad * x) if broken else (grad * y.conj(), grad * x.conj())

    op.register_autograd(backward, setup_context=setup_context)
    return op


@fault(
    kind=CONJUGATE,
    note="Backward multiplies by the result as it is. The sample is real; complex inputs, which the op takes, show it.",
    sample=lambda: (leaf(2, 3),),
)
def aside_exponential(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        require(x, FLOATS + COMPLEX)
        return packed(x.exp())

    @op.register_fake
    def _(x):
        require(x, FLOATS + COMPLEX)
        return x.new_empty(x.shape)

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    def backward(ctx, grad):
        (out,) = ctx.saved_tensors
        return grad * out if broken else grad * out.conj()

    op.register_autograd(backward, setup_context=setup_context)
    return op


@fault(
    kind=CONJUGATE,
    note="Backward turns the gradient the same way as forward. It shows but for whole and half turns.",
    sample=lambda: (leaf(4, dtype=torch.complex64), 0.5),
)
def aside_rotate_phase(name: str, broken: bool) -> Any:
    lib = library(name)
    base = name.split("::")[1]
    lib.define(f"{base}(Tensor x, float turns=0.5) -> Tensor")

    def factor(turns: float) -> complex:
        return cmath.exp(2j * math.pi * turns)

    def check(x: Tensor, turns: float) -> None:
        require(x, COMPLEX)
        if not math.isfinite(turns):
            raise ValueError(f"expected a finite number of turns, got {turns}")

    def kernel(x, turns=0.5):
        check(x, turns)
        return packed(x * factor(turns))

    def fake(x, turns=0.5):
        check(x, turns)
        return x.new_empty(x.shape)

    def setup_context(ctx, inputs, output):
        ctx.turns = inputs[1]

    def backward(ctx, grad):
        return grad * factor(ctx.turns if broken else -ctx.turns), None

    lib.impl(base, kernel, "CPU")
    torch.library.register_fake(name, fake, lib=lib)
    torch.library.register_autograd(name, backward, setup_context=setup_context, lib=lib)
    return overload(name)
