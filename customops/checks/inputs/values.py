"""Other elements, dtypes, numbers and choices; and what is there at all.

The latter: arguments that are absent, lists of another length, one tensor in two places, other devices.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from customops._schema.model import REQUIRED
from customops._schema.structure import Either, Group, Node
from customops._schema.types import item_type, row_of
from customops.checks._trial import Case
from customops.checks.inputs.constants import Constants
from customops.checks.inputs.parts import (
    NORMAL,
    QUICK,
    THOROUGH,
    Change,
    Parts,
    Place,
    in_turn,
    is_inexact,
    is_integer,
    resized,
    wide,
)


def values(parts: Parts, rank: int) -> Iterator[Case]:
    """Of all tensors of floats, of integers and of bools together, then of each by itself."""
    spots = [spot for spot in parts.resizable("value") if spot.tensor.numel()]
    tables = list(_TABLES)
    if not parts.is_careful:
        are_integers = all(is_integer(spot.tensor) for spot in parts.spots)
        tables.append((is_integer, _FREE_INTS if are_integers else _COUNTS))
    for has_kind, table in tables:
        alike = [spot for spot in spots if has_kind(spot.tensor)]
        label = ", ".join(spot.label for spot in alike)
        for name, change in table[rank].items():
            yield from parts.cases(alike, _in_its_dtype(change), "value", f"{label}: {name}")
    if rank == QUICK or len(parts.resizable("value")) < 2:
        return
    for has_kind, table in tables:
        for spot in spots:
            for name, change in table[rank - 1].items() if has_kind(spot.tensor) else ():
                yield from parts.cases([spot], _in_its_dtype(change), "value", f"{spot.label} alone: {name}")


def padding(parts: Parts, rank: int) -> Iterator[Case]:
    """-1 in the place of one of the integers, which may be indices."""
    if rank != NORMAL or parts.is_careful:
        return
    for spot in parts.resizable("value"):
        tensor = spot.tensor
        if is_integer(tensor) and tensor.dtype.is_signed and tensor.numel() and int(wide(tensor).min()) >= 0:
            yield from parts.cases([spot], _in_its_dtype(_first(-1)), "padding", f"{spot.label}: -1 in the first place")


def _in_its_dtype(change: Change) -> Change:
    """The change, made in a dtype that can do it."""

    def changed(tensor: torch.Tensor) -> torch.Tensor | None:
        new = change(wide(tensor))
        return None if new is None else new.to(tensor.dtype)

    return changed


def _first(value: float) -> Change:
    """The value for the first element, and none other."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        new = tensor.clone()
        new[(0,) * new.dim()] = value
        return new

    return change


def _all(value: float) -> Change:
    return lambda tensor: torch.full_like(tensor, value)


