"""Tensors to differentiate by, and values to compare."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

X = torch.tensor([0.3, -1.2, 2.0])


def leaf(*values: float) -> Tensor:
    return torch.tensor(values, requires_grad=True)


def leaf_of(x: Tensor) -> Tensor:
    return x.clone().requires_grad_()


def slope(op: Any) -> float:
    """The derivative of an op at 1."""
    x = leaf(1.0)
    op(x).backward()
    assert x.grad is not None
    return x.grad.item()


def exact(value: Any) -> Any:
    """A form that is equal only for values that a kernel cannot tell apart (1, 1.0 and True; 0.0 and -0.0; nan)."""
    if isinstance(value, Tensor):
        return "Tensor", value.dtype, tuple(value.shape), value.tolist()
    if isinstance(value, torch.Generator):
        return "Generator", value.device, value.initial_seed()
    if isinstance(value, (list, tuple)):
        return type(value), [exact(item) for item in value]
    return type(value), repr(value) if isinstance(value, float) else value
