"""Gradients of one operator at one point that have to be equal, however they are asked for.

Of each other, these say nothing about whether a gradient is right: `gradients` does. They find a backward that depends
on what it must not depend on: the memory layout of the gradient it is given, which outputs are used, which inputs
require grad, how often it ran. And one that writes to tensors that are not its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from customops.checks._derivatives import (
    Function,
    Gradients,
    Recorded,
    Tensors,
    are_finite,
    backward_may_fail,
    generator,
    only,
    random_like,
    scale_of,
    shifted,
)
from customops.checks._runs import difference
from customops.checks._trial import Trial
from customops.checks._variants import other_arguments
from customops.errors import where

_TOLERANCE = {torch.float64: 1e-7, torch.complex128: 1e-7}
_COARSE_TOLERANCE = 1e-3
_FEW = 4  #: inputs, of which each choice is tried


def compare_variants(function: Function, wanted: Sequence[int]) -> None:
    _Variants(function, wanted).run()


def compare_choices(function: Function, wanted: Sequence[int]) -> None:
    """Several inputs that require grad, while others do not."""
    _Variants(function, wanted).compare_choices()


class _Variants:
    def __init__(self, function: Function, wanted: Sequence[int]) -> None:
        self.function = function
        self.wanted = wanted
        self.recorded = Recorded(function, function.values, wanted)
        self.ordinary: dict[int, float] = {}  # the size of the gradients, for random gradients of the outputs
        outputs = self.recorded.outputs
        self.cotangents = only(random_like(outputs, generator()), self.recorded.tracked, outputs)

    def run(self) -> None:
        expected = self._first()
        # That of a sum over a normalisation, say, is zero but for rounding.
        self.ordinary = {i: float(g.abs().max()) for i, g in enumerate(expected) if g is not None and g.numel()}
        if not are_finite(expected):
            return  # NaN hides differences, and comes of rounding as of mistakes
        self._compare(
            expected,
            self.cotangents,
            "a second backward through the same graph gives other gradients",
            "do not write to what the formula has saved; keep no state between calls",
        )
        self._compare_layouts(expected)
        self._compare_outputs(expected)
        self._compare_zeros()
        self._compare_inputs(expected)

    def _first(self) -> Gradients:
        """The gradients, and a look at all that backward must not write to."""
        recorded = self.recorded
        kept = {
            "the gradient that it is given": [v for v in self.cotangents if v is not None],
            "an input of the operator": recorded.leaves,
            "a result of the operator": recorded.outputs,
        }
        before = {what: [tensor.detach().clone() for tensor in tensors] for what, tensors in kept.items()}
        with backward_may_fail(self.function, "backward fails"):
            gradients = recorded.gradients(self.cotangents)
        for what, tensors in kept.items():
            found = difference([tensor.detach() for tensor in tensors], before[what], exact=True)
            if found:
                raise self.function.fault(
                    f"backward writes to {what}",
                    "the values it had",
                    found,
                    "use operations that make a new tensor, in the place of those that end in _; or write to a clone",
                )
        return [gradient.detach().clone() if gradient is not None else None for gradient in gradients]

    def _compare_layouts(self, expected: Gradients) -> None:
        fix = "read the gradient by its strides, or call .contiguous() on it; use reshape instead of view"
        strided = [None if v is None else _in_another_layout(v) for v in self.cotangents]
        if _would_be_copied(strided):
            self._compare(expected, strided, "backward is wrong where the gradient it is given is not contiguous", fix)
        if any(v is not None and v.is_complex() for v in self.cotangents):
            lazily = [v if v is None else v.conj().resolve_conj().conj() for v in self.cotangents]
            problem = "backward is wrong where the gradient it is given is lazily conjugated, as that of .conj() is"
            self._compare(expected, lazily, problem, "call .resolve_conj() on the gradient before its memory is read")
        ones: Gradients = [None if v is None else torch.ones_like(v) for v in self.cotangents]
        expanded: Gradients = [None if v is None else v.new_ones(()).expand(v.shape) for v in self.cotangents]
        with backward_may_fail(self.function, "backward fails"):
            of_ones = self.recorded.gradients(ones)
        if are_finite(of_ones) and _would_be_copied(expanded):
            problem = "backward is wrong where the gradient it is given is expanded, as that of .sum() is"
            self._compare(of_ones, expanded, problem, fix)

    def _compare_outputs(self, expected: Gradients) -> None:
        """Each output alone; by linearity the gradients add up."""
        tracked = self.recorded.tracked
        if len(tracked) < 2:
            return
        problem = "backward is wrong where only some of the outputs are used"
        sums: Gradients = [None] * len(expected)
        for k in tracked:
            alone = [v if i == k else None for i, v in enumerate(self.cotangents)]
            with backward_may_fail(self.function, problem):
                found = self.recorded.gradients(alone)
            sums = [_sum(a, b) for a, b in zip(sums, found, strict=True)]
        self._judge(
            sums, expected, problem, "the gradient of an output that is not used may be None or zeros: take both"
        )

    def _compare_zeros(self) -> None:
        """A gradient of zero gives zeros, unless the operator is there for what its backward adds."""
        if self.recorded.returns_an_input():
            return
        zeros = [None if v is None else torch.zeros_like(v) for v in self.cotangents]
        problem = "backward makes something else than zeros of a gradient of zeros"
        self._compare(
            [None] * len(self.recorded.leaves), zeros, problem, "do not divide by the gradient, nor add to it"
        )

    def _compare_inputs(self, expected: Gradients) -> None:
        for i in self.wanted if len(self.wanted) > 1 else ():
            label = self.function.inputs[i].label
            self._compare_choice(expected, (i,), f"the gradient of {label} is another one where {label} alone", label)

    def compare_choices(self) -> None:
        """Each choice of several inputs to require grad, where there are few of them."""
        expected = self._first()
        if not are_finite(expected):
            return
        for size in range(2, len(self.wanted)) if len(self.wanted) <= _FEW else ():
            for chosen in itertools.combinations(self.wanted, size):
                labels = " and ".join(self.function.inputs[i].label for i in chosen)
                self._compare_choice(expected, chosen, f"gradients are other ones where {labels} alone")

    def _compare_choice(
        self, expected: Gradients, chosen: Sequence[int], problem: str, argument: str | None = None
    ) -> None:
        problem = f"{problem} require{'s' if len(chosen) == 1 else ''} grad"
        with backward_may_fail(self.function, problem):
            found = Recorded(self.function, self.function.values, chosen).gradients(self.cotangents)
        some: Gradients = [gradient if k in chosen else None for k, gradient in enumerate(expected)]
        fix = "return a gradient for each argument in its place; ctx.needs_input_grad[i] is for argument i"
        self._judge(found, some, problem, fix, argument)

    def _compare(self, expected: Gradients, cotangents: Gradients, problem: str, fix: str) -> None:
        with backward_may_fail(self.function, problem):
            found = self.recorded.gradients(cotangents)
        self._judge(found, expected, problem, fix)

    def _judge(
        self, found: Gradients, expected: Gradients, problem: str, fix: str, argument: str | None = None
    ) -> None:
        for i in self.wanted:
            one, other = self._dense(found[i], i), self._dense(expected[i], i)
            differs = difference(
                one, other, rtol=_TOLERANCE.get(other.dtype, _COARSE_TOLERANCE), scale=self.ordinary.get(i, 0.0)
            )
            if differs:
                label = self.function.inputs[i].label
                raise self.function.fault(
                    problem, f"the gradient of {label} as ordinarily", differs, fix, argument=argument
                )

    def _dense(self, gradient: torch.Tensor | None, i: int) -> torch.Tensor:
        return torch.zeros_like(self.recorded.leaves[i]) if gradient is None else gradient.detach()


def _would_be_copied(gradients: Gradients) -> bool:
    """Does .contiguous() cure what is unusual? It leaves the strides of what is empty, or has one element."""
    return any(v is not None and not v.is_contiguous() for v in gradients)


def _sum(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other


def _in_another_layout(tensor: torch.Tensor) -> torch.Tensor:
    """The same values: every second element of a larger tensor, with the dimensions in another order."""
    larger = torch.zeros((*reversed(tensor.shape), 2), dtype=tensor.dtype, device=tensor.device)
    strided = larger[..., 1].permute(tuple(range(tensor.dim() - 1, -1, -1)))
    return strided.copy_(tensor.detach())


# Gradients of an operator and of its reference may differ by right where the function has a kink, or a tie, so they
# have to differ at points nearby as well. The gradient is what its author chose where the reference has none, or zeros,
# as a rounding has, and where the operator returns its input as it is.
_DISTANCES = (0.0, 0.03, 0.2)
_REFERENCE_TOLERANCE = 1e-3

#: The number of an input, and how its gradient differs.
Finding = tuple[int, str]


def compare_with_reference(function: Function, wanted: Sequence[int]) -> bool:
    """Compare the gradients by the inputs of the numbers `wanted`. Was there something to compare?"""
    reference = function.reference()
    if reference is None:
        return False
    found: list[Finding] = []
    for point in _points(function.values):
        try:
            finding = _finding(function, reference, point, wanted)
        except Exception:  # one of the two refuses the point, or to be differentiated
            continue
        if finding is None:
            return True
        found.append(finding)
    if len(found) < 2:
        return False
    i, differs = found[0]
    label, by = function.inputs[i].label, function.trial.reference
    assert by is not None
    raise function.fault(
        "the operator has other gradients than its reference function",
        f"the gradient of {label} by {where(by)}",
        differs,
        f"correct the formula for {label}, or the reference function",
        argument=label,
    )


def _points(values: Tensors) -> list[Tensors]:
    directions = [u * scale_of(x) for u, x in zip(random_like(values, generator()), values, strict=True)]
    return [shifted(values, directions, distance) for distance in _DISTANCES]


def _finding(function: Function, reference: Function, point: Tensors, wanted: Sequence[int]) -> Finding | None:
    """What differs.

    Raises:
        ValueError: nothing can be said.
    """
    one, other = Recorded(function, point, wanted), Recorded(reference, point, wanted)
    if difference(*([y.detach() for y in recorded.outputs] for recorded in (one, other)), rtol=_REFERENCE_TOLERANCE):
        raise ValueError("the results differ")
    both = [k for k in one.tracked if k in other.tracked]
    cotangents = only(random_like(one.outputs, generator()), both, one.outputs)
    gradients, right = one.gradients(cotangents), other.gradients(cotangents)
    told = [i for i in wanted if _has_gradient(right[i]) and (gradients[i] is not None or _is_asked_for(function, i))]
    if not told or one.returns_an_input():
        raise ValueError("the reference has no gradients to compare with")
    differences = ((i, _difference(gradients[i], right[i])) for i in told)
    return next(((i, differs) for i, differs in differences if differs), None)


def _has_gradient(gradient: torch.Tensor | None) -> bool:
    return gradient is not None and bool(gradient.any()) and bool(gradient.isfinite().all())


def _is_asked_for(function: Function, i: int) -> bool:
    """Does the sample ask for the gradient of an input, or of none?"""
    return function.inputs[i].requires_grad or not any(item.requires_grad for item in function.inputs)


def _difference(gradient: torch.Tensor | None, right: torch.Tensor | None) -> str | None:
    assert right is not None
    gradient = torch.zeros_like(right) if gradient is None else gradient
    found = difference(gradient, right, rtol=_REFERENCE_TOLERANCE)
    is_square = right.dim() > 1 and right.shape[-1] == right.shape[-2]
    if found and is_square and any(torch.allclose(x, x.mH) for x in (gradient, right)):
        # Of symmetric matrices, of which one triangle may be read alone.
        return difference(gradient + gradient.mH, right + right.mH, rtol=_REFERENCE_TOLERANCE)
    return found


def is_always_identity(function: Function, i: int, k: int) -> bool:
    """Is output `k` input `i` also with other numbers, and with optional arguments that are absent here?

    If not, returning the input is what the operator computes here, and not something done for the sake of backward.
    """
    label = function.inputs[i].label
    return not any(_changes(trial, label, k) for trial in other_arguments(function.trial, "normal"))


def _changes(trial: Trial, label: str, k: int) -> bool:
    try:
        other = Function(trial)
        other.settle()
        given = next(item.tensor for item in other.inputs if item.label == label)
        return not torch.equal(other.base[k], given)
    except Exception:  # these arguments need not be taken, or the results are other ones
        return False
