"""vLLM's IR ops `rms_norm` and `fused_add_rms_norm` with several providers, and no registry around them.

vLLM declares an op by its native code (`register_op`), gives it implementations (`register_impl`, with `supported` and
`supports_args`), chooses by a list of priorities, and lowers its ops in a pass of its own. Here the native code is the
reference, an implementation a kernel with a name, `supports_args` its `when=`, and the list a preference.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import customops
from customops import custom_op

# The native code: what the ops mean, and the provider "native" under its name here, "reference" ---------------------


def rms_norm_native(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    wide = x.float()
    part = wide if variance_size is None else wide[..., :variance_size]
    normed = (wide * torch.rsqrt(part.square().mean(-1, keepdim=True) + epsilon)).to(x.dtype)
    return normed if weight is None else normed * weight


def fused_add_rms_norm_native(
    x: Tensor, residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    total = x.float() + residual.float()
    part = total if variance_size is None else total[..., :variance_size]
    normed = (total * torch.rsqrt(part.square().mean(-1, keepdim=True) + epsilon)).to(x.dtype)
    return normed if weight is None else normed * weight, total.to(x.dtype)


# The ops. Their own functions run where no provider is for the device ------------------------------------------------


@custom_op("examples_vllm_ir::rms_norm", mutates_args=(), reference=rms_norm_native, differentiable=False)
def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    """Weighted root-mean-square layer normalization."""
    return rms_norm_native(x, weight, epsilon, variance_size)


@custom_op(
    "examples_vllm_ir::fused_add_rms_norm", mutates_args=(), reference=fused_add_rms_norm_native, differentiable=False
)
def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """Add the residual, then normalize; returns both."""
    return fused_add_rms_norm_native(x, residual, weight, epsilon, variance_size)


# Providers. vLLM's are of CUDA, ROCm and XPU; these two are of the CPU, with the same limits ------------------------


def whole_rows(variance_size: int | None) -> bool | str:
    """What `vllm_c` says: it has no variance_size."""
    return variance_size is None or "takes no variance_size"


def half_rows(x: Tensor, weight: Tensor | None, variance_size: int | None) -> bool | str:
    """What `aiter` says: 16 bits, too, and a weight of the same."""
    if x.dtype not in (torch.float16, torch.bfloat16):
        return "takes float16 and bfloat16"
    if weight is None or weight.dtype != x.dtype:
        return "needs a weight of the dtype of x"
    return whole_rows(variance_size)


def normalized(wide: Tensor, x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    """In the dtype of `x`, times the weight; with the strides that the native code gives it."""
    normed = torch.empty_like(wide).copy_(torch.nn.functional.rms_norm(wide, x.shape[-1:], None, epsilon)).to(x.dtype)
    return normed if weight is None else normed * weight


@rms_norm.register_kernel("cpu", name="vllm_c", when=whole_rows)
def rms_norm_c(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None) -> Tensor:
    return normalized(x.float(), x, weight, epsilon)


@rms_norm.register_kernel("cpu", name="aiter", when=half_rows, priority=1)
def rms_norm_aiter(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None) -> Tensor:
    return rms_norm_native(x, weight, epsilon)


@fused_add_rms_norm.register_kernel("cpu", name="vllm_c", when=whole_rows)
def fused_add_rms_norm_c(
    x: Tensor, residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None
) -> tuple[Tensor, Tensor]:
    total = x.float() + residual.float()
    return normalized(total, x, weight, epsilon), total.to(x.dtype)


@fused_add_rms_norm.register_kernel("cpu", name="aiter", when=half_rows, priority=1)
def fused_add_rms_norm_aiter(
    x: Tensor, residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None
) -> tuple[Tensor, Tensor]:
    return fused_add_rms_norm_native(x, residual, weight, epsilon)


@rms_norm.register_samples
def _() -> Iterator[tuple[Any, ...]]:
    yield torch.randn(3, 8), torch.randn(8), 1e-6
    yield torch.randn(3, 8, dtype=torch.bfloat16), torch.randn(8, dtype=torch.bfloat16), 1e-6
    yield torch.randn(2, 3, 8), None, 1e-5, 4


@fused_add_rms_norm.register_samples
def _() -> Iterator[tuple[Any, ...]]:
    yield torch.randn(3, 8), torch.randn(3, 8), torch.randn(8), 1e-6
    half = torch.bfloat16
    yield torch.randn(3, 8, dtype=half), torch.randn(3, 8, dtype=half), torch.randn(8, dtype=half), 1e-6
    yield torch.randn(3, 8), torch.randn(3, 8), None, 1e-5, 4


#: What vLLM's --ir-op-priority.rms_norm=vllm_c,native is, in a scope; CUSTOMOPS_PREFER says it for a program.
PRIORITY = {"examples_vllm_ir::*": ["vllm_c", "reference"]}


def chosen(op: Any, *args: Any) -> str:
    return op.explain(*args).steps[-1].what.partition("named ")[2]  # type: ignore[no-any-return]


def main() -> None:
    x, weight = torch.randn(2, 8), torch.ones(8)
    half = (x.half(), weight.half(), 1e-6)
    print("float32:", chosen(rms_norm, x, weight, 1e-6))
    print("float16:", chosen(rms_norm, *half))
    print("half of the row:", chosen(rms_norm, *half, 4))
    with customops.prefer(PRIORITY):
        print("float16, with a list of priorities:", chosen(rms_norm, *half))
    normed, total = torch.compile(fused_add_rms_norm, backend="aot_eager", fullgraph=True)(x, x, weight, 1e-6)
    torch.testing.assert_close(total, 2 * x)
    torch.testing.assert_close(normed, torch.nn.functional.rms_norm(2 * x, (8,), weight, 1e-6))


if __name__ == "__main__":
    main()
