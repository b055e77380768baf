"""RMSNorm in Triton, forward and backward: compilers see the kernels, and torch sees an op.

`triton_op` takes the place of `custom_op`, and `wrap_triton` stands around each kernel that is launched. No fake impl
is needed. Without a GPU the kernels run under Triton's interpreter, on CPU tensors: slowly, and with the same results.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported, and when a kernel is decorated

import triton
import triton.language as tl

from customops import triton_op, wrap_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def forward_kernel(x, weight, out, columns, eps, WIDE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, BLOCK)
    mask = i < columns
    at = tl.program_id(0) * columns + i
    row = tl.load(x + at, mask=mask, other=0.0).to(WIDE)
    scale = 1 / tl.sqrt(tl.sum(row * row, axis=0) / columns + eps)
    result = row * scale * tl.load(weight + i, mask=mask, other=0.0).to(WIDE)
    tl.store(out + at, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(  # type: ignore[no-untyped-def]
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


def sizes(x: Tensor) -> tuple[int, dict[str, Any]]:
    """The columns of `x`, and what the kernels are compiled for: they compute in float32 or wider."""
    columns = x.shape[1]
    return columns, {"WIDE": tl.float64 if x.dtype == torch.float64 else tl.float32, "BLOCK": block(columns)}


def block(columns: int) -> int:
    return int(triton.next_power_of_2(columns))


@triton_op("examples::triton_rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    columns, meta = sizes(x)
    # The kernels take rows one after the other, so other strides are made so.
    wrap_triton(forward_kernel)[(x.shape[0],)](x.contiguous(), weight.contiguous(), out, columns, eps, **meta)
    return out


@triton_op("examples::triton_rms_norm_backward", mutates_args=())
def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    columns, meta = sizes(x)
    parts = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, torch.float32))
    inputs = grad.contiguous(), x.contiguous(), weight.contiguous()
    wrap_triton(backward_kernel)[(x.shape[0],)](*inputs, grad_x, parts, columns, eps, **meta)
    return grad_x, parts.sum(0).to(weight.dtype)


def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
    *saved, ctx.eps = inputs
    ctx.save_for_backward(*saved)


def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    return *rms_norm_backward(grad, *ctx.saved_tensors, ctx.eps), None


rms_norm.register_autograd(backward, setup_context=setup_context, once_differentiable=True)


@rms_norm.register_samples(fixed=("size",))
def _() -> Iterator[tuple[Any, ...]]:
    yield torch.randn(3, 5, device=DEVICE, requires_grad=True), torch.randn(5, device=DEVICE, requires_grad=True)


@rms_norm_backward.register_samples(fixed=("size",))
def _() -> Iterator[tuple[Any, ...]]:
    grad, x = torch.randn(2, 3, 5, device=DEVICE)
    yield grad, x, torch.randn(5, device=DEVICE), 1e-6


def main() -> None:
    x = torch.randn(4, 7, device=DEVICE, requires_grad=True)
    weight = torch.randn(7, device=DEVICE, requires_grad=True)
    expected = torch.nn.functional.rms_norm(x, (7,), weight, 1e-6)
    theirs = torch.autograd.grad(expected.square().sum(), (x, weight))
    for fn in (rms_norm, torch.compile(rms_norm, fullgraph=True)):
        y = fn(x, weight)
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(torch.autograd.grad(y.square().sum(), (x, weight)), theirs)
    print(f"rms_norm on {DEVICE}: values and gradients are those of torch, compiled too")


if __name__ == "__main__":
    main()
