"""test_uninitialized_memory: no result is what happened to be in memory.

The operator runs with all new memory filled with NaN (integers: with the largest number), and again with memory as it
comes. All else is the same, so a result that differs was never written, or was computed from what was not. An output
no element of which is written is taken for a work space, unless that is so for empty inputs alone.
"""

from __future__ import annotations

from typing import Any

import torch

from customops.checks._fills import deterministic, is_filled, mark_of, marked
from customops.checks._inputs import tensors_in
from customops.checks._outcome import NotExercised
from customops.checks._runs import attempt, first_difference, require_comparable
from customops.checks._trial import Trial


def check(trial: Trial) -> None:
    require_comparable(trial)
    trial = trial.detached()
    with deterministic(fill=False):
        ordinary = attempt(trial)
    with is_filled():
        filled, again = attempt(trial), attempt(trial)
    if ordinary is None or filled is None or again is None:
        raise NotExercised("the operator does not take these inputs with deterministic algorithms")
    if first_difference(again, filled):
        raise NotExercised("equal calls have different results: there is nothing to compare with")
    if any(all(_is_fill(tensor) for tensor in _tensors(value)) for value in filled.values()):
        work_space = _unwritten(trial) or set()
        if work_space and any(tensor.numel() == 0 for tensor in trial.tensors):
            with_elements = _unwritten(trial.map_tensors(_not_empty))
            if with_elements is not None:
                work_space &= with_elements
        ordinary = {name: value for name, value in ordinary.items() if name not in work_space}
    found = first_difference(filled, ordinary, rtol=trial.rtol)
    if found:
        raise trial.fault(
            "a result depends on memory that was never written",
            got=f"{found[0]}, where new memory is filled: {found[1]} (as it comes)",
            fix="write every element of what torch.empty, empty_like, new_empty or numpy.empty returned, also at the "
            "ends and for small sizes; or use zeros",
        )


def _unwritten(trial: Trial) -> set[str] | None:
    """The outputs that keep what new memory is filled with; None if the operator does not take the inputs."""
    with marked():
        marks = attempt(trial)
    if marks is None:
        return None
    # A sum with what was there would differ from it.
    return {name for name, value in marks.items() if all(bool((x == mark_of(x)).all()) for x in _tensors(value))}


def _not_empty(_name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.numel() else tensor.new_ones([size or 2 for size in tensor.shape])


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tensors_in(value) if leaf.layout is torch.strided and not leaf.is_quantized]


def _is_fill(tensor: torch.Tensor) -> bool:
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().all())
    return tensor.dtype is torch.bool or bool((tensor == torch.iinfo(tensor.dtype).max).all())
