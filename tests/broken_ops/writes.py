"""Ops that write to a copy of what they should write to, or read what they have written."""

from __future__ import annotations

from typing import Any

import torch
from broken_ops.corpus import fault
from broken_ops.defining import alike, define, floats, require, writable
from torch import Tensor

from customops import custom_op

COPY = "schema: a declared mutation goes to a copy"
OVERLAP = "schema: wrong if two arguments are one tensor or overlap"


@fault(
    kind=COPY,
    note="The buffer is reshaped and written, which is a copy if it is transposed.",
    sample=lambda: (torch.zeros(3, 4), torch.randn(3, 4)),
)
def accumulate(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args={"buffer"})
    def op(buffer: Tensor, x: Tensor) -> None:
        alike(buffer, x)
        writable(buffer)
        if broken:
            buffer.reshape(-1).add_(x.reshape(-1))
        else:
            buffer.add_(x)

    @op.register_fake
    def _(buffer, x):
        alike(buffer, x)
        writable(buffer)

    return op


@fault(
    kind=COPY,
    note="The kernel writes to x.contiguous(); a slice of columns shows it.",
    sample=lambda: (torch.randn(3, 4), 0.5),
)
def limit_rows(name: str, broken: bool) -> Any:
    def check(x, limit):
        floats(x)
        writable(x)
        require(limit >= 0, "a limit that is not negative is needed")

    @torch.library.custom_op(name, mutates_args={"x"})
    def op(x: Tensor, limit: float) -> None:
        check(x, limit)
        target = x.contiguous() if broken else x
        target.clamp_(-limit, limit)

    @op.register_fake
    def _(x, limit):
        check(x, limit)

    return op


@fault(
    kind=COPY,
    note="An in-place op that returns its argument, and writes to a flattened copy if that is not contiguous.",
    sample=lambda: (torch.randn(2, 3), 2.0),
)
def stretch_(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args={"x"}, tags=torch.Tag.inplace)
    def op(x: Tensor, by: float) -> Tensor:
        floats(x)
        writable(x)
        target = x.flatten() if broken and x.dim() else x
        target.mul_(by)
        return x

    def setup_context(ctx, inputs, output):
        ctx.by = inputs[1]

    op.register_autograd(lambda ctx, grad: (grad * ctx.by, None), setup_context=setup_context)
    return op


@fault(
    kind=OVERLAP,
    note="The output is cleared before the input is read; one tensor for both gives zeros.",
    sample=lambda: (torch.randn(4), torch.empty(4)),
)
def double_into(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args={"out"})
    def op(x: Tensor, out: Tensor) -> None:
        alike(x, out)
        writable(out)
        if broken:
            out.zero_().add_(x, alpha=2)
        else:
            out.copy_(x * 2)

    @op.register_fake
    def _(x, out):
        alike(x, out)
        writable(out)

    return op


@fault(
    kind=OVERLAP,
    note="The weight is read after the output is written; one tensor for both shows it.",
    sample=lambda: (torch.empty(3, 4), torch.randn(3, 4), torch.rand(3, 4)),
)
def normalise_into(name: str, broken: bool) -> Any:
    def check(out, x, weight):
        alike(out, x, weight)
        writable(out)

    def kernel(out, x, weight):
        check(out, x, weight)
        normalised = x / (1 + x.abs().sum())
        if broken:
            out.copy_(normalised).mul_(weight)
        else:
            out.copy_(normalised * weight)

    return define(name, "(Tensor(a!) out, Tensor x, Tensor weight) -> ()", kernel, fake=check)


@fault(
    kind=OVERLAP,
    note="Values are moved one after the other; an output that is the input, shifted by one, shows it.",
    sample=lambda: (torch.randn(5), torch.empty(5)),
)
def halve_into(name: str, broken: bool) -> Any:
    def check(x, out):
        alike(x, out)
        floats(x, dims=1)
        writable(out)

    @torch.library.custom_op(name, mutates_args={"out"})
    def op(x: Tensor, out: Tensor) -> None:
        check(x, out)
        values = x if broken else x.clone()
        for at in range(len(out)):
            out[at] = values[at] * 0.5

    @op.register_fake
    def _(x, out):
        check(x, out)

    return op
