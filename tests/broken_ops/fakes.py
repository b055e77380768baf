"""Fakes that promise other strides, sizes, dtypes or aliases than the kernel gives."""

from __future__ import annotations

from typing import Any

import torch
from broken_ops.corpus import fault
from broken_ops.defining import define, dense, floats, require
from torch import Tensor

from customops import custom_op, get_ctx

STRIDES = "fake: contiguous strides where the kernel keeps the layout"
RANGE = "fake: a data-dependent size has a wrong range"
PLACE = "fake: a fixed device, the default dtype, or an alias where the kernel copies"


@fault(
    kind=STRIDES,
    note="The kernel keeps the strides of its input; a transposed input shows it.",
    sample=lambda: (torch.randn(3, 4),),
)
def saturate(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x)
        return torch.tanh(x, out=torch.empty_like(x))

    @op.register_fake
    def _(x):
        floats(x)
        return x.new_empty(x.shape) if broken else torch.empty_like(x)

    return op


@fault(
    kind=STRIDES,
    note="The kernel keeps channels-last memory, the fake promises the contiguous format.",
    sample=lambda: (torch.randn(2, 3, 4, 5),),
)
def shift_channels(name: str, broken: bool) -> Any:
    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x, dims=4)
        return torch.empty_like(x).copy_(x.roll(1, 1))

    @op.register_fake
    def _(x):
        floats(x, dims=4)
        return torch.empty_like(x, memory_format=torch.contiguous_format if broken else torch.preserve_format)

    return op


@fault(
    kind=STRIDES,
    note="The values keep the layout of the input, as their signs do; the fake has it for the signs alone.",
    sample=lambda: (torch.randn(4, 3),),
)
def sign_and_size(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> tuple[Tensor, Tensor]:
        floats(x)
        return torch.empty_like(x).copy_(x.abs()), torch.empty_like(x, dtype=torch.int8).copy_(x.sign())

    @op.register_fake
    def _(x):
        floats(x)
        size = torch.empty(x.shape, dtype=x.dtype, device=x.device) if broken else torch.empty_like(x)
        return size, torch.empty_like(x, dtype=torch.int8)

    return op


@fault(
    kind=RANGE,
    note="The size is said to be one at least; an input without positive values shows it.",
    sample=lambda: (torch.tensor([1.0, -2.0, 3.0, 0.5]),),
)
def positives(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x)
        return dense(x[x > 0])

    @op.register_fake
    def _(x):
        floats(x)
        return x.new_empty(get_ctx().new_dynamic_size(min=1 if broken else 0))

    return op


@fault(
    kind=RANGE,
    note="The size is said to be four at most; more than four distinct numbers show it.",
    sample=lambda: (torch.tensor([3, 1, 3, 2, 2, 1]),),
)
def distinct(name: str, broken: bool) -> Any:
    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        require(x.dtype == torch.int64, "int64 is needed")
        return dense(x.unique())

    @op.register_fake
    def _(x):
        require(x.dtype == torch.int64, "int64 is needed")
        return x.new_empty(torch.library.get_ctx().new_dynamic_size(max=4 if broken else None))

    return op


@fault(
    kind=RANGE,
    note="The size is said to be two at least; a threshold that one value or none exceeds shows it.",
    sample=lambda: (torch.arange(6.0), 2.5),
)
def above(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
        floats(x, dims=1)
        where = (x > threshold).nonzero()[:, 0]
        return dense(x[where]), dense(where)

    @op.register_fake
    def _(x, threshold):
        floats(x, dims=1)
        count = get_ctx().new_dynamic_size(min=2 if broken else 0)
        return x.new_empty(count), x.new_empty(count, dtype=torch.int64)

    return op


@fault(
    kind=PLACE,
    note="The fake has the default dtype; a float64 input shows it.",
    sample=lambda: (torch.randn(5),),
)
def window(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x, dims=1)
        return dense(x * torch.hann_window(len(x), dtype=x.dtype, device=x.device))

    @op.register_fake
    def _(x):
        floats(x, dims=1)
        return torch.empty(len(x), device=x.device) if broken else x.new_empty(len(x))

    return op


@fault(
    kind=PLACE,
    note="The fake returns its input, the kernel a copy.",
    sample=lambda: (torch.randn(3, 2), 0.5),
)
def limited(name: str, broken: bool) -> Any:
    def kernel(x, limit):
        floats(x)
        return torch.empty_like(x).copy_(x.clamp(max=limit))

    def fake(x, limit):
        floats(x)
        return x if broken else torch.empty_like(x)

    return define(name, "(Tensor x, float limit) -> Tensor", kernel, fake=fake)


@fault(
    kind=PLACE,
    note="The fake of the second return is on the CPU, wherever the input is.",
    sample=lambda: (torch.randn(4, 3),),
)
def rows_with_norms(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> tuple[Tensor, Tensor]:
        floats(x, dims=2)
        norms = dense(x.square().sum(1).sqrt())
        return dense(x / norms[:, None]), norms

    @op.register_fake
    def _(x):
        floats(x, dims=2)
        return x.new_empty(x.shape), torch.empty(len(x), dtype=x.dtype, device="cpu" if broken else x.device)

    return op
