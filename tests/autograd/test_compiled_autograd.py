"""Compiled autograd, which reads what a backward kept through an object of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from customops import Registry

pytestmark = pytest.mark.compile


def test_zeros_of_returns_that_are_not_used(registry: Registry, ns: str) -> None:
    op: Any = registry.custom_op(
        f"{ns}::f", lambda x: (x * 2, 1.5, x * 3), mutates_args=(), schema="(Tensor x) -> (Tensor, float, Tensor)"
    )
    op.register_autograd(lambda ctx, a, _, b: 2 * a + 3 * b)
    gradients: list[Tensor] = []
    for compiled in (False, True):
        x = torch.ones(2, requires_grad=True)
        loss = op(x)[0].sum()
        if compiled:
            with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
                loss.backward()
        else:
            loss.backward()
        assert x.grad is not None
        gradients.append(x.grad)
    torch.testing.assert_close(gradients, [torch.full((2,), 2.0)] * 2)


def test_the_gradient_of_a_function(registry: Registry, ns: str) -> None:
    """It is not traced: where that has to be, an error says so."""
    op: Any = registry.custom_op(f"{ns}::f", lambda x: x * x, mutates_args=(), schema="(Tensor x) -> Tensor")
    op.register_autograd_from(lambda x: x * x)

    def step(fullgraph: bool) -> Tensor:
        x = torch.rand(2, requires_grad=True)
        loss = op(x).sum()
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=fullgraph)):
            loss.backward()
        assert x.grad is not None
        return x.grad - 2 * x.detach()

    with pytest.raises(Exception, match=r"leave out fullgraph=True, or register_autograd\(backward\)"):
        step(fullgraph=True)
    torch._dynamo.reset()
    torch.testing.assert_close(step(fullgraph=False), torch.zeros(2))
