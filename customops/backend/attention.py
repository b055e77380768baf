"""Attention with a kernel of the device's own.

`torch.nn.functional.scaled_dot_product_attention` asks a C++ function of the device which kernel to use, and takes
the slow one (math) where there is no such function. Python cannot give it one. So with the first kernel for the fused
op the choice is made here, above autograd, where torch has derivatives for the fused op.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from customops.backend import _compat
from customops.errors import UnsupportedError

FUSED = "aten::_scaled_dot_product_fused_attention_overrideable"
MATH = "aten::_scaled_dot_product_attention_math"
CHOICE = "scaled_dot_product_attention"


def after_kernel(op: Any, dtypes: Iterable[torch.dtype] | None) -> None:
    """Have attention call the fused op, once that has a kernel, and for the dtypes that it takes."""
    if _compat.full_name(op) != FUSED:
        return
    _taken.dtypes = frozenset(dtypes) if dtypes is not None else None
    if not _installed:
        library = _compat.Library("aten", "IMPL")
        _compat.impl(library, CHOICE, _compat.outside_dynamo(attention), "AutogradPrivateUse1")
        _installed.append(library)


class _Taken:
    """What the kernel of the fused op takes: None for every dtype."""

    dtypes: frozenset[torch.dtype] | None = None


_taken = _Taken()
_installed: list[Any] = []


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    fused: Any = _compat.find_op(FUSED)
    is_taken = _taken.dtypes is None or query.dtype in _taken.dtypes
    if not (is_taken and _compat.has_kernel(FUSED, "PrivateUse1")) or enable_gqa or query.dim() != 4:
        slow: Any = _compat.find_op(MATH)
        result = slow(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return result[0]  # type: ignore[no-any-return]
    bias = attn_mask
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        bias = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), -math.inf)
    result = fused(query, key, value, bias, dropout_p, is_causal, scale=scale)
    return result[0]  # type: ignore[no-any-return]


def no_fallback(*_: Any, **__: Any) -> Any:
    """What runs where a kernel of the fused op, or of its backward, returns NotImplemented."""
    raise UnsupportedError(
        "the CPU has no such op to fall back to",
        op=FUSED,
        fix="say before what the kernel takes, backend.kernel(op, dtypes=...), or raise in it",
    )
