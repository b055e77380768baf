"""Ops with a backward, and what their gradients are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, List

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

#: torch warns when it batches an op by a loop, for want of a batching rule.
slow_vmap = pytest.mark.filterwarnings("ignore:There is a performance drop")


def gradients(f: Callable[..., Tensor], *inputs: Tensor) -> list[Any]:
    """Gradients of a weighted sum of what `f` returns; the weights tell elements apart."""
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    y = f(*leaves)
    (y * torch.arange(1, y.numel() + 1, dtype=y.dtype).view(y.shape)).sum().backward()
    return [x.grad for x in leaves]


def assert_same_gradients(f: Callable[..., Tensor], reference: Callable[..., Tensor], *inputs: Tensor) -> None:
    for got, wanted in zip(gradients(f, *inputs), gradients(reference, *inputs), strict=True):
        assert got is wanted is None or torch.allclose(got, wanted)


def product_fn(x: Tensor, y: Tensor) -> Tensor:
    return torch.from_numpy(np.asarray(x.numpy(force=True) ** 2 * y.numpy(force=True)))


def plain(x: Tensor, y: Tensor) -> Tensor:
    return x * x * y


def product_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def product_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, y = ctx.saved_tensors
    return grad * 2 * x * y, grad * x * x


def times(factor: float) -> Callable[[Any, Tensor], Tensor]:
    """A formula by which it shows."""
    return lambda ctx, grad: grad * factor


def weighted_sum(xs: Any, weight: float = 2.0) -> Tensor:
    return sum((x * weight * (i + 1) for i, x in enumerate(xs) if x is not None), torch.zeros(2))  # type: ignore[return-value]


def combine_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.factors = [inputs[1] * (i + 1) for i in range(len(inputs[0]))]
    ctx.needed = ctx.needs_input_grad


def split_fn(x: Tensor, n: int = 2) -> List[Tensor]:
    return [x[i] * (i + 1) for i in range(n)]


def exp_fn(x: Tensor) -> Tensor:
    return torch.from_numpy(np.asarray(np.exp(x.numpy(force=True))))


X = torch.tensor([0.5, 1.0, 1.5])


class Recorder(TorchDispatchMode):
    """Notes the ops that reach it, and runs them."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func)
        return func(*args, **(kwargs or {}))
