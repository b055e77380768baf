"""test_pointwise: an op tagged as pointwise computes each element of its results from the elements at that place.

Compilers fuse and split such ops as they like. Here one element of one input is changed: results may change where it is
broadcast to, and nowhere else.
"""

from __future__ import annotations

import functools

import torch

from customops.checks._calls import Results, attempt, steady_results, where_of
from customops.checks._compare import difference
from customops.checks._outcome import NotExercised
from customops.checks._trial import Trial
from customops.checks._variants import are_plain
from customops.errors import CheckError


def check(trial: Trial) -> None:
    if torch.Tag.pointwise not in trial.op.tags or trial.is_builtin:
        raise NotExercised("the operator is not tagged as pointwise")
    trial = trial.detached()
    if not are_plain(trial):
        raise NotExercised("an input is not a plain strided tensor")
    expected = steady_results(trial)
    tried = False
    for tensor in trial.tensors:
        if not tensor.is_floating_point() or tensor.numel() < 2:
            continue
        label = next(name for name, value in trial.arguments.items() if _is_or_has(value, tensor))
        for place in (0, -1):
            at = torch.zeros(tensor.shape, dtype=torch.bool, device=tensor.device)
            at.view(-1)[place] = True
            actual = attempt(trial.map_tensors(functools.partial(_changed, tensor, at)))
            if actual is not None:
                tried = True
                _judge(trial, label, expected, actual, at)
    if not tried:
        raise NotExercised("there is no input of floating point with several elements")


def _changed(which: torch.Tensor, at: torch.Tensor, _name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.where(~at, tensor * 1.5 + 1) if tensor is which else tensor


def _is_or_has(value: object, tensor: torch.Tensor) -> bool:
    return value is tensor or (isinstance(value, (list, tuple)) and any(each is tensor for each in value))


def _judge(trial: Trial, label: str, before: Results, after: Results, at: torch.Tensor) -> None:
    for name, value in before.items():
        try:
            others = ~at.expand(value.shape)
        except (AttributeError, RuntimeError):  # no tensor, or its sizes are not those of a broadcast input
            continue
        found = difference(after[name][others], value[others], exact=True) if after[name].shape == value.shape else None
        if found:
            raise CheckError(
                "the operator is tagged as pointwise, and an element of the result depends on other elements",
                op=trial.name,
                argument=label,
                expected=f"no change of {name} beside the place of the element that was changed",
                got=found,
                where=where_of(trial),
                fix="leave out torch.Tag.pointwise",
            )
