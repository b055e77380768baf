"""Fixtures that several files of this folder use."""

from __future__ import annotations

from typing import Any, List

import pytest
import torch
from helpers.formulas import exp_fn, product_backward, product_fn, product_setup, split_fn, weighted_sum
from torch import Tensor

from customops import Registry


@pytest.fixture
def product(registry: Registry, ns: str) -> Any:
    op = registry.custom_op(f"{ns}::product", product_fn, mutates_args=())
    op.register_fake(lambda x, y: torch.empty_like(x))
    op.register_autograd(product_backward, setup_context=product_setup)
    return op


@pytest.fixture
def scale(registry: Registry, ns: str) -> Any:
    @registry.custom_op(f"{ns}::scale", mutates_args=())
    def scale(
        x: Tensor, by: float = 2.0, dtype: torch.dtype = torch.float32, *, times: int = 1, sizes: List[int] = (3, 4)
    ) -> Tensor:
        return (x * by * times).to(dtype)

    return scale


@pytest.fixture
def combine(registry: Registry, ns: str) -> Any:
    @registry.custom_op(f"{ns}::combine", mutates_args=())
    def combine(xs: List[Tensor], weight: float = 2.0) -> Tensor:
        return weighted_sum(xs, weight)

    combine.register_fake(lambda xs, weight: torch.empty(2))
    return combine


@pytest.fixture
def split(registry: Registry, ns: str) -> Any:
    op = registry.custom_op(f"{ns}::split", split_fn, mutates_args=())
    op.register_fake(lambda x, n: [torch.empty_like(x[i]) for i in range(n)])
    return op


@pytest.fixture
def exp(registry: Registry, ns: str) -> Any:
    """Saves its output."""
    op = registry.custom_op(f"{ns}::exp", exp_fn, mutates_args=())
    op.register_fake(torch.empty_like)
    op.register_autograd(
        lambda ctx, grad: grad * ctx.saved_tensors[0],
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
    )
    return op
