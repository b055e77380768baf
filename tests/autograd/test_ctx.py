"""The ctx: what it keeps, and for how long."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from helpers.tensors import leaf, slope

# The ctx --------------------------------------------------------------------------------------------------------------


@pytest.mark.parity(56)
def test_metadata_of_the_user_survives(double: Any) -> None:
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx._pt_metadata = 3

    double.register_autograd(lambda ctx, grad: grad * ctx._pt_metadata, setup_context=setup_context)
    assert slope(double) == 3.0


def test_a_saved_tensor_that_is_mutated_is_noticed(exp: Any, product: Any) -> None:
    y = exp(leaf(1.0))
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    x, weight = leaf(1.0), torch.ones(1)
    z = product(x, weight)
    weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward()


def test_nothing_keeps_the_graph_alive(product: Any, exp: Any) -> None:
    gc.collect()
    gc.disable()
    try:
        for op in lambda x: product(x, x), exp:
            x = torch.rand(3, requires_grad=True) * 1
            y = op(x)
            references = weakref.ref(x), weakref.ref(y.grad_fn)
            y.sum().backward()
            del x, y
            assert [reference() for reference in references] == [None, None]
    finally:
        gc.enable()
