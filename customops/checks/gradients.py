"""test_gradients: the gradients of an operator are those of what it computes.

A gradient is compared with central differences of the operator itself: for random v and u, the inner product of the
gradient (for v as the gradient of the outputs) with u is that of v with the slope along u. Where the differences
cannot be trusted, at a kink or a jump, a point nearby is tried. After a mismatch each input and each output is tried
alone, with several steps, and all of these have to agree before it is reported.

Where there is a reference function, gradients are compared with those of it, too; see `_reference`.

Then gradients are compared with each other: the same again, in another memory layout, of each output alone, of each
input alone. See `_gradient_variants`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from customops.checks import _gradient_relations
from customops.checks._derivatives import (
    Accuracy,
    Function,
    Gradients,
    Recorded,
    Slope,
    Tensors,
    Verdict,
    backward_may_fail,
    confirmed,
    derived_from,
    differentiable_inputs,
    generator,
    inner,
    judge,
    only,
    random_direction,
    random_like,
    recording,
    scale_of,
    shifted,
    slope,
)
from customops.checks._gradient_relations import is_always_identity
from customops.checks._outcome import NotExercised
from customops.checks._trial import Trial
from customops.errors import CheckError, name_of

_LARGE_STEPS = (0.3, 1.0, 3.0)
_MOST_ELEMENTS = 64
_MOST_DOUBTS = 5  #: pairs of an input and an output that are looked at after a mismatch
_MANY = 8  #: outputs: with more, an input is tried with all at once before it is with each


def check(trial: Trial) -> None:
    with recording():
        function = Function.of(trial)
        wanted = differentiable_inputs(function)
        _gradient_relations.compare_variants(function, wanted)  # first: a backward that writes spoils the rest
        verdict = Comparison(function, wanted).run()
        if not _gradient_relations.compare_with_reference(function, wanted) and verdict != "agrees":
            raise NotExercised(f"the gradients cannot be compared with finite differences: {verdict}")


class _WrongElement(NamedTuple):
    """A derivative by one element of an input, and what backward says it is."""

    numeric: float
    analytic: float
    which: str

    @property
    def error(self) -> float:
        return abs(self.numeric - self.analytic)

    def texts(self) -> tuple[str, str]:
        return f"{self.numeric:.6g} (finite differences, {self.which})", f"{self.analytic:.6g} (backward)"


class Comparison:
    """Gradients of a function by some of its inputs, and finite differences."""

    def __init__(self, function: Function, wanted: Sequence[int]) -> None:
        self.function = function
        self.wanted = wanted
        self.numbers = generator()
        self.accuracy = Accuracy.of(function.epsilon)
        self.scales = [scale_of(x) for x in function.values]
        #: Why nothing is said about some inputs.
        self.exempt: str | None = None

    def run(self) -> str:
        """'agrees', or why nothing can be said.

        Raises:
            CheckError: the gradients differ.
        """
        reason = "the operator is not smooth around these inputs, or too steep"
        for i, point in enumerate(self._points()):
            verdict = self._verdict(point, self._random_direction())
            if verdict == "unclear" and i == 0:
                self._compare_common_shift(point)
            if verdict == "differs":
                self._confirm(point)
                reason = self.exempt or reason
                if self.exempt:
                    break
            elif verdict == "agrees":
                return verdict
        return reason

    def _points(self) -> list[Tensors]:
        """The inputs, and points nearby."""
        values = self.function.values
        nearby = [shifted(values, self._random_direction(), distance) for distance in (0.03, 0.2)]
        relative = [u * x.abs() for u, x in zip(random_like(values, self.numbers), values, strict=True)]
        return [values, *nearby, shifted(values, relative, 0.01)]

    def _random_direction(self, only: int | None = None) -> Tensors:
        moving = self.wanted if only is None else [only]
        return random_direction(self.function.values, self.scales, moving, self.numbers)

    def _slope(self, point: Tensors, direction: Tensors, step: float) -> Slope | None:
        base = self.function.base if point is self.function.values else None
        return slope(self.function, point, direction, step, self.function.epsilon, base)

    def _verdict(self, point: Tensors, direction: Tensors) -> Verdict:
        found = self._slope(point, direction, self.accuracy.steps[0])
        if found is None or not found.is_finite():
            return "unclear"
        try:
            with backward_may_fail(self.function, "backward fails"):
                recorded = Recorded(self.function, point, self.wanted)
                cotangents = only(random_like(found.value, self.numbers), recorded.tracked, recorded.outputs)
                gradients = recorded.gradients(cotangents)
        except NotExercised:
            return "unclear"
        return judge(found, cotangents, gradients, direction, self.accuracy.tolerance)

    def _confirm(self, point: Tensors) -> None:
        """Find the input, and the output, of which the gradient is wrong, and raise."""
        for i, k, gradients, differs in itertools.islice(self._wrong_pairs(point), _MOST_DOUBTS):
            if not self._is_exempt(i, k, point, gradients) and not self._is_symmetric(i, gradients[i], differs):
                raise self._error(i, k, point)

    def _wrong_pairs(self, point: Tensors) -> Iterator[tuple[int, int, Gradients, Callable[[Tensors], bool]]]:
        """Inputs and outputs of which the gradient differs from finite differences."""
        for i in self.wanted:
            recorded = Recorded(self.function, point, self.wanted)
            if len(recorded.tracked) > _MANY and not self._is_wrong(i, recorded.tracked, recorded, point)[0]:
                continue
            for k in recorded.tracked:
                is_wrong, gradients, differs = self._is_wrong(i, [k], recorded, point)
                if is_wrong:
                    yield i, k, gradients, differs

    def _is_wrong(
        self, i: int, of: Sequence[int], recorded: Recorded, point: Tensors
    ) -> tuple[bool, Gradients, Callable[[Tensors], bool]]:
        """Is the gradient of an input wrong, for some outputs? Also the gradients, and what judges a direction."""
        cotangents = only(random_like(recorded.outputs, self.numbers), of, recorded.outputs)
        gradients = recorded.gradients(cotangents)
        differs = functools.partial(self._differs, point, cotangents, gradients)
        return all(differs(self._random_direction(i)) for _ in range(2)), gradients, differs

    def _differs(self, point: Tensors, cotangents: Gradients, gradients: Gradients, direction: Tensors) -> bool:
        """Do the differences with all steps that can be trusted say so?"""
        slopes = [self._slope(point, direction, step) for step in self.accuracy.steps]
        tolerance = self.accuracy.tolerance
        return confirmed([judge(found, cotangents, gradients, direction, tolerance) for found in slopes])

    def _is_exempt(self, i: int, k: int, point: Tensors, gradients: Gradients) -> bool:
        """Is there no saying what the gradient should be? `exempt` has the reason."""
        gradient, item, direction = gradients[i], self.function.inputs[i], self._random_direction(i)
        others_require = any(other.requires_grad for other in self.function.inputs)
        has_no_formula = all(each is None for each in gradients)
        if gradient is None and (others_require or has_no_formula) and not item.requires_grad:
            self.exempt = f"backward gives {item.label} no gradient, and the sample does not ask for one"
            return True
        if (gradient is None or not bool((gradient != 0).any())) and self.function.is_random():
            self.exempt = "the operator is random, and samples have no gradient"
            return True
        here = self.function(point)[k]
        if here.shape == point[i].shape and torch.equal(here, point[i]) and is_always_identity(self.function, i, k):
            self.exempt = "the operator returns its input as it is: it may be there for what its backward does"
            return True
        found = self._slope(point, direction, self.accuracy.steps[0])
        is_flat = found is not None and not bool((found.value[k] != 0).any())
        if is_flat and self._changes_far_off(k, point, direction):
            self.exempt = "the operator is a step function, with a gradient that its author chose"
            return True
        return False

    def _is_symmetric(self, i: int, gradient: torch.Tensor | None, judge: Callable[[Tensors], bool]) -> bool:
        """Is it the gradient of a function of symmetric matrices? Such functions read one triangle alone."""
        if gradient is None or gradient.dim() < 2 or gradient.shape[-1] != gradient.shape[-2] or gradient.shape[-1] < 2:
            return False
        direction = self._random_direction(i)
        direction[i] = direction[i] + direction[i].mH
        if not torch.allclose(gradient, gradient.mH) or judge(direction):
            return False
        self.exempt = "the operator is one of symmetric matrices: it reads one triangle of them"
        return True

    def _changes_far_off(self, k: int, point: Tensors, direction: Tensors) -> bool:
        here = self.function(point)[k]
        for step in (*_LARGE_STEPS, *(-step for step in _LARGE_STEPS)):
            try:
                there = self.function(shifted(point, direction, step))[k]
            except Exception:  # refused, so nothing is known of what is there
                continue
            if there.shape != here.shape or not torch.equal(there, here):
                return True
        return False

    def _compare_common_shift(self, point: Tensors) -> None:
        """Where the function has kinks, ties perhaps, it may be smooth if all elements change alike."""
        ones = [torch.full_like(x, max(self.scales)) for x in point]
        direction = [u if i in self.wanted else torch.zeros_like(u) for i, u in enumerate(ones)]
        if self._verdict(point, direction) != "differs":
            return
        recorded = Recorded(self.function, point, self.wanted)
        for k in recorded.tracked:
            cotangents = only(random_like(recorded.outputs, self.numbers), [k], recorded.outputs)
            if any(recorded.gradients(cotangents)[i] is None for i in self.wanted):
                continue  # of these nothing is said, or has been said
            if self._differs(point, cotangents, recorded.gradients(cotangents), direction):
                raise self.function.fault(
                    "the gradients at a kink, or a tie, do not add up to the slope along which there is none",
                    "the slope where all elements change alike",
                    "another one, by the gradients",
                    "have elements that tie share the gradient, or give it to one of them",
                )

    def _error(self, i: int, k: int, point: Tensors) -> CheckError:
        label = self.function.inputs[i].label
        wrong = self._worst_element(i, k, point, ones=True)
        if wrong is None or math.isclose(wrong.numeric, wrong.analytic, rel_tol=1e-3):
            # Wrong elements may cancel in the sum, as where two are exchanged: weigh the outputs at random.
            wrong = self._worst_element(i, k, point, ones=False) or wrong
        derived = derived_from(self.function.trial)
        if not self._has_gradient(i, k, point):
            of_output = f" for output {k}" if len(self.function.base) > 1 else ""
            problem = f"backward gives {label} no gradient{of_output}, though the result depends on it"
            fix = f"return the gradient of {label}; or declare that it has none: nondiff_args={{{label!r}}}"
        else:
            problem = f"the gradient of {label} is not the derivative of what the operator computes"
            fix = f"correct the formula for {label}: look at this element, with the other inputs as they are"
        if derived is not None:
            fix = f"the gradient is that of {name_of(derived)}: make it compute what the kernel does"
        expected, got = wrong.texts() if wrong else ("another one", "this one")
        return self.function.fault(problem, expected, got, fix, argument=label)

    def _has_gradient(self, i: int, k: int, point: Tensors) -> bool:
        recorded = Recorded(self.function, point, self.wanted)
        gradient = recorded.gradients(only(random_like(recorded.outputs, self.numbers), [k], recorded.outputs))[i]
        return gradient is not None and bool((gradient != 0).any())

    def _worst_element(self, i: int, k: int, point: Tensors, *, ones: bool) -> _WrongElement | None:
        """The element of which the gradient is most wrong.

        Args:
            ones: let the gradients of the outputs be ones, so that the numbers are those of the formula.
        """
        recorded = Recorded(self.function, point, self.wanted)
        all_ones = [torch.ones_like(output) for output in recorded.outputs]
        cotangents = only(all_ones if ones else random_like(all_ones, self.numbers), [k], all_ones)
        gradient = recorded.gradients(cotangents)[i]
        worst = None
        for n in range(min(point[i].numel(), _MOST_ELEMENTS)):
            direction = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in point]
            direction[i].view(-1)[n] = self.scales[i]
            found = self._slope(point, direction, self.accuracy.steps[0])
            if found is None or not found.is_finite():
                continue
            numeric = inner(cotangents, found.value) / self.scales[i]
            analytic = inner([gradient], [direction[i]]) / self.scales[i]
            at = tuple(int(x) for x in torch.unravel_index(torch.tensor(n), point[i].shape)) if n or k else ()
            weights = "" if ones else " times random numbers"
            element = _WrongElement(numeric, analytic, f"element {at or 0}, for output {k}{weights}")
            if worst is None or element.error > worst.error:
                worst = element
        return worst
