"""Functions that ops are made of."""

from __future__ import annotations

import sys

from torch import Tensor

#: The line of a decorated function, counted from that of its decorator: Python 3.10 calls decorators from the former.
BELOW_DECORATOR = 0 if sys.version_info >= (3, 11) else 1


def double_fn(x: Tensor) -> Tensor:
    return x * 2


def add_fn(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def add_one(x: Tensor) -> Tensor:
    return x + 1


def scale_fn(x: Tensor, y: Tensor, by: float = 2.0, *, times: int = 1) -> Tensor:
    return x * y * by * times
