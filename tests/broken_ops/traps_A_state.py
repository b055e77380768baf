"""Right ops that keep something, declare something unusual, or whose derivative is a convention."""

from __future__ import annotations

import threading
from typing import Any

import torch
from broken_ops.corpus import trap
from broken_ops.defining import alike, dense, floats, require, save_inputs, writable
from torch import Tensor
from torch.library import EffectType

from customops import custom_op


@trap(
    why="Each thread keeps a workspace, which is filled first and never returned.",
    sample=lambda: (torch.rand(8),),
)
def horner(name: str) -> Any:
    kept = threading.local()

    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x)
        work = getattr(kept, "work", None)
        if work is None or work.shape != x.shape or work.dtype != x.dtype:
            kept.work = work = x.new_empty(x.shape)
        work.fill_(1.0)
        for power in range(1, 6):
            work.mul_(x).add_(1 / (power + 1))
        return work.clone()

    @op.register_fake
    def _(x):
        floats(x)
        return x.new_empty(x.shape)

    return op


@trap(why="Tables are kept between calls, one for each size and dtype.", sample=lambda: (torch.randn(6),))
def windowed(name: str) -> Any:
    tables: dict[tuple[int, torch.dtype], Tensor] = {}

    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x, dims=1)
        key = (len(x), x.dtype)
        if key not in tables:
            tables[key] = torch.hann_window(len(x), dtype=x.dtype)
        return x * tables[key]

    @op.register_fake
    def _(x):
        floats(x, dims=1)
        return x.new_empty(len(x))

    return op


@trap(why="The op has an effect, which is registered: each call counts.", sample=lambda: (torch.randn(3),))
def logged(name: str) -> Any:
    calls: list[int] = []

    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> None:
        calls.append(x.numel())

    op.register_fake(lambda x: None)
    op.register_effect(EffectType.ORDERED)
    return op


@trap(why="A second derivative raises, as declared.", sample=lambda: (torch.randn(4, requires_grad=True),))
def once_only(name: str) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x)
        return torch.empty_like(x).copy_(x * x.sigmoid())

    @op.register_fake
    def _(x):
        floats(x)
        return torch.empty_like(x)

    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        slope = x.sigmoid()
        return slope.mul_(1 + x * (1 - slope)).mul_(grad)

    op.register_autograd(backward, setup_context=save_inputs, once_differentiable=True)
    return op


@trap(
    why="A straight-through estimator: the result has steps, the gradient is that of the identity.",
    sample=lambda: (torch.randn(5, requires_grad=True), 0.25),
)
def quantised(name: str) -> Any:
    def check(x, step):
        floats(x)
        require(step > 0, "a positive step is needed")

    @custom_op(name, mutates_args=())
    def op(x: Tensor, step: float) -> Tensor:
        check(x, step)
        return torch.empty_like(x).copy_((x / step).round() * step)

    @op.register_fake
    def _(x, step):
        check(x, step)
        return torch.empty_like(x)

    op.register_autograd(lambda ctx, grad: (grad.clone(), None))
    return op


@trap(
    why="It writes into an output that it is given, and returns it; derivatives are refused.",
    sample=lambda: ((torch.randn(3, 4),), {"out": torch.empty(4)}),
)
def column_maxima_out(name: str) -> Any:
    @custom_op(name, mutates_args={"out"}, tags=torch.Tag.out)
    def op(x: Tensor, *, out: Tensor) -> Tensor:
        floats(x, dims=2)
        floats(x, out)
        writable(out)
        require(len(x) > 0 and out.shape == x.shape[1:], "a row is needed, and a place for each column")
        return out.copy_(x.amax(0))

    return op


@trap(why="All tensors of a list are written.", sample=lambda: ([torch.randn(3), torch.randn(2, 2)], 0.5))
def scale_all_(name: str) -> Any:
    @custom_op(name, mutates_args={"xs"})
    def op(xs: list[Tensor], by: float) -> None:
        for x in xs:
            floats(x)
            writable(x)
        for x in xs:
            x.mul_(by)

    @op.register_fake
    def _(xs, by):
        for x in xs:
            floats(x)
            writable(x)

    return op


@trap(
    why="A norm: at zero it has no derivative, and the gradient is zero by convention.",
    sample=lambda: (torch.tensor([[3.0, 4.0], [0.0, 0.0]], requires_grad=True),),
)
def row_lengths(name: str) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x, dims=2)
        return x.new_empty(len(x)).copy_(x.square().sum(1).sqrt())

    @op.register_fake
    def _(x):
        floats(x, dims=2)
        return x.new_empty(len(x))

    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        squares = x.square().sum(1, keepdim=True)
        lengths = torch.where(squares > 0, squares, 1).sqrt()
        return grad[:, None] * x / lengths

    op.register_autograd(backward, setup_context=save_inputs)
    return op


