"""Other dtypes: all tensors of a dtype together, with the arguments that name it, then one tensor by itself."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

import torch

from customops.checks._case import Case
from customops.checks.inputs._elements import is_inexact
from customops.checks.inputs._parts import Parts, Spot
from customops.checks.inputs._ranks import NORMAL, QUICK, THOROUGH

_FLOATS = {
    QUICK: (torch.float64, torch.float32, torch.bfloat16),
    NORMAL: (torch.float16,),
    # Of those not of floating point: kernels take them by accident, too, and few authors mean them.
    THOROUGH: (
        torch.int32,
        torch.complex64,
        torch.complex128,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int64,
        torch.bool,
    ),
}
_COMPLEX = {QUICK: (torch.complex128, torch.complex64), NORMAL: (torch.float32,), THOROUGH: (torch.float64,)}
_INTS = {
    QUICK: (torch.int32, torch.int64),
    NORMAL: (torch.uint8, torch.int16, torch.int8, torch.float32),
    THOROUGH: (torch.float64, torch.bool),
}
_BOOLS: Mapping[int, tuple[torch.dtype, ...]] = {QUICK: (), NORMAL: (torch.uint8,), THOROUGH: (torch.float32,)}
#: One tensor of several, of floating point and of integers.
_MIXED_FLOATS = {QUICK: (), NORMAL: (torch.float64, torch.float16, torch.float32), THOROUGH: (torch.bfloat16,)}
_MIXED_INTS = {QUICK: (), NORMAL: (torch.int32, torch.int64), THOROUGH: (torch.uint8,)}


def dtypes(parts: Parts, rank: int) -> Iterator[Case]:
    spots = parts.resizable("dtype")
    for old in dict.fromkeys(spot.tensor.dtype for spot in spots):
        alike = [spot for spot in spots if spot.tensor.dtype is old]
        for new in _others(old)[rank]:
            if new is not old:
                yield from _together(parts, alike, old, new)
    if len(spots) < 2:
        return
    for spot in spots:
        mixed = _MIXED_FLOATS if spot.tensor.is_floating_point() else _MIXED_INTS
        if spot.tensor.dtype not in (torch.bool, torch.complex64, torch.complex128):
            for new in mixed[rank]:
                yield from _alone(parts, spot, new)


def _others(dtype: torch.dtype) -> Mapping[int, tuple[torch.dtype, ...]]:
    if dtype.is_floating_point:
        return _FLOATS
    if dtype.is_complex:
        return _COMPLEX
    return _BOOLS if dtype is torch.bool else _INTS


def _together(parts: Parts, spots: list[Spot], old: torch.dtype, new: torch.dtype) -> Iterator[Case]:
    trial = parts.each(spots, functools.partial(as_dtype, dtype=new))
    if trial is None:
        return
    label = f"{', '.join(spot.label for spot in spots)}: {name_of(new)}"
    named = {place.name: new for place, value in parts.numbers if value is old}
    if named:
        yield Case(trial.with_arguments(**named), "dtype", f"{label}, and {', '.join(named)}")
    yield Case(trial, "dtype", label)


def _alone(parts: Parts, spot: Spot, new: torch.dtype) -> Iterator[Case]:
    if new is not spot.tensor.dtype:
        trial = parts.each([spot], functools.partial(as_dtype, dtype=new))
        if trial is not None:
            yield Case(trial, "dtype", f"{spot.label} alone: {name_of(new)}")


def as_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """The tensor in another dtype; complex ones get an imaginary part. None where not all elements fit."""
    if dtype.is_complex and not tensor.is_complex():
        wide = tensor.to(dtype)
        return wide + 0.5j * wide.roll(1) if wide.numel() and wide.dim() else wide
    if tensor.is_complex() and not dtype.is_complex:
        tensor = torch.view_as_real(tensor.resolve_conj())[..., 0]
    new = tensor.to(dtype)
    if is_inexact(tensor.dtype) or is_inexact(dtype):
        return new
    return new if bool((new.to(tensor.dtype) == tensor).all()) else None


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
