"""`probe`: which inputs does an operator accept?

Its kernel runs once on copies of each, and its fake impl once on fakes. An input that the kernel takes is accepted;
where the fake impl alone refuses it, that is kept, for a check to judge.
"""

from __future__ import annotations

import functools
import math
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from customops import _compat
from customops.checks._case import Case
from customops.checks._compare import difference
from customops.checks._inputs import seeded, tensors_in
from customops.checks._trial import Trial

#: Inputs on which a kernel takes longer, or returns more elements, are dropped, and with them those that are larger.
SLOW_SECONDS = 1.0
HUGE_ELEMENTS = 5_000_000


@dataclass(frozen=True)
class Rejection:
    """An input that the kernel refuses; with None for `fake_error`, the fake impl takes it."""

    case: Case
    kernel_error: BaseException
    fake_error: Exception | None


@dataclass
class Probed:
    """What came of probing.

    Attributes:
        accepted: the inputs that the kernel takes.
        rejected: those that it refuses.
        refused_by_fake: the places in `accepted` of those that the fake impl refuses, with what it raised.
        dropped: the number of those that were too slow or too large.
        seconds: how long it took.
        is_late: it ended since it took too long.
    """

    accepted: list[Case] = field(default_factory=list)
    rejected: list[Rejection] = field(default_factory=list)
    refused_by_fake: dict[int, Exception] = field(default_factory=dict)
    dropped: int = 0
    seconds: float = 0.0
    is_late: bool = False


def probe(cases: Iterable[Case], *, at_most: int | None = None, seconds: float | None = None) -> Probed:
    """Run the operator on each case; end when `at_most` are accepted, or so many seconds after the first.

    The first call of a process loads and compiles things, and says nothing about the next.
    """
    start = after_first = time.perf_counter()
    probed, mode = Probed(), _compat.tracing.fake_mode()
    limit: int | None = None
    for case in cases:
        if limit is not None and _elements(case.trial) >= limit:
            probed.dropped += 1
            continue
        if _probe(case, mode, probed):
            limit = _elements(case.trial)
        now = time.perf_counter()
        after_first = now if len(probed.accepted) + len(probed.rejected) == 1 else after_first
        probed.seconds = now - start
        is_enough = at_most is not None and len(probed.accepted) >= at_most
        probed.is_late = seconds is not None and now - after_first > seconds
        if is_enough or probed.is_late:
            break
    return probed


def _probe(case: Case, mode: Any, probed: Probed) -> bool:
    """Is it too large? Else puts it where it belongs."""
    start = time.perf_counter()
    with warnings.catch_warnings(record=True), torch.no_grad():
        warnings.simplefilter("always")
        error, result = kernel_error(case.trial)
        if error is None and case.kind == "padding" and _stands_for_an_index(case.trial, result):
            return False
        is_large = time.perf_counter() - start > SLOW_SECONDS or sum(t.numel() for t in result) > HUGE_ELEMENTS
        fake = _fake_error(case.trial, mode)
    if error is not None:
        probed.rejected.append(Rejection(case, error, fake))
        return is_large
    if is_large and case.kind != "sample":
        probed.dropped += 1
        return True
    if fake is not None:
        probed.refused_by_fake[len(probed.accepted)] = fake
    probed.accepted.append(case)
    return is_large


def kernel_error(trial: Trial) -> tuple[BaseException | None, list[torch.Tensor]]:
    """What the kernel raises on copies of the inputs, or the tensors that it returns, and has written."""
    try:
        copy = trial.copy(leaves=True)
        with seeded((copy.args, copy.kwargs)):
            returned = copy.op(*copy.args, **copy.kwargs)
        return None, [*tensors_in(returned), *tensors_in(copy.mutated)]
    except (Exception, SystemExit) as error:  # whatever it is: the operator does not take them
        return error, []


def _stands_for_an_index(trial: Trial, result: list[torch.Tensor]) -> bool:
    """Is the result for -1 that for another number, as where it counts from the end, or is clamped to 0?"""
    shapes = [tensor.shape for tensor in trial.tensors]
    sizes = {math.prod(shape[i:j]) for shape in shapes for i in range(len(shape)) for j in range(i + 1, len(shape) + 1)}
    for index in sorted({0, *(size - 1 for size in sizes if size)}):
        error, other = kernel_error(trial.map_tensors(functools.partial(_with_index, index)))
        if error is None and difference(result, other, exact=True) is None:
            return True
    return False


def _with_index(index: int, _name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point() or tensor.is_complex() or not tensor.dtype.is_signed:
        return tensor
    return torch.where(tensor == -1, index, tensor).to(tensor.dtype)


def _fake_error(trial: Trial, mode: Any) -> Exception | None:
    """What the fake impl raises, but that it needs the data, or that torch has no fake of an input."""
    values, spec = _compat.tracing.tree_flatten((trial.args, trial.kwargs))
    try:
        fakes = [mode.from_tensor(v, static_shapes=True) if isinstance(v, torch.Tensor) else v for v in values]
        args, kwargs = _compat.tracing.tree_unflatten(fakes, spec)
        with mode, _compat.tracing.quiet_fakes():
            trial.op(*args, **kwargs)
    except _compat.tracing.NoFakeTensor:
        return None
    except Exception as error:
        return None if _compat.tracing.needs_data(error) else error
    return None


def _elements(trial: Trial) -> int:
    return sum(tensor.numel() for tensor in trial.tensors)
