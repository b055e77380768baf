"""Dtypes that accelerators compute in and the CPU does not: the op runs in a wider one, and its results are rounded.

Float16, bfloat16 and complex32 are taken so by any op, as accelerators compute in float32 inside. Other dtypes by those
ops alone that accelerators have for them: the rest refuse them everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from customops.backend.fallback_plans import FallbackPlan

#: How kernels of the CPU say so.
_REFUSED = re.compile(r"not implemented for '|doesn't support tensors of type")

_FLOATING = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}
_INTEGERS = {dtype: torch.float64 for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)}
_BOOLS = {torch.bool: torch.uint8}
_FLOAT8 = {getattr(torch, f"float8_{kind}"): torch.float32 for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")}

#: By the name of an op, without overload.
_OTHERS: dict[str, dict[torch.dtype, torch.dtype]] = {
    "aten::histc": _INTEGERS,
    "aten::abs": _BOOLS,
    "aten::abs_": _BOOLS,
    "aten::trace": _BOOLS,
    "aten::scatter": _FLOAT8,
    "aten::scatter_": _FLOAT8,
}


class Wider:
    """One call of an op on the CPU, in wider dtypes."""

    def __init__(self, plan: FallbackPlan) -> None:
        self.plan = plan
        self.dtypes = _FLOATING | _OTHERS.get(plan.name.partition(".")[0], {})
        self.changed = False

    @staticmethod
    def is_for(error: RuntimeError) -> bool:
        """Did a kernel of the CPU refuse a dtype?"""
        return _REFUSED.search(str(error)) is not None

    def run(self, compute: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
        """What ``compute(args, kwargs)`` would be, if the CPU had it; NotImplemented where no dtype can be wider.

        What the op writes to is resized, where it has to be, and written.
        """
        wide_args, wide_kwargs = self._widen(args), {name: self._widen(value) for name, value in kwargs.items()}
        if not self.changed:
            return NotImplemented
        try:
            expected = self.plan.op(*map(_as_meta, args), **{name: _as_meta(value) for name, value in kwargs.items()})
        except NotImplementedError:  # torch cannot tell the dtypes of the results
            return NotImplemented
        result = compute(wide_args, wide_kwargs)
        for key in self.plan.writes:
            given, wide = (kwargs[key], wide_kwargs[key]) if isinstance(key, str) else (args[key], wide_args[key])
            if wide is not given:
                given.resize_(wide.shape).copy_(wide)
        return _narrow(result, expected)

    def _widen(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [self._widen(item) for item in value]
        dtype = value.dtype if isinstance(value, Tensor) else value
        if not isinstance(dtype, torch.dtype) or dtype not in self.dtypes:
            return value
        self.changed = True
        wide = self.dtypes[dtype]
        return value.to(wide) if isinstance(value, Tensor) else wide


def _narrow(result: Any, expected: Any) -> Any:
    if isinstance(result, (list, tuple)):
        return [_narrow(*pair) for pair in zip(result, expected, strict=True)]
    return result.to(expected.dtype) if isinstance(result, Tensor) else result


def _as_meta(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_as_meta(item) for item in value]
    if isinstance(value, Tensor):
        return value.to("meta")
    return None if isinstance(value, torch.Generator) else value
