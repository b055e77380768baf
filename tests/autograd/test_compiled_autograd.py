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
    op.register_reference(lambda x: x * x, gives="gradients")

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


@pytest.mark.parametrize("schema", ["(Tensor x, Tensor y) -> Tensor", "(Tensor[] x, Tensor y) -> Tensor"])
def test_needs_input_grad_is_traced_and_guarded(registry: Registry, ns: str, schema: str) -> None:
    is_list = "[]" in schema

    def kernel(x: Any, y: Tensor) -> Tensor:
        return (x[0] if is_list else x) * y

    def backward(ctx: Any, grad: Tensor) -> Any:
        x, y = ctx.saved_tensors
        of_x, of_y = ctx.needs_input_grad
        grad_x = grad * y if (of_x[0] if is_list else of_x) else None
        return [grad_x] if is_list else grad_x, grad * x if of_y else None

    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        assert len(ctx.needs_input_grad) == 2
        ctx.save_for_backward(inputs[0][0] if is_list else inputs[0], inputs[1])

    op: Any = registry.custom_op(f"{ns}::f", kernel, mutates_args=(), schema=schema)
    op.register_autograd(backward, setup_context=setup_context)
    graphs: list[Any] = []

    def count(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    for needs_y in (True, True, False, True, False):
        x, y = torch.ones(2, requires_grad=True), torch.full((2,), 3.0, requires_grad=needs_y)
        loss = op([x] if is_list else x, y).sum()
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend=count, fullgraph=True)):
            loss.backward()
        torch.testing.assert_close(x.grad, torch.full((2,), 3.0))
        assert (y.grad is not None) is needs_y
    assert len(graphs) == 2
