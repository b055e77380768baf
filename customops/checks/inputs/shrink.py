"""`shrink`: the smallest input, of those that a failing one leads to, that still fails."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from customops.checks._case import Case
from customops.checks._trial import Trial
from customops.checks.inputs._elements import follow
from customops.checks.inputs._parts import Parts, Spot
from customops.checks.inputs.declared import holds
from customops.checks.inputs.sizes import with_shapes
from customops.checks.inputs.variation import Variation


def shrink(case: Case, fails: Callable[[Trial], bool], budget: float = 0.5, variation: Variation | None = None) -> Case:
    """Make a failing input simpler as long as it fails; its label then says so.

    Args:
        fails: does it fail in the same way? Of an input that the operator refuses it says no.
        budget: seconds.
        variation: what may be changed of the sample, and what has to be true of it.
    """
    if case.kind == "padding":  # in a smaller tensor -1 may be another index
        return case
    end, variation = time.perf_counter() + budget, variation or Variation()
    trial, is_smaller = case.trial, True
    while is_smaller:
        is_smaller = False
        for simpler in _simpler(Parts(trial, variation)):
            if time.perf_counter() > end:
                break
            if holds(variation, simpler) and fails(simpler):
                trial, is_smaller = simpler, True
                break
    if trial is case.trial:
        return case
    return Case(trial, case.kind, ", ".join(filter(None, (case.label, "simplified"))), case.sample)


def _simpler(parts: Parts) -> Iterator[Trial]:
    """Calls that are a step simpler, those of the largest step first."""
    yield from _shorter_lists(parts)
    yield from _smaller(parts)
    yield from _plainer(parts)
    yield from _left_out(parts)


def _smaller(parts: Parts) -> Iterator[Trial]:
    if parts.is_careful:  # it may read past the end of what is too small
        return
    spots = parts.resizable("size")
    for size in sorted({size for spot in spots for size in spot.tensor.shape if size > 1}, reverse=True):
        for new in dict.fromkeys((1, 2, size // 2, size - 1)):
            if new < size:
                yield from _with_size(parts, spots, size, new)


def _with_size(parts: Parts, spots: Sequence[Spot], size: int, new: int) -> Iterator[Trial]:
    """With dimensions of another size; where a tensor is laid out in an unusual way, slices, which are, too."""
    trial = None
    if any(_contiguous(spot.tensor) is not None for spot in spots):
        trial = parts.each(spots, functools.partial(_sliced, size=size, new=new))
    if trial is not None:
        yield trial
    shapes = [[new if old == size else old for old in spot.tensor.shape] for spot in spots]
    trial = with_shapes(parts, spots, shapes, {size: new})
    if trial is not None:
        yield trial


def _sliced(tensor: torch.Tensor, size: int, new: int) -> torch.Tensor | None:
    dims = [dim for dim, old in enumerate(tensor.shape) if old == size]
    part = follow(tensor, {size: new}) if dims else tensor
    for dim in dims:
        part = part.narrow(dim, 0, new)
    return part if dims else None


def _plainer(parts: Parts) -> Iterator[Trial]:
    """With contiguous tensors, and with small round numbers in them."""
    for change, kind in ((_contiguous, "layout"), (_counted, "value")):
        for spot in parts.resizable(kind):
            trial = parts.each([spot], change)
            if trial is not None:
                yield trial


def _contiguous(tensor: torch.Tensor) -> torch.Tensor | None:
    is_plain = tensor.is_contiguous() and tensor.storage_offset() == 0
    if is_plain and not tensor.is_conj() and not tensor.is_neg():
        return None
    return tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def _counted(tensor: torch.Tensor) -> torch.Tensor | None:
    """1, 2, 3, ..., laid out as the tensor is."""
    if not tensor.is_floating_point() or not tensor.numel() or _contiguous(tensor) is not None:
        return None
    plain = torch.arange(1, tensor.numel() + 1, device=tensor.device).reshape(tensor.shape).to(tensor.dtype)
    return None if torch.equal(plain, tensor) else plain


def _shorter_lists(parts: Parts) -> Iterator[Trial]:
    for name, value in parts.trial.arguments.items():
        place = parts.places[name]
        is_free = not place.is_bound and place.length is None and parts.variation.allows("list", name)
        if isinstance(value, list | tuple) and len(value) > 1 and is_free:
            yield parts.with_arguments({name: list(value[:1])})
            yield parts.with_arguments({name: list(value[: len(value) // 2])})
            yield parts.with_arguments({name: list(value[:-1])})


def _left_out(parts: Parts) -> Iterator[Trial]:
    for name in parts.trial.arguments:
        place = parts.places[name]
        if not place.is_bound and parts.variation.allows("optional", name) and _has_default(parts, name):
            yield parts.without(name)


def _has_default(parts: Parts, name: str) -> bool:
    return any(argument.name == name and argument.has_default for argument in parts.trial.schema.arguments)
