"""test_second_order: the gradient of a gradient is that of what backward computes.

Backward is taken for a function of the inputs and of the gradients of the outputs. Its gradient, which autograd
records under ``create_graph=True``, is compared with central differences of it. So this says nothing of whether the
first gradient is right; and an operator that refuses to be differentiated twice, with an error, is in order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from customops.checks._derivatives import (
    Differences,
    Function,
    Gradients,
    Recorded,
    Tensors,
    differentiable,
    formula_may_fail,
    gradients_of,
    only,
    random_like,
    shifted,
)
from customops.checks._outcome import NotExercised, in_short, raised_at, require
from customops.checks._trial import Trial
from customops.errors import CheckError


def check(trial: Trial) -> None:
    with differentiable(trial) as (function, wanted):
        _Second(function, wanted).run()


class _Second(Differences):
    """Backward as a function of a point: the inputs, then the gradients of the outputs."""

    def __init__(self, function: Function, wanted: Sequence[int]) -> None:
        super().__init__(function, wanted)
        self.evaluate, self.count = self._first, len(self.point)
        self.tracked = Recorded(function, self.point, wanted).tracked
        self.point += random_like([function.base[k] for k in self.tracked], self.numbers)
        self.scales += [1.0] * len(self.tracked)

    def run(self) -> None:
        moving = [*self.wanted, *range(self.count, len(self.point))]
        for distance in (0.0, 0.03):
            point = shifted(self.point, self.direction(moving), distance) if distance else self.point
            with formula_may_fail(self.function, "backward fails"):
                weights = random_like(self._first(point), self.numbers)
            direction = self.direction(moving)
            found = self.slope(point, direction)
            verdict = self.judge(found, weights, self._second(point, weights), direction)
            if verdict == "agrees":
                return
            for i in self.wanted if verdict == "differs" else ():
                of_one = only(random_like(point[: self.count], self.numbers), [i])
                second = self._second(point, of_one)
                for j in moving:
                    directions = [self.direction([j], symmetric=symmetric) for symmetric in (False, True)]
                    if all(self.differs(point, of_one, second, direction) for direction in directions):
                        raise self._error(point, i, j)
        raise NotExercised("the second derivative cannot be compared: the gradient is not smooth here, or too steep")

    def _first(self, point: Sequence[torch.Tensor]) -> Tensors:
        """The gradients, zeros where there is none."""
        with torch.enable_grad():
            recorded = Recorded(self.function, point[: self.count], self.wanted)
            gradients = recorded.gradients(self._cotangents(recorded, point[self.count :]))
        return [torch.zeros_like(x) if g is None else g for g, x in zip(gradients, point, strict=False)]

    def _cotangents(self, recorded: Recorded, given: Sequence[torch.Tensor]) -> Gradients:
        require(recorded.tracked == self.tracked, "which outputs require grad depends on the values")
        by_output = dict(zip(self.tracked, given, strict=True))
        return [by_output.get(k) for k in range(len(recorded.outputs))]

    def _second(self, point: Tensors, weights: Sequence[torch.Tensor | None]) -> Gradients:
        """The gradients of the gradients, by autograd."""
        try:
            recorded = Recorded(self.function, point[: self.count], self.wanted)
            given = [v.detach().clone().requires_grad_() for v in point[self.count :]]
            first = recorded.gradients(self._cotangents(recorded, given), create_graph=True)
            pairs = [(g, w) for g, w in zip(first, weights, strict=True) if g is not None and w is not None]
            pairs = [(g, w) for g, w in pairs if g.requires_grad]
            leaves = [*recorded.leaves, *given]
            if not pairs:
                return [None] * len(leaves)
            of, with_weights = zip(*pairs, strict=True)
            return gradients_of(of, leaves, with_weights)
        except NotExercised:
            raise
        except Exception as error:  # loud, as it should be
            at = raised_at(error)
            problem = f"the operator cannot be differentiated twice: {in_short(error, 200)}"
            raise NotExercised(f"{problem}, at {at}" if at else problem) from error

    def _error(self, point: Tensors, i: int, j: int) -> CheckError:
        second = self._second(point, only([torch.ones_like(x) for x in point[: self.count]], [i]))[j]
        names = [item.label for item in self.function.inputs] + [f"the gradient of output {k}" for k in self.tracked]
        label, by = names[i], names[j]
        if second is None or not bool((second != 0).any()):
            problem, got = "silently zero", "None" if second is None else "zeros"
            fix = (
                "make the formula of differentiable operators only, of saved inputs and outputs, nothing detached; "
                "or register it with once_differentiable=True, and it is an error"
            )
        else:
            problem, got = "wrong", "another gradient"
            fix = "look at how the gradients of the operators that the formula calls are defined"
        problem = f"the second derivative is {problem}: of the gradient of {label}, by {by}"
        expected = f"what changes in the gradient of {label} as {by} changes"
        return self.function.fault(problem, expected, got, fix, argument=label)
