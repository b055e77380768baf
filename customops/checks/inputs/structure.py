"""What is there at all: arguments that are absent, lists of another length, one tensor in two places, other devices."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from customops._schema.model import REQUIRED
from customops._schema.structure import Either, Group, Node
from customops._schema.types import item_type
from customops.checks._trial import Case
from customops.checks.inputs.parts import NORMAL, QUICK, THOROUGH, Parts, Place, resized
from customops.checks.inputs.values import python_type


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
            for new in _guesses(parts, place):
                what = f"a tensor of shape {tuple(new.shape)}" if isinstance(new, torch.Tensor) else repr(new)
                yield _given(parts, {place.name: new}, f"{place.name} given: {what}")
        yield from _other_objects(parts, parts.nodes)


def _guesses(parts: Parts, place: Place) -> Iterator[Any]:
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
        yield from place.choices or _NUMBERS.get(python_type(place), ())


#: Python type of an optional argument -> values where the sample has None.
_NUMBERS: dict[Any, tuple[Any, ...]] = {
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
                new = {node.tensor.name: torch.tensor(number), node.number.name: None}
                yield _given(parts, new, f"{node.path}: a tensor")


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
