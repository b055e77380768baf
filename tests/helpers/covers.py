"""The part of a product of parameters that `make test` runs; the rest is marked `full`, for `make test-all`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import pytest

A = TypeVar("A")
B = TypeVar("B")


def cover(first: Sequence[A], second: Sequence[B], of_first: int = 8, of_second: int = 8) -> set[tuple[A, B]]:
    """Return pairs with at least `of_first` pairs for each of `first`, and `of_second` for each of `second`.

    The partners of a member are spread evenly over the other sequence, because neighbours there resemble each other.
    """
    width = min(len(second), max(of_first, math.ceil(len(second) * of_second / len(first))))
    steps = [len(second) * step // width for step in range(width)]
    return {(each, second[(row + step) % len(second)]) for row, each in enumerate(first) for step in steps}


def every(step: int, values: Iterable[A]) -> list[Any]:
    """Return values for `parametrize`, all but every `step`-th of them marked `full`."""
    return [value if at % step == 0 else beyond(value) for at, value in enumerate(values)]


def beyond(value: Any) -> Any:
    """Return a value for `parametrize`, or a tuple of values, that only `make test-all` runs."""
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.full)