def _all_as(pick: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda tensor: torch.full_like(tensor, pick(tensor).item())


def _ties(tensor: torch.Tensor) -> torch.Tensor | None:
    """Two elements in a row are equal."""
    if tensor.numel() < 2:
        return None
    flat = tensor.reshape(-1)
    return flat[torch.arange(flat.numel(), device=flat.device) // 2].reshape(tensor.shape)


def _every_second_infinite(tensor: torch.Tensor) -> torch.Tensor | None:
    new = tensor.clone(memory_format=torch.contiguous_format)
    new.view(-1)[1::2] = float("inf")
    return new if tensor.numel() > 1 else None


def _every_second(tensor: torch.Tensor) -> torch.Tensor | None:
    """Every second element is False, of bools."""
    return (
        (torch.arange(tensor.numel()) % 2 == 0).reshape(tensor.shape).to(tensor.device) if tensor.numel() > 1 else None
    )


def _merged(tensor: torch.Tensor) -> torch.Tensor | None:
    """The first of some counts is added to the second, and then is 0: there are as many in all."""
    if tensor.dim() != 1 or tensor.numel() < 2 or int(tensor.min()) < 0:
        return None
    new = tensor.clone()
    new[1] += new[0]
    new[0] = 0
    return new


def _last_smaller(tensor: torch.Tensor) -> torch.Tensor | None:
    """One less for the last one of several that are equal, lengths perhaps."""
    if tensor.dim() != 1 or tensor.numel() < 2 or int(tensor.min()) < 1 or int(tensor.min()) != int(tensor.max()):
        return None
    new = tensor.clone()
    new[-1] -= 1
    return new


def _different(tensor: torch.Tensor) -> torch.Tensor | None:
    new = torch.arange(tensor.numel(), device=tensor.device).reshape(tensor.shape).to(tensor.dtype)
    return new if tensor.numel() <= 127 else None


def _inverted_order(tensor: torch.Tensor) -> torch.Tensor | None:
    return tensor.reshape(-1).flip(0).reshape(tensor.shape) if tensor.numel() > 1 else None


#: For each rank, by its number: what to try, and how to make it.
_Table = tuple[Mapping[str, Change], Mapping[str, Change], Mapping[str, Change]]

_FLOATS: _Table = (
    {"other signs": torch.neg, "zeros": torch.zeros_like},
    {
        "ties": _ties,
        "NaN in the first place": _first(float("nan")),
        "infinite in the first place": _first(float("inf")),
        "infinite in every second place": _every_second_infinite,
        "halves": lambda tensor: tensor.round() + 0.5,
        "negative": lambda tensor: -tensor.abs(),
        "large": lambda tensor: tensor * 1e4,
        "tiny": lambda tensor: tensor * 1e-6,
        "-0.0": _all(-0.0),
        "equal": _all_as(torch.max),
    },
    {
        "huge": lambda tensor: tensor * 1e30,
        "NaN": _all(float("nan")),
        "-inf": _all(-float("inf")),
        "reversed": _inverted_order,
    },
)
_COMPLEX: _Table = (
    {"zeros": torch.zeros_like},
    {"other signs": torch.neg, "NaN in the first place": _first(float("nan"))},
    {"ties": _ties},
)
#: Integers may be indices: they stay between the smallest and the largest of the sample.
_INTS: _Table = (
    {"the smallest": _all_as(torch.min), "the last one smaller": _last_smaller},
    {"the largest": _all_as(torch.max), "reversed": _inverted_order, "ties": _ties},
    {"zeros": torch.zeros_like},
)
_BOOLS: _Table = (
    {"False": _all(False)},
    {"every second": _every_second, "True": _all(True), "inverted": torch.logical_not},
    {},
)
#: Integers of an op that takes other tensors, too.
_COUNTS: _Table = ({}, {"the first added to the second": _merged}, {})
#: Integers of an op that takes no other tensors, to which they could be indices.
_FREE_INTS: _Table = (
    {},
    {
        "other signs": torch.neg,
        "all different": _different,
    },
    {"beyond what a float32 resolves": lambda tensor: tensor + 2**24 + 1},
)
_TABLES: Sequence[tuple[Callable[[torch.Tensor], bool], _Table]] = (
    (torch.Tensor.is_floating_point, _FLOATS),
    (torch.Tensor.is_complex, _COMPLEX),
    (lambda tensor: tensor.dtype is torch.bool, _BOOLS),
    (is_integer, _INTS),
)


# Numbers and choices


def numbers(parts: Parts, rank: int) -> Iterator[Case]:
    """One argument at a time: the first other value of each, then the second of each."""
    yield from in_turn(_of_place(parts, place, value, rank) for place, value in parts.numbers)


def _of_place(parts: Parts, place: Place, value: Any, rank: int) -> Iterator[Case]:
    is_choice = bool(place.choices) or python_type(place) in (bool, torch.dtype, torch.memory_format)
    if not parts.variation.allows("choice" if is_choice else "value", place.name):
        return
    seen = {repr(value)}
    for new in _other_values(parts, place, value, rank):
        if repr(new) not in seen:
            seen.add(repr(new))
            trial = parts.trial.with_arguments(**{place.name: new})
            yield Case(trial, "choice" if is_choice else "number", f"{place.name}={in_words(new)}")


def named_numbers(parts: Parts, named: Constants) -> Iterator[Case]:
    """Numbers and words that the code mentions, for arguments of their type."""
    for place, value in parts.numbers:
        if place.choices or not parts.variation.allows("value", place.name) or isinstance(value, list | tuple):
            continue
        kind = python_type(place)
        news: list[Any] = []
        if kind is int and isinstance(value, int):
            news = [new for n in named.ints for new in (n, n + 1) if abs(n) < 2**24]
        elif kind in (float, torch.types.Number) and isinstance(value, float):
            news = [*named.floats, *map(float, named.ints)]
        elif kind is str:
            news = [*named.strings]
        elif kind is torch.dtype:
            news = [*named.dtypes]
        for new in news:
            if new != value:
                is_choice = kind in (str, torch.dtype)
                trial = parts.trial.with_arguments(**{place.name: new})
                yield Case(trial, "choice" if is_choice else "number", f"{place.name}={in_words(new)}")


def named_values(parts: Parts, named: Constants) -> Iterator[Case]:
    """Elements on both sides of a number that the code mentions, and the dtypes."""
    spots = [spot for spot in parts.resizable("value") if spot.tensor.is_floating_point() and spot.tensor.numel()]
    label = ", ".join(spot.label for spot in spots)
    for number in [*named.floats, *(float(n) for n in named.ints)]:
        if abs(number) > 1 and abs(number) <= 1e4:

            def around(tensor: torch.Tensor, number: float = number) -> torch.Tensor:
                return tensor + number

            yield from parts.cases(spots, _in_its_dtype(around), "value", f"{label}: around {number:g}")
    for dtype in named.dtypes:
        for spot in parts.resizable("dtype"):
            old = spot.tensor.dtype
            is_like = old.is_floating_point == dtype.is_floating_point and old.is_complex == dtype.is_complex
            if is_like and dtype is not old and old is not torch.bool and dtype is not torch.bool:
                change = functools.partial(as_dtype, dtype=dtype)
                yield from parts.cases([spot], change, "dtype", f"{spot.label} alone: {name_of(dtype)}")


def python_type(place: Place) -> Any:
    """The Python type of a value, or of an item of a list; None if it has none."""
    type_ = item_type(place.type) or place.type
    if type_.removesuffix("?") == "int":  # the hint ``int`` is a SymInt
        return int
    return next(iter(row_of(type_).hints), None)


def _other_values(parts: Parts, place: Place, value: Any, rank: int) -> Iterator[Any]:
    """Other values; of a list those as long, with all items alike, or with another for the last one."""
    kind = python_type(place)
    if not isinstance(value, list | tuple):
        if item_type(place.type) is not None:
            return  # it is None, and there is no list to go by
        if not place.choices:
            yield from _other_numbers(parts, kind, value, rank)
        elif rank < THOROUGH:
            yield from place.choices[: 4 if rank == QUICK else None]
        return
    items = list(value)
    if not items:
        return
    if place.choices:
        if rank == NORMAL:
            yield from ([choice] * len(items) for choice in place.choices)
            yield items[::-1]
        return
    if rank == NORMAL and (kind in _NUMBERS or kind is bool):
        yield items[::-1]
    count = parts.spots[0].tensor.dim() if parts.spots else 0
    if rank == QUICK and kind is int and are_dims(items, count):
        yield from ([*range(1, count), 0], [0, count - 1]) if len(items) == count else ([0, 1], [*range(count)])
    for new in _other_numbers(parts, kind, items[-1], rank):
        yield [*items[:-1], new]
        if rank != QUICK:
            yield [new] * len(items)


def are_dims(items: Sequence[Any], count: int) -> bool:
    """May these be some of so many dimensions, each once?"""
    return count > 1 and all(-count <= item < count for item in items) and len({i % count for i in items}) == len(items)


def _other_numbers(parts: Parts, kind: Any, value: Any, rank: int) -> Iterator[Any]:
    if kind is bool and rank == QUICK:
        yield not value
    if kind != torch.types.Number or (isinstance(value, float | int) and not isinstance(value, bool)):
        yield from _NUMBERS.get(kind, ((), (), ()))[rank]
    if kind is int and isinstance(value, int) and rank == NORMAL:
        yield from (value + 1, value - 1)
        for spot in parts.spots[:1]:
            yield from (-spot.tensor.dim(), spot.tensor.dim() - 1)
    elif kind is int and isinstance(value, int) and rank == THOROUGH:
        yield from (-value, 2 * value + 1)
    elif kind is float and isinstance(value, float) and rank == NORMAL:
        yield from (-value, 0.6 * value)


#: Python type of an argument -> values to try, for each rank.
_NUMBERS: Mapping[Any, tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]] = {
    int: ((0, -1), (1, 2), (3, -2, 17)),
    float: ((0.0, -1.0), (1.0, 0.5, 2.0), (1e-6, -0.5, 1e4, float("inf"))),
    torch.types.Number: ((0.0, 3), (0, -1.5, 1, 2.5), (True, 1e4)),
    complex: ((1j,), (0j, 1 + 0j, -0.5 + 2j), ()),
    torch.dtype: (
        (torch.float64,),
        (torch.float32, torch.float16, torch.int64, torch.bool, torch.complex64),
        (torch.bfloat16, torch.int32, torch.uint8),
    ),
    torch.memory_format: (
        (),
        (torch.contiguous_format, torch.preserve_format, torch.channels_last),
        (torch.channels_last_3d,),
    ),
}


def in_words(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# Dtypes

#: For each rank.
_Dtypes = tuple[tuple[torch.dtype, ...], tuple[torch.dtype, ...], tuple[torch.dtype, ...]]

_OF_FLOATS: _Dtypes = (
    (torch.float64, torch.float32, torch.bfloat16),
    (torch.float16,),
    # Of those not of floating point: kernels take them by accident, too, and few authors mean them.
    (torch.int32, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64, torch.bool),
)
_OF_COMPLEX: _Dtypes = ((torch.complex128, torch.complex64), (torch.float32,), (torch.float64,))
_OF_BOOLS: _Dtypes = ((), (torch.uint8,), (torch.float32,))
_OF_INTS: _Dtypes = (
    (torch.int32, torch.int64),
    (torch.uint8, torch.int16, torch.int8, torch.float32),
    (torch.float64, torch.bool),
)
#: One tensor of several, of floating point and of integers.
_ALONE_OF_FLOATS: _Dtypes = ((), (torch.float64, torch.float16, torch.float32), (torch.bfloat16,))
_ALONE_OF_INTS: _Dtypes = ((), (torch.int32, torch.int64), (torch.uint8,))


def dtypes(parts: Parts, rank: int) -> Iterator[Case]:
    """All tensors of a dtype together, with the arguments that name it, then one tensor by itself."""
    spots = parts.resizable("dtype")
    for old in dict.fromkeys(spot.tensor.dtype for spot in spots):
        alike = [spot for spot in spots if spot.tensor.dtype is old]
        named = [place.name for place, value in parts.numbers if value is old]
        others = _OF_COMPLEX if old.is_complex else _OF_BOOLS if old is torch.bool else _OF_INTS
        for new in (_OF_FLOATS if old.is_floating_point else others)[rank]:
            trial = parts.each(alike, functools.partial(as_dtype, dtype=new)) if new is not old else None
            if trial is None:
                continue
            label = f"{', '.join(spot.label for spot in alike)}: {name_of(new)}"
            if named:
                both = trial.with_arguments(**dict.fromkeys(named, new))
                yield Case(both, "dtype", f"{label}, and {', '.join(named)}")
            yield Case(trial, "dtype", label)
    for spot in spots if len(spots) > 1 else ():
        old = spot.tensor.dtype
        if old.is_floating_point or is_integer(spot.tensor):
            for new in (_ALONE_OF_FLOATS if old.is_floating_point else _ALONE_OF_INTS)[rank]:
                if new is not old:
                    change = functools.partial(as_dtype, dtype=new)
                    yield from parts.cases([spot], change, "dtype", f"{spot.label} alone: {name_of(new)}")


def as_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """The tensor in another dtype; complex ones get an imaginary part. None where not all elements fit."""
    if dtype.is_complex and not tensor.is_complex():
        new = tensor.to(dtype)
        return new + 0.5j * new.roll(1) if new.numel() and new.dim() else new
    if tensor.is_complex() and not dtype.is_complex:
        tensor = torch.view_as_real(tensor.resolve_conj())[..., 0]
    new = tensor.to(dtype)
    if is_inexact(tensor.dtype) or is_inexact(dtype):
        return new
    return new if bool((new.to(tensor.dtype) == tensor).all()) else None


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# What is there at all


def _given(parts: Parts, values: Mapping[str, Any], label: str) -> Case:
    return Case(parts.trial.with_arguments(**values), "optional", label)


def optionals(parts: Parts, rank: int) -> Iterator[Case]:
    """Arguments that are None, or left to their defaults, and such that the sample leaves out."""
    given = parts.trial.arguments
    places = [place for place in parts.places.values() if not place.is_bound]
    free = [place for place in places if parts.variation.allows("optional", place.name)]
    if rank == NORMAL:
        for place in free:
            if place.default is not REQUIRED and place.name in given:
                yield Case(parts.without(place.name), "optional", f"{place.name} left out")
    elif rank == THOROUGH:
        left_out = [place for place in free if place.name not in given and place.default is not REQUIRED]
        if left_out:
            yield _given(parts, {place.name: place.default for place in left_out}, "all defaults passed")
    else:
        values = [(place, given.get(place.name, place.default)) for place in free if place.type.endswith("?")]
        there = [place.name for place, value in values if value is not None and value is not REQUIRED]
        for name in there:
            yield _given(parts, {name: None}, f"{name}=None")
        if len(there) > 1:
            yield _given(parts, dict.fromkeys(there), f"{', '.join(there)}: None")
        for place in (place for place, value in values if value is None):
            for new in _guessed(parts, place):
                what = f"a tensor of shape {tuple(new.shape)}" if isinstance(new, torch.Tensor) else repr(new)
                yield _given(parts, {place.name: new}, f"{place.name} given: {what}")
        yield from _other_objects(parts, parts.nodes)


def _guessed(parts: Parts, place: Place) -> Iterator[Any]:
    """A tensor like another for one that is absent, and numbers."""
    if place.type.removesuffix("?") == "Tensor":
        tensors = [spot.tensor for spot in parts.resizable("optional")]
        by_shape = {tuple(tensor.shape): tensor for tensor in reversed(tensors)}
        shapes = list(dict.fromkeys(tuple(tensor.shape) for tensor in tensors))[:3]
        for seed, shape in enumerate(shapes, 101):
            yield resized(by_shape[shape], shape, seed)
        first = next((tensor for tensor in tensors if tensor.dim() > 1), None)
        if first is not None:
            yield resized(first, first.shape[-1:], 100)
    elif item_type(place.type) is None:
        yield from place.choices or _GUESSES.get(python_type(place), ())


#: Python type of an optional argument -> values where the sample has None.
_GUESSES: dict[Any, tuple[Any, ...]] = {
    int: (1, 0),
    float: (0.5,),
    bool: (True, False),
    torch.types.Number: (0.5,),
    torch.dtype: (torch.float64,),
    torch.memory_format: (torch.contiguous_format,),
}


def _other_objects(parts: Parts, nodes: Iterable[Node]) -> Iterator[Case]:
    """An object that is None, and a number for a tensor or a tensor for a number."""
    given = parts.trial.arguments
    for node in nodes:
        if isinstance(node, Group):
            is_there = node.given is not None and given.get(node.given.name) is True
            if is_there and parts.variation.allows("optional", node.path):
                yield _given(parts, node.take_apart(None), f"{node.path}=None")
            yield from _other_objects(parts, node.fields.values())
        elif isinstance(node, Either) and parts.variation.allows("optional", node.path):
            tensor, number = given.get(node.tensor.name), given.get(node.number.name)
            if isinstance(tensor, torch.Tensor):
                other = 2.0 if tensor.is_floating_point() else 2
                yield _given(parts, {node.tensor.name: None, node.number.name: other}, f"{node.path}: a number")
            elif isinstance(number, float):
                columns = [spot.tensor.shape[-1:] for spot in parts.spots[:1]]
                for shape in dict.fromkeys([torch.Size(), *columns]):
                    tensor = torch.linspace(number, number / 2, shape.numel()).reshape(shape)
                    new = {node.tensor.name: tensor, node.number.name: None}
                    yield _given(parts, new, f"{node.path}: a tensor" + (" for each column" if shape else ""))


def lists(parts: Parts, rank: int) -> Iterator[Case]:
    for name, value in parts.trial.arguments.items():
        place = parts.places[name]
        if not isinstance(value, list | tuple) or place.is_bound or not parts.variation.allows("list", name):
            continue
        items = list(value)
        found: list[tuple[str, list[Any]]] = []
        if "Tensor" in place.type:
            found = list(_tensor_lists(parts, name, items, rank))
        elif place.length is None and items and rank == QUICK:
            found = [("one item more", [*items, items[-1]])]
        elif place.length is None and items and rank == NORMAL:
            found = [("empty", []), ("one item", items[:1]), ("one item less", items[:-1])]
        for label, new in found:
            is_same = len(new) == len(items) and all(a is b for a, b in zip(new, items, strict=True))
            if not is_same or "Tensor" not in place.type:
                yield Case(parts.trial.with_arguments(**{name: new}), "list", f"{name}: {label}")


def _tensor_lists(parts: Parts, name: str, items: list[Any], rank: int) -> Iterator[tuple[str, list[Any]]]:
    spots = [spot for spot in parts.resizable("list") if spot.argument == name]
    last = spots[-1].tensor if spots else None
    if rank == QUICK:
        if last is not None:
            yield "one tensor more", [*items, resized(last, last.shape, 200)]
        yield "one tensor", items[:1]
    elif rank == THOROUGH:
        yield "in reverse order", items[::-1]
    else:
        yield "empty", []
        if last is None:
            return
        if not spots[0].is_written:
            yield "one tensor twice", [*items, items[-1]]
        # More than one launch of a kernel can get: its parameters have a limit of some kilobytes.
        some = itertools.islice(itertools.cycle(items), 40)
        yield "40 tensors", [x if x is None else x.detach().clone().requires_grad_(x.requires_grad) for x in some]
        for dim in range(last.dim()):
            shape = list(last.shape)
            shape[dim] += 2
            new = [*items[:-1], resized(last, shape, 300 + dim)] if len(items) > 1 else [*items, resized(last, shape)]
            yield f"tensors of unequal sizes in dimension {dim}", new


def same(parts: Parts, rank: int) -> Iterator[Case]:
    """One tensor for two that are alike."""
    if rank != NORMAL:
        return
    spots = [spot for spot in parts.resizable("same") if not spot.is_written]
    for one, other in itertools.combinations(spots, 2):
        a, b = one.tensor, other.tensor
        if (a.shape, a.dtype, a.device, a.requires_grad) == (b.shape, b.dtype, b.device, b.requires_grad):
            use_a = functools.partial(lambda a, _: a, a)
            yield from parts.cases([other], use_a, "same", f"{one.label} is {other.label}")


def devices(parts: Parts, rank: int) -> Iterator[Case]:
    """All tensors, and the arguments that name their device, on another one."""
    spots = parts.resizable("device")
    here = {spot.tensor.device.type for spot in spots}
    if rank != QUICK or len(here) != 1:
        return
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    for device in [torch.device("cpu"), *([accelerator] if accelerator is not None else [])]:
        if device.type in here:
            continue
        trial = parts.each(spots, functools.partial(torch.Tensor.to, device=device))
        if trial is not None:
            numbers = [(place.name, value) for place, value in parts.numbers if isinstance(value, torch.device)]
            named = {name: device for name, value in numbers if value.type in here}
            yield Case(trial.with_arguments(**named), "device", f"on {device.type}")
