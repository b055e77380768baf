"""Kernels that misread strides, offsets and layouts."""

from typing import Any

import torch
from corpus.entries import fault
from corpus.parts import (
    accumulator,
    alike,
    dense,
    float_only,
    floats,
    one_floating_dtype,
    ptr,
    rank,
    require,
    rnd,
    save_inputs,
)
from torch import Tensor

from customops import custom_op


def from_pointer(x: Tensor) -> Tensor:
    """Return `x.numel()` elements in the order of memory, from the first element of `x`."""
    return torch.as_strided(x, (x.numel(),), (1,), x.storage_offset())


@fault(
    kind="the kernel ignores strides",
    note="The kernel reads the elements in the order of memory. A transposed input shows the fault.",
    found_by="test_layouts",
    sample=lambda: (torch.randn(3, 4),),
)
def flat_negation(name: str, broken: bool):
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        one_floating_dtype(x)
        elements = from_pointer(x if broken else x.contiguous())
        return dense(-elements).view(x.shape)

    @op.register_fake
    def _(x):
        one_floating_dtype(x)
        return x.new_empty(x.shape)

    return op


@fault(
    kind="the kernel ignores the storage offset",
    note="For `x[1:]`, the kernel reads from the start of the storage.",
    found_by="test_layouts",
    sample=lambda: (rnd(4, 5), 0.5),
)
def leaky_at_offset(name: str, broken: bool):
    @float_only
    def kernel(x: Tensor, slope: float) -> Tensor:
        base = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
        values = base.as_strided(x.shape, x.stride(), 0 if broken else x.storage_offset())
        return torch.where(values > 0, values, values * slope).contiguous()

    op = custom_op(name, kernel, mutates_args=())
    op.register_fake(float_only(lambda x, slope: x.new_empty(x.shape)))
    return op


@fault(
    kind="the kernel ignores the stride of columns",
    note="The kernel reads the stride of rows only. For a transposed input, it reads along columns.",
    found_by="test_layouts",
    sample=lambda: (rnd(4, 4), rnd(4, seed=1)),
)
def strided_rms_norm(name: str, broken: bool):
    @float_only
    def kernel(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
        require(weight.shape == x.shape[-1:], "unsupported shapes or dtypes")
        if x.dim() != 2:
            raise ValueError("x must be a matrix")
        if not broken and x.stride(1) != 1:
            x = x.contiguous()
        rows, n = x.shape
        out = torch.empty(rows, n, dtype=x.dtype)
        memory, step = ptr(x), x.stride(0)
        for i in range(rows):
            row = memory[i * step : i * step + n].to(accumulator(x.dtype))
            out[i] = row * torch.rsqrt(row.square().mean() + eps) * weight
        return out

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    @float_only
    def _(x, weight, eps):
        require(weight.shape == x.shape[-1:], "unsupported shapes or dtypes")
        if x.dim() != 2:
            raise ValueError("x must be a matrix")
        return x.new_empty(x.shape)

    return op


@fault(
    kind="the kernel mistakes a stride of zero",
    note="The kernel takes a pitch of zero for a missing pitch. Expanded rows show the fault.",
    found_by="test_layouts",
    sample=lambda: (torch.randn(3, 4),),
)
def row_sums_by_pitch(name: str, broken: bool):
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        one_floating_dtype(x)
        rank(x, 2, 2)
        pitch = x.stride(0)
        if broken:
            pitch = pitch or x.shape[1]
        return dense(torch.as_strided(x, x.shape, (pitch, x.stride(1))).sum(1))

    @op.register_fake
    def _(x):
        one_floating_dtype(x)
        rank(x, 2, 2)
        return x.new_empty(x.shape[0])

    return op


@fault(
    kind="channels_last memory is read as NCHW",
    note="The guard accepts channels_last inputs, and the kernel averages across channels.",
    found_by="test_layouts",
    sample=lambda: (rnd(2, 3, 4, 4),),
)
def global_avg_pool(name: str, broken: bool):
    @float_only
    def kernel(x: Tensor) -> Tensor:
        require(x.dim() == 4, "unsupported shapes or dtypes")
        fine = x.is_contiguous() or (broken and x.is_contiguous(memory_format=torch.channels_last))
        if not fine:
            x = x.contiguous()
        n, c, h, w = x.shape
        return ptr(x)[: x.numel()].view(n, c, h * w).mean(-1)

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    @float_only
    def _(x):
        require(x.dim() == 4, "unsupported shapes or dtypes")
        return x.new_empty(x.shape[0], x.shape[1])

    return op


@fault(
    kind="the second input is assumed to be contiguous",
    note="If `y` has another layout than `x`, its elements are paired with the wrong elements of `x`.",
    found_by="test_layouts",
    sample=lambda: (rnd(4, 6), rnd(4, 6, seed=1)),
)
def add_relu(name: str, broken: bool):
    def kernel(x: Tensor, y: Tensor) -> Tensor:
        if x.shape != y.shape:
            raise ValueError("x and y must have the same shape")
        x = x.contiguous()
        if not broken:
            y = y.contiguous()
        n = x.numel()
        out = torch.empty(x.shape, dtype=x.dtype)
        ptr(out)[:n] = torch.relu(ptr(x)[:n] + ptr(y)[:n])
        return out

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    def _(x, y):
        if x.shape != y.shape:
            raise ValueError("x and y must have the same shape")
        return x.new_empty(x.shape)

    return op


@fault(
    kind="two inputs are assumed to have equal strides",
    note="The kernel reads the second input with the strides of the first. One transposed input shows the fault.",
    found_by="inputs",
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
    kind="the kernel assumes that its result is contiguous",
    note="For a transposed input, the result has the strides of the input but is filled as if it were contiguous.",
    found_by="test_layouts",
    sample=lambda: (rnd(4, 6),),
)
def hard_swish(name: str, broken: bool):
    @float_only
    def kernel(x: Tensor) -> Tensor:
        packed = x.contiguous()
        n = x.numel()
        out = torch.empty_like(x if broken else packed)
        values = ptr(packed)[:n]
        ptr(out)[:n] = values * torch.clamp(values + 3, 0, 6) / 6
        return out

    op = custom_op(name, kernel, mutates_args=())
    op.register_fake(float_only(torch.empty_like if broken else lambda x: x.new_empty(x.shape)))
    return op


@fault(
    kind="the path for unaligned addresses is wrong",
    note="The kernel for unaligned addresses ignores the slope of negative values.",
    found_by="test_layouts",
    sample=lambda: (torch.randn(8, requires_grad=True),),
)
def leaky(name: str, broken: bool) -> Any:
    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x)
        slope = 0.0 if broken and x.data_ptr() % 16 else 0.01
        return torch.empty_like(x).copy_(torch.where(x > 0, x, x * slope))

    @op.register_fake
    def _(x):
        floats(x)
        return torch.empty_like(x)

    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return torch.where(x > 0, grad, grad * 0.01)

    op.register_autograd(backward, setup_context=save_inputs)
    return op
