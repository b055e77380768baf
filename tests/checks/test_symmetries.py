"""test_symmetries: what a change of values does at the sample's sizes, it does at others and far away."""

from __future__ import annotations

import contextlib
import re
from typing import Any, Optional

import pytest
import torch
from helpers.numeric_checks import Finds
from torch import Tensor

import customops
from customops.checks import NotExercised, laws

OTHER_SIZES = "what a change of values does to a result at the sample's sizes, it does not at other sizes"
FAR_AWAY = "a result is left as it is by adding a small constant to all elements, and not by a large one"
LISTS = "a member of a list has another result than alone, where the list is another"
ZERO = "an optional number of 0.0 has the result of None"


@pytest.fixture
def op(registry: customops.Registry, ns: str) -> Finds:
    return Finds(laws.check_symmetries, registry, ns)


def in_lanes(x: Tensor, start: float) -> Tensor:
    """The largest element of each row, eight lanes at a time."""
    n = x.shape[-1]
    padded = torch.full((*x.shape[:-1], -(-n // 8) * 8), start, dtype=x.dtype)
    padded[..., :n] = x
    return padded.amax(-1)


def max_from_zero(x: Tensor) -> Tensor:
    return in_lanes(x, 0.0)


def max_from_infinity(x: Tensor) -> Tensor:
    return in_lanes(x, -float("inf"))


def mean_of_blocks(x: Tensor) -> Tensor:
    return x.sum(-1) / (-(-x.shape[-1] // 8) * 8)


def variance_of_squares(x: Tensor) -> Tensor:
    return x.square().mean(-1) - x.mean(-1).square()


def variance(x: Tensor) -> Tensor:
    return x.var(-1, correction=0)


def masked(x: Tensor, mask: Tensor, value: float) -> Tensor:
    return torch.softmax(x.masked_fill(~mask, value), -1)


def masked_finite(x: Tensor, mask: Tensor) -> Tensor:
    return masked(x, mask, -1e4)


def masked_infinite(x: Tensor, mask: Tensor) -> Tensor:
    return masked(x, mask, -float("inf"))


def padded_rows(x: Tensor) -> Tensor:
    """Zeros that fill up rows are no elements of the tensor."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % 8))


def limited(x: Tensor) -> Tensor:
    """Norms up to 10 are left as they are."""
    return x * (10 / x.norm().clamp(min=10))


def largest_or_zero(x: Tensor) -> Tensor:
    return x.amax(-1).clamp(min=0)


def rms_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def layer_norm(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight)


ROWS = (torch.randn(4, 8),)
MASKED = (torch.randn(3, 6), torch.tensor([[True] * 4 + [False] * 2] * 3))


@pytest.mark.parametrize(
    ("fn", "args", "problem"),
    [
        (max_from_zero, ROWS, OTHER_SIZES),
        (mean_of_blocks, ROWS, OTHER_SIZES),
        (variance_of_squares, ROWS, FAR_AWAY),
        (masked_finite, MASKED, FAR_AWAY),
    ],
)
def test_found(op: Finds, fn: Any, args: Any, problem: str) -> None:
    op.finds(fn, *args, match=re.escape(problem))


def from_lower_median(x: Tensor) -> Tensor:
    """An odd row has one middle element, which negating the row negates."""
    return x - x.median(-1, keepdim=True).values


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (from_lower_median, (torch.randn(4, 7),)),
        (from_lower_median, (torch.randn(3, 5),)),
        (max_from_infinity, ROWS),
        (variance, ROWS),
        (masked_infinite, MASKED),
        (padded_rows, ROWS),
        (limited, ROWS),
        (largest_or_zero, ROWS),
        (rms_norm, ROWS),
        (layer_norm, (torch.randn(4, 8), torch.randn(8))),
    ],
)
def test_right(op: Finds, fn: Any, args: Any) -> None:
    with contextlib.suppress(NotExercised):
        op.passes(fn, *args)


def scaled_by_first(xs: list[Tensor], by: float) -> list[Tensor]:
    """As many elements of each as the first has."""
    count = xs[0].numel()
    return [torch.cat([x.reshape(-1)[:count] * by, x.reshape(-1)[count:]]).reshape(x.shape) for x in xs]


def scaled_30(xs: list[Tensor], by: float) -> list[Tensor]:
    return [x * by if i < 30 else x.clone() for i, x in enumerate(xs)]


def scaled(xs: list[Tensor], by: float) -> list[Tensor]:
    return [x * by for x in xs]


def scaled_by_total(xs: list[Tensor], by: float) -> list[Tensor]:
    total = sum(float(x.square().sum()) for x in xs)
    return [x * by / total for x in xs]


@pytest.mark.parametrize("fn", [scaled_by_first, scaled_30])
def test_members_of_lists(op: Finds, fn: Any) -> None:
    op.finds(fn, [torch.randn(3), torch.randn(3)], 0.5, match=LISTS)


@pytest.mark.parametrize("fn", [scaled, scaled_by_total])
def test_lists_of_right_operators(op: Finds, fn: Any) -> None:
    with contextlib.suppress(NotExercised):
        op.passes(fn, [torch.randn(3), torch.randn(3)], 0.5)


def or_default(x: Tensor, scale: Optional[float] = None) -> Tensor:
    return x * (scale or 0.5) + 1


def if_none(x: Tensor, scale: Optional[float] = None) -> Tensor:
    return x * (0.5 if scale is None else scale) + 1


def test_zero_is_not_none(op: Finds) -> None:
    assert "is not None" in str(op.finds(or_default, torch.randn(3), 0.25, match=ZERO).fix)
    op.passes(if_none, torch.randn(3), 0.25)


def test_what_has_no_sign_at_zero(registry: customops.Registry, ns: str) -> None:
    """-0 is 0, so that its result cannot be negated."""
    op = registry.custom_op(f"{ns}::binarize", lambda x: torch.where(x >= 0, 1.0, -1.0), schema="(Tensor x) -> Tensor")
    op.register_fake(lambda x: torch.empty(x.shape))
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    report = customops.check(op, [(x,)], only="test_symmetries")
    assert not report.failures, report
