"""Other sizes: none, one, more, and other numbers of dimensions.

Dimensions of one size in the sample are taken for the same thing and change together, in all tensors, and with them
the numbers that equal it. After these, dimensions change by themselves.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from customops.checks._trial import Case, Trial
from customops.checks.inputs._elements import follow, is_inexact, resized
from customops.checks.inputs.parts import NORMAL, QUICK, THOROUGH, Parts, Spot, in_turn, made

#: Old size -> new one.
Change = Mapping[int, int]

#: No input has more elements than this, or than twice the sample's.
MAX_ELEMENTS = 5000
#: Sizes beyond what a kernel handles in one block.
_BLOCKS = {QUICK: (70,), NORMAL: (130,)}
_SMALL_BLOCK = 33
_LARGE_BLOCKS = (1030, 257)


def sizes(parts: Parts, rank: int) -> Iterator[Case]:
    spots = parts.resizable("size")
    if not spots:
        return
    known = sorted({size for spot in spots for size in spot.tensor.shape if size > 1}, reverse=True)
    if rank == QUICK:
        changes = _first_changes(known)
        yield from _together(parts, spots, itertools.islice(changes, 1))
        if any(_is_square(spot) for spot in spots):  # what is right for those alone shows soon
            yield from _same_dimension(parts, spots)
        yield from _together(parts, spots, changes)
    elif rank == NORMAL:
        yield from _ranks_changed(parts, spots)
        yield from in_turn([_together(parts, spots, _more_changes(known)), _broadcast(parts, spots)])
        yield from _same_dimension(parts, spots)
    else:
        yield from _together(parts, spots, _all_changes(known))
        yield from _one_dimension(parts, spots, (0, None))


def _first_changes(known: list[int]) -> Iterator[Change]:
    if not known:
        return
    yield {size: 2 * size + 1 for size in known}
    yield {known[-1]: 0}
    yield {size: 1 for size in known}
    yield {known[0]: _BLOCKS[QUICK][0]}


def _more_changes(known: list[int]) -> Iterator[Change]:
    if not known:
        return
    yield {size: 2 * size for size in known}
    yield {size: 0 for size in known}
    for size in known:
        yield from ({size: new} for new in (0, 1, size + 1, 2))
    yield {known[0]: _BLOCKS[NORMAL][0]}
    yield {known[-1]: _BLOCKS[NORMAL][0]}
    yield {known[0]: _SMALL_BLOCK}  # of tensors of many dimensions, for which the others are too large


def _all_changes(known: list[int]) -> Iterator[Change]:
    for size in known:
        yield from ({size: new} for new in (*_LARGE_BLOCKS, size - 1, 3, 4, 8, 16, 31, 64))
        yield from (
            {size: one, other: two} for other in known if other < size for one in (0, 1, 5) for two in (0, 1, 7)
        )
    yield {size: 4 * size for size in known}


def _together(parts: Parts, spots: list[Spot], changes: Iterable[Change]) -> Iterator[Case]:
    for wanted in changes:
        change = {old: new for old, new in wanted.items() if old != new}
        shapes = [[change.get(size, size) for size in spot.tensor.shape] for spot in spots]
        trial = with_shapes(parts, spots, shapes, change)
        if trial is None:
            continue
        label = ", ".join(f"{old} to {new}" for old, new in change.items())
        numbers = _numbers_that_follow(parts, change)
        if numbers:
            yield Case(trial.with_arguments(**numbers), "size", f"sizes: {label}, and {', '.join(numbers)}")
        yield Case(trial, "size", f"sizes: {label}")


def with_shapes(
    parts: Parts, spots: Sequence[Spot], shapes: Sequence[Sequence[int]], change: Change | None = None
) -> Trial | None:
    """The sample with tensors of these shapes; None if that changes nothing, or they are too large.

    Where `change` says which sizes become which, integers that point into such a dimension follow.
    """
    before = sum(spot.tensor.numel() for spot in spots)
    after = sum(torch.Size(shape).numel() for shape in shapes)
    if after > max(MAX_ELEMENTS, 2 * before):
        return None
    wanted = {id(spot.tensor): shape for spot, shape in zip(spots, shapes, strict=True)}
    trial: Trial | None = None
    for spot in spots:
        make = functools.partial(_with_shape, shape=wanted[id(spot.tensor)], seed=spot.seed, change=change)
        trial = parts.each([spot], make, trial) or trial
    return trial


def _with_shape(tensor: torch.Tensor, shape: Sequence[int], seed: int, change: Change | None) -> torch.Tensor | None:
    elements = follow(tensor, dict(change)) if change else tensor
    if list(tensor.shape) == list(shape) and elements is tensor:
        return None
    return resized(elements, shape, seed)


def _numbers_that_follow(parts: Parts, change: Change) -> dict[str, Any]:
    """The integers among the arguments that equal an old size, with the new one."""
    numbers: dict[str, Any] = {}
    for place, value in parts.numbers:
        if place.choices or not parts.variation.allows("size", place.name):
            continue
        new = _followed(value, change)
        if new != value:
            numbers[place.name] = new
    return numbers


def _followed(value: Any, change: Change) -> Any:
    if isinstance(value, list | tuple):
        return [_followed(item, change) for item in value] if any(item in change for item in value) else value
    return change.get(value, value) if type(value) is int else value


def _same_dimension(parts: Parts, spots: list[Spot]) -> Iterator[Case]:
    """A dimension of all tensors of which it has the same size; the others of this size stay.

    Dimensions are counted from the first, and, where tensors have different numbers of them, from the last.
    """
    ranks = {spot.tensor.dim() for spot in spots}
    most = max(ranks, default=0)
    for dim in [*range(most), *(range(-1, -most - 1, -1) if len(ranks) > 1 else ())]:
        having = [spot for spot in spots if -spot.tensor.dim() <= dim < spot.tensor.dim()]
        for size in sorted({spot.tensor.shape[dim] for spot in having} - {1}):
            group = [spot for spot in having if spot.tensor.shape[dim] == size]
            if _count(spots, size) > len(group):
                trial = with_shapes(parts, group, [_set(spot, dim, size + 2) for spot in group])
                yield from made(trial, "size", f"dimension {dim} of all tensors: {size} to {size + 2}")


def _is_square(spot: Spot) -> bool:
    sizes = [size for size in spot.tensor.shape if size > 1]
    return len(set(sizes)) < len(sizes)


def _count(spots: list[Spot], size: int) -> int:
    """How many dimensions of tensors have this size."""
    return sum(list(spot.tensor.shape).count(size) for spot in spots)


def _broadcast(parts: Parts, spots: list[Spot]) -> Iterator[Case]:
    """One tensor of several without its first dimension, then with one of size 1: it may be broadcast to the others."""
    if parts.is_careful or len(spots) < 2:
        return
    for spot in reversed(spots):  # the first is often the one that the others are broadcast to
        if spot.tensor.dim():
            trial = with_shapes(parts, [spot], [spot.tensor.shape[1:]])
            yield from made(trial, "broadcast", f"{spot.label}: no first dimension")
        trial = with_shapes(parts, [spot], [(2, *spot.tensor.shape)])
        yield from made(trial, "broadcast", f"{spot.label}: one more dimension")
    for case in _one_dimension(parts, spots, (1,)):
        yield replace(case, kind="broadcast")


def _one_dimension(parts: Parts, spots: list[Spot], news: tuple[int | None, ...]) -> Iterator[Case]:
    """One dimension of one tensor of several."""
    if parts.is_careful or len(spots) < 2:
        return
    for spot in spots:
        for dim, size in enumerate(spot.tensor.shape):
            for new in [size + 2 if new is None else new for new in news]:
                trial = with_shapes(parts, [spot], [_set(spot, dim, new)])
                yield from made(trial, "size", f"{spot.label}: dimension {dim} of size {new}")


def _set(spot: Spot, dim: int, new: int) -> list[int]:
    shape = list(spot.tensor.shape)
    shape[dim] = new
    return shape


def _ranks_changed(parts: Parts, spots: list[Spot]) -> Iterator[Case]:
    """All tensors, then those of each number of dimensions, with one more and with one less; and single elements."""
    counts = sorted({spot.tensor.dim() for spot in spots}, reverse=True)
    groups = [("all tensors", spots)] if len(spots) > 1 else []
    if len(counts) > 1 or len(spots) == 1:
        alike = [[spot for spot in spots if spot.tensor.dim() == count] for count in counts]
        groups += [(", ".join(spot.label for spot in group), group) for group in alike]
    for name, group in groups:
        for label, shape_of in _SHAPES.items():
            trial = with_shapes(parts, group, [shape_of(list(spot.tensor.shape)) for spot in group])
            yield from made(trial, "size", f"{name}: {label}")


_SHAPES: Mapping[str, Callable[[list[int]], list[int]]] = {
    "one more dimension": lambda shape: [2, *shape],
    "one dimension less": lambda shape: shape[1:],
    "0-dimensional": lambda shape: [],
}


#: Lays out the same elements in memory in another way, for which a kernel that goes by strides returns the same.
#: (Expanded tensors have other elements than the sample: a dimension of stride 0 repeats its first.)
Layout = Callable[[torch.Tensor], torch.Tensor | None]


def layouts(parts: Parts, rank: int) -> Iterator[Case]:
    """All tensors together, then each by itself."""
    spots = parts.resizable("layout")
    groups = [(spots, TOGETHER[rank])]
    if len(spots) > 1:
        groups += [([spot], ALONE[rank]) for spot in spots]
    for group, table in groups:
        for name, layout in table.items():
            yield from _in_layout(parts, group, name, layout)


def in_layout(parts: Parts, name: str) -> Iterator[Case]:
    """All tensors in one layout, by its name in `TOGETHER`."""
    layout = next(table[name] for table in TOGETHER.values() if name in table)
    yield from _in_layout(parts, parts.resizable("layout"), name, layout)


def _in_layout(parts: Parts, spots: list[Spot], name: str, layout: Layout) -> Iterator[Case]:
    may_have = [spot for spot in spots if not (spot.is_written and layout is expanded)]
    trial = parts.each(may_have, layout)
    if trial is not None:
        label = "all tensors" if len(may_have) > 1 else may_have[0].label
        yield Case(trial, "layout", f"{label}: {name}")


def permuted(tensor: torch.Tensor, dims: list[int]) -> torch.Tensor | None:
    """The tensor, in memory with its dimensions in this order."""
    back = [dims.index(dim) for dim in range(len(dims))]
    new = tensor.permute(dims).clone(memory_format=torch.contiguous_format).permute(back)
    moved = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    return None if len(moved) < 2 or new.stride() == tensor.stride() else new


def transposed(tensor: torch.Tensor) -> torch.Tensor | None:
    rank = tensor.dim()
    return permuted(tensor, [*range(rank - 2), rank - 1, rank - 2]) if rank > 1 else None


def reversed_dims(tensor: torch.Tensor) -> torch.Tensor | None:
    rank = tensor.dim()
    return permuted(tensor, list(reversed(range(rank)))) if rank > 2 else None


def sliced(tensor: torch.Tensor) -> torch.Tensor | None:
    """With other elements between those of the tensor."""
    if not tensor.dim() or not tensor.numel():
        return None
    wide = _filled((*tensor.shape[:-1], 2 * tensor.shape[-1]), tensor)
    return wide[..., ::2].copy_(tensor)


def rows_apart(tensor: torch.Tensor) -> torch.Tensor | None:
    """With other elements between the rows: the last dimension has stride 1."""
    if tensor.dim() < 2 or not tensor.numel():
        return None
    wide = _filled((*tensor.shape[:-1], tensor.shape[-1] + 3), tensor)
    return wide[..., 1 : tensor.shape[-1] + 1].copy_(tensor)


def offset(tensor: torch.Tensor) -> torch.Tensor | None:
    """Not at the start of its storage, and not where memory is aligned."""
    if not tensor.numel():
        return None
    storage = _filled((tensor.numel() + 2,), tensor)
    return storage[1:-1].view(tensor.shape).copy_(tensor)


def long_storage(tensor: torch.Tensor) -> torch.Tensor | None:
    """At the start of a storage that is larger."""
    storage = _filled((tensor.numel() + 9,), tensor)
    return storage[: tensor.numel()].view(tensor.shape).copy_(tensor)


def expanded(tensor: torch.Tensor) -> torch.Tensor | None:
    """The first row, or column, for all others; what would lie there without a stride of 0 is nobody's."""
    sizes = list(tensor.shape)
    dim = next((dim for dim, size in enumerate(sizes) if size > 1), None)
    if dim is None:
        return None
    storage = _filled(tuple(sizes), tensor)
    return storage.narrow(dim, 0, 1).copy_(tensor.narrow(dim, 0, 1)).expand(sizes)


