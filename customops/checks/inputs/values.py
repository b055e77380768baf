"""Other elements of the tensors: zeros, ties, other signs, large and tiny ones, infinities and NaN."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from customops._schema.types import row_of
from customops.checks._trial import Case
from customops.checks.inputs._elements import is_inexact, wide
from customops.checks.inputs.parts import NORMAL, QUICK, THOROUGH, Parts, Place, Spot, in_turn, made

Values = Callable[[torch.Tensor], torch.Tensor | None]


def values(parts: Parts, rank: int) -> Iterator[Case]:
    """Of all tensors of floats, of integers and of bools together, then of each by itself."""
    spots = parts.resizable("value")
    for table, has_kind in _tables(parts):
        alike = [spot for spot in spots if has_kind(spot.tensor) and spot.tensor.numel()]
        for name, change in table[rank].items():
            trial = parts.each(alike, _in_its_dtype(change))
            yield from made(trial, "value", f"{', '.join(spot.label for spot in alike)}: {name}")
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
            yield from made(trial, "padding", f"{spot.label}: -1 in the first place")


def _tables(parts: Parts) -> Iterator[tuple[dict[int, Mapping[str, Values]], Callable[[torch.Tensor], bool]]]:
    yield from _TABLES
    if not parts.is_careful:
        if all(_is_integer(spot.tensor) for spot in parts.spots):
            yield _FREE_INTS, _is_integer
        else:
            yield _COUNTS, _is_integer


def _alone(parts: Parts, spot: Spot, table: Mapping[str, Values]) -> Iterator[Case]:
    for name, change in table.items():
        yield from made(parts.each([spot], _in_its_dtype(change)), "value", f"{spot.label} alone: {name}")


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
        for new in _other_numbers(parts, place, value, rank):
            trial = parts.with_arguments({place.name: new})
            yield Case(trial, "choice" if is_choice else "number", f"{place.name}={in_words(new)}")


def python_type(place: Place) -> Any:
    """The Python type of a value, or of an item of a list; None if it has none."""
    type_ = place.item_type or place.type
    if type_.removesuffix("?") == "int":  # the hint ``int`` is a SymInt
        return int
    return next(iter(row_of(type_).hints), None)


def _other_numbers(parts: Parts, place: Place, value: Any, rank: int) -> Iterator[Any]:
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


_FLOAT_DTYPES = {
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
_COMPLEX_DTYPES = {QUICK: (torch.complex128, torch.complex64), NORMAL: (torch.float32,), THOROUGH: (torch.float64,)}
_INT_DTYPES = {
    QUICK: (torch.int32, torch.int64),
    NORMAL: (torch.uint8, torch.int16, torch.int8, torch.float32),
    THOROUGH: (torch.float64, torch.bool),
}
_BOOL_DTYPES: Mapping[int, tuple[torch.dtype, ...]] = {QUICK: (), NORMAL: (torch.uint8,), THOROUGH: (torch.float32,)}
#: One tensor of several, of floating point and of integers.
_MIXED_FLOATS = {QUICK: (), NORMAL: (torch.float64, torch.float16, torch.float32), THOROUGH: (torch.bfloat16,)}
_MIXED_INTS = {QUICK: (), NORMAL: (torch.int32, torch.int64), THOROUGH: (torch.uint8,)}


def dtypes(parts: Parts, rank: int) -> Iterator[Case]:
    """All tensors of a dtype together, with the arguments that name it, then one tensor by itself."""
    spots = parts.resizable("dtype")
    for old in dict.fromkeys(spot.tensor.dtype for spot in spots):
        alike = [spot for spot in spots if spot.tensor.dtype is old]
        for new in _other_dtypes(old)[rank]:
            if new is not old:
                yield from _together(parts, alike, old, new)
    if len(spots) < 2:
        return
    for spot in spots:
        mixed = _MIXED_FLOATS if spot.tensor.is_floating_point() else _MIXED_INTS
        if spot.tensor.dtype not in (torch.bool, torch.complex64, torch.complex128):
            for new in mixed[rank]:
                yield from _alone_in_dtype(parts, spot, new)


def _other_dtypes(dtype: torch.dtype) -> Mapping[int, tuple[torch.dtype, ...]]:
    if dtype.is_floating_point:
        return _FLOAT_DTYPES
    if dtype.is_complex:
        return _COMPLEX_DTYPES
    return _BOOL_DTYPES if dtype is torch.bool else _INT_DTYPES


def _together(parts: Parts, spots: list[Spot], old: torch.dtype, new: torch.dtype) -> Iterator[Case]:
    trial = parts.each(spots, functools.partial(as_dtype, dtype=new))
    if trial is None:
        return
    label = f"{', '.join(spot.label for spot in spots)}: {name_of(new)}"
    named = {place.name: new for place, value in parts.numbers if value is old}
    if named:
        yield Case(trial.with_arguments(**named), "dtype", f"{label}, and {', '.join(named)}")
    yield Case(trial, "dtype", label)


def _alone_in_dtype(parts: Parts, spot: Spot, new: torch.dtype) -> Iterator[Case]:
    if new is not spot.tensor.dtype:
        trial = parts.each([spot], functools.partial(as_dtype, dtype=new))
        yield from made(trial, "dtype", f"{spot.label} alone: {name_of(new)}")


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
