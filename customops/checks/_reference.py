"""Gradients of an operator against those of a plain function that computes the same.

They may differ by right where the function has a kink, or a tie, so they have to differ at points nearby as well. The
gradient is what its author chose where the reference has none, or zeros, as a rounding has, and where the operator
returns its input as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from customops.checks._compare import difference
from customops.checks._differences import Tensors, generator, random_like, scale_of, shifted
from customops.checks._function import Function, place_of_formula
from customops.checks._recorded import Gradients, Recorded
from customops.errors import CheckError, where

_DISTANCES = (0.0, 0.03, 0.2)
_TOLERANCE = 1e-3

#: The number of an input, and how its gradient differs.
Finding = tuple[int, str]


def compare(function: Function, wanted: Sequence[int]) -> bool:
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
    raise _error(function, *found[0])


def _points(values: Tensors) -> list[Tensors]:
    directions = [u * scale_of(x) for u, x in zip(random_like(values, generator()), values, strict=True)]
    return [shifted(values, directions, distance) for distance in _DISTANCES]


def _finding(function: Function, reference: Function, point: Tensors, wanted: Sequence[int]) -> Finding | None:
    """What differs.

    Raises:
        ValueError: nothing can be said.
    """
    one, other = Recorded(function, point, wanted), Recorded(reference, point, wanted)
    if difference(*([y.detach() for y in recorded.outputs] for recorded in (one, other)), rtol=_TOLERANCE):
        raise ValueError("the results differ")
    both = set(one.tracked) & set(other.tracked)
    random = random_like(one.outputs, generator())
    cotangents: Gradients = [v if k in both else None for k, v in enumerate(random)]
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
    found = difference(gradient, right, rtol=_TOLERANCE)
    is_square = right.dim() > 1 and right.shape[-1] == right.shape[-2]
    if found and is_square and any(torch.allclose(x, x.mH) for x in (gradient, right)):
        # Of symmetric matrices, of which one triangle may be read alone.
        return difference(gradient + gradient.mH, right + right.mH, rtol=_TOLERANCE)
    return found


def _error(function: Function, i: int, got: str) -> CheckError:
    trial, label = function.trial, function.inputs[i].label
    assert trial.reference is not None
    return CheckError(
        "the operator has other gradients than its reference function",
        op=trial.name,
        argument=label,
        expected=f"the gradient of {label} by {where(trial.reference)}",
        got=got,
        where=place_of_formula(trial),
        fix=f"correct the formula for {label}, or the reference function",
    )
