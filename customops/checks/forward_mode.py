"""test_forward_mode: the tangents of forward mode are the slopes of what the operator computes.

For tangents of all inputs, and of each input alone, the tangents that `torch.autograd.forward_ad` gives, and
`torch.func.jvp`, are compared with central differences. A mismatch is reported if backward, too, says something else:
a gradient that was chosen, as that of a step function, is no matter of this check.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch.autograd import forward_ad

from customops.checks._derivatives import (
    Differences,
    Function,
    Gradients,
    Recorded,
    Tensors,
    Verdict,
    confirmed,
    differentiable_inputs,
    formula_may_fail,
    inner,
    only,
    random_like,
    recording,
    shifted,
)
from customops.checks._outcome import NotExercised, require
from customops.checks._runs import difference
from customops.checks._trial import Trial
from customops.errors import CheckError

_FINE = 1e-6  #: how far apart two ways may be that run the same formula
_FIX = "correct the jvp formula; the tangent of an input that has none is None, or zeros, and must not count"


def check(trial: Trial) -> None:
    with recording():
        _Forward(Function.of(trial)).run()


class _Forward(Differences):
    def run(self) -> None:
        function, trial = self.function, self.function.trial
        if function.writes and trial.custom_op is None and not trial.name.startswith("aten::"):
            raise NotExercised("the operator writes to its arguments, and forward mode does not know of that")
        try:
            moving = differentiable_inputs(function)
            differentiable = Recorded(function, self.point, moving).tracked
        except (NotExercised, CheckError):  # for test_gradients to find
            moving, differentiable = list(range(len(self.point))), []
        direction = self.direction(moving)
        given = [u.clone() for u in direction]
        with formula_may_fail(function, "the operator fails where its inputs have tangents", "jvp"):
            primals, tangents = self._call(self.point, given, moving)
        have = {k for k, tangent in enumerate(tangents) if tangent is not None}
        require(have, "no output has a tangent: the operator has no formula for forward mode")
        fix = "the jvp formula writes to what was saved, or to a tangent: compute new tensors"
        differs = difference(primals, function.base, rtol=_FINE)
        if differs:
            raise self._fault("a call with tangents has other results than one without", "the same", differs, fix)
        differs = None if function.writes else difference(given, direction, exact=True)
        if differs:
            raise self._fault("the formula writes to the tangents that it is given", "the same", differs, fix)
        # `torch.func.jvp` runs the same formula, at a level of its own.
        found: Sequence[torch.Tensor] = ()
        with suppress(Exception):  # a write to its argument, say, which torch.func refuses, or an op that is not nested
            values, changes = (tuple(each[i] for i in moving) for each in (self.point, direction))
            _, found = torch.func.jvp(function.of_some(moving), values, changes)  # type: ignore[misc]
        for k, (one, other) in enumerate(zip(found, tangents, strict=False)):
            differs = None if other is None else difference(one.detach(), other, rtol=_FINE)
            if differs:
                problem = "torch.func.jvp gives another tangent than torch.autograd.forward_ad"
                raise self._fault(problem, f"the tangent of output {k}", differs)
        tracked = sorted(have.union(differentiable))
        ways = [moving, *([i] for i in moving if len(moving) > 1)]
        if "agrees" not in [self._compare(way, tracked) for way in ways]:
            raise NotExercised("the tangents cannot be compared: the operator is not smooth here, or too steep")

    def _call(self, point: Tensors, direction: Tensors, moving: Sequence[int]) -> tuple[Tensors, Gradients]:
        """The results of a call in which the inputs `moving` have tangents, and the tangents of the results."""
        with forward_ad.dual_level():
            pairs = enumerate(zip(point, direction, strict=True))
            duals = [forward_ad.make_dual(x.detach().clone(), u) if i in moving else x.detach() for i, (x, u) in pairs]
            outputs = [forward_ad.unpack_dual(output) for output in self.function(duals)]
            primals = [output.primal.detach().clone() for output in outputs]
            return primals, [None if y.tangent is None else y.tangent.detach().clone() for y in outputs]

    def _compare(self, moving: Sequence[int], tracked: list[int]) -> Verdict:
        point = self.point
        problem = "forward mode is wrong"
        if len(moving) < len(point):
            problem += f" where {self.function.inputs[moving[0]].label} alone has a tangent"
        with formula_may_fail(self.function, f"{problem}: the formula fails", "jvp"):
            self._call(point, self.direction(moving), moving)
        for distance in (0.0, 0.03):
            point = shifted(point, self.direction(range(len(point))), distance) if distance else point
            verdict = self._verdict(point, moving, tracked, self.steps[0])
            if verdict == "agrees":
                return "agrees"
            if verdict == "differs":
                verdicts = [self._verdict(point, moving, tracked, step) for step in self.steps]
                verdicts += [self._verdict(point, moving, tracked, self.steps[0], symmetric=True)]
                if confirmed(verdicts) and not self._is_as_backward(point, moving, tracked):
                    raise self._error(point, moving, tracked, problem)
        return "unclear"

    def _verdict(
        self, point: Tensors, moving: Sequence[int], tracked: list[int], step: float, *, symmetric: bool = False
    ) -> Verdict:
        direction = self.direction(moving, symmetric=symmetric)
        found = self.slope(point, direction, step)
        if found is None:
            return "unclear"
        _, tangents = self._call(point, direction, moving)
        weights = only(random_like(found.value, self.numbers), tracked)
        # The tangents are compared in the place of gradients, weighed alike; where there is none it is zero.
        numeric = [None if tangent is None else v for v, tangent in zip(weights, tangents, strict=True)]
        shown = [torch.zeros_like(x) if t is None else t for x, t in zip(found.value, tangents, strict=True)]
        return self.judge(found, weights, numeric, shown)

    def _is_as_backward(self, point: Tensors, moving: Sequence[int], tracked: list[int]) -> bool:
        direction = self.direction(moving)
        _, tangents = self._call(point, direction, moving)
        try:
            recorded = Recorded(self.function, point, moving)
            cotangents = recorded.cotangents(self.numbers, tracked)
            gradients = recorded.gradients(cotangents)
        except Exception:  # it need not have a backward
            return False
        (forward, size), (backward, more) = inner(cotangents, tangents), inner(gradients, direction)
        return abs(forward - backward) <= 1e-3 * (size + more)

    def _error(self, point: Tensors, moving: Sequence[int], tracked: list[int], problem: str) -> CheckError:
        direction = self.direction(moving)
        found = self.slope(point, direction)
        _, tangents = self._call(point, direction, moving)
        for k in tracked if found is not None else ():
            slope, tangent = found.value[k], tangents[k]  # type: ignore[union-attr]
            if tangent is None and bool((slope != 0).any()):
                problem = f"{problem}: output {k} has no tangent, though it changes"
                return self._fault(problem, "the slope, by finite differences", "None")
            differs = tangent is not None and difference(tangent.to(slope.dtype), slope, rtol=1e-3)
            if differs:
                return self._fault(problem, f"the slope of output {k}, by finite differences", differs)
        return self._fault(problem, "the slope, by finite differences", "another tangent")

    def _fault(self, problem: str, expected: str, got: str, fix: str = _FIX) -> CheckError:
        return self.function.fault(problem, expected, got, fix, kind="jvp")
