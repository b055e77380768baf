"""Derivatives along a direction, by central differences, and how far they can be trusted.

`error` of a slope is made of three parts: what half the step changes; what remains, at half the step, of the
difference between the slopes to the two sides, which at a kink does not get smaller with the step; and rounding. It
is large near kinks and jumps, for steep functions and for those that round inside, and small wherever the function is
smooth at the scale of the step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

Tensors = list[torch.Tensor]
Evaluate = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor | None]]

Verdict = Literal["agrees", "unclear", "differs"]

_SEED = 0x5EED
_FINE = 1e-10  #: What resolves less is compared with other steps and tolerances.


def generator() -> torch.Generator:
    """Random numbers of one's own, the same in every run."""
    return torch.Generator().manual_seed(_SEED)


def random_like(tensors: Sequence[torch.Tensor], numbers: torch.Generator) -> Tensors:
    """Tensors of normally distributed numbers."""
    return [torch.randn(t.shape, dtype=t.dtype, generator=numbers).to(t.device) for t in tensors]


def scale_of(tensor: torch.Tensor) -> float:
    """The size of a typical element; 1 if there is none."""
    size = tensor.detach().abs()
    finite = size[size.isfinite() & (size > 0)]
    typical = float(finite.mean()) if finite.numel() else 1.0
    return min(max(typical, 1e-6), 1e6)


def shifted(point: Sequence[torch.Tensor], direction: Sequence[torch.Tensor], step: float) -> Tensors:
    return [x + step * u for x, u in zip(point, direction, strict=True)]


def as_symmetric(direction: torch.Tensor) -> torch.Tensor:
    """A direction in which square matrices stay symmetric; functions of symmetric matrices read one triangle alone."""
    is_square = direction.dim() > 1 and direction.shape[-1] == direction.shape[-2]
    return direction + direction.mH if is_square else direction


def inner(one: Sequence[torch.Tensor | None], other: Sequence[torch.Tensor | None]) -> float:
    """The real part of the inner product of tensors; None counts as zero."""
    return sum(
        float((a.conj() * b).real.sum(dtype=torch.float64))
        for a, b in zip(one, other, strict=True)
        if a is not None and b is not None
    )


def size_of_terms(one: Sequence[torch.Tensor | None], other: Sequence[torch.Tensor | None]) -> float:
    """The sum of the sizes of the terms of the inner product."""
    return sum(
        float((a.abs() * b.abs()).sum(dtype=torch.float64))
        for a, b in zip(one, other, strict=True)
        if a is not None and b is not None
    )


@dataclass(frozen=True)
class Accuracy:
    """The steps to take, the best one first, and how far apart results may be, relatively to the sum of all terms."""

    epsilon: float
    steps: tuple[float, ...]
    tolerance: float

    @classmethod
    def of(cls, epsilon: float) -> Accuracy:
        if epsilon < _FINE:
            return cls(epsilon, (1e-4, 1e-3, 1e-5, 1e-2), 1e-4)
        return cls(epsilon, (1e-2, 3e-2, 1e-1), 2e-2)


@dataclass(frozen=True)
class Slope:
    """The derivative of each output along a direction, and its error, both elementwise."""

    value: Tensors
    error: Tensors

    def is_zero(self) -> bool:
        return not any(bool((value != 0).any()) for value in self.value)

    def is_finite(self) -> bool:
        return all(bool((value + error).isfinite().all()) for value, error in zip(self.value, self.error, strict=True))


def slope(
    function: Evaluate,
    point: Sequence[torch.Tensor],
    direction: Sequence[torch.Tensor],
    step: float,
    epsilon: float,
    base: Sequence[torch.Tensor | None] | None = None,
) -> Slope | None:
    """The slope of a function at a point; None if it is not defined around it, or changes its shape there.

    None, too, if the elements are so large that a step is lost in rounding.
    """
    if not all(map(functools.partial(_can_step, step / 2), point, direction)):
        return None
    try:
        with torch.no_grad():
            at = [
                _wide(base if base is not None and factor == 0 else function(shifted(point, direction, factor * step)))
                for factor in (0.0, 1.0, -1.0, 0.5, -0.5)
            ]
    except Exception:  # the neighbourhood may be refused: the operator need take the given inputs alone
        return None
    values, errors = [], []
    for outputs in zip(*at, strict=True):
        if any(output.shape != outputs[0].shape for output in outputs):
            return None
        value, error = _of_output(outputs, step, epsilon)
        values.append(value)
        errors.append(error)
    return Slope(values, errors)


def _can_step(step: float, x: torch.Tensor, direction: torch.Tensor) -> bool:
    if not x.numel():
        return True
    way = step * direction
    return bool((((x + way) - x - way).abs() <= 1e-3 * way.abs() + torch.finfo(x.dtype).tiny).all())


def judge(
    found: Slope | None,
    cotangents: Sequence[torch.Tensor | None],
    gradients: Sequence[torch.Tensor | None],
    direction: Sequence[torch.Tensor],
    tolerance: float,
) -> Verdict:
    """Is the slope, weighed with `cotangents`, that along `direction` by the gradients?"""
    if found is None or not found.is_finite():
        return "unclear"
    numeric, analytic = inner(cotangents, found.value), inner(gradients, direction)
    size = size_of_terms(cotangents, found.value) + size_of_terms(gradients, direction)
    error = size_of_terms(cotangents, found.error)
    if not abs(numeric) + abs(analytic) + size + error < float("inf"):
        return "unclear"
    if abs(numeric - analytic) > 10 * error + tolerance * size:
        return "differs"
    return "unclear" if error > 0.01 * size > 0 else "agrees"


def confirmed(verdicts: Sequence[Verdict]) -> bool:
    """Do the differences with all steps that can be trusted say so?"""
    return verdicts.count("differs") >= 2 and "agrees" not in verdicts


def _of_output(at: Sequence[torch.Tensor], step: float, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    here, ahead, behind, half_ahead, half_behind = at
    whole, half = (ahead - behind) / (2 * step), (half_ahead - half_behind) / step
    bend = (ahead - 2 * here + behind) / step
    half_bend = (half_ahead - 2 * here + half_behind) / (step / 2)
    rounding = 8 * epsilon * torch.maximum(ahead.abs(), behind.abs()) / step
    error = (half - whole).abs() + (2 * half_bend - bend).abs() + rounding
    return half + (half - whole) / 3, error


def _wide(outputs: Sequence[torch.Tensor | None]) -> Tensors:
    return [
        output.detach().to(torch.complex128 if output.is_complex() else torch.float64)
        for output in outputs
        if output is not None
    ]
