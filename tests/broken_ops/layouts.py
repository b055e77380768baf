"""Kernels that walk over memory as only a plain, contiguous tensor allows it."""

from __future__ import annotations

from typing import Any

import torch
from broken_ops.corpus import fault
from broken_ops.defining import alike, define, dense, floats, memory
from torch import Tensor

from customops import custom_op

OFFSET = "layout: the kernel ignores the storage offset"
SAME_STRIDES = "layout: the kernel assumes the same strides for two inputs"
TAIL = "layout: a kernel in blocks forgets the tail"


@fault(
    kind=OFFSET,
    note="Strides are heeded, the offset is not; a slice that starts later shows it.",
    sample=lambda: (torch.randn(3, 4),),
)
def doubled(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x)
        seen = torch.as_strided(x, x.shape, x.stride(), 0 if broken else x.storage_offset())
        return torch.empty_like(x).copy_(seen * 2)

    @op.register_fake
    def _(x):
        floats(x)
        return torch.empty_like(x)

    return op


@fault(
    kind=OFFSET,
    note="The kernel takes the pointer of the storage; a contiguous slice shows it.",
    sample=lambda: (torch.randn(4, 3),),
)
def total_energy(name: str, broken: bool) -> Any:
    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x)
        x = x.contiguous()
        return memory(x, x.numel(), 0 if broken else x.storage_offset()).square().sum()

    @op.register_fake
    def _(x):
        floats(x)
        return x.new_empty(())

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    op.register_autograd(lambda ctx, grad: 2 * grad * ctx.saved_tensors[0], setup_context=setup_context)
    return op


@fault(
    kind=OFFSET,
    note="The offset of the bias alone is lost; a bias which is a part of another tensor shows it.",
    sample=lambda: (torch.randn(3, 4), torch.randn(4)),
)
def shifted_rows(name: str, broken: bool) -> Any:
    def check(x, bias):
        floats(x, dims=2)
        floats(x, bias)
        if bias.shape != x.shape[1:]:
            raise ValueError("a bias for each column is needed")

    def kernel(x, bias):
        check(x, bias)
        bias = bias.contiguous()
        return dense(x + memory(bias, len(bias), 0 if broken else bias.storage_offset()))

    def fake(x, bias):
        check(x, bias)
        return x.new_empty(x.shape)

    return define(name, "(Tensor x, Tensor bias) -> Tensor", kernel, fake=fake)


@fault(
    kind=SAME_STRIDES,
    note="The second input is read with the strides of the first; one transposed input shows it.",
    sample=lambda: (torch.randn(3, 4), torch.randn(3, 4), 0.25),
)
def blended(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor, y: Tensor, weight: float) -> Tensor:
        alike(x, y)
        strides = x.stride() if broken else y.stride()
        y = torch.as_strided(y, y.shape, strides, y.storage_offset())
        return torch.empty_like(x).copy_(x * (1 - weight) + y * weight)

    @op.register_fake
    def _(x, y, weight):
        alike(x, y)
        return torch.empty_like(x)

    return op


@fault(
    kind=SAME_STRIDES,
    note="Whether memory can be read flat is asked of two of the three inputs.",
    sample=lambda: (torch.randn(3, 4), torch.randn(3, 4), torch.randn(3, 4)),
)
def multiply_add(name: str, broken: bool) -> Any:
    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        alike(x, y, z)
        asked = (x, y) if broken else (x, y, z)
        if all(tensor.is_contiguous() for tensor in asked):
            size = x.numel()
            return (memory(x, size) * memory(y, size) + memory(z, size)).view(x.shape)
        return dense(x * y + z)

    @op.register_fake
    def _(x, y, z):
        alike(x, y, z)
        return x.new_empty(x.shape)

    return op


@fault(
    kind=TAIL,
    note="The last block is scaled only if it is full; a size that four does not divide shows it.",
    sample=lambda: (torch.randn(8, requires_grad=True), 3.0),
)
def scaled_blocks(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor, by: float) -> Tensor:
        floats(x)
        out = dense(x)
        flat = out.view(-1)
        for start in range(0, len(flat) // 4 * 4 if broken else len(flat), 4):
            flat[start : start + 4] *= by
        return out

    @op.register_fake
    def _(x, by):
        floats(x)
        return x.new_empty(x.shape)

    def setup_context(ctx, inputs, output):
        ctx.by = inputs[1]

    op.register_autograd(lambda ctx, grad: (grad * ctx.by, None), setup_context=setup_context)
    return op


@fault(
    kind=TAIL,
    note="Eight lanes are summed, and what is left over is not.",
    sample=lambda: (torch.randn(16, requires_grad=True),),
)
def lane_sum(name: str, broken: bool) -> Any:
    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x)
        flat = x.reshape(-1)
        full = len(flat) // 8 * 8
        lanes = flat[:full].view(-1, 8).sum(0)
        return lanes.sum() if broken else lanes.sum() + flat[full:].sum()

    @op.register_fake
    def _(x):
        floats(x)
        return x.new_empty(())

    def setup_context(ctx, inputs, output):
        ctx.shape = inputs[0].shape

    op.register_autograd(lambda ctx, grad: grad.expand(ctx.shape), setup_context=setup_context)
    return op


@fault(
    kind=TAIL,
    note="The largest value is looked for in whole blocks of four columns.",
    sample=lambda: (torch.randn(3, 8),),
)
def row_peaks(name: str, broken: bool) -> Any:
    def check(x):
        floats(x, dims=2)
        if x.shape[1] == 0:
            raise ValueError("a column is needed")

    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        check(x)
        best = dense(x[:, 0])
        for block in x.split(4, 1):
            if block.shape[1] == 4 or not broken:
                best = torch.maximum(best, block.amax(1))
        return best

    @op.register_fake
    def _(x):
        check(x)
        return x.new_empty(len(x))

    return op
