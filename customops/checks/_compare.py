"""Do two results agree?

Tolerances go by dtype, and by the largest element of the expected tensor: sums in another order differ by rounding of
the largest term, however small the sum is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from customops import _compat

#: Relative tolerances; about the square root of what the dtype resolves, for float32 and below somewhat less.
TOLERANCES = {
    torch.float64: 1e-9,
    torch.complex128: 1e-9,
    torch.float32: 2e-5,
    torch.complex64: 2e-5,
    torch.float16: 4e-3,
    torch.complex32: 4e-3,
    torch.bfloat16: 3e-2,
}
_EIGHT_BITS = 0.25  #: of floats of 8 bits and less


def tolerance_of(dtype: torch.dtype) -> float:
    """How far apart two elements of a dtype may be, relatively; 0 for integers and bools."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    return TOLERANCES.get(dtype, _EIGHT_BITS)


def difference(
    actual: Any, expected: Any, *, rtol: float | None = None, exact: bool = False, scale: float = 0.0
) -> str | None:
    """What differs between two nests of tensors, numbers and None; None if nothing does.

    NaN equals NaN. Shapes and dtypes have to agree, strides need not.

    Args:
        rtol: the tolerance, relative to the largest finite element of the expected tensor; by default that of the
            coarser dtype.
        exact: compare bit by bit, but for NaN.
        scale: the size of elements that counts as ordinary, where all of these may be zero but for rounding.
    """
    allowed = _Allowed(rtol, exact, scale)
    actual_leaves, leaves = _compat.tracing.tree_leaves(actual), _compat.tracing.tree_leaves(expected)
    if len(leaves) != len(actual_leaves):
        return f"{len(actual_leaves)} values and not {len(leaves)}"
    for i, (one, other) in enumerate(zip(actual_leaves, leaves, strict=True)):
        found = _leaves_differ(one, other, allowed)
        if found:
            return found if len(leaves) == 1 else f"value {i}: {found}"
    return None


@dataclass(frozen=True)
class _Allowed:
    """How far apart elements may be."""

    rtol: float | None
    exact: bool
    scale: float

    def around(self, expected: torch.Tensor, dtype: torch.dtype) -> float:
        finite = expected[expected.isfinite()]
        scale = max(float(finite.abs().max()) if finite.numel() else 0.0, self.scale)
        rtol = tolerance_of(dtype) if self.rtol is None else self.rtol
        tiny = torch.finfo(dtype).tiny if dtype.is_floating_point or dtype.is_complex else 0.0
        return rtol * (scale or 1.0) + tiny


def _leaves_differ(actual: Any, expected: Any, allowed: _Allowed) -> str | None:
    if not isinstance(actual, torch.Tensor) or not isinstance(expected, torch.Tensor):
        if isinstance(actual, float) and isinstance(expected, float):
            actual, expected = (torch.tensor(value, dtype=torch.float64) for value in (actual, expected))
            return _tensors_differ(actual, expected, allowed)
        return None if type(actual) is type(expected) and actual == expected else f"{actual!r} and not {expected!r}"
    if actual.shape != expected.shape:
        return f"shape {tuple(actual.shape)} and not {tuple(expected.shape)}"
    if actual.dtype != expected.dtype:
        return f"dtype {actual.dtype} and not {expected.dtype}"
    return _tensors_differ(actual, expected, allowed)


def _tensors_differ(actual: torch.Tensor, expected: torch.Tensor, allowed: _Allowed) -> str | None:
    with torch.no_grad():
        one, other = _comparable(actual), _comparable(expected)
        if torch.equal(one, other):
            return None
        differs = (one != other) & ~((one != one) & (other != other))
        if not allowed.exact and differs.any():
            differs &= ~((one - other).abs() <= allowed.around(other, expected.dtype))
        if not differs.any():
            return None
        count, where = int(differs.sum()), tuple(differs.nonzero()[0].tolist())
        values = f"{_number(one[where])} and not {_number(other[where])}"
        if differs.dim() == 0:
            return values
        return f"{count} of {differs.numel()} elements, the first at {where}: {values}"


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    """Its values as dense float64, complex128 or integers, on the CPU."""
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    tensor = (tensor.dequantize() if tensor.is_quantized else tensor.detach()).cpu()
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.to(torch.float64) if tensor.is_floating_point() else tensor.to(torch.int64)


def _number(element: torch.Tensor) -> str:
    value = element.item()
    return f"{value:.6g}" if isinstance(value, float) else str(value)
