"""Ops that torch asks a device for and that the CPU has no kernel for, written in terms of others.

torch picks these for PrivateUse1 (the fused cells of LSTM and GRU, the overrideable convolution). The fallback runs
them on CPU tensors, like any other op.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

SUBSTITUTES: dict[str, Callable[..., Any]] = {}


def _substitute(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def enter(fn: Callable[..., Any]) -> Callable[..., Any]:
        SUBSTITUTES[f"aten::{name}"] = fn
        return fn

    return enter


@_substitute("_efficientzerotensor")
def zeros(size: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    # torch's has no memory, which neither DLPack nor the CPU's kernels on lent tensors can take.
    return torch.zeros(size, dtype=dtype, device="cpu")


# What accelerators have in more dtypes --------------------------------------------------------------------------------


@_substitute("nansum.out")
@_substitute("nansum")
def nansum(tensor: Tensor, dim: Any = None, keepdim: bool = False, **options: Any) -> Tensor:
    if not tensor.is_complex():
        return torch.nansum(tensor, dim, keepdim, **options)
    return torch.sum(torch.where(tensor.isnan(), 0, tensor), dim, keepdim, **options)


def _product(name: str) -> None:
    """``torch.mm(a, b, out_dtype)`` and its kin: the product of more exact factors."""

    def product(*args: Any, **options: Any) -> Tensor:
        *factors, dtype = args
        return op(*(factor.to(dtype) for factor in factors), **options)  # type: ignore[no-any-return]

    op = getattr(torch, name)
    _substitute(f"{name}.dtype")(product)
    _substitute(f"{name}.dtype_out")(product)


for _name in ("mm", "bmm", "addmm", "baddbmm"):
    _product(_name)


# Convolution ----------------------------------------------------------------------------------------------------


@_substitute("convolution_overrideable")
def convolution(*args: Any) -> Tensor:
    return torch.ops.aten.convolution.default(*args)  # type: ignore[no-any-return]


@_substitute("convolution_backward_overrideable")
def convolution_backward(grad: Tensor, input: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
    *geometry, output_mask = rest
    bias_sizes = [grad.shape[1]]
    backward: Any = torch.ops.aten.convolution_backward.default
    return backward(grad, input, weight, bias_sizes, *geometry, output_mask)  # type: ignore[no-any-return]


# LSTM and GRU ---------------------------------------------------------------------------------------------------


def _sum_of_gates(*parts: Tensor | None) -> Tensor:
    there = [part for part in parts if part is not None]
    total = there[0]
    for part in there[1:]:
        total = total + part
    return total


@_substitute("_thnn_fused_lstm_cell")
def lstm_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    cx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The hidden and the cell state, and the activated gates for the backward."""
    gates = _sum_of_gates(input_gates, hidden_gates, input_bias, hidden_bias)
    into, keep, new, out = gates.chunk(4, 1)
    into, keep, new, out = into.sigmoid(), keep.sigmoid(), new.tanh(), out.sigmoid()
    cy = keep * cx + into * new
    return out * cy.tanh(), cy, torch.cat([into, keep, new, out], 1)


@_substitute("_thnn_fused_lstm_cell_backward_impl")
def lstm_cell_backward(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of the gates, of the cell state and of a bias."""
    into, keep, new, out = workspace.chunk(4, 1)
    tanh_cy = cy.tanh()
    grad_out = torch.zeros_like(cy) if grad_hy is None else grad_hy * tanh_cy
    grad_cell = torch.zeros_like(cy) if grad_cy is None else grad_cy
    if grad_hy is not None:
        grad_cell = grad_cell + grad_hy * out * (1 - tanh_cy * tanh_cy)
    gates = torch.cat(
        [
            grad_cell * new * into * (1 - into),
            grad_cell * cx * keep * (1 - keep),
            grad_cell * into * (1 - new * new),
            grad_out * out * (1 - out),
        ],
        1,
    )
    return gates, grad_cell * keep, gates.sum(0) if has_bias else None


@_substitute("_thnn_fused_gru_cell")
def gru_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    hx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The hidden state, and for the backward: reset, update and new gate, the state, and the hidden part of new."""
    from_input, from_hidden = _sum_of_gates(input_gates, input_bias), _sum_of_gates(hidden_gates, hidden_bias)
    input_reset, input_update, input_new = from_input.chunk(3, 1)
    hidden_reset, hidden_update, hidden_new = from_hidden.chunk(3, 1)
    reset, update = (input_reset + hidden_reset).sigmoid(), (input_update + hidden_update).sigmoid()
    new = (input_new + reset * hidden_new).tanh()
    return new + update * (hx - new), torch.cat([reset, update, new, hx, hidden_new], 1)


@_substitute("_thnn_fused_gru_cell_backward")
def gru_cell_backward(
    grad_hy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of the input gates, the hidden gates, the state and both biases."""
    reset, update, new, hx, hidden_new = workspace.chunk(5, 1)
    grad_new = grad_hy * (1 - update) * (1 - new * new)
    grad_update = grad_hy * (hx - new) * update * (1 - update)
    grad_reset = grad_new * hidden_new * reset * (1 - reset)
    input_gates = torch.cat([grad_reset, grad_update, grad_new], 1)
    hidden_gates = torch.cat([grad_reset, grad_update, grad_new * reset], 1)
    biases = (input_gates.sum(0), hidden_gates.sum(0)) if has_bias else (None, None)
    return input_gates, hidden_gates, grad_hy * update, *biases
