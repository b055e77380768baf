"""Ops that torch asks a device for and that the CPU has no kernel for, written in terms of others.

torch picks these for PrivateUse1 (the fused cells of LSTM and GRU, the overrideable convolution). The fallback runs
them on CPU tensors, like any other op.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def zeros(size: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    # torch's has no memory, which neither DLPack nor the CPU's kernels on lent tensors can take.
    return torch.zeros(size, dtype=dtype, device="cpu")


# What accelerators have in more dtypes --------------------------------------------------------------------------------


def nansum(tensor: Tensor, dim: Any = None, keepdim: bool = False, **options: Any) -> Tensor:
    if not tensor.is_complex():
        return torch.nansum(tensor, dim, keepdim, **options)
    return torch.sum(torch.where(tensor.isnan(), 0, tensor), dim, keepdim, **options)


def _product(op: Any) -> Callable[..., Any]:
    """``torch.mm(a, b, out_dtype)`` and its kin: the product of more exact factors."""

    def product(*args: Any, **options: Any) -> Any:
        *factors, dtype = args
        return op(*(factor.to(dtype) for factor in factors), **options)

    return product


# Convolution ----------------------------------------------------------------------------------------------------


def convolution_backward(grad: Tensor, input: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
    bias_sizes = [grad.shape[1]]
    backward: Any = torch.ops.aten.convolution_backward.default
    return backward(grad, input, weight, bias_sizes, *rest)  # type: ignore[no-any-return]


# LSTM and GRU ---------------------------------------------------------------------------------------------------


def _sum_of_gates(*parts: Tensor | None) -> Tensor:
    return functools.reduce(torch.add, [part for part in parts if part is not None])


def lstm_cell(
    input_gates: Tensor, hidden_gates: Tensor, cx: Tensor, *biases: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The hidden and the cell state, and the activated gates for the backward."""
    gates = _sum_of_gates(input_gates, hidden_gates, *biases)
    into, keep, new, out = gates.chunk(4, 1)
    into, keep, new, out = into.sigmoid(), keep.sigmoid(), new.tanh(), out.sigmoid()
    cy = keep * cx + into * new
    return out * cy.tanh(), cy, torch.cat([into, keep, new, out], 1)


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


def gru_cell(
    input_gates: Tensor, hidden_gates: Tensor, hx: Tensor, input_bias: Any = None, hidden_bias: Any = None
) -> tuple[Tensor, Tensor]:
    """The hidden state, and for the backward: reset, update and new gate, the state, and the hidden part of new."""
    from_input, from_hidden = _sum_of_gates(input_gates, input_bias), _sum_of_gates(hidden_gates, hidden_bias)
    input_reset, input_update, input_new = from_input.chunk(3, 1)
    hidden_reset, hidden_update, hidden_new = from_hidden.chunk(3, 1)
    reset, update = (input_reset + hidden_reset).sigmoid(), (input_update + hidden_update).sigmoid()
    new = (input_new + reset * hidden_new).tanh()
    return new + update * (hx - new), torch.cat([reset, update, new, hx, hidden_new], 1)


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


SUBSTITUTES: dict[str, Callable[..., Any]] = {
    "aten::_efficientzerotensor": zeros,
    **dict.fromkeys(("aten::nansum", "aten::nansum.out"), nansum),
    **{
        f"aten::{op.__name__}.{of}": _product(op)
        for op in (torch.mm, torch.bmm, torch.addmm, torch.baddbmm)
        for of in ("dtype", "dtype_out")
    },
    "aten::convolution_overrideable": torch.ops.aten.convolution.default,
    "aten::convolution_backward_overrideable": convolution_backward,
    "aten::_thnn_fused_lstm_cell": lstm_cell,
    "aten::_thnn_fused_lstm_cell_backward_impl": lstm_cell_backward,
    "aten::_thnn_fused_gru_cell": gru_cell,
    "aten::_thnn_fused_gru_cell_backward": gru_cell_backward,
}
