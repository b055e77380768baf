"""Fixtures that several files of this folder use."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.interop import product_fn
from torch import Tensor

from customops import Registry


@pytest.fixture
def product(registry: Registry, ns: str) -> Any:
    """``x * x * y`` in numpy, with a fake and a formula."""
    op = registry.custom_op(f"{ns}::product", product_fn, mutates_args=())

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return grad * 2 * x * y, grad * x * x

    op.register_fake(lambda x, y: x.new_empty(x.shape))
    op.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    return op
