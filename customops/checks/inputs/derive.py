"""`derive`: the inputs that are made of a sample, most revealing first."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch

from customops.checks._trial import EFFORTS, Case, Effort, Kind, Trial
from customops.checks.inputs import shapes, values
from customops.checks.inputs.constants import constants_of
from customops.checks.inputs.parts import (
    NORMAL,
    QUICK,
    THOROUGH,
    Change,
    Parts,
    Variation,
    arguments_of,
    in_turn,
    resized,
    with_argument,
)


def derive(
    sample: Trial,
    variation: Variation | None = None,
    effort: Effort = "normal",
    number: int = 0,
    outcomes: Mapping[str, bool] | None = None,
) -> Iterator[Case]:
    """The inputs made of sample `number`, itself first. Whether the operator accepts them is for `probe` to find.

    What it finds it may add to `outcomes`, by label: some inputs are made where others were refused.
    """
    variation = variation or Variation()
    parts = Parts(sample, variation, outcomes)
    yield Case(sample, sample=number)
    seen: set[tuple[str, str]] = set()
    for rank in range(EFFORTS.index(effort) + 1):
        for case in in_turn([subject(parts, rank) for subject in _SUBJECTS]):
            is_new = (case.kind, case.label) not in seen
            seen.add((case.kind, case.label))
            if is_new and variation.holds(case.trial):
                yield replace(case, sample=number)


def _declared(parts: Parts, rank: int) -> Iterator[Case]:
    """The values that `Variation.vary` gives."""
    if rank != QUICK or not parts.variation.vary:
        return
    given = arguments_of(parts.trial)
    for key in parts.variation.vary:
        name, _, aspect = key.rpartition(".") if key.endswith((".dtype", ".shape")) else (key, "", "")
        for value in parts.variation.values(key, given.get(key)) if not aspect else ():
            kind: Kind = "choice" if isinstance(value, bool | str | torch.dtype) else "number"
            yield Case(with_argument(parts.trial, name, value), kind, f"{name}={values.in_words(value)}")
        for spot in (spot for spot in parts.spots if aspect and spot.argument == name):
            for new in parts.variation.values(key, getattr(spot.tensor, aspect)):
                if aspect == "dtype":
                    change: Change = functools.partial(values.as_dtype, dtype=new)
                    yield from parts.cases([spot], change, "dtype", f"{spot.label}: {values.name_of(new)}")
                else:
                    change = functools.partial(resized, shape=new, seed=spot.seed)
                    yield from parts.cases([spot], change, "size", f"{spot.label}: shape {tuple(new)}")


def _pairs(parts: Parts, rank: int) -> Iterator[Case]:
    """Two changes at once."""
    if rank == NORMAL:
        yield from _both(parts, shapes.sizes, shapes.layouts, at_most=2)
        # Rows of an odd size, with gaps in between: a kernel that works on whole vectors reaches into these.
        yield from _both(parts, shapes.sizes, lambda of, _: shapes.in_layout(of, shapes.ROWS_APART), at_most=1)
        # A dimension of one element, whose stride means nothing, beside larger ones.
        for case in itertools.chain(shapes.sizes(parts, QUICK), shapes.sizes(parts, NORMAL)):
            found = [tensor.shape for tensor in case.trial.tensors]
            keeps_ranks = list(map(len, found)) == [tensor.dim() for tensor in parts.trial.tensors]
            has_ones = any(1 in shape and max(shape) > 1 for shape in found)
            if keeps_ranks and has_ones and not any(0 in shape for shape in found):
                yield from _changed(case, shapes.in_layout(Parts(case.trial, parts.variation), shapes.ODD_STRIDES))
                break
        yield from _both(parts, values.optionals, values.dtypes, at_most=1)
        for case in values.dtypes(parts, QUICK):  # many elements of a dtype that resolves little
            if any(tensor.dtype is torch.bfloat16 for tensor in case.trial.tensors):
                large = itertools.islice(shapes.sizes(Parts(case.trial, parts.variation), THOROUGH), 1)
                yield from (replace(other, kind="dtype") for other in _changed(case, large))
    elif rank == THOROUGH:
        for first in (shapes.sizes, values.dtypes, values.lists, values.numbers, values.optionals):
            yield from _both(parts, first, shapes.layouts, at_most=8)
        yield from _both(parts, values.dtypes, shapes.sizes, at_most=4)
        yield from _both(parts, values.numbers, shapes.sizes, at_most=16)
        yield from _both(parts, values.numbers, values.dtypes, at_most=8)
        yield from _both(parts, values.dtypes, values.values, at_most=4)


def _named(parts: Parts, rank: int) -> Iterator[Case]:
    """Sizes, values and dtypes that the code mentions: what it may decide by."""
    if rank != NORMAL or parts.is_careful:
        return
    named = constants_of(parts.trial)
    found = in_turn(
        [shapes.named_sizes(parts, named.sizes), values.named_numbers(parts, named), values.named_values(parts, named)]
    )
    yield from (replace(case, is_named=True) for case in found)


#: What makes inputs: those of a rank, in an order of its own.
Subject = Callable[[Parts, int], Iterator[Case]]

_SUBJECTS = (
    _declared,
    _named,
    shapes.sizes,
    shapes.layouts,
    values.numbers,
    values.optionals,
    values.lists,
    values.dtypes,
    values.values,
    values.padding,
    values.same,
    values.devices,
    _pairs,
)


def _both(parts: Parts, first: Subject, second: Subject, at_most: int) -> Iterator[Case]:
    """What `second` makes first of what `first` makes first."""
    for case in itertools.islice(first(parts, QUICK), at_most):
        yield from _changed(case, second(Parts(case.trial, parts.variation), QUICK))


def _changed(case: Case, again: Iterator[Case]) -> Iterator[Case]:
    return (replace(other, label=f"{case.label}; {other.label}") for other in again)
