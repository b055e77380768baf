"""Other numbers, bools, members of enums, dtypes: what is no tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from customops._schema.types import row_of
from customops.checks._case import Case
from customops.checks.inputs._order import in_turn
from customops.checks.inputs._parts import Parts, Place
from customops.checks.inputs._ranks import NORMAL, QUICK, THOROUGH

_DTYPES = {
    QUICK: (torch.float64,),
    NORMAL: (torch.float32, torch.float16, torch.int64, torch.bool, torch.complex64),
    THOROUGH: (torch.bfloat16, torch.int32, torch.uint8),
}
_FORMATS = {
    QUICK: (),
    NORMAL: (torch.contiguous_format, torch.preserve_format, torch.channels_last),
    THOROUGH: (torch.channels_last_3d,),
}


def numbers(parts: Parts, rank: int) -> Iterator[Case]:
    """One argument at a time: the first other value of each, then the second of each."""
    yield from in_turn(_of_place(parts, place, value, rank) for place, value in parts.numbers)


def _of_place(parts: Parts, place: Place, value: Any, rank: int) -> Iterator[Case]:
    is_choice = bool(place.choices) or python_type(place) in (bool, torch.dtype, torch.memory_format)
    if parts.variation.allows("choice" if is_choice else "value", place.name):
        for new in _others(parts, place, value, rank):
            trial = parts.with_arguments({place.name: new})
            yield Case(trial, "choice" if is_choice else "number", f"{place.name}={in_words(new)}")


def python_type(place: Place) -> Any:
    """The Python type of a value, or of an item of a list; None if it has none."""
    type_ = place.item_type or place.type
    if type_.removesuffix("?") == "int":  # the hint ``int`` is a SymInt
        return int
    return next(iter(row_of(type_).hints), None)


def _others(parts: Parts, place: Place, value: Any, rank: int) -> Iterator[Any]:
    """Other values that it may have."""
    seen = [repr(value)]
    lists = isinstance(value, list | tuple)
    found = _lists(parts, place, list(value), rank) if lists else _singles(parts, place, value, rank)
    for new in found:
        if repr(new) not in seen:
            seen.append(repr(new))
            yield new


def _singles(parts: Parts, place: Place, value: Any, rank: int) -> Iterator[Any]:
    if place.item_type is not None:
        return  # it is None, and there is no list to go by
    if place.choices:
        yield from place.choices[: 4 if rank == QUICK else None] if rank < THOROUGH else ()
        return
    maker = _MAKERS.get(python_type(place))
    if maker is not None:
        yield from maker(parts, value, rank)


def _lists(parts: Parts, place: Place, value: list[Any], rank: int) -> Iterator[Any]:
    """Lists as long; all items alike, or the last one another."""
    if not value:
        return
    if place.choices:
        if rank == NORMAL:
            yield from ([choice] * len(value) for choice in place.choices)
            yield value[::-1]
        return
    maker = _MAKERS.get(python_type(place))
    if maker is None:
        return
    if rank == NORMAL:
        yield value[::-1]
    for new in maker(parts, value[-1], rank):
        yield [*value[:-1], new]
        if rank != QUICK:
            yield [new] * len(value)


def _ints(parts: Parts, value: Any, rank: int) -> Iterator[int]:
    dims = [spot.tensor.dim() for spot in parts.spots]
    yield from {QUICK: (0, -1), NORMAL: (1, 2), THOROUGH: (3, -2, 17)}[rank]
    if rank == NORMAL and isinstance(value, int):
        yield value + 1
        yield value - 1
        yield from (edge for dim in dims[:1] for edge in (-dim, dim - 1))
    if rank == THOROUGH and isinstance(value, int):
        yield -value
        yield 2 * value + 1


def _floats(parts: Parts, value: Any, rank: int) -> Iterator[float]:
    yield from {QUICK: (0.0, -1.0), NORMAL: (1.0, 0.5, 2.0), THOROUGH: (1e-6, -0.5, 1e4, float("inf"))}[rank]
    if rank == NORMAL and isinstance(value, float):
        yield -value
        yield 0.6 * value


def _scalars(parts: Parts, value: Any, rank: int) -> Iterator[Any]:
    if isinstance(value, float | int) and not isinstance(value, bool):
        yield from {QUICK: (0.0, 3), NORMAL: (0, -1.5, 1, 2.5), THOROUGH: (True, 1e4)}[rank]


def _bools(parts: Parts, value: Any, rank: int) -> Iterator[bool]:
    if rank == QUICK:
        yield not value


def _complex(parts: Parts, value: Any, rank: int) -> Iterator[complex]:
    yield from {QUICK: (1j,), NORMAL: (0j, 1 + 0j, -0.5 + 2j), THOROUGH: ()}[rank]


#: Python type of an argument -> what makes other values of it.
_MAKERS: dict[Any, Callable[[Parts, Any, int], Iterator[Any]]] = {
    int: _ints,
    float: _floats,
    torch.types.Number: _scalars,
    bool: _bools,
    complex: _complex,
    torch.dtype: lambda parts, value, rank: iter(_DTYPES[rank]),
    torch.memory_format: lambda parts, value, rank: iter(_FORMATS[rank]),
}


def in_words(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
