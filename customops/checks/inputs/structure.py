"""What is there at all: arguments that are absent, lists of another length, one tensor in two places, other devices."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from customops._schema.model import REQUIRED
from customops._schema.structure import Either, Group
from customops.checks._trial import Case
from customops.checks.inputs._elements import resized
from customops.checks.inputs.parts import NORMAL, QUICK, THOROUGH, Parts, Place, Spot
from customops.checks.inputs.values import python_type


def optionals(parts: Parts, rank: int) -> Iterator[Case]:
    """Arguments that are None, or left to their defaults, and such that the sample leaves out."""
    if rank == QUICK:
        yield from _absent(parts)
        yield from _present(parts)
        yield from _grouped(parts)
    elif rank == NORMAL:
        yield from _left_out(parts)
    else:
        yield from _explicit(parts)


def _free(parts: Parts) -> Iterator[tuple[Place, Any]]:
    given = parts.trial.arguments
    for place in parts.places.values():
        if not place.is_bound and parts.variation.allows("optional", place.name):
            yield place, given.get(place.name, place.default)


def _absent(parts: Parts) -> Iterator[Case]:
    there = [
        place for place, value in _free(parts) if place.is_optional and value is not None and value is not REQUIRED
    ]
    for place in there:
        yield Case(parts.with_arguments({place.name: None}), "optional", f"{place.name}=None")
    if len(there) > 1:
        trial = parts.with_arguments({place.name: None for place in there})
        yield Case(trial, "optional", f"{', '.join(place.name for place in there)}: None")


def _present(parts: Parts) -> Iterator[Case]:
    """A tensor like another for an optional one that is absent, and numbers."""
    for place, value in _free(parts):
        if value is None and place.is_optional:
            for new in _guesses(parts, place):
                trial = parts.with_arguments({place.name: new})
                what = f"a tensor of shape {tuple(new.shape)}" if isinstance(new, torch.Tensor) else repr(new)
                yield Case(trial, "optional", f"{place.name} given: {what}")


def _guesses(parts: Parts, place: Place) -> Iterator[Any]:
    if place.type.removesuffix("?") == "Tensor":
        shapes: list[tuple[int, ...]] = []
        for spot in parts.resizable("optional"):
            if tuple(spot.tensor.shape) not in shapes and len(shapes) < 3:
                shapes.append(tuple(spot.tensor.shape))
                yield resized(spot.tensor, spot.tensor.shape, 100 + len(shapes))
        first = next((s.tensor for s in parts.resizable("optional") if s.tensor.dim() > 1), None)
        if first is not None:
            yield resized(first, first.shape[-1:], 100)
    elif place.choices and place.item_type is None:
        yield from place.choices
    elif place.item_type is None:
        yield from _NUMBERS.get(python_type(place), ())


#: Of tensors in a long list.
_MANY = 40
#: Python type of an optional argument -> values where the sample has None.
_NUMBERS: dict[Any, tuple[Any, ...]] = {
    int: (1, 0),
    float: (0.5,),
    bool: (True, False),
    torch.types.Number: (0.5,),
    torch.dtype: (torch.float64,),
    torch.memory_format: (torch.contiguous_format,),
}


def _grouped(parts: Parts) -> Iterator[Case]:
    """An object that is None, and a number for a tensor or a tensor for a number."""
    given = parts.trial.arguments
    for node in parts.groups:
        if not parts.variation.allows("optional", node.path):
            continue
        if isinstance(node, Group) and node.given is not None and given.get(node.given.name) is True:
            trial = parts.with_arguments({name: value for name, value in node.take_apart(None).items()})
            yield Case(trial, "optional", f"{node.path}=None")
        elif isinstance(node, Either):
            new = _other_kind(given.get(node.tensor.name), given.get(node.number.name))
            if new is not None:
                trial = parts.with_arguments({node.tensor.name: new[0], node.number.name: new[1]})
                yield Case(trial, "optional", f"{node.path}: {'a tensor' if new[1] is None else 'a number'}")


def _other_kind(tensor: Any, number: Any) -> tuple[Any, Any] | None:
    if isinstance(tensor, torch.Tensor):
        return None, 2 if not tensor.is_floating_point() else 2.0
    return (torch.tensor(number), None) if isinstance(number, float) else None


def _left_out(parts: Parts) -> Iterator[Case]:
    for place, _ in _free(parts):
        if place.default is not REQUIRED and place.name in parts.trial.arguments:
            yield Case(parts.without(place.name), "optional", f"{place.name} left out")


def _explicit(parts: Parts) -> Iterator[Case]:
    values = {p.name: p.default for p, _ in _free(parts) if p.name not in parts.trial.arguments}
    values = {name: value for name, value in values.items() if value is not REQUIRED}
    if values:
        yield Case(parts.with_arguments(values), "optional", "all defaults passed")


def lists(parts: Parts, rank: int) -> Iterator[Case]:
    for name, value in parts.trial.arguments.items():
        place = parts.places[name]
        if not isinstance(value, list | tuple) or place.is_bound or not parts.variation.allows("list", name):
            continue
        if "Tensor" in place.type:
            yield from _tensor_lists(parts, name, list(value), rank)
        elif place.length is None and value:
            for label, new in _lengths(list(value), rank):
                yield Case(parts.with_arguments({name: new}), "list", f"{name}: {label}")


def _lengths(items: list[Any], rank: int) -> Iterator[tuple[str, list[Any]]]:
    if rank == QUICK:
        yield "one item more", [*items, items[-1]]
    elif rank == NORMAL:
        yield "empty", []
        yield "one item", items[:1]
        yield "one item less", items[:-1]


def _tensor_lists(parts: Parts, name: str, items: list[Any], rank: int) -> Iterator[Case]:
    spots = [spot for spot in parts.resizable("list") if spot.argument == name]
    found: list[tuple[str, list[Any]]] = []
    if spots and rank == QUICK:
        last = spots[-1].tensor
        found.append(("one tensor more", [*items, resized(last, last.shape, 200)]))
        found.append(("one tensor", items[:1]))
    elif rank == QUICK:
        found.append(("one tensor", items[:1]))
    elif rank == NORMAL:
        found.append(("empty", []))
        if spots and not spots[0].is_written:
            found.append(("one tensor twice", [*items, items[-1]]))
        if spots:
            found.append((f"{_MANY} tensors", _many(items)))
        found += [(f"tensors of unequal sizes in dimension {dim}", new) for dim, new in _unequal(spots, items)]
    elif rank == THOROUGH:
        found.append(("in reverse order", items[::-1]))
    for label, new in found:
        if len(new) != len(items) or any(a is not b for a, b in zip(new, items, strict=True)):
            yield Case(parts.with_arguments({name: new}), "list", f"{name}: {label}")


def _many(items: list[Any]) -> list[Any]:
    """More tensors than one launch of a kernel can get: its parameters have a limit of some kilobytes."""
    return [_copied(item) for item, _ in zip(itertools.cycle(items), range(_MANY), strict=False)]


def _copied(item: torch.Tensor | None) -> torch.Tensor | None:
    return item if item is None else item.detach().clone().requires_grad_(item.requires_grad)


def _unequal(spots: list[Spot], items: list[Any]) -> Iterator[tuple[int, list[Any]]]:
    if not spots:
        return
    last = spots[-1].tensor
    for dim in range(last.dim()):
        shape = list(last.shape)
        shape[dim] += 2
        yield dim, [*items[:-1], resized(last, shape, 300 + dim)] if len(items) > 1 else [*items, resized(last, shape)]


def same(parts: Parts, rank: int) -> Iterator[Case]:
    """One tensor for two that are alike."""
    if rank != NORMAL:
        return
    spots = [spot for spot in parts.resizable("same") if not spot.is_written]
    for one, other in itertools.combinations(spots, 2):
        a, b = one.tensor, other.tensor
        if (a.shape, a.dtype, a.device, a.requires_grad) == (b.shape, b.dtype, b.device, b.requires_grad):
            trial = parts.with_tensors({id(b): a})
            yield Case(trial, "same", f"{one.label} is {other.label}")


def devices(parts: Parts, rank: int) -> Iterator[Case]:
    """All tensors, and the arguments that name their device, on another one."""
    spots = parts.resizable("device")
    here = {spot.tensor.device.type for spot in spots}
    if rank != QUICK or len(here) != 1:
        return
    old = next(iter(here))
    for device in _others(old):
        trial = parts.each(spots, functools.partial(torch.Tensor.to, device=device))
        if trial is not None:
            named = {
                p.name: device for p, value in parts.numbers if isinstance(value, torch.device) and value.type == old
            }
            yield Case(trial.with_arguments(**named), "device", f"on {device.type}")


def _others(old: str) -> Iterator[torch.device]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    found = [torch.device("cpu"), *([accelerator] if accelerator is not None else [])]
    return (device for device in found if device.type != old)
