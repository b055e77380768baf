"""`probe`: which inputs does an operator accept?

Its kernel runs once on copies of each. An input that the kernel takes is accepted, whatever the fake impl says.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from customops.checks._inputs import as_ordinary, is_ordinary, seeded, tensors_in
from customops.checks._limits import Limits, TookTooLong
from customops.checks._outcome import processor_time
from customops.checks._runs import attempt, difference
from customops.checks._trial import Case, Trial, without_data
from customops.checks.inputs.parts import Parts, Spot, Variation, follow, is_integer
from customops.checks.inputs.shapes import with_shapes

#: Inputs on which a kernel takes longer, or returns more elements, are dropped, and with them those that are larger.
SLOW_SECONDS = 1.0
HUGE_ELEMENTS = 5_000_000


@dataclass(frozen=True)
class Rejection:
    """An input that the kernel refuses."""

    case: Case
    kernel_error: BaseException


@dataclass
class Probed:
    """What came of probing."""

    accepted: list[Case] = field(default_factory=list)
    rejected: list[Rejection] = field(default_factory=list)
    dropped: int = 0  #: the number of those that were too slow or too large
    seconds: float = 0.0
    is_late: bool = False  #: it ended since it took too long


def probe(
    cases: Iterable[Case],
    *,
    at_most: int | None = None,
    seconds: float | None = None,
    outcomes: dict[str, bool] | None = None,
    limits: Limits | None = None,
) -> Probed:
    """Run the operator on each case; end when `at_most` are accepted, or so many seconds after the first.

    The first call of a process loads and compiles things, so its time is left out. `outcomes` records by label which
    cases the operator accepts.
    """
    start, after_first = time.perf_counter(), processor_time()
    probed = Probed()
    limits = limits or Limits()
    limit: int | None = None  # elements of those that were too large
    for case in cases:
        if limit is not None and _elements(case.trial.tensors) >= limit:
            probed.dropped += 1
            continue
        before, reference = processor_time(), case.trial.reference
        with warnings.catch_warnings(record=True), torch.no_grad():
            warnings.simplefilter("always")
            error, result = kernel_error(case.trial, limits)
            is_large = processor_time() - before > SLOW_SECONDS or _elements(tensors_in(result)) > HUGE_ELEMENTS
            is_index = error is None and case.kind == "padding" and _stands_for_an_index(case.trial, result)
        if is_large:
            limit = _elements(case.trial.tensors)
        if outcomes is not None:
            outcomes[case.label] = error is None
        if error is not None:
            probed.rejected.append(Rejection(case, error))
        elif is_large and case.kind != "sample":
            probed.dropped += 1
        elif not is_index or (reference is not None and attempt(case.trial, op=reference) is None):
            probed.accepted.append(replace(case, kind="index" if is_index else case.kind, results=without_data(result)))
        now = processor_time()
        after_first = now if len(probed.accepted) + len(probed.rejected) == 1 else after_first
        probed.seconds = time.perf_counter() - start
        is_enough = at_most is not None and len(probed.accepted) >= at_most
        probed.is_late = seconds is not None and now - after_first > seconds
        if is_enough or probed.is_late:
            break
    return probed


def _elements(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def kernel_error(trial: Trial, limits: Limits | None = None) -> tuple[BaseException | None, list[Any]]:
    """What the kernel raises on copies of the inputs, or what it returns, and has written."""
    try:
        copy = trial.copy(leaves=True)
        with seeded((copy.args, copy.kwargs)), (limits or Limits()).applied():
            returned = copy.op(*copy.args, **copy.kwargs)
        return None, [returned, *copy.mutated.values()]
    except (Exception, SystemExit, TookTooLong) as error:  # whatever it is: the operator does not take them
        return error, []


def _stands_for_an_index(trial: Trial, result: list[Any]) -> bool:
    """Is the result for -1 that for another number, as where it counts from the end, or is clamped to 0?"""
    shapes = [tensor.shape for tensor in trial.tensors]
    sizes = {math.prod(shape[i:j]) for shape in shapes for i in range(len(shape)) for j in range(i + 1, len(shape) + 1)}
    signed = [tensor for tensor in trial.distinct if is_integer(tensor) and tensor.dtype.is_signed]
    for index in sorted({0, *(size - 1 for size in sizes if size)}):
        changed = {id(tensor): torch.where(tensor == -1, index, tensor).to(tensor.dtype) for tensor in signed}
        error, other = kernel_error(trial.replaced(changed))
        if error is None and difference(result, other, exact=True) is None:
            return True
    return False


def shrink(case: Case, fails: Callable[[Trial], bool], budget: float = 0.5, variation: Variation | None = None) -> Case:
    """Make a failing input simpler as long as it fails; its label then says so.

    Args:
        fails: does it fail in the same way? Of an input that the operator refuses it says no.
        budget: seconds.
        variation: what may be changed of the sample, and what has to be true of it.
    """
    if case.kind in ("padding", "index"):  # in a smaller tensor -1 may be another index
        return case
    end, variation = processor_time() + budget, variation or Variation()
    trial, is_smaller = case.trial, True
    while is_smaller:
        is_smaller = False
        for simpler in _simpler(Parts(trial, variation)):
            if processor_time() > end:
                break
            if variation.holds(simpler) and fails(simpler):
                trial, is_smaller = simpler, True
                break
    if trial is case.trial:
        return case
    return replace(case, trial=trial, label=", ".join(filter(None, (case.label, "simplified"))))


def _simpler(parts: Parts) -> Iterator[Trial]:
    """Calls that are a step simpler, those of the largest step first."""
    for name, value in parts.trial.arguments.items():
        place = parts.places[name]
        is_free = not place.is_bound and place.length is None and parts.variation.allows("list", name)
        if isinstance(value, list | tuple) and len(value) > 1 and is_free:
            for count in (1, len(value) // 2, len(value) - 1):
                yield parts.trial.with_arguments(**{name: list(value[:count])})
    if not parts.is_careful:  # else it may read past the end of what is too small
        spots = parts.resizable("size")
        for size in sorted({size for spot in spots for size in spot.tensor.shape if size > 1}, reverse=True):
            for new in dict.fromkeys((1, 2, size // 2, size - 1)):
                if new < size:
                    yield from _smaller(parts, spots, size, new)
    for change, kind in ((_contiguous, "layout"), (_counted, "value")):
        for spot in parts.resizable(kind):
            trial = parts.each([spot], change)
            if trial is not None:
                yield trial
    for name in parts.trial.arguments:
        place = parts.places[name]
        has_default = any(each.name == name and each.has_default for each in parts.trial.schema.arguments)
        if has_default and not place.is_bound and parts.variation.allows("optional", name):
            yield parts.without(name)


def _smaller(parts: Parts, spots: Sequence[Spot], size: int, new: int) -> Iterator[Trial]:
    """With dimensions of another size; where a tensor is laid out in an unusual way, slices, which are, too."""

    def part_of(tensor: torch.Tensor) -> torch.Tensor | None:
        dims = [dim for dim, old in enumerate(tensor.shape) if old == size]
        part = follow(tensor, {size: new}) if dims else tensor
        for dim in dims:
            part = part.narrow(dim, 0, new)
        return part if dims else None

    shapes = [[new if old == size else old for old in spot.tensor.shape] for spot in spots]
    is_unusual = any(not is_ordinary(spot.tensor) for spot in spots)
    if is_unusual and (sliced := parts.each(spots, part_of)) is not None:
        yield sliced
    if (reshaped := with_shapes(parts, spots, shapes, {size: new})) is not None:
        yield reshaped


def _contiguous(tensor: torch.Tensor) -> torch.Tensor | None:
    return None if is_ordinary(tensor) else as_ordinary(tensor)


def _counted(tensor: torch.Tensor) -> torch.Tensor | None:
    """1, 2, 3, ..., where a tensor is contiguous."""
    if not tensor.is_floating_point() or not tensor.numel() or not is_ordinary(tensor):
        return None
    plain = torch.arange(1, tensor.numel() + 1, device=tensor.device).reshape(tensor.shape).to(tensor.dtype)
    return None if torch.equal(plain, tensor) else plain
