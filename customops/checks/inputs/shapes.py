"""Other sizes: none, one, more, and other numbers of dimensions. And other layouts in memory.

Dimensions of one size in the sample are taken for the same thing and change together, in all tensors, and with them
the numbers that equal it. After these, dimensions change by themselves.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from customops import _torch
from customops.checks._trial import Case, Kind, Trial
from customops.checks.inputs.parts import (
    NORMAL,
    QUICK,
    THOROUGH,
    Change,
    Parts,
    Spot,
    follow,
    in_turn,
    is_inexact,
    resized,
)

#: Old size -> new one.
Sizes = Mapping[int, int]

#: No input has more elements than this, or than twice the sample's.
MAX_ELEMENTS = 5000
#: Nor do elements times the integers that grow with a size exceed this: a kernel may loop over all of them.
MAX_STEPS = 50_000_000


def sizes(parts: Parts, rank: int) -> Iterator[Case]:
    spots = parts.resizable("size")
    if not spots:
        return
    changes = _changes(sorted({size for spot in spots for size in spot.tensor.shape if size > 1}, reverse=True), rank)
    if rank == QUICK:
        yield from _together(parts, spots, itertools.islice(changes, 1))
        larger = [[size for size in spot.tensor.shape if size > 1] for spot in spots]
        if any(len(set(shape)) < len(shape) for shape in larger):  # what is right for squares alone shows soon
            yield from _same_dimension(parts, spots)
        yield from _together(parts, spots, changes)
    elif rank == NORMAL:
        for case in _together(parts, spots, _related(parts, spots)):  # most others are refused
            yield replace(case, is_named=True)
        for case in _all_but_one(parts, spots):
            yield replace(case, is_named=True)
        yield from _columns(parts, spots)
        yield from _ranks_changed(parts, spots)
        yield from in_turn([_together(parts, spots, changes), _broadcast(parts, spots)])
        yield from _same_dimension(parts, spots)
    else:
        yield from _together(parts, spots, changes)
        yield from _one_dimension(parts, spots, (0, None), "size")


#: The same for sizes that the code mentions.
MAX_NAMED_ELEMENTS = 300_000


def named_sizes(parts: Parts, named: Sequence[int]) -> Iterator[Case]:
    """Each size of the sample as the code mentions it, and one more."""
    spots = parts.resizable("size")
    known = sorted({size for spot in spots for size in spot.tensor.shape if size > 1}, reverse=True)
    changes = [{size: new} for new in named for size in known]
    yield from _together(parts, spots, changes, MAX_NAMED_ELEMENTS)


def _changes(known: list[int], rank: int) -> Iterator[Sizes]:
    """What becomes of the sizes of the sample, which are sorted from the largest; some go beyond a kernel's blocks."""
    if not known:
        return
    largest, smallest = known[0], known[-1]
    if rank == QUICK:
        yield {size: 2 * size + 1 for size in known}
        yield {smallest: 0}
        yield dict.fromkeys(known, 1)
        yield {largest: 70}
    elif rank == NORMAL:
        yield {size: 2 * size for size in known}
        yield dict.fromkeys(known, 0)
        for size in known:
            yield from ({size: new} for new in (0, 1, size + 1, 2))
        yield {largest: 130}
        yield {smallest: 130}
        yield {largest: 33}  # of tensors of many dimensions, for which the others are too large
    else:
        for size in known:
            yield from ({size: new} for new in (1030, 257, size - 1, 3, 4, 8, 16, 31, 64))
            for other in (other for other in known if other < size):
                yield from ({size: one, other: two} for one in (0, 1, 5) for two in (0, 1, 7))
        yield {size: 4 * size for size in known}


