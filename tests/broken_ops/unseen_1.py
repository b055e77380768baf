"""Fakes that are wrong about padding, meta tensors, numbers that are returned, other numbers of dimensions."""

from __future__ import annotations

from typing import Any

import torch
from broken_ops.corpus import fault
from broken_ops.defining import dense, floats, require
from torch import Tensor

from customops import custom_op, get_ctx

PITCH = "fake: rows padded to a pitch, or padded columns, are promised without the padding"
META = "fake: it refuses or fails on meta tensors, though it takes fake ones"
NUMBER = "fake: a number that the op returns is promised to be another one"
DIMENSIONS = "number of dimensions: a part of the op is right for two dimensions alone"


def pitched(x: Tensor, rows: Any, columns: Any) -> Tensor:
    """Zeros in rows that begin every 16 bytes."""
    each = 16 // x.element_size()
    return x.new_zeros(rows, (columns + each - 1) // each * each)[:, :columns]


@fault(
    kind=PITCH,
    note="The kernel pads each row to 16 bytes; a width that is no multiple of that shows the fake's plain strides.",
    sample=lambda: (torch.randn(3, 8),),
)
def u_pitched_tanh(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x, dims=2)
        return pitched(x, *x.shape).copy_(x.tanh())

    @op.register_fake
    def _(x):
        floats(x, dims=2)
        return x.new_empty(x.shape) if broken else pitched(x, *x.shape)

    return op


def in_columns(x: Tensor, rows: Any, columns: Any, align: int) -> Tensor:
    """Zeros in column-major memory, of which each column has a multiple of `align` rows."""
    return x.new_zeros(columns, (rows + align - 1) // align * align).t()[:rows]


@fault(
    kind=PITCH,
    note=(
        "The scales are column-major, with columns of a multiple of four rows; five rows show that the fake forgets it."
    ),
    sample=lambda: (torch.randn(4, 8), 4),
)
def u_group_scales(name: str, broken: bool) -> Any:
    def valid(x, group):
        floats(x, dims=2)
        require(group > 0, "a positive group is needed")
        require(x.shape[1] % group == 0, "whole groups are needed")

    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
        valid(x, group)
        rows, groups = len(x), x.shape[1] // group
        parts = x.reshape(rows, groups, group)
        largest = parts.abs().amax(2).clamp(min=1e-6)
        scales = in_columns(x, rows, groups, 4).copy_(largest)
        return dense((parts / largest[:, :, None]).reshape(x.shape)), scales

    @op.register_fake
    def _(x, group):
        valid(x, group)
        return x.new_empty(x.shape), in_columns(x, len(x), x.shape[1] // group, 1 if broken else 4)

    return op


@fault(
    kind=META,
    note="The fake wants the device types for which there is a kernel; a call on meta tensors shows it.",
    sample=lambda: (torch.randn(4, 3),),
)
def u_guarded_rows(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x, dims=2)
        return dense(x.sin().sum(1))

    @op.register_fake
    def _(x):
        floats(x, dims=2)
        if broken:
            require(x.device.type in ("cpu", "cuda", "xpu"), "there is no kernel for this device")
        return x.new_empty(len(x))

    return op


PER_BLOCK = {"cpu": 4, "cuda": 32}


@fault(
    kind=META,
    note="The fake looks the size of a block up by the type of the device; there is no entry for meta tensors.",
    sample=lambda: (torch.randn(10),),
)
def u_block_sums(name: str, broken: bool) -> Any:
    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x, dims=1)
        size = PER_BLOCK["cpu"]
        blocks = (len(x) + size - 1) // size
        padded = torch.cat([x, x.new_zeros(blocks * size - len(x))])
        return dense(padded.view(blocks, size).sum(1))

    @op.register_fake
    def _(x):
        floats(x, dims=1)
        size = PER_BLOCK[x.device.type] if broken else PER_BLOCK["cpu"]
        return x.new_empty((len(x) + size - 1) // size)

    return op


@fault(
    kind=NUMBER,
    note=(
        "How many elements were kept depends on the data; the fake says all, as for the sample, and compilers "
        "believe it."
    ),
    sample=lambda: (torch.tensor([0.5, 2.0, 1.5, 3.0]), 0.0),
)
def u_keep_above(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor, threshold: float) -> tuple[Tensor, int]:
        floats(x)
        kept = x > threshold
        return dense(torch.where(kept, x, 0.0)), int(kept.sum())

    @op.register_fake
    def _(x, threshold):
        floats(x)
        return x.new_empty(x.shape), x.numel() if broken else get_ctx().new_dynamic_size()

    return op


@fault(
    kind=NUMBER,
    note=(
        "The fake returns the bound on the longest run, its length in the sample; shorter runs show it in "
        "compiled code."
    ),
    sample=lambda: (torch.tensor([7, 7, 7, 7, 7]),),
)
def u_longest_run(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def op(ids: Tensor) -> int:
        require(ids.dtype == torch.int64 and ids.dim() == 1, "a vector of int64 is needed")
        longest = length = 0
        last = None
        for each in ids.tolist():
            length = length + 1 if each == last else 1
            last, longest = each, max(longest, length)
        return longest

    @op.register_fake
    def _(ids):
        require(ids.dtype == torch.int64 and ids.dim() == 1, "a vector of int64 is needed")
        return len(ids) if broken else get_ctx().new_dynamic_size()

    return op


@fault(
    kind=DIMENSIONS,
    note="The fake has one square sum for each index of the first dimension; an input of three dimensions, or of one.",
    sample=lambda: (torch.randn(4, 3),),
)
def u_square_sums(name: str, broken: bool) -> Any:
    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x, least=1)
        return dense(x.square().sum(-1))

    @op.register_fake
    def _(x):
        floats(x, least=1)
        return x.new_empty(x.shape[0]) if broken else x.new_empty(x.shape[:-1])

    return op


@fault(
    kind=DIMENSIONS,
    note="The gradient of the scales is summed over dimension 1, the last one of two; other numbers of dimensions.",
    sample=lambda: (torch.randn(2, 3), torch.randn(2)),
)
def u_scale_rows(name: str, broken: bool) -> Any:
    def valid(x, scales):
        floats(x, scales, least=0)
        require(x.dim() > 0, "a dimension is needed")
        require(scales.shape == x.shape[:-1], "a scale for each row is needed")

    @custom_op(name, mutates_args=())
    def op(x: Tensor, scales: Tensor) -> Tensor:
        valid(x, scales)
        return dense(x * scales.unsqueeze(-1))

    @op.register_fake
    def _(x, scales):
        valid(x, scales)
        return x.new_empty(x.shape)

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @op.register_autograd(setup_context=setup_context)
    def _(ctx, grad):
        x, scales = ctx.saved_tensors
        return grad * scales.unsqueeze(-1), (grad * x).sum(1 if broken else -1)

    return op
