"""test_second_order: the gradient of a gradient is that of what backward computes.

Backward is taken for a function of the inputs and of the gradients of the outputs. Its gradient, which autograd
records under ``create_graph=True``, is compared with central differences of it. So this says nothing of whether the
first gradient is right; and an operator that refuses to be differentiated twice, with an error, is in order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from customops.checks._derivatives import (
    Accuracy,
    Function,
    Gradients,
    Recorded,
    Tensors,
    as_symmetric,
    backward_may_fail,
    confirmed,
    differentiable_inputs,
    generator,
    judge,
    only,
    random_direction,
    random_like,
    recording,
    scale_of,
    shifted,
    slope,
)
from customops.checks._outcome import NotExercised, in_short
from customops.checks._trial import Trial
from customops.errors import CheckError


def check(trial: Trial) -> None:
    with recording():
        function = Function.of(trial)
        _Second(function, differentiable_inputs(function)).run()


class _Second:
    """Backward as a function of a point: the inputs, then the gradients of the outputs."""

    def __init__(self, function: Function, wanted: Sequence[int]) -> None:
        self.function = function
        self.wanted = wanted
        self.numbers = generator()
        self.accuracy = Accuracy.of(function.epsilon)
        self.tracked = Recorded(function, function.values, wanted).tracked
        outputs = [function.base[k] for k in self.tracked]
        self.point = [*function.values, *random_like(outputs, self.numbers)]
        self.scales = [*(scale_of(x) for x in function.values), *(1.0 for _ in outputs)]
        self.names = [*(item.label for item in function.inputs), *(f"the gradient of output {k}" for k in self.tracked)]
        self.moving = [*wanted, *range(len(function.values), len(self.point))]

    def run(self) -> None:
        for distance in (0.0, 0.03):
            point = shifted(self.point, self._direction(self.moving), distance) if distance else self.point
            with backward_may_fail(self.function, "backward fails"):
                weights = random_like(self._first(point), self.numbers)
            direction = self._direction(self.moving)
            found = slope(self._first, point, direction, self.accuracy.steps[0], self.accuracy.epsilon)
            second = self._second(point, weights)
            verdict = judge(found, weights, second, direction, self.accuracy.tolerance)
            if verdict == "differs":
                self._confirm(point)
            elif verdict == "agrees":
                return
        raise NotExercised("the second derivative cannot be compared: the gradient is not smooth here, or too steep")

    def _direction(self, moving: Sequence[int]) -> Tensors:
        return random_direction(self.point, self.scales, moving, self.numbers)

    def _first(self, point: Sequence[torch.Tensor]) -> Tensors:
        """The gradients, zeros where there is none."""
        count = len(self.function.values)
        with torch.enable_grad():
            recorded = Recorded(self.function, point[:count], self.wanted)
            gradients = recorded.gradients(self._cotangents(recorded, point[count:]))
        return [torch.zeros_like(x) if g is None else g for g, x in zip(gradients, point, strict=False)]

    def _cotangents(self, recorded: Recorded, given: Sequence[torch.Tensor]) -> Gradients:
        if recorded.tracked != self.tracked:
            raise NotExercised("which outputs require grad depends on the values")
        by_output = dict(zip(self.tracked, given, strict=True))
        return [by_output.get(k) for k in range(len(recorded.outputs))]

    def _second(self, point: Tensors, weights: Sequence[torch.Tensor | None]) -> Gradients:
        """The gradients of the gradients, by autograd."""
        count = len(self.function.values)
        try:
            recorded = Recorded(self.function, point[:count], self.wanted)
            given = [v.detach().clone().requires_grad_() for v in point[count:]]
            first = recorded.gradients(self._cotangents(recorded, given), create_graph=True)
            pairs = [(g, w) for g, w in zip(first, weights, strict=True) if g is not None and w is not None]
            pairs = [(g, w) for g, w in pairs if g.requires_grad]
            leaves = [*recorded.leaves, *given]
            if not pairs:
                return [None] * len(leaves)
            asked = [leaf for leaf in leaves if leaf.requires_grad]
            of, with_weights = zip(*pairs, strict=True)
            found = iter(torch.autograd.grad(of, asked, with_weights, allow_unused=True))
        except NotExercised:
            raise
        except Exception as error:  # loud, as it should be
            raise NotExercised(f"the operator cannot be differentiated twice: {in_short(error, 200)}") from error
        return [next(found) if leaf.requires_grad else None for leaf in leaves]

    def _confirm(self, point: Tensors) -> None:
        """Find the gradient, and what it is wrongly differentiated by, and raise."""
        for i in self.wanted:
            for j in self.moving:
                if all(self._differs(point, i, j, symmetric) for symmetric in (False, True)):
                    raise self._error(point, i, j)

    def _differs(self, point: Tensors, i: int, j: int, symmetric: bool) -> bool:
        values = point[: len(self.function.values)]
        weights = only(random_like(values, self.numbers), [i], values)
        second, direction = self._second(point, weights), self._direction([j])
        if symmetric:
            direction[j] = as_symmetric(direction[j])
        slopes = [slope(self._first, point, direction, step, self.accuracy.epsilon) for step in self.accuracy.steps]
        return confirmed([judge(found, weights, second, direction, self.accuracy.tolerance) for found in slopes])

    def _error(self, point: Tensors, i: int, j: int) -> CheckError:
        values = point[: len(self.function.values)]
        second = self._second(point, only([torch.ones_like(x) for x in values], [i], values))[j]
        is_zero = second is None or not bool((second != 0).any())
        label, by = self.names[i], self.names[j]
        if is_zero:
            problem = f"the second derivative is silently zero: of the gradient of {label}, by {by}"
            fix = (
                "make the formula of differentiable operators only, of saved inputs and outputs, nothing detached; "
                "or register it with once_differentiable=True, and it is an error"
            )
        else:
            problem = f"the second derivative is wrong: of the gradient of {label}, by {by}"
            fix = "look at how the gradients of the operators that the formula calls are defined"
        expected = f"what changes in the gradient of {label} as {by} changes"
        got = "None" if second is None else "zeros" if is_zero else "another gradient"
        return self.function.fault(problem, expected, got, fix, argument=label)
