"""What the tests of generated functions share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parents[2]


def plus(n: float) -> Callable[[Tensor], Tensor]:
    """A kernel; each call makes another function."""
    return lambda x: x + n


def value(op: Any) -> float:
    """What the op makes of 0, called each way."""
    results = {op(torch.zeros(1)).item() for _ in range(2)} | {op._opoverload(torch.zeros(1)).item()}
    with torch.inference_mode():
        results.add(op(torch.zeros(1)).item())
    (result,) = results
    return float(result)
