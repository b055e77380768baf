"""test_forward_mode: the tangents of forward mode are the slopes of what the operator computes.

For tangents of all inputs, and of each input alone, the tangents that `torch.autograd.forward_ad` gives, and
`torch.func.jvp`, are compared with central differences. A mismatch is reported if backward, too, says something else:
a gradient that was chosen, as that of a step function, is no matter of this check.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.autograd import forward_ad

from customops.checks._derivatives import (
    Accuracy,
    Function,
    Gradients,
    Recorded,
    Tensors,
    Verdict,
    confirmed,
    differentiable_inputs,
    generator,
    inner,
    judge,
    only,
    place_of_formula,
    random_direction,
    random_like,
    recording,
    refuses_gradients,
    scale_of,
    shifted,
    size_of_terms,
    slope,
)
from customops.checks._outcome import NotExercised, in_short
from customops.checks._runs import difference
from customops.checks._trial import Trial
from customops.errors import CheckError

_AGREES_WITH_BACKWARD = 1e-3
_OF_FUNC = 1e-6


_FIX = "correct the jvp formula; the tangent of an input that has none is None, or zeros, and must not count"


def check(trial: Trial) -> None:
    with recording():
        _Forward(Function.of(trial)).run()


class _Forward:
    def __init__(self, function: Function) -> None:
        self.function = function
        self.numbers = generator()
        self.accuracy = Accuracy.of(function.epsilon)
        self.scales = [scale_of(x) for x in function.values]
        self.everything = list(range(len(function.values)))

    def run(self) -> None:
        moving, tracked = self._by_backward()
        tracked = self._with_tangents(moving, tracked)
        self._compare_primals(moving)
        self._compare_with_func(moving)
        ways = [moving, *([i] for i in moving if len(moving) > 1)]
        verdicts = [self._compare(way, tracked) for way in ways]
        if "agrees" not in verdicts:
            raise NotExercised("the tangents cannot be compared: the operator is not smooth here, or too steep")

    def _by_backward(self) -> tuple[list[int], list[int]]:
        """The inputs and the outputs that are differentiable by backward; all inputs if there is none."""
        trial = self.function.trial
        if self.function.writes and trial.custom_op is None and not trial.name.startswith("aten::"):
            raise NotExercised("the operator writes to its arguments, and forward mode does not know of that")
        try:
            wanted = differentiable_inputs(self.function)
            return wanted, Recorded(self.function, self.function.values, wanted).tracked
        except (NotExercised, CheckError):  # for test_gradients to find
            return self.everything, []

    def _with_tangents(self, moving: list[int], tracked: list[int]) -> list[int]:
        """The outputs that should have a tangent: those that have one, or are differentiable by backward."""
        with _refusals("the operator fails where its inputs have tangents", self.function):
            found = self._tangents(self.function.values, self._direction(moving), moving)
        have = {k for k, tangent in enumerate(found) if tangent is not None}
        if not have:
            raise NotExercised("no output has a tangent: the operator has no formula for forward mode")
        return sorted(have.union(tracked))

    def _compare_primals(self, moving: Sequence[int]) -> None:
        """Results are the same with and without tangents, and the formula writes to no tangent that it is given."""
        direction = self._direction(moving)
        given = [u.clone() for u in direction]
        with forward_ad.dual_level():
            outputs = self._dual_outputs(self.function.values, given, moving)
            found = [output.primal.detach().clone() for output in outputs]
        fix = "the jvp formula writes to what was saved, or to a tangent: compute new tensors"
        differs = difference(found, self.function.base, rtol=_OF_FUNC)
        if differs:
            raise self._report("a call with tangents has other results than one without", "the same", differs, fix)
        differs = None if self.function.writes else difference(given, direction, exact=True)
        if differs:
            raise self._report("the formula writes to the tangents that it is given", "the same", differs, fix)

    def _direction(self, moving: Sequence[int], *, symmetric: bool = False) -> Tensors:
        return random_direction(self.function.values, self.scales, moving, self.numbers, symmetric=symmetric)

    def _tangents(self, point: Tensors, direction: Tensors, moving: Sequence[int]) -> Gradients:
        with forward_ad.dual_level():
            return [_value(output.tangent) for output in self._dual_outputs(point, direction, moving)]

    def _dual_outputs(
        self, point: Tensors, direction: Tensors, moving: Sequence[int]
    ) -> list[forward_ad.UnpackedDualTensor]:
        pairs = enumerate(zip(point, direction, strict=True))
        duals = [forward_ad.make_dual(x.detach().clone(), u) if i in moving else x.detach() for i, (x, u) in pairs]
        return [forward_ad.unpack_dual(output) for output in self.function(duals)]

    def _compare(self, moving: Sequence[int], tracked: list[int]) -> Verdict:
        point = self.function.values
        names = [self.function.inputs[i].label for i in moving]
        alone = len(moving) < len(self.everything)
        problem = f"forward mode is wrong where {names[0]} alone has a tangent" if alone else "forward mode is wrong"
        with _refusals(f"{problem}: the formula fails", self.function):
            self._tangents(point, self._direction(moving), moving)
        for distance in (0.0, 0.03):
            point = shifted(point, self._direction(self.everything), distance) if distance else point
            verdict = self._verdict(point, moving, tracked, self.accuracy.steps[0])
            if verdict == "agrees":
                return "agrees"
            if verdict == "differs":
                verdicts = [self._verdict(point, moving, tracked, step) for step in self.accuracy.steps]
                verdicts += [self._verdict(point, moving, tracked, self.accuracy.steps[0], symmetric=True)]
                if confirmed(verdicts) and not self._is_as_backward(point, moving, tracked):
                    raise self._error(point, moving, tracked, problem)
        return "unclear"

    def _verdict(
        self, point: Tensors, moving: Sequence[int], tracked: list[int], step: float, *, symmetric: bool = False
    ) -> Verdict:
        direction = self._direction(moving, symmetric=symmetric)
        found = slope(self.function, point, direction, step, self.accuracy.epsilon)
        if found is None:
            return "unclear"
        tangents = self._tangents(point, direction, moving)
        weights = only(random_like(found.value, self.numbers), tracked, found.value)
        pairs = zip(weights, tangents, found.value, strict=True)
        compared = [(v, tangent, like) for v, tangent, like in pairs if v is not None]
        given = [None if tangent is None else v for v, tangent, _ in compared]
        shown = [torch.zeros_like(like) if tangent is None else tangent for _, tangent, like in compared]
        return judge(found, weights, given, shown, self.accuracy.tolerance)

    def _is_as_backward(self, point: Tensors, moving: Sequence[int], tracked: list[int]) -> bool:
        direction = self._direction(moving)
        tangents = self._tangents(point, direction, moving)
        try:
            recorded = Recorded(self.function, point, moving)
            cotangents = only(random_like(recorded.outputs, self.numbers), tracked, recorded.outputs)
            gradients = recorded.gradients(cotangents)
        except Exception:  # it need not have a backward
            return False
        gap = abs(inner(cotangents, tangents) - inner(gradients, direction))
        size = size_of_terms(cotangents, tangents) + size_of_terms(gradients, direction)
        return gap <= _AGREES_WITH_BACKWARD * size

    def _compare_with_func(self, moving: list[int]) -> None:
        """`torch.func.jvp` runs the same formula, at a level of its own."""
        direction = self._direction(moving)
        tangents = self._tangents(self.function.values, direction, moving)

        def call(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
            by_number = dict(zip(moving, values, strict=True))
            return tuple(self.function([by_number.get(i, x) for i, x in enumerate(self.function.values)]))

        primals = tuple(self.function.values[i] for i in moving)
        try:
            _, found = torch.func.jvp(call, primals, tuple(direction[i] for i in moving))  # type: ignore[misc]
        except Exception:  # a write to its argument, say, which torch.func refuses, or an op that cannot be nested
            return
        for k, (one, other) in enumerate(zip(found, tangents, strict=True)):
            differs = other is not None and difference(one.detach(), other, rtol=_OF_FUNC)
            if differs:
                problem = "torch.func.jvp gives another tangent than torch.autograd.forward_ad"
                raise self._report(problem, f"the tangent of output {k}", differs)

    def _error(self, point: Tensors, moving: Sequence[int], tracked: list[int], problem: str) -> CheckError:
        direction = self._direction(moving)
        found = slope(self.function, point, direction, self.accuracy.steps[0], self.accuracy.epsilon)
        tangents = self._tangents(point, direction, moving)
        texts = ("the slope, by finite differences", "another tangent")
        for k in tracked:
            expected, tangent = found.value[k] if found is not None else None, tangents[k]
            if expected is None:
                continue
            if tangent is None and bool((expected != 0).any()):
                return self._report(f"{problem}: output {k} has no tangent, though it changes", texts[0], "None")
            differs = tangent is not None and difference(tangent.to(expected.dtype), expected, rtol=1e-3)
            if differs:
                texts = f"the slope of output {k}, by finite differences", differs
                break
        return self._report(problem, *texts)

    def _report(self, problem: str, expected: str, got: str, fix: str = _FIX) -> CheckError:
        return self.function.fault(problem, expected, got, fix, kind="jvp")


@contextmanager
def _refusals(problem: str, function: Function) -> Iterator[None]:
    """What the block raises becomes NotExercised if it is a refusal, and a finding otherwise."""
    try:
        yield
    except (NotExercised, CheckError):
        raise
    except Exception as error:
        if refuses_gradients(error):
            raise NotExercised(f"the operator refuses forward mode: {in_short(error, 200)}") from error
        raise CheckError(
            problem,
            op=function.trial.name,
            got=in_short(error, 300),
            where=place_of_formula(function.trial, "jvp"),
            fix="the tangent of an input that has none is None, or zeros: the formula has to take both",
        ) from error


def _value(tangent: torch.Tensor | None) -> torch.Tensor | None:
    return None if tangent is None else tangent.detach().clone()