def channels_last(tensor: torch.Tensor) -> torch.Tensor | None:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if tensor.dim() not in formats:
        return None
    new = tensor.clone(memory_format=formats[tensor.dim()])
    return None if new.stride() == tensor.stride() else new


def negative_view(tensor: torch.Tensor) -> torch.Tensor | None:
    """Held in memory with the other sign."""
    if tensor.dtype not in (torch.float32, torch.float64) or tensor.device.type == "mps":
        return None
    return torch.complex(torch.zeros_like(tensor), -tensor).conj().imag


def conjugate_view(tensor: torch.Tensor) -> torch.Tensor | None:
    return tensor.resolve_conj().conj_physical().conj() if tensor.is_complex() else None


def odd_strides(tensor: torch.Tensor) -> torch.Tensor | None:
    """With strides of dimensions of one element that no contiguous tensor has: they mean nothing."""
    if 1 not in tensor.shape or not tensor.numel():
        return None
    new = tensor.clone(memory_format=torch.contiguous_format)
    strides = [
        7 * tensor.numel() + 3 if size == 1 else step for size, step in zip(new.shape, new.stride(), strict=True)
    ]
    return new.as_strided(tuple(new.shape), strides)


def _filled(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Memory that nobody has to read: NaN, or an element that there is."""
    if is_inexact(like.dtype) and like.element_size() > 1:
        return torch.full(shape, float("nan"), dtype=like.dtype, device=like.device)
    first = like.reshape(-1)[:1] if like.numel() else torch.zeros(1, dtype=like.dtype, device=like.device)
    return first.expand(torch.Size(shape).numel()).reshape(shape).clone()


ODD_STRIDES = "with odd strides of dimensions of size 1"
ROWS_APART = "with gaps between the rows"

#: Tried with all tensors alike.
TOGETHER: dict[int, Mapping[str, Layout]] = {
    QUICK: {"transposed": transposed, "with a step of 2": sliced, "at an odd storage offset": offset},
    NORMAL: {
        "expanded": expanded,
        "with its dimensions reversed in memory": reversed_dims,
        "channels last": channels_last,
        ROWS_APART: rows_apart,
        "a conjugate view": conjugate_view,
        "a negative view": negative_view,
        "in a larger storage": long_storage,
        ODD_STRIDES: odd_strides,
    },
    THOROUGH: {},
}
#: Tried with one tensor of several.
ALONE: dict[int, Mapping[str, Layout]] = {
    QUICK: {},
    NORMAL: {"transposed": transposed, "with a step of 2": sliced, "expanded": expanded},
    THOROUGH: {
        "at an odd storage offset": offset,
        ROWS_APART: rows_apart,
        "a negative view": negative_view,
        "a conjugate view": conjugate_view,
        "channels last": channels_last,
    },
}
