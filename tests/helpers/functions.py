"""Functions that ops are made of."""

from __future__ import annotations

from torch import Tensor


def double_fn(x: Tensor) -> Tensor:
    return x * 2


def add_fn(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def add_one(x: Tensor) -> Tensor:
    return x + 1


def scale_fn(x: Tensor, y: Tensor, by: float = 2.0, *, times: int = 1) -> Tensor:
    return x * y * by * times
