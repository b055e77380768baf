"""Ops that hold for the first size they meet, for plain tensors, or outside of modes."""

from __future__ import annotations

from typing import Any

import torch
from broken_ops.corpus import fault
from broken_ops.defining import floats
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from customops import custom_op

SPECIALISES = "compile: the fake or the kernel specialises on a size"
SUBCLASS = "modes: the op breaks with subclasses or modes"


class Through(TorchDispatchMode):
    """A mode that calls what it is given."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@fault(
    kind=SPECIALISES,
    note="The fake makes an int of a size; a dynamic size shows it.",
    sample=lambda: (torch.randn(6, 2),),
)
def pair_sums(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x, dims=2)
        half = len(x) // 2
        return x[:half] + x[half : 2 * half].contiguous()

    @op.register_fake
    def _(x):
        floats(x, dims=2)
        rows = int(x.shape[0]) if broken else x.shape[0]
        return x.new_empty(rows // 2, x.shape[1])

    return op


@fault(
    kind=SPECIALISES,
    note="The fake keeps the number of rows of its first call; a second size shows it.",
    sample=lambda: (torch.randn(4, 3),),
)
def row_norms(name: str, broken: bool) -> Any:
    plan: dict[str, Any] = {}

    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x, dims=2)
        return x.new_empty(len(x)).copy_(x.square().sum(1).sqrt())

    @op.register_fake
    def _(x):
        floats(x, dims=2)
        return x.new_empty(plan.setdefault("rows", x.shape[0]) if broken else x.shape[0])

    return op


@fault(
    kind=SPECIALISES,
    note="The kernel keeps the table of its first call; a second size meets it.",
    sample=lambda: (torch.randn(8),),
)
def ramped(name: str, broken: bool) -> Any:
    tables: list[Tensor] = []

    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x, dims=1)
        table = torch.arange(len(x), dtype=torch.float64) / (len(x) + 1)
        if broken:
            tables.append(table)
            table = tables[0][: len(x)]
        return (x * table).to(x.dtype)

    @op.register_fake
    def _(x):
        floats(x, dims=1)
        return x.new_empty(len(x))

    return op


@fault(
    kind=SUBCLASS,
    note="The kernel asks for the type Tensor itself; a Parameter shows it.",
    sample=lambda: (torch.randn(3, 4), torch.randn(3, 4)),
)
def weighted_sum(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor, weight: Tensor) -> Tensor:
        floats(x, weight)
        if x.shape != weight.shape:
            raise ValueError("one shape is needed")
        if broken and type(weight) is not Tensor:
            raise TypeError("the weight has to be a tensor")
        return (x * weight).sum()

    @op.register_fake
    def _(x, weight):
        floats(x, weight)
        if x.shape != weight.shape:
            raise ValueError("one shape is needed")
        return x.new_empty(())

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight, grad * x

    op.register_autograd(backward, setup_context=setup_context)
    return op


@fault(
    kind=SUBCLASS,
    note="The rule for a mode drops keyword arguments; a call with one under that mode shows it.",
    sample=lambda: (torch.randn(4),),
)
def tilted(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor, *, slope: float = 1.0) -> Tensor:
        floats(x, dims=1)
        return x + slope * torch.arange(len(x), dtype=x.dtype)

    @op.register_fake
    def _(x, *, slope):
        floats(x, dims=1)
        return x.new_empty(len(x))

    @op.register_torch_dispatch(Through)
    def _(mode, func, types, args, kwargs):
        return func(*args) if broken else func(*args, **kwargs)

    return op
