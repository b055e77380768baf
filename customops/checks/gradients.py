"""test_gradients, test_second_order and test_forward_mode: derivatives are those of what an operator computes.

A gradient is compared with central differences of the operator itself: for random v and u, the inner product of the
gradient (for v as the gradient of the outputs) with u is that of v with the slope along u. Where the differences
cannot be trusted, at a kink or a jump, a point nearby is tried. After a mismatch each input and each output is tried
alone, with several steps, and all of these have to agree before it is reported.

Before that, gradients are compared however they are asked for: again, in another memory layout, of each output alone,
of each input alone. This finds a backward that depends on what it must not depend on, and one that writes to tensors
that are not its own. Where there is a reference function, gradients are compared with those of it, too.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Sequence

import torch
from torch.autograd import forward_ad

from customops._places import name_of, where
from customops.checks._derivatives import (
    Claim,
    Differences,
    Function,
    Gradients,
    Ordinary,
    Recorded,
    Tensors,
    Verdict,
    are_finite,
    differentiable,
    differentiable_inputs,
    formula_may_fail,
    function_derived,
    generator,
    gradients_of,
    inner,
    only,
    random_like,
    recording,
    scale_of,
    shifted,
)
from customops.checks._outcome import NotExercised, in_short, raised_at, require
from customops.checks._runs import difference
from customops.checks._trial import Trial
from customops.checks._variants import other_arguments
from customops.checks.inputs.parts import is_symmetric
from customops.errors import CheckError

_LARGE_STEPS = (0.3, 1.0, 3.0, -0.3, -1.0, -3.0, 1e2, 1e4)  #: times the size of elements
_MOST_ELEMENTS = 64
_TIE = "the slopes along several directions do not add up: the operator is not smooth there"
_UNSTABLE = "a change of the last digits of the inputs changes the gradient: it is not determined there"
_MOST_DOUBTS = 5  #: pairs of an input and an output that are looked at after a mismatch
_MANY = 8  #: outputs: with more, an input is tried with all at once before it is with each


def check_gradients(trial: Trial) -> None:
    with differentiable(trial) as (function, wanted):
        _Relations(function, wanted).run()  # first: a backward that writes spoils the rest
        samples = getattr(trial.custom_op, "_samples", None)
        if samples is not None and samples.gradient == "chosen":
            verdict = 'its author chose it (gradient="chosen" of register_samples)'
        else:
            verdict = _Comparison(function, wanted).run()
        if not _compare_with_reference(function, wanted) and verdict != "agrees":
            raise NotExercised(f"the gradients cannot be compared with finite differences: {verdict}")


class _Relations(Ordinary):
    """Gradients that are equal however they are asked for."""

    def run(self) -> None:
        if not self.settle():
            return
        problem = "a second backward through the same graph gives other gradients"
        fix = "do not write to what the formula has saved; keep no state between calls"
        self._compare(self.cotangents, problem, fix)

        # In other memory layouts. (What is empty, or has one element, is contiguous in all of them.)
        def are_contiguous(gradients: Gradients) -> bool:
            return all(v is None or v.is_contiguous() for v in gradients)

        fix = "read the gradient by its strides, or call .contiguous() on it; use reshape instead of view"
        strided = self._given(_spread)
        if not are_contiguous(strided):
            self._compare(strided, "backward is wrong where the gradient it is given is not contiguous", fix)
        if any(v is not None and v.is_complex() for v in self.cotangents):
            lazily = self._given(lambda v: v.conj().resolve_conj().conj())
            problem = "backward is wrong where the gradient it is given is lazily conjugated, as that of .conj() is"
            self._compare(lazily, problem, "call .resolve_conj() on the gradient before its memory is read")
        expanded = self._given(lambda v: v.new_ones(()).expand(v.shape))
        with formula_may_fail(self.function, "backward fails"):
            of_ones = self.recorded.gradients(self._given(torch.ones_like))
        if are_finite(of_ones) and not are_contiguous(expanded):
            problem = "backward is wrong where the gradient it is given is expanded, as that of .sum() is"
            self._compare(expanded, problem, fix, of_ones)
        # Each output alone: by linearity the gradients add up.
        problem = "backward is wrong where only some of the outputs are used"
        sums = [torch.zeros_like(leaf) for leaf in self.recorded.leaves]
        for k in self.recorded.tracked if len(self.recorded.tracked) > 1 else ():
            with formula_may_fail(self.function, problem):
                found = self.recorded.gradients(only(self.cotangents, [k]))
            sums = [a if b is None else a + b for a, b in zip(sums, found, strict=True)]
        if len(self.recorded.tracked) > 1:
            fix = "the gradient of an output that is not used may be None or zeros: take both"
            self.judge(sums, self.expected, problem, fix)
        if not self.recorded.returns_an_input():  # else it is there, perhaps, for what its backward adds
            zeros = self._given(torch.zeros_like)
            problem = "backward makes something else than zeros of a gradient of zeros"
            fix = "do not divide by the gradient, nor add to it"
            self._compare(zeros, problem, fix, [None] * len(self.expected))
        for i in self.wanted if len(self.wanted) > 1 else ():
            label = self.function.inputs[i].label
            self.compare_choice((i,), f"the gradient of {label} is another one where {label} alone", label)

    def _given(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Gradients:
        return [None if v is None else change(v) for v in self.cotangents]

    def _compare(self, cotangents: Gradients, problem: str, fix: str, expected: Gradients | None = None) -> None:
        with formula_may_fail(self.function, problem):
            found = self.recorded.gradients(cotangents)
        self.judge(found, self.expected if expected is None else expected, problem, fix)


def _spread(tensor: torch.Tensor) -> torch.Tensor:
    """Return every second element of a larger tensor, with the dimensions in another order."""
    larger = tensor.new_zeros((*reversed(tensor.shape), 2))
    return larger[..., 1].permute(tuple(range(tensor.dim() - 1, -1, -1))).copy_(tensor)


class _Comparison(Differences):
    """Gradients of a function by some of its inputs, and finite differences."""

    def run(self) -> str:
        """Return 'agrees', or why the gradients cannot be compared."""
        self._look_for_nan()
        # Of symmetric matrices one triangle alone may be read: they stay so.
        stay = all(x.dim() < 2 or (x.shape[-1] == x.shape[-2] and torch.equal(x, x.mH)) for x in self.point)
        nearby = [shifted(self.point, self.direction(self.wanted, symmetric=stay), by) for by in (0.03, 0.2)]
        random = self.direction(range(len(self.point)), symmetric=stay)
        relative = [u / scale * x.abs() for u, scale, x in zip(random, self.scales, self.point, strict=True)]
        for i, point in enumerate([self.point, *nearby, shifted(self.point, relative, 0.01)]):
            verdict = self._verdict(point, self.direction(self.wanted))
            if verdict == "agrees":
                return verdict
            if verdict == "unclear" and i == 0:
                self._compare_common_shift(point)
            reason = self._confirm(point) if verdict == "differs" else None
            if reason and reason not in (_TIE, _UNSTABLE):
                return reason
        return "the operator is not smooth around these inputs, or too steep"

    def _look_for_nan(self) -> None:
        """Raise CheckError for a gradient that is NaN in an element along which finite differences find a slope.

        Plain functions have such gradients, too, for numbers such as a scale of zero.
        """
        trial = self.function.trial
        if trial.reference is not None or any(isinstance(n, float) and n == 0 for n in trial.arguments.values()):
            return
        try:
            _, gradients = self.gradients_at(self.point)
        except Exception:  # for `_verdict` to judge
            return
        for i in self.wanted:
            gradient = gradients[i]
            if gradient is None or not bool(gradient.isnan().any()):
                continue
            at = tuple(gradient.isnan().nonzero()[0].tolist())
            direction = [torch.zeros_like(x) for x in self.point]
            direction[i][at] = self.scales[i]
            found = self.slope(self.point, direction)
            pairs = [] if found is None else list(zip(found.value, found.error, strict=True))
            if pairs and all(bool((error <= 1e-3 * (value.abs() + 1)).all()) for value, error in pairs):
                label = self.function.inputs[i].label
                raise self.function.fault(
                    f"the gradient of {label} is NaN where the operator has a derivative",
                    f"a number for element {at}",
                    "nan (backward)",
                    "the formula divides zero by zero, or multiplies zero by infinity: do without the quotient, or "
                    "replace the argument before, with torch.where",
                    argument=label,
                )

    def _verdict(self, point: Tensors, direction: Tensors) -> Verdict:
        found = self.slope(point, direction)
        if found is None:
            return "unclear"
        try:
            with formula_may_fail(self.function, "backward fails"):
                cotangents, gradients = self.gradients_at(point)
        except NotExercised:
            return "unclear"
        return self.judge(found, Claim(cotangents, gradients, direction))

    def _compare_common_shift(self, point: Tensors) -> None:
        """Change all elements alike: where the function has kinks, ties perhaps, it may be smooth in that direction."""
        # By the size of most of them: what is smooth beside small numbers need not be so for steps of the largest.
        size = max((float(x.abs().median()) for x in point if x.numel()), default=0.0) or max(self.scales)
        ones = [torch.full_like(x, size) for x in point]
        direction = [u if i in self.wanted else torch.zeros_like(u) for i, u in enumerate(ones)]
        if self._verdict(point, direction) != "differs":
            return
        for k in Recorded(self.function, point, self.wanted).tracked:
            cotangents, gradients = self.gradients_at(point, [k])
            known = [(i, g) for i in self.wanted if (g := gradients[i]) is not None]
            if len(known) < len(self.wanted):
                continue  # of these nothing is said, or has been said
            if any(self._is_passed_on(i, k, point, cotangents, gradient) for i, gradient in known):
                continue
            if self.differs(point, direction, Claim(cotangents, gradients, direction)):
                raise self.function.fault(
                    "the gradients at a kink, or a tie, do not add up to the slope along which there is none",
                    "the slope where all elements change alike",
                    "another one, by the gradients",
                    "have elements that tie share the gradient, or give it to one of them",
                )

    def _confirm(self, point: Tensors) -> str | None:
        """Raise CheckError for the input and the output whose gradient is wrong, or return why it is no fault."""
        doubts: list[str] = []
        tracked = Recorded(self.function, point, self.wanted).tracked
        for i in self.wanted:
            if len(tracked) > _MANY and self._wrong_gradients(i, tracked, point) is None:
                continue
            for k in tracked:
                wrong = self._wrong_gradients(i, [k], point)
                exempt = self._exemption(i, k, point, *wrong) if wrong is not None else None
                if wrong is not None and exempt is None:
                    raise self._error(i, k, point)
                doubts += [exempt] if exempt else []
                if len(doubts) == _MOST_DOUBTS:
                    return exempt
        return doubts[-1] if doubts else None

    def _wrong_gradients(self, i: int, of: Sequence[int], point: Tensors) -> tuple[Gradients, Gradients] | None:
        """Return gradients of some outputs, and those of the inputs for them, if the gradient of input `i` is wrong."""
        cotangents, gradients = self.gradients_at(point, of)
        directions = (self.direction([i]) for _ in range(2))
        is_wrong = all(self.differs(point, along, Claim(cotangents, gradients, along)) for along in directions)
        return (cotangents, gradients) if is_wrong else None

    def _exemption(self, i: int, k: int, point: Tensors, cotangents: Gradients, gradients: Gradients) -> str | None:
        """Return the reason why a gradient cannot be judged, or None."""
        gradient, item, direction = gradients[i], self.function.inputs[i], self.direction([i])
        others_require = any(other.requires_grad for other in self.function.inputs)
        has_no_formula = all(each is None for each in gradients)
        if gradient is None and (others_require or has_no_formula) and not item.requires_grad:
            return f"backward gives {item.label} no gradient, and the sample does not ask for one"
        if (gradient is None or not bool((gradient != 0).any())) and self.function.is_random():
            return "the operator is random, and samples have no gradient"
        here = self.function(point)[k]
        if here.shape == point[i].shape and torch.equal(here, point[i]) and _is_always_identity(self.function, i, k):
            return "the operator returns its input as it is: it may be there for what its backward does"
        found = self.slope(point, direction)
        is_flat = found is not None and not bool((found.value[k] != 0).any())
        for step in _LARGE_STEPS if is_flat else ():
            try:
                there = self.function(shifted(point, direction, step))[k]
            except Exception:  # refused, so nothing is known of what is there
                continue
            if there.shape != here.shape or not torch.equal(there, here):
                return "the operator is a step function, with a gradient that its author chose"
        if gradient is not None and self._is_passed_on(i, k, point, cotangents, gradient):
            return "the operator rounds most elements, and passes the gradient on, which its author chose"
        if gradient is not None and self._is_steep(i, k, point, cotangents, gradient):
            return "the operator is too steep around these inputs"
        if gradient is not None and self._is_unstable(i, point, cotangents, gradient):
            return _UNSTABLE
        if not self._is_linear(point, i, k):
            return _TIE
        # Functions of symmetric matrices read one triangle alone.
        if gradient is None or gradient.dim() < 2 or gradient.shape[-1] != gradient.shape[-2] or gradient.shape[-1] < 2:
            return None
        direction = self.direction([i], symmetric=True)
        is_one = is_symmetric(point[i]) or torch.allclose(gradient, gradient.mH)
        if is_one and not self.differs(point, direction, Claim(cotangents, gradients, direction)):
            return "the operator is one of symmetric matrices: it reads one triangle of them"
        return None

    def _is_linear(self, point: Tensors, i: int, k: int) -> bool:
        """Return whether slopes along two directions add up. They do not where elements tie."""
        one, other = self.direction([i]), self.direction([i])
        both = [u + w for u, w in zip(one, other, strict=True)]
        slopes = [self.slope(point, direction) for direction in (one, other, both)]
        if any(found is None for found in slopes):
            return True
        first, second, sum_ = (found.value[k] for found in slopes if found is not None)
        if not sum_.numel():
            return True
        error = max(float(found.error[k].max()) for found in slopes if found is not None)
        size = float((first.abs() + second.abs()).max())
        return float((first + second - sum_).abs().max()) <= 10 * error + 1e-3 * size

    def _is_passed_on(self, i: int, k: int, point: Tensors, cotangents: Gradients, gradient: torch.Tensor) -> bool:
        """Return whether the op rounds to a scale that the largest element makes, and passes its gradient on.

        A small change of most elements by themselves changes nothing then.
        """
        here, given = self.function(point)[k], cotangents[k]
        if given is None or given.shape != gradient.shape:
            return False
        passed = (gradient == given).reshape(-1)
        if not bool((passed | (gradient == 0).reshape(-1)).all()) or int(passed.sum()) < 3:
            return False
        numbers, same = passed.nonzero().reshape(-1).tolist()[:16], 0
        for n in numbers:
            moved = [x.clone(memory_format=torch.contiguous_format) for x in point]
            moved[i].view(-1)[n] += self.steps[0] * self.scales[i]
            with contextlib.suppress(Exception):  # refused, so nothing is known of what is there
                same += torch.equal(self.function(moved)[k], here)
        return same >= 0.6 * len(numbers)

    def _is_steep(self, i: int, k: int, point: Tensors, cotangents: Gradients, gradient: torch.Tensor) -> bool:
        """Return whether a slope is what a large gradient says, for a change as small as that asks for.

        As of ``x / (x + 1e-20)`` at zero, of which finite differences see nothing. The largest element changes, or, for
        where elements tie, all change alike.
        """
        given, here = cotangents[k], self.function(point)[k]
        if given is None or not gradient.numel() or gradient.is_complex() or not here.numel():
            return False
        size = float((given * here).abs().sum()) or 1.0
        alone = torch.zeros_like(gradient).reshape(-1)
        alone[int(gradient.abs().argmax())] = 1
        for direction in (alone.reshape(gradient.shape), torch.ones_like(gradient)):
            slope = float((gradient * direction).sum())
            if not math.isfinite(slope) or abs(slope) * self.steps[-1] * self.scales[i] < 1e3 * size:
                continue
            for step in (1e-3 * size / slope, -1e-3 * size / slope):
                moved = [x + step * direction if j == i else x for j, x in enumerate(point)]
                with contextlib.suppress(Exception):  # refused, so nothing is known of what is there
                    there = self.function(moved)[k]
                    found = float((given * (there - here)).sum()) / step
                    if math.isclose(found, slope, rel_tol=0.1):
                        return True
        return False

    def _is_unstable(self, i: int, point: Tensors, cotangents: Gradients, gradient: torch.Tensor) -> bool:
        """Return whether a change of the last digits changes the whole gradient, as for a nearly singular matrix."""
        largest = float(gradient.abs().max()) if gradient.numel() else 0.0
        for direction in (self.direction(range(len(point))) for _ in range(2)):
            moved = [x * (1 + 1e-13 * u / scale) for x, u, scale in zip(point, direction, self.scales, strict=True)]
            with contextlib.suppress(Exception):  # refused, so nothing is known of what is there
                other = Recorded(self.function, moved, self.wanted).gradients(cotangents)[i]
                if other is not None and float((other - gradient).abs().max()) > 0.01 * largest > 0:
                    return True
        return False

    def _error(self, i: int, k: int, point: Tensors) -> CheckError:
        label = self.function.inputs[i].label
        wrong = self._worst_element(i, k, point, ones=True)
        if wrong is None or math.isclose(wrong[0], wrong[1], rel_tol=1e-3):
            # Wrong elements may cancel in the sum, as where two are exchanged: weigh the outputs at random.
            wrong = self._worst_element(i, k, point, ones=False) or wrong
        gradient = self.gradients_at(point, [k])[1][i]
        if gradient is None or not bool((gradient != 0).any()):
            problem = f"backward gives {label} no gradient, though the result depends on it"
            fix = f"return the gradient of {label}; or declare that it has none: nondiff_args={{{label!r}}}"
            if len(self.function.base) > 1:
                problem = f"backward gives {label} no gradient for output {k}, though the result depends on it"
                fix = (
                    f"return the gradient of {label}; or, if output {k} is to have none, False for it in "
                    f"differentiable= of the op, or ctx.mark_non_differentiable(output[{k}]) in setup_context"
                )
        else:
            problem = f"the gradient of {label} is not the derivative of what the operator computes"
            fix = f"correct the formula for {label}: look at this element, with the other inputs as they are"
        derived = function_derived(self.function.trial)
        if derived is not None:
            fix = f"the gradient is that of {name_of(derived)}: make it compute what the kernel does"
        expected, got = "another one", "this one"
        if wrong is not None:
            numeric, analytic, element = wrong
            expected, got = f"{numeric:.6g} (finite differences, {element})", f"{analytic:.6g} (backward)"
        return self.function.fault(problem, expected, got, fix, argument=label)

    def _worst_element(self, i: int, k: int, point: Tensors, *, ones: bool) -> tuple[float, float, str] | None:
        """Return the derivative by the element whose gradient is most wrong, what backward says, and the element.

        With `ones` for the gradients of the outputs, the numbers are those of the formula.
        """
        recorded = Recorded(self.function, point, self.wanted)
        all_ones = [torch.ones_like(output) for output in recorded.outputs]
        cotangents = only(all_ones, [k]) if ones else recorded.cotangents(self.numbers, [k])
        gradient = recorded.gradients(cotangents)[i]
        worst = None
        for n in range(min(point[i].numel(), _MOST_ELEMENTS)):
            direction = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in point]
            direction[i].view(-1)[n] = self.scales[i]
            found = self.slope(point, direction)
            if found is None:
                continue
            numeric = inner(cotangents, found.value)[0] / self.scales[i]
            analytic = inner([gradient], [direction[i]])[0] / self.scales[i]
            at = tuple(int(x) for x in torch.unravel_index(torch.tensor(n), point[i].shape)) if n or k else ()
            weights = "" if ones else " times random numbers"
            if worst is None or abs(numeric - analytic) > abs(worst[0] - worst[1]):
                worst = numeric, analytic, f"element {at or 0}, for output {k}{weights}"
        return worst


def _is_always_identity(function: Function, i: int, k: int) -> bool:
    """Return whether output `k` is input `i` also with other numbers and optional arguments."""
    for trial in other_arguments(function.trial, "normal"):
        try:
            other = Function(trial)
            other.settle()
            given = next(item.tensor for item in other.inputs if item.label == function.inputs[i].label)
            if not torch.equal(other.base[k], given):
                return False
        except Exception:  # these arguments need not be taken, or the results are other ones
            continue
    return True


# Gradients of an operator and of its reference may differ by right where the function has a kink, or a tie, so they
# have to differ at points nearby as well. The gradient is what its author chose where the reference has none, or zeros,
# as a rounding has, where an input is NaN, and where the operator returns its input as it is.
def _compare_with_reference(function: Function, wanted: Sequence[int]) -> bool:
    """Compare the gradients by the inputs of the numbers `wanted`; return whether there was something to compare."""
    if function.trial.reference is None or any(bool(x.isnan().any()) for x in function.values):
        return False
    values, reference = function.values, copy.copy(function)
    reference.called, reference.entered = function.trial.reference, []
    direction = [u * scale_of(x) for u, x in zip(random_like(values, generator()), values, strict=True)]
    wrong = []  # an input, and how its gradient differs, for each point
    for distance in (0.0, 0.03, 0.2):
        point = shifted(values, direction, distance)
        try:
            one, other = Recorded(function, point, wanted), Recorded(reference, point, wanted)
            cotangents = one.cotangents(generator(), [k for k in one.tracked if k in other.tracked])
            gradients, right_ones = one.gradients(cotangents), other.gradients(cotangents)
        except Exception:  # one of the two refuses the point, or to be differentiated
            continue
        results = [[y.detach() for y in recorded.outputs] for recorded in (one, other)]
        if difference(*results, rtol=1e-3) or one.returns_an_input():
            continue
        found: dict[int, str | None] = {}
        for i in wanted:
            gradient, right = gradients[i], right_ones[i]
            if right is None or not bool(right.any()) or not bool(right.isfinite().all()):
                continue
            if gradient is None:
                # Does the sample ask for the gradient of this input, or of none?
                if not function.inputs[i].requires_grad and any(item.requires_grad for item in function.inputs):
                    continue
                gradient = torch.zeros_like(right)
            found[i] = difference(gradient, right, rtol=1e-3)
            is_square = right.dim() > 1 and right.shape[-1] == right.shape[-2]
            if found[i] and is_square and any(torch.allclose(x, x.mH) for x in (gradient, right)):
                # Of symmetric matrices, of which one triangle may be read alone.
                found[i] = difference(gradient + gradient.mH, right + right.mH, rtol=1e-3)
        if found and not any(found.values()):
            return True
        wrong += [(i, differs) for i, differs in found.items() if differs][:1]
    if len(wrong) < 2:
        return False
    i, differs = wrong[0]
    label = function.inputs[i].label
    raise function.fault(
        "the operator has other gradients than its reference function",
        f"the gradient of {label} by {where(reference.called)}",
        differs,
        f"correct the formula for {label}, or the reference function",
        argument=label,
    )


# ----------------------------------------------------------------------------------------------------------------------
# test_second_order: the gradient of a gradient is that of what backward computes.
#
# Backward is taken for a function of the inputs and of the gradients of the outputs. Its gradient, which autograd
# records under ``create_graph=True``, is compared with central differences of it. So this says nothing of whether the
# first gradient is right; and an operator that refuses to be differentiated twice, with an error, is in order.


def check_second_order(trial: Trial) -> None:
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
            along = self.direction(moving)
            verdict = self.judge(self.slope(point, along), Claim(weights, self._second(point, weights), along))
            if verdict == "agrees":
                return
            for i in self.wanted if verdict == "differs" else ():
                of_one = only(random_like(point[: self.count], self.numbers), [i])
                second = self._second(point, of_one)
                for j in moving:
                    directions = [self.direction([j], symmetric=symmetric) for symmetric in (False, True)]
                    if all(self.differs(point, along, Claim(of_one, second, along)) for along in directions):
                        raise self._error(point, i, j)
        raise NotExercised("the second derivative cannot be compared: the gradient is not smooth here, or too steep")

    def _first(self, point: Sequence[torch.Tensor]) -> Tensors:
        """Return the gradients, zeros where there is none."""
        with torch.enable_grad():
            recorded = Recorded(self.function, point[: self.count], self.wanted)
            gradients = recorded.gradients(self._cotangents(recorded, point[self.count :]))
        return [torch.zeros_like(x) if g is None else g for g, x in zip(gradients, point, strict=False)]

    def _cotangents(self, recorded: Recorded, given: Sequence[torch.Tensor]) -> Gradients:
        require(recorded.tracked == self.tracked, "which outputs require grad depends on the values")
        by_output = dict(zip(self.tracked, given, strict=True))
        return [by_output.get(k) for k in range(len(recorded.outputs))]

    def _second(self, point: Tensors, weights: Sequence[torch.Tensor | None]) -> Gradients:
        """Return the gradients of the gradients, by autograd."""
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


# ----------------------------------------------------------------------------------------------------------------------
# test_forward_mode: the tangents of forward mode are the slopes of what the operator computes.
#
# For tangents of all inputs, and of each input alone, the tangents that `torch.autograd.forward_ad` gives, and
# `torch.func.jvp`, are compared with central differences. A mismatch is reported if backward, too, says something else:
# a gradient that was chosen, as that of a step function, is no matter of this check.

_SAME_FORMULA = 1e-6  #: how far apart two ways may be that run the same formula
_FIX_OF_JVP = "correct the jvp formula; the tangent of an input that has none is None, or zeros, and must not count"


def check_forward_mode(trial: Trial) -> None:
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
        differs = difference(primals, function.base, rtol=_SAME_FORMULA)
        if differs:
            raise self._fault("a call with tangents has other results than one without", "the same", differs, fix)
        differs = None if function.writes else difference(given, direction, exact=True)
        if differs:
            raise self._fault("the formula writes to the tangents that it is given", "the same", differs, fix)
        # `torch.func.jvp` runs the same formula, at a level of its own.
        found: Sequence[torch.Tensor] = ()
        # A write to its argument, say, torch.func refuses; or an op is not nested.
        with contextlib.suppress(Exception):
            values, changes = (tuple(each[i] for i in moving) for each in (self.point, direction))
            _, found = torch.func.jvp(function.of_some(moving), values, changes)  # type: ignore[misc]
        for k, (one, other) in enumerate(zip(found, tangents, strict=False)):
            differs = None if other is None else difference(one.detach(), other, rtol=_SAME_FORMULA)
            if differs:
                problem = "torch.func.jvp gives another tangent than torch.autograd.forward_ad"
                raise self._fault(problem, f"the tangent of output {k}", differs)
        tracked = sorted(have.union(differentiable))
        ways = [moving, *([i] for i in moving if len(moving) > 1)]
        if "agrees" not in [self._compare(way, tracked) for way in ways]:
            raise NotExercised("the tangents cannot be compared: the operator is not smooth here, or too steep")

    def _call(self, point: Tensors, direction: Tensors, moving: Sequence[int]) -> tuple[Tensors, Gradients]:
        """Return the results of a call in which the inputs `moving` have tangents, and the tangents of the results."""
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
            directions = [self.direction(moving, symmetric=symmetric) for symmetric in (False, True)]
            if (found := self.slope(point, directions[0])) is None:
                continue
            claims = [self._claim(point, direction, moving, tracked) for direction in directions]
            verdict = self.judge(found, claims[0])
            if verdict == "agrees":
                return "agrees"
            if verdict == "differs" and all(map(self.differs, (point, point), directions, claims)):
                if not self._is_as_backward(point, directions[0], moving, claims[0]):
                    raise self._error(found.value, claims[0], problem)
        return "unclear"

    def _claim(self, point: Tensors, direction: Tensors, moving: Sequence[int], tracked: list[int]) -> Claim:
        _, tangents = self._call(point, direction, moving)
        weights = only(random_like(self.function.base, self.numbers), tracked)
        return Claim(weights, weights, tangents)

    def _is_as_backward(self, point: Tensors, direction: Tensors, moving: Sequence[int], claim: Claim) -> bool:
        try:
            gradients = Recorded(self.function, point, moving).gradients(claim.weights)
        except Exception:  # it need not have a backward
            return False
        (forward, size), (backward, more) = inner(claim.one, claim.other), inner(gradients, direction)
        return abs(forward - backward) <= 1e-3 * (size + more)

    def _error(self, slopes: Tensors, claim: Claim, problem: str) -> CheckError:
        for k, (weight, slope, tangent) in enumerate(zip(claim.weights, slopes, claim.other, strict=True)):
            if weight is None:
                continue
            if tangent is None and bool((slope != 0).any()):
                problem = f"{problem}: output {k} has no tangent, though it changes"
                return self._fault(problem, "the slope, by finite differences", "None")
            differs = tangent is not None and difference(tangent.to(slope.dtype), slope, rtol=1e-3)
            if differs:
                return self._fault(problem, f"the slope of output {k}, by finite differences", differs)
        return self._fault(problem, "the slope, by finite differences", "another tangent")

    def _fault(self, problem: str, expected: str, got: str, fix: str = _FIX_OF_JVP) -> CheckError:
        return self.function.fault(problem, expected, got, fix, kind="jvp")
