"""Optional, keyword-only and default arguments that the parts of an op understand differently."""

from __future__ import annotations

from typing import Any, Optional

import torch
from broken_ops.corpus import fault
from broken_ops.defining import define, floats, require
from torch import Tensor

from customops import custom_op

ABSENT = "arguments: an absent optional argument is mistaken"
DEFAULTS = "arguments: a keyword-only argument or a default differs between the parts"


@fault(
    kind=ABSENT,
    note="A scale of zero counts as absent.",
    sample=lambda: (torch.randn(4, requires_grad=True), 2.0),
)
def maybe_scaled(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor, scale: float | None = None) -> Tensor:
        floats(x)
        factor = (scale or 1.0) if broken else 1.0 if scale is None else scale
        return torch.empty_like(x).copy_(x * factor)

    @op.register_fake
    def _(x, scale):
        floats(x)
        return torch.empty_like(x)

    def setup_context(ctx, inputs, output):
        ctx.scale = inputs[1]

    def backward(ctx, grad):
        return (grad.clone() if ctx.scale is None else grad * ctx.scale), None

    op.register_autograd(backward, setup_context=setup_context)
    return op


@fault(
    kind=ABSENT,
    note="Without a weight the kernel takes ones, and backward zeros.",
    sample=lambda: (torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)),
)
def maybe_weighted(name: str, broken: bool) -> Any:
    def check(x, weight):
        floats(x)
        if weight is not None:
            floats(x, weight)
            require(weight.shape == x.shape, "one shape is needed")

    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor, weight: Optional[Tensor] = None) -> Tensor:
        check(x, weight)
        return torch.empty_like(x).copy_(x if weight is None else x * weight)

    @op.register_fake
    def _(x, weight=None):
        check(x, weight)
        return torch.empty_like(x)

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        if weight is None:
            return torch.zeros_like(grad) if broken else grad.clone(), None
        return grad * weight, grad * x

    op.register_autograd(backward, setup_context=setup_context)
    return op


@fault(
    kind=ABSENT,
    note="dim=0 counts as absent, so that all is summed.",
    sample=lambda: (torch.randn(3, 4), 1),
)
def sum_over(name: str, broken: bool) -> Any:
    def check(x, dim):
        floats(x)
        require(dim is None or -x.dim() <= dim < x.dim(), "there is no such dimension")

    @custom_op(name, mutates_args=())
    def op(x: Tensor, dim: int | None = None) -> Tensor:
        check(x, dim)
        everything = not dim if broken else dim is None
        total = x.sum() if everything else x.sum(dim)
        return x.new_empty(total.shape).copy_(total)

    @op.register_fake
    def _(x, dim):
        check(x, dim)
        if dim is None:
            return x.new_empty(())
        left = list(x.shape)
        del left[dim]
        return x.new_empty(left)

    return op


@fault(
    kind=DEFAULTS,
    note="The kernel repeats three times if nothing is said, the schema and the fake twice.",
    sample=lambda: (torch.randn(2, 3), 4),
)
def repeated(name: str, broken: bool) -> Any:
    def check(x, times):
        floats(x, least=1)
        require(times >= 0, "a count that is not negative is needed")

    def kernel(x, times=3 if broken else 2):
        check(x, times)
        return torch.cat([x] * times) if times else x.new_empty(0, *x.shape[1:])

    def fake(x, times=2):
        check(x, times)
        return x.new_empty(x.shape[0] * times, *x.shape[1:])

    return define(name, "(Tensor x, int times=2) -> Tensor", kernel, fake=fake)


@fault(
    kind=DEFAULTS,
    note="Backward takes the keyword-only argument to be at its default.",
    sample=lambda: (torch.randn(5, requires_grad=True),),
)
def damped(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor, *, by: float = 1.0) -> Tensor:
        floats(x)
        return torch.empty_like(x).copy_(x * by)

    @op.register_fake
    def _(x, *, by):
        floats(x)
        return torch.empty_like(x)

    def setup_context(ctx, inputs, keyword_only_inputs, output):
        ctx.by = 1.0 if broken else keyword_only_inputs["by"]

    op.register_autograd(lambda ctx, grad: grad * ctx.by, setup_context=setup_context)
    return op


@fault(
    kind=DEFAULTS,
    note="The rule for vmap does not hand on the keyword-only argument.",
    sample=lambda: (torch.randn(5),),
)
def bent(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor, *, power: float = 1.0) -> Tensor:
        floats(x)
        return torch.empty_like(x).copy_(x.abs() ** power)

    @op.register_fake
    def _(x, *, power):
        floats(x)
        return torch.empty_like(x)

    @op.register_vmap
    def _(info, in_dims, x, *, power):
        return (op(x) if broken else op(x, power=power)), in_dims[0]

    return op