@trap(why="The place of the largest value has no gradient, and ties go to the first.", sample=lambda: (torch.ones(4),))
def first_largest(name: str) -> Any:
    def check(x):
        floats(x)
        require(x.numel() > 0, "a value is needed")

    @custom_op(name, mutates_args=(), differentiable=False)
    def op(x: Tensor) -> Tensor:
        check(x)
        return x.argmax()

    @op.register_fake
    def _(x):
        check(x)
        return x.new_empty((), dtype=torch.int64)

    return op


@trap(
    why="Negative values give nan, and zero an infinite gradient, as for torch.sqrt.",
    sample=lambda: (torch.tensor([0.25, 4.0, 0.0, -1.0], requires_grad=True),),
)
def square_root(name: str) -> Any:
    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x)
        return torch.empty_like(x).copy_(x.sqrt())

    @op.register_fake
    def _(x):
        floats(x)
        return torch.empty_like(x)

    op.register_autograd(lambda ctx, grad: grad / (2 * ctx.saved_tensors[0].sqrt()), setup_context=save_inputs)
    return op


@trap(
    why="The result is channels-last, whatever comes in.",
    sample=lambda: (torch.randn(2, 3, 4, 5),),
)
def to_channels_last(name: str) -> Any:
    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x, dims=4)
        return torch.empty(x.shape, dtype=x.dtype, memory_format=torch.channels_last).copy_(x * 2)

    @op.register_fake
    def _(x):
        floats(x, dims=4)
        return torch.empty(x.shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)

    op.register_autograd(lambda ctx, grad: grad * 2)
    return op


@trap(
    why="Indices are values: the fake cannot see that one is too large, the kernel refuses it.",
    sample=lambda: (torch.randn(4, 3, requires_grad=True), torch.tensor([0, 3, 3])),
)
def looked_up(name: str) -> Any:
    def check(table, at):
        floats(table, dims=2)
        require(at.dtype == torch.int64 and at.dim() == 1, "a list of int64 indices is needed")

    @custom_op(name, mutates_args=())
    def op(table: Tensor, at: Tensor) -> Tensor:
        check(table, at)
        if bool(((at < 0) | (at >= len(table))).any()):
            raise ValueError("an index is out of range")
        return dense(table[at])

    @op.register_fake
    def _(table, at):
        check(table, at)
        return table.new_empty(len(at), table.shape[1])

    def setup_context(ctx, inputs, output):
        ctx.rows = len(inputs[0])
        ctx.save_for_backward(inputs[1])

    def backward(ctx, grad):
        (at,) = ctx.saved_tensors
        return grad.new_zeros(ctx.rows, grad.shape[1]).index_add(0, at, grad), None

    op.register_autograd(backward, setup_context=setup_context)
    return op


@trap(
    why="The order of a float32 sum depends on the layout, so the last digits differ.",
    sample=lambda: (torch.randn(40, 50),),
)
def everything_summed(name: str) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x)
        return x.sum()

    @op.register_fake
    def _(x):
        floats(x)
        return x.new_empty(())

    def setup_context(ctx, inputs, output):
        ctx.shape = inputs[0].shape

    op.register_autograd(lambda ctx, grad: grad.expand(ctx.shape), setup_context=setup_context)
    return op


@trap(
    why="Under autocast the op gets, and gives, bfloat16.",
    sample=lambda: (torch.randn(3, 4, requires_grad=True), torch.randn(4, requires_grad=True)),
)
def projected(name: str) -> Any:
    def check(x, weight):
        known = (torch.bfloat16, torch.float32, torch.float64)
        require(x.dtype in known and weight.dtype == x.dtype, "one dtype is needed, bfloat16 or wider")
        require(x.dim() == 2 and weight.shape == x.shape[1:], "a weight for each column is needed")

    @custom_op(name, mutates_args=())
    def op(x: Tensor, weight: Tensor) -> Tensor:
        check(x, weight)
        return x.new_empty(len(x)).copy_((x.double() * weight.double()).sum(1))

    @op.register_fake
    def _(x, weight):
        check(x, weight)
        return x.new_empty(len(x))

    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad[:, None] * weight, (grad[:, None] * x).sum(0)

    op.register_autograd(backward, setup_context=save_inputs)
    op.register_autocast("cpu", torch.bfloat16)
    return op


@trap(
    why="One argument has no gradient, as declared, though the result depends on it.",
    sample=lambda: (torch.randn(4, requires_grad=True), torch.rand(4)),
)
def shaken(name: str) -> Any:
    @custom_op(name, mutates_args=(), nondiff_args="noise")
    def op(x: Tensor, noise: Tensor) -> Tensor:
        alike(x, noise)
        return torch.empty_like(x).copy_(x * x + noise)

    @op.register_fake
    def _(x, noise):
        alike(x, noise)
        return torch.empty_like(x)

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    op.register_autograd(lambda ctx, grad: {"x": 2 * grad * ctx.saved_tensors[0]}, setup_context=setup_context)
    return op
