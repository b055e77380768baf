"""test_stability: float32 gives an answer wherever the problem has one.

Some formulas are right on paper and overflow on the way, for values that are nothing special: the logarithm of a sum of
exponentials for values in the hundreds. So the operator runs in float32 on such values, and in float64.

What is lost by nature is allowed for: changes of the inputs by what float32 resolves show, in float64, how steep the
operator is there. Results beside poles, and those beyond the range in which float32 is at ease, are left out. Digits
that are lost in a difference, as by exp(x) - 1 near zero, are no finding: many right operators do so.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from customops.checks._outcome import NotExercised
from customops.checks._runs import Results, attempt, nudges, steady_results
from customops.checks._trial import Trial

_HUNDREDS = 300.0  #: The exponential overflows in float32, and not in float64.
_ORDINARY = 1e6  #: results that a float32 should be able to hold, whatever they are computed from
_EPSILON = torch.finfo(torch.float32).eps

Change = Callable[[torch.Tensor], torch.Tensor]


def check(trial: Trial) -> None:
    trial = trial.detached()
    steady_results(trial)
    floating = [tensor for tensor in trial.tensors if tensor.is_floating_point() and tensor.numel()]
    if not floating or any(tensor.layout is not torch.strided or tensor.is_quantized for tensor in trial.tensors):
        raise NotExercised("no input is a plain tensor of floating point")
    if any(tensor.is_complex() for tensor in trial.tensors) or not all(bool(t.isfinite().all()) for t in floating):
        raise NotExercised("an input is complex, or not finite")
    if not _check_overflow(trial, _in_hundreds):
        raise NotExercised("the operator does not take float32 and float64, or has no floating-point results")


def _in_hundreds(tensor: torch.Tensor) -> torch.Tensor:
    return _to_size(tensor, _HUNDREDS)


def _to_size(tensor: torch.Tensor, size: float) -> torch.Tensor:
    largest = float(tensor.abs().max())
    return tensor * (size / largest) if largest else tensor


class _Runs:
    """The results in float32 and in float64, for the same numbers, and for such as differ by rounding."""

    def __init__(self, trial: Trial, change: Change) -> None:
        def changed(_name: str, tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_floating_point() or not tensor.numel():
                return tensor
            return change(tensor.double()).float()

        self.narrow = trial.map_tensors(changed)
        self.wide = self.narrow.in_float64()
        self.actual = attempt(self.narrow)
        self.truth = None if self.actual is None else attempt(self.wide)

    @property
    def pairs(self) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        """The results that can be compared: name, that in float32, that in float64."""
        if self.actual is None or self.truth is None:
            return []
        all_of = [(name, self.actual[name], truth) for name, truth in self.truth.items()]
        return [pair for pair in all_of if _are_comparable(*pair[1:])]

    def near(self) -> list[Results]:
        found = [attempt(self.wide.map_tensors(nudge)) for nudge in nudges(_EPSILON)]
        return [results for results in found if results is not None]


def _are_comparable(actual: object, truth: object) -> bool:
    if not isinstance(actual, torch.Tensor) or not isinstance(truth, torch.Tensor):
        return False
    is_wider = actual.dtype is torch.float32 and truth.dtype is torch.float64
    return is_wider and actual.shape == truth.shape and truth.layout is torch.strided and truth.numel() > 0


def _check_overflow(trial: Trial, change: Change) -> bool:
    """Are results not finite that are ordinary numbers?"""
    runs = _Runs(trial, change)
    for name, actual, truth in runs.pairs:
        if not (~actual.isfinite() & (truth.abs() < _ORDINARY)).any():
            continue
        others = [results[name] for results in runs.near()]
        if not all(other.shape == truth.shape for other in others):
            continue
        is_ordinary = torch.stack([truth, *others]).abs().amax(0) < _ORDINARY
        wrong = ~actual.isfinite() & is_ordinary
        if wrong.any():
            raise trial.fault(
                "a result for float32 is not finite, and that for the same numbers in float64 is an ordinary one",
                expected="what float64 gives, but for rounding",
                got=f"{name}, for values up to {_HUNDREDS:g}: {_first(wrong, actual, truth)}",
                fix="something overflows on the way, such as exp(x) for x > 88: subtract the largest value first, or "
                "use logsumexp, log_softmax, softplus, logaddexp",
            )
    return bool(runs.pairs)


def _first(wrong: torch.Tensor, actual: torch.Tensor, truth: torch.Tensor) -> str:
    at = tuple(wrong.nonzero()[0].tolist())
    count = f"{int(wrong.sum())} of {wrong.numel()} elements, the first at {at}: " if at else ""
    return f"{count}{actual[at].item():.6g} and not {truth[at].item():.6g}"
