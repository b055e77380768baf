"""Other elements of the tensors: zeros, ties, other signs, large and tiny ones, infinities and NaN."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from customops.checks._case import Case
from customops.checks.inputs._elements import is_inexact, wide
from customops.checks.inputs._parts import Parts, Spot
from customops.checks.inputs._ranks import NORMAL, QUICK, THOROUGH

Values = Callable[[torch.Tensor], torch.Tensor | None]


def values(parts: Parts, rank: int) -> Iterator[Case]:
    """Of all tensors of floats, of integers and of bools together, then of each by itself."""
    spots = parts.resizable("value")
    for table, has_kind in _tables(parts):
        alike = [spot for spot in spots if has_kind(spot.tensor) and spot.tensor.numel()]
        for name, change in table[rank].items():
            trial = parts.each(alike, _in_its_dtype(change))
            if trial is not None:
                yield Case(trial, "value", f"{', '.join(spot.label for spot in alike)}: {name}")
    if rank != QUICK and len(spots) > 1:
        for table, has_kind in _tables(parts):
            for spot in spots:
                if has_kind(spot.tensor) and spot.tensor.numel():
                    yield from _alone(parts, spot, table[rank - 1])


def padding(parts: Parts, rank: int) -> Iterator[Case]:
    """-1 in the place of one of the integers, which may be indices."""
    if rank != NORMAL or parts.is_careful:
        return
    for spot in parts.resizable("value"):
        tensor = spot.tensor
        if _is_integer(tensor) and tensor.dtype.is_signed and tensor.numel() and int(wide(tensor).min()) >= 0:
            trial = parts.each([spot], _in_its_dtype(_first(-1)))
            if trial is not None:
                yield Case(trial, "padding", f"{spot.label}: -1 in the first place")


def _tables(parts: Parts) -> Iterator[tuple[dict[int, Mapping[str, Values]], Callable[[torch.Tensor], bool]]]:
    yield from _TABLES
    if not parts.is_careful:
        if all(_is_integer(spot.tensor) for spot in parts.spots):
            yield _FREE_INTS, _is_integer
        else:
            yield _COUNTS, _is_integer


def _alone(parts: Parts, spot: Spot, table: Mapping[str, Values]) -> Iterator[Case]:
    for name, change in table.items():
        trial = parts.each([spot], _in_its_dtype(change))
        if trial is not None:
            yield Case(trial, "value", f"{spot.label} alone: {name}")


def _in_its_dtype(change: Values) -> Values:
    """The change, made in a dtype that can do it."""

    def changed(tensor: torch.Tensor) -> torch.Tensor | None:
        new = change(wide(tensor))
        return None if new is None else new.to(tensor.dtype)

    return changed


def _first(value: float) -> Values:
    """The value for the first element, and none other."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        new = tensor.clone()
        new[(0,) * new.dim()] = value
        return new

    return change


def _ties(tensor: torch.Tensor) -> torch.Tensor | None:
    """Each second element as the one before it."""
    if tensor.numel() < 2:
        return None
    flat = tensor.reshape(-1)
    return flat[torch.arange(flat.numel(), device=flat.device) // 2].reshape(tensor.shape)


def _all_equal(pick: Callable[[torch.Tensor], torch.Tensor]) -> Values:
    return lambda tensor: torch.full_like(tensor, pick(tensor).item())


def _is_integer(tensor: torch.Tensor) -> bool:
    return not (is_inexact(tensor.dtype) or tensor.dtype is torch.bool)


def _every_second(tensor: torch.Tensor, value: float) -> torch.Tensor | None:
    if tensor.numel() < 2:
        return None
    new = tensor.clone(memory_format=torch.contiguous_format)
    new.view(-1)[1::2] = value
    return new


def _merged(tensor: torch.Tensor) -> torch.Tensor | None:
    """The first of some counts is added to the second, and then is 0: there are as many in all."""
    if tensor.dim() != 1 or tensor.numel() < 2 or int(tensor.min()) < 0:
        return None
    new = tensor.clone()
    new[1] += new[0]
    new[0] = 0
    return new


def _different(tensor: torch.Tensor) -> torch.Tensor | None:
    if tensor.numel() > 127:
        return None
    return torch.arange(tensor.numel(), device=tensor.device).reshape(tensor.shape).to(tensor.dtype)


def _inverted_order(tensor: torch.Tensor) -> torch.Tensor | None:
    return tensor.reshape(-1).flip(0).reshape(tensor.shape) if tensor.numel() > 1 else None


_FLOATS: dict[int, Mapping[str, Values]] = {
    QUICK: {"other signs": lambda tensor: -tensor, "zeros": torch.zeros_like},
    NORMAL: {
        "ties": _ties,
        "NaN in the first place": _first(float("nan")),
        "infinite in the first place": _first(float("inf")),
        "infinite in every second place": lambda tensor: _every_second(tensor, float("inf")),
        "halves": lambda tensor: tensor.round() + 0.5,
        "negative": lambda tensor: -tensor.abs(),
        "large": lambda tensor: tensor * 1e4,
        "tiny": lambda tensor: tensor * 1e-6,
        "-0.0": lambda tensor: torch.full_like(tensor, -0.0),
        "equal": _all_equal(torch.Tensor.max),
    },
    THOROUGH: {
        "huge": lambda tensor: tensor * 1e30,
        "NaN": lambda tensor: torch.full_like(tensor, float("nan")),
        "-inf": lambda tensor: torch.full_like(tensor, -float("inf")),
        "reversed": _inverted_order,
    },
}
_COMPLEX: dict[int, Mapping[str, Values]] = {
    QUICK: {"zeros": torch.zeros_like},
    NORMAL: {"other signs": lambda tensor: -tensor, "NaN in the first place": _first(float("nan"))},
    THOROUGH: {"ties": _ties},
}
#: Integers may be indices: they stay between the smallest and the largest of the sample.
_INTS: dict[int, Mapping[str, Values]] = {
    QUICK: {"the smallest": _all_equal(torch.Tensor.min)},
    NORMAL: {"the largest": _all_equal(torch.Tensor.max), "reversed": _inverted_order, "ties": _ties},
    THOROUGH: {"zeros": torch.zeros_like},
}
_BOOLS: dict[int, Mapping[str, Values]] = {
    QUICK: {"False": lambda tensor: torch.full_like(tensor, False)},
    NORMAL: {"True": lambda tensor: torch.full_like(tensor, True), "inverted": torch.logical_not},
    THOROUGH: {},
}
#: Integers of an op that takes other tensors, too.
_COUNTS: dict[int, Mapping[str, Values]] = {
    QUICK: {},
    NORMAL: {"the first added to the second": _merged},
    THOROUGH: {},
}
#: Integers of an op that takes no other tensors, to which they could be indices.
_FREE_INTS: dict[int, Mapping[str, Values]] = {
    QUICK: {},
    NORMAL: {"other signs": lambda tensor: -tensor, "all different": _different},
    THOROUGH: {"beyond what a float32 resolves": lambda tensor: tensor + 2**24 + 1},
}
_TABLES: list[tuple[dict[int, Mapping[str, Values]], Callable[[torch.Tensor], bool]]] = [
    (_FLOATS, torch.Tensor.is_floating_point),
    (_COMPLEX, torch.Tensor.is_complex),
    (_BOOLS, lambda tensor: tensor.dtype is torch.bool),
    (_INTS, _is_integer),
]
