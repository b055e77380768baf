"""Ops of Triton kernels: a vector add, a fused softmax, RMSNorm with its backward, and a rotary embedding in place.

They run on the GPU, or where there is none under Triton's interpreter, if ``TRITON_INTERPRET=1`` was set before.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from customops import triton_op, wrap_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def add_kernel(x, y, out, n, WIDE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    total = tl.load(x + i, mask=mask).to(WIDE) + tl.load(y + i, mask=mask).to(WIDE)
    tl.store(out + i, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def softmax_kernel(x, out, columns, WIDE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, BLOCK)
    mask = i < columns
    row = tl.load(x + tl.program_id(0) * columns + i, mask=mask, other=-float("inf")).to(WIDE)
    exponents = tl.exp(row - tl.max(row, axis=0))
    result = exponents / tl.sum(exponents, axis=0)
    tl.store(out + tl.program_id(0) * columns + i, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def rms_norm_kernel(x, weight, out, columns, eps, WIDE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, BLOCK)
    mask = i < columns
    row = tl.load(x + tl.program_id(0) * columns + i, mask=mask, other=0.0).to(WIDE)
    scale = 1 / tl.sqrt(tl.sum(row * row, axis=0) / columns + eps)
    result = row * scale * tl.load(weight + i, mask=mask, other=0.0).to(WIDE)
    tl.store(out + tl.program_id(0) * columns + i, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def rms_norm_backward_kernel(  # type: ignore[no-untyped-def]
    grad, x, weight, grad_x, parts, columns, eps, WIDE: tl.constexpr, BLOCK: tl.constexpr
):
    i = tl.arange(0, BLOCK)
    mask = i < columns
    at = tl.program_id(0) * columns + i
    row = tl.load(x + at, mask=mask, other=0.0).to(WIDE)
    given = tl.load(grad + at, mask=mask, other=0.0).to(WIDE)
    scale = 1 / tl.sqrt(tl.sum(row * row, axis=0) / columns + eps)
    weighted = given * tl.load(weight + i, mask=mask, other=0.0).to(WIDE)
    along = tl.sum(weighted * row, axis=0) / columns
    result = scale * weighted - row * along * scale * scale * scale
    tl.store(grad_x + at, result.to(grad_x.dtype.element_ty), mask=mask)
    tl.store(parts + at, given * row * scale, mask=mask)


@triton.jit
def rotary_kernel(  # type: ignore[no-untyped-def]
    x, cos, sin, heads, half, stride_t, stride_h, stride_w, WIDE: tl.constexpr, BLOCK: tl.constexpr
):
    token, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    i = tl.arange(0, BLOCK)
    mask = i < half
    first = x + token * stride_t + head * stride_h + i * stride_w
    second = first + half * stride_w
    a, b = tl.load(first, mask=mask).to(WIDE), tl.load(second, mask=mask).to(WIDE)
    c = tl.load(cos + token * half + i, mask=mask).to(WIDE)
    s = tl.load(sin + token * half + i, mask=mask).to(WIDE)
    tl.store(first, (a * c - b * s).to(x.dtype.element_ty), mask=mask)
    tl.store(second, (b * c + a * s).to(x.dtype.element_ty), mask=mask)


def wide(x: Tensor) -> Any:
    """The type to compute in."""
    return tl.float64 if x.dtype == torch.float64 else tl.float32


@triton_op("triton_ops::add", mutates_args=())
def add(x: Tensor, y: Tensor) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    n = out.numel()
    launch = wrap_triton(add_kernel)[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)]
    launch(x.contiguous(), y.contiguous(), out, n, WIDE=wide(x), BLOCK=16)
    return out


@triton_op("triton_ops::softmax", mutates_args=())
def softmax(x: Tensor) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows, columns = x.shape
    block = triton.next_power_of_2(columns)
    wrap_triton(softmax_kernel)[(rows,)](x.contiguous(), out, columns, WIDE=wide(x), BLOCK=block)
    return out


@triton_op("triton_ops::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows, columns = x.shape
    launch = wrap_triton(rms_norm_kernel)[(rows,)]
    launch(x.contiguous(), weight.contiguous(), out, columns, eps, wide(x), triton.next_power_of_2(columns))
    return out


@triton_op("triton_ops::rms_norm_backward", mutates_args=())
def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows, columns = x.shape
    parts = x.new_empty(rows, columns, dtype=torch.promote_types(x.dtype, torch.float32))
    inputs = grad.contiguous(), x.contiguous(), weight.contiguous()
    block = triton.next_power_of_2(columns)
    wrap_triton(rms_norm_backward_kernel)[(rows,)](*inputs, grad_x, parts, columns, eps, WIDE=wide(x), BLOCK=block)
    return grad_x, parts.sum(0).to(weight.dtype)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
    x, weight, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    return *rms_norm_backward(grad, *ctx.saved_tensors, ctx.eps), None


def _add_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    return grad, grad


def _softmax_save(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _softmax_backward(ctx: Any, grad: Tensor) -> Tensor:
    (y,) = ctx.saved_tensors
    return y * (grad - (grad * y).sum(-1, keepdim=True))


add.register_autograd(_add_backward)
softmax.register_autograd(_softmax_backward, setup_context=_softmax_save)
rms_norm.register_autograd(_backward, setup_context=_save)


@triton_op("triton_ops::rotary_", mutates_args=("x",))
def rotary_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    tokens, heads, width = x.shape
    block = triton.next_power_of_2(width // 2)
    launch = wrap_triton(rotary_kernel)[(tokens * heads,)]
    launch(x, cos.contiguous(), sin.contiguous(), heads, width // 2, *x.stride(), WIDE=wide(x), BLOCK=block)


def rotary_inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    angles = torch.outer(torch.arange(3), 10000 ** -torch.linspace(0, 1, 4))
    x = torch.randn(3, 2, 8, dtype=dtype)
    return tuple(t.to(DEVICE) for t in (x, angles.cos().to(dtype), angles.sin().to(dtype)))  # type: ignore[return-value]


def rotary_in_torch(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    pairs = x.unflatten(-1, (2, -1)).transpose(-1, -2).contiguous()
    turned = torch.view_as_real(torch.view_as_complex(pairs) * torch.complex(cos, sin).unsqueeze(1))
    return turned.transpose(-1, -2).flatten(-2)