def _related(parts: Parts, spots: list[Spot]) -> Iterator[Sizes]:
    """Where odd sizes were refused: multiples, and sizes that grow together, as a width and heads times it."""
    known = sorted({size for spot in spots for size in spot.tensor.shape if size > 1})
    if parts.outcomes.get(_label({size: 2 * size + 1 for size in reversed(known)})) is not False:
        return
    numbers = [value for _, value in parts.numbers if type(value) is int and value > 1]
    for size in known:
        multiples = [other for other in known if other % size == 0]
        sums = [other for other in known if other - size in known]
        powers = [2**i for i in range(1, 9) if size % 2**i == 0]
        for step in dict.fromkeys([1, *powers, *(n for n in numbers if size % n == 0)]):
            forms: list[Callable[[int], Sizes]] = [
                lambda by: {size: size + by},  # noqa: B023 - they are called before the next turn
                lambda by: {other: other // size * (size + by) for other in multiples},  # noqa: B023
                lambda by: {size: size + by, **{other: other + by for other in sums}},  # noqa: B023
            ]
            for form in forms:
                yield form(step)
                if parts.outcomes.get(_label(form(step))):
                    yield form(3 * step)
                    yield form(-(-130 // step) * step)
                    break
            else:
                continue
            break


def _all_but_one(parts: Parts, spots: list[Spot]) -> Iterator[Case]:
    """A size of several tensors in all of them but one, as keys and values may be longer than queries are."""
    for size in sorted({size for spot in spots for size in spot.tensor.shape if size > 1}, reverse=True):
        having = [spot for spot in spots if size in spot.tensor.shape]
        for one in having if len(having) > 2 else ():
            others = [spot for spot in having if spot is not one]
            for new in (size + 2, max(size - 1, 2)):  # of size 1 it would be broadcast
                shapes = [[new if old == size else old for old in spot.tensor.shape] for spot in others]
                yield from _reshaped(parts, others, shapes, f"all of size {size} but {one.label}: {new}")


def _label(change: Sizes) -> str:
    return "sizes: " + ", ".join(f"{old} to {new}" for old, new in change.items())


def _together(parts: Parts, spots: list[Spot], changes: Iterable[Sizes], at_most: int = MAX_ELEMENTS) -> Iterator[Case]:
    for wanted in changes:
        change = {old: new for old, new in wanted.items() if old != new}
        shapes = [[change.get(size, size) for size in spot.tensor.shape] for spot in spots]
        trial = with_shapes(parts, spots, shapes, change, at_most)
        if trial is None:
            continue
        label = _label(change)
        numbers: dict[str, Any] = {}  # the integers among the arguments that equal an old size
        for place, value in parts.numbers:
            new = _followed(value, change)
            if new != value and not place.choices and parts.variation.allows("size", place.name):
                numbers[place.name] = new
        grown = [size for size in _torch.trees.tree_leaves(list(numbers.values())) if size > 1]
        if numbers and math.prod(grown, start=max(tensor.numel() for tensor in trial.tensors)) <= MAX_STEPS:
            yield Case(trial.with_arguments(**numbers), "size", f"{label}, and {', '.join(numbers)}")
        yield Case(trial, "size", label)


def _followed(value: Any, change: Sizes) -> Any:
    if isinstance(value, list | tuple):
        return [_followed(item, change) for item in value] if any(item in change for item in value) else value
    return change.get(value, value) if type(value) is int else value


def with_shapes(
    parts: Parts,
    spots: Sequence[Spot],
    shapes: Sequence[Sequence[int]],
    change: Sizes | None = None,
    at_most: int = MAX_ELEMENTS,
) -> Trial | None:
    """The sample with tensors of these shapes; None if that changes nothing, or they are too large.

    Where `change` says which sizes become which, integers that point into such a dimension follow.
    """
    before = sum(spot.tensor.numel() for spot in spots)
    if sum(torch.Size(shape).numel() for shape in shapes) > max(at_most, 2 * before):
        return None

    def to_shape(tensor: torch.Tensor, shape: Sequence[int], seed: int) -> torch.Tensor | None:
        elements = follow(tensor, change) if change else tensor
        is_same = list(tensor.shape) == list(shape) and elements is tensor
        return None if is_same else resized(elements, shape, seed)

    return parts.changed(
        (spot, functools.partial(to_shape, shape=shape, seed=spot.seed))
        for spot, shape in zip(spots, shapes, strict=True)
    )


def _reshaped(
    parts: Parts, spots: Sequence[Spot], shapes: Sequence[Sequence[int]], label: str, kind: Kind = "size"
) -> Iterator[Case]:
    trial = with_shapes(parts, spots, shapes)
    if trial is not None:
        yield Case(trial, kind, label)


def _with_size(spot: Spot, dim: int, new: int) -> list[int]:
    shape = list(spot.tensor.shape)
    shape[dim] = new
    return shape


def _same_dimension(parts: Parts, spots: list[Spot]) -> Iterator[Case]:
    """A dimension, counted from the front or the back, of all tensors that have it in the same size; others stay."""
    ranks = {spot.tensor.dim() for spot in spots}
    most = max(ranks, default=0)
    for dim in [*range(most), *(range(-1, -most - 1, -1) if len(ranks) > 1 else ())]:
        having = [spot for spot in spots if -spot.tensor.dim() <= dim < spot.tensor.dim()]
        for size in sorted({spot.tensor.shape[dim] for spot in having} - {1}):
            group = [spot for spot in having if spot.tensor.shape[dim] == size]
            if sum(list(spot.tensor.shape).count(size) for spot in spots) > len(group):
                shapes = [_with_size(spot, dim, size + 2) for spot in group]
                yield from _reshaped(parts, group, shapes, f"dimension {dim} of all tensors: {size} to {size + 2}")


def _broadcast(parts: Parts, spots: list[Spot]) -> Iterator[Case]:
    """One tensor of several without its first dimension, then with one of size 1: it may be broadcast to the others."""
    if parts.is_careful or len(spots) < 2:
        return
    for spot in reversed(spots):  # the first is often the one that the others are broadcast to
        shape = tuple(spot.tensor.shape)
        if shape:
            yield from _reshaped(parts, [spot], [shape[1:]], f"{spot.label}: no first dimension", "broadcast")
        yield from _reshaped(parts, [spot], [(2, *shape)], f"{spot.label}: one more dimension", "broadcast")
    yield from _one_dimension(parts, spots, (1,), "broadcast")


def _columns(parts: Parts, spots: list[Spot]) -> Iterator[Case]:
    """A tensor of fewer dimensions than another, as a column that is broadcast to the other's rows."""
    widest = max((spot.tensor.shape for spot in spots), key=len, default=())
    for spot in spots if not parts.is_careful else ():
        if 0 < spot.tensor.dim() < len(widest):
            yield from _reshaped(parts, [spot], [(*widest[:-1], 1)], f"{spot.label}: a column", "broadcast")


def _one_dimension(parts: Parts, spots: list[Spot], news: tuple[int | None, ...], kind: Kind) -> Iterator[Case]:
    """One dimension of one tensor of several; None stands for two more than it has."""
    if parts.is_careful or len(spots) < 2:
        return
    for spot in spots:
        for dim, size in enumerate(spot.tensor.shape):
            for new in [size + 2 if new is None else new for new in news]:
                label = f"{spot.label}: dimension {dim} of size {new}"
                yield from _reshaped(parts, [spot], [_with_size(spot, dim, new)], label, kind)


def _ranks_changed(parts: Parts, spots: list[Spot]) -> Iterator[Case]:
    """All tensors, then those of each number of dimensions, with one more and with one less; and single elements."""
    counts = sorted({spot.tensor.dim() for spot in spots}, reverse=True)
    groups = [("all tensors", spots)] if len(spots) > 1 else []
    if len(counts) > 1 or len(spots) == 1:
        alike = [[spot for spot in spots if spot.tensor.dim() == count] for count in counts]
        groups += [(", ".join(spot.label for spot in group), group) for group in alike]
    for name, group in groups:
        shapes = [list(spot.tensor.shape) for spot in group]
        for case in _reshaped(parts, group, [[2, *shape] for shape in shapes], f"{name}: one more dimension"):
            yield case
            for place, value in parts.numbers:
                if isinstance(value, list | tuple) and sorted(map(str, value)) == [str(i) for i in range(counts[0])]:
                    order = [*range(1, counts[0] + 1), 0]  # the inverse of a cycle is another one
                    trial = case.trial.with_arguments(**{place.name: order})
                    yield Case(trial, "size", f"{case.label}, {place.name}={order}")
        yield from _reshaped(parts, group, [shape[1:] for shape in shapes], f"{name}: one dimension less")
        yield from _reshaped(parts, group, [[] for _ in shapes], f"{name}: 0-dimensional")


# Layouts: the same elements in memory in another way, for which a kernel that goes by strides returns the same.
# (Expanded tensors have other elements than the sample: a dimension of stride 0 repeats its first.)


def layouts(parts: Parts, rank: int) -> Iterator[Case]:
    """All tensors together, then each by itself."""
    spots = parts.resizable("layout")
    for name in _TOGETHER[rank]:
        yield from in_layout(parts, name)
    for spot in spots if len(spots) > 1 else ():
        for name in _ALONE[rank]:
            yield from in_layout(parts, name, [spot])


def in_layout(parts: Parts, name: str, spots: list[Spot] | None = None) -> Iterator[Case]:
    """Some tensors, by default all, in one layout."""
    spots = parts.resizable("layout") if spots is None else spots
    may_have = [spot for spot in spots if not (spot.is_written and name == "expanded")]
    label = may_have[0].label if len(may_have) == 1 else "all tensors"
    yield from parts.cases(may_have, _LAYOUTS[name], "layout", f"{label}: {name}")


def _permuted(tensor: torch.Tensor, dims: Sequence[int]) -> torch.Tensor | None:
    """The tensor, in memory with its dimensions in this order."""
    back = [dims.index(dim) for dim in range(len(dims))]
    new = tensor.permute(tuple(dims)).clone(memory_format=torch.contiguous_format).permute(back)
    moved = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    return None if len(moved) < 2 or new.stride() == tensor.stride() else new


def _sliced(tensor: torch.Tensor) -> torch.Tensor | None:
    """With other elements between those of the tensor."""
    if not tensor.dim() or not tensor.numel():
        return None
    return _filled((*tensor.shape[:-1], 2 * tensor.shape[-1]), tensor)[..., ::2].copy_(tensor)


def _rows_apart(tensor: torch.Tensor) -> torch.Tensor | None:
    """With other elements between the rows: the last dimension has stride 1."""
    if tensor.dim() < 2 or not tensor.numel():
        return None
    return _filled((*tensor.shape[:-1], tensor.shape[-1] + 3), tensor)[..., 1:-2].copy_(tensor)


def _amid(before: int, after: int, tensor: torch.Tensor) -> torch.Tensor:
    """With so many other elements before it and after it; not where memory is aligned, if there are some before."""
    end = before + tensor.numel()
    return _filled((end + after,), tensor)[before:end].view(tensor.shape).copy_(tensor)


def _expanded(tensor: torch.Tensor) -> torch.Tensor | None:
    """The first row, or column, for all others; what would lie there without a stride of 0 is nobody's."""
    sizes = tuple(tensor.shape)
    dim = next((dim for dim, size in enumerate(sizes) if size > 1), None)
    if dim is None:
        return None
    return _filled(sizes, tensor).narrow(dim, 0, 1).copy_(tensor.narrow(dim, 0, 1)).expand(sizes)


def _channels_last(tensor: torch.Tensor) -> torch.Tensor | None:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if tensor.dim() not in formats:
        return None
    new = tensor.clone(memory_format=formats[tensor.dim()])
    return None if new.stride() == tensor.stride() else new


def _negative_view(tensor: torch.Tensor) -> torch.Tensor | None:
    """Held in memory with the other sign."""
    if tensor.dtype not in (torch.float32, torch.float64) or tensor.device.type == "mps":
        return None
    return torch.complex(torch.zeros_like(tensor), -tensor).conj().imag


def _odd_strides(tensor: torch.Tensor) -> torch.Tensor | None:
    """With strides of dimensions of one element that no contiguous tensor has: they mean nothing."""
    if 1 not in tensor.shape or not tensor.numel():
        return None
    new, odd = tensor.clone(memory_format=torch.contiguous_format), 7 * tensor.numel() + 3
    strides = [odd if size == 1 else step for size, step in zip(new.shape, new.stride(), strict=True)]
    return new.as_strided(tuple(new.shape), strides)


def _filled(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Memory that nobody has to read: NaN, or an element that there is."""
    if is_inexact(like.dtype) and like.element_size() > 1:
        return torch.full(shape, float("nan"), dtype=like.dtype, device=like.device)
    first = like.reshape(-1)[:1] if like.numel() else torch.zeros(1, dtype=like.dtype, device=like.device)
    return first.expand(torch.Size(shape).numel()).reshape(shape).clone()


ODD_STRIDES = "with odd strides of dimensions of size 1"
ROWS_APART = "with gaps between the rows"

_LAYOUTS: Mapping[str, Change] = {
    "transposed": lambda x: _permuted(x, [*range(x.dim() - 2), x.dim() - 1, x.dim() - 2]) if x.dim() > 1 else None,
    "with a step of 2": _sliced,
    "at an odd storage offset": lambda tensor: _amid(1, 1, tensor) if tensor.numel() else None,
    "expanded": _expanded,
    "with its dimensions reversed in memory": lambda x: _permuted(x, range(x.dim())[::-1]) if x.dim() > 2 else None,
    "channels last": _channels_last,
    ROWS_APART: _rows_apart,
    "a conjugate view": lambda tensor: tensor.resolve_conj().conj_physical().conj() if tensor.is_complex() else None,
    "a negative view": _negative_view,
    "in a larger storage": lambda tensor: _amid(0, 9, tensor),
    ODD_STRIDES: _odd_strides,
}
#: Tried with all tensors alike: a few soon.
_TOGETHER = {QUICK: list(_LAYOUTS)[:3], NORMAL: list(_LAYOUTS)[3:], THOROUGH: []}
#: Tried with one tensor of several.
_ALONE: Mapping[int, Sequence[str]] = {
    QUICK: (),
    NORMAL: ("transposed", "with a step of 2", "expanded"),
    THOROUGH: ("at an odd storage offset", ROWS_APART, "a negative view", "a conjugate view", "channels last"),
}
