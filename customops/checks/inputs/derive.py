"""`derive`: the inputs that are made of a sample, most revealing first."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from customops.checks._check import Effort
from customops.checks._trial import Case, Trial
from customops.checks.inputs.declared import declared, holds
from customops.checks.inputs.parts import NORMAL, QUICK, THOROUGH, Parts, Variation, in_turn, ranks
from customops.checks.inputs.shapes import ODD_STRIDES, ROWS_APART, in_layout, layouts, sizes
from customops.checks.inputs.structure import devices, lists, optionals, same
from customops.checks.inputs.values import dtypes, numbers, padding, values

#: What makes inputs: those of a rank, in an order of its own.
Subject = Callable[[Parts, int], Iterator[Case]]

_SUBJECTS: tuple[Subject, ...] = (
    declared,
    sizes,
    layouts,
    numbers,
    optionals,
    lists,
    dtypes,
    values,
    padding,
    same,
    devices,
)


def derive(
    sample: Trial, variation: Variation | None = None, effort: Effort = "normal", number: int = 0
) -> Iterator[Case]:
    """The inputs made of a sample, the sample first. Whether the operator accepts them is for `probe` to find out.

    Args:
        number: the number of the sample, which its cases have.
    """
    variation = variation or Variation()
    parts = Parts(sample, variation)
    yield Case(sample, sample=number)
    seen: set[tuple[str, str]] = set()
    for rank in ranks(effort):
        subjects = [subject(parts, rank) for subject in _SUBJECTS]
        for case in in_turn([*subjects, _pairs(parts, rank)]):
            is_new = (case.kind, case.label) not in seen
            seen.add((case.kind, case.label))
            if is_new and holds(variation, case.trial):
                yield replace(case, sample=number)


def _pairs(parts: Parts, rank: int) -> Iterator[Case]:
    """Two changes at once."""
    if rank == NORMAL:
        yield from _both(parts, sizes, layouts, at_most=2)
        yield from _odd_rows_apart(parts)
        yield from _ones_with_odd_strides(parts)
        yield from _long_sums(parts)
    elif rank == THOROUGH:
        for first in (sizes, dtypes, lists, numbers, optionals):
            yield from _both(parts, first, layouts, at_most=8)
        yield from _both(parts, dtypes, sizes, at_most=4)
        yield from _both(parts, numbers, sizes, at_most=16)
        yield from _both(parts, numbers, dtypes, at_most=8)
        yield from _both(parts, dtypes, values, at_most=4)


def _odd_rows_apart(parts: Parts) -> Iterator[Case]:
    """Rows of an odd size, with gaps in between: a kernel that works on whole vectors reaches into these."""
    for case in itertools.islice(sizes(parts, QUICK), 1):
        yield from _laid_out(case, parts.variation, ROWS_APART)


def _ones_with_odd_strides(parts: Parts) -> Iterator[Case]:
    """A dimension of one element, whose stride means nothing, beside larger ones."""
    for case in itertools.chain(sizes(parts, QUICK), sizes(parts, NORMAL)):
        shapes = [tensor.shape for tensor in case.trial.tensors]
        keeps_ranks = list(map(len, shapes)) == [tensor.dim() for tensor in parts.trial.tensors]
        has_ones = any(1 in shape and max(shape) > 1 for shape in shapes)
        if keeps_ranks and has_ones and not any(0 in shape for shape in shapes):
            yield from _laid_out(case, parts.variation, ODD_STRIDES)
            return


def _laid_out(case: Case, variation: Variation, layout: str) -> Iterator[Case]:
    for other in in_layout(Parts(case.trial, variation), layout):
        yield replace(other, label=f"{case.label}; {other.label}")


def _long_sums(parts: Parts) -> Iterator[Case]:
    """Many elements of a dtype that resolves little."""
    for case in dtypes(parts, QUICK):
        if any(tensor.dtype is torch.bfloat16 for tensor in case.trial.tensors):
            large = next(sizes(Parts(case.trial, parts.variation), THOROUGH), None)
            if large is not None:
                yield Case(large.trial, "dtype", f"{case.label}; {large.label}")


def _both(parts: Parts, first: Subject, second: Subject, at_most: int) -> Iterator[Case]:
    """What `second` makes first of what `first` makes first."""
    for i, case in enumerate(first(parts, QUICK)):
        if i == at_most:
            return
        for other in second(Parts(case.trial, parts.variation), QUICK):
            yield Case(other.trial, other.kind, f"{case.label}; {other.label}")
