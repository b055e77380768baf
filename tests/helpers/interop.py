"""What the tests of both frameworks together share."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def scale_fn(x: Tensor, by: float = 3.0) -> Tensor:
    return x * by


def product_fn(x: Tensor, y: Tensor) -> Tensor:
    return torch.from_numpy(np.array(x.numpy(force=True) ** 2 * y.numpy(force=True), order="C"))
