"""Grad modes, hooks, checkpoints and threads of eager autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.formulas import assert_same_gradients
from torch import Tensor
from torch.autograd.function import once_differentiable

from customops import Registry

# Modes and engines of eager autograd ----------------------------------------------------------------------------------


def test_lazily_conjugated_inputs(registry: Registry, ns: str) -> None:
    square = registry.custom_op(f"{ns}::square", lambda z: z * z, mutates_args=(), schema="(Tensor z) -> Tensor")
    square.register_autograd(
        lambda ctx, grad: grad * 2 * ctx.saved_tensors[0].conj(),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
    )
    z = torch.rand(3, dtype=torch.complex64)
    for view in lambda z: z.conj(), lambda z: z.conj().imag:
        got, wanted = (torch.view_as_real(z).clone().requires_grad_() for _ in range(2))
        square(view(torch.view_as_complex(got))).abs().sum().backward()
        (view(torch.view_as_complex(wanted)) ** 2).abs().sum().backward()
        assert got.grad is not None
        assert torch.allclose(got.grad, wanted.grad)


def test_once_differentiable(double: Any) -> None:
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.from_numpy(grad.numpy() * 2)

    double.register_autograd(backward)
    x = torch.ones(2, requires_grad=True)
    (gradient,) = torch.autograd.grad((double(x) ** 2).sum(), x, create_graph=True)
    assert gradient.tolist() == [8.0, 8.0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        torch.autograd.grad(gradient.sum(), x, allow_unused=True)  # of what torch's decorator makes, this is None


@pytest.mark.compile
def test_formulas_that_call_ops(registry: Registry, ns: str) -> None:
    """sin and cos in numpy, each the derivative of the other."""
    sin = registry.custom_op(f"{ns}::sin", lambda x: torch.from_numpy(np.sin(x.numpy(force=True))),
                             mutates_args=(), schema="(Tensor x) -> Tensor")  # fmt: skip
    cos = registry.custom_op(f"{ns}::cos", lambda x: torch.from_numpy(np.cos(x.numpy(force=True))),
                             mutates_args=(), schema="(Tensor x) -> Tensor")  # fmt: skip
    for op, derivative in (sin, cos), (cos, lambda x: -sin(x)):
        op.register_autograd(
            lambda ctx, grad, derivative=derivative: grad * derivative(*ctx.saved_tensors),
            setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
        )
        op.register_fake(torch.empty_like)
    x = torch.rand(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(sin, (x,))
    assert torch.autograd.gradgradcheck(sin, (x,))

    def nth(f: Callable[[Tensor], Tensor], order: int) -> Callable[[Tensor], Tensor]:
        for _ in range(order):
            f = torch.func.grad(lambda x, f=f: f(x).sum())
        return f

    x = x.detach()
    for order in range(1, 5):
        assert torch.allclose(nth(lambda x: sin(x) ** 3, order)(x), nth(lambda x: torch.sin(x) ** 3, order)(x))
    compiled = torch.compile(lambda x: sin(x) ** 3, backend="aot_eager", fullgraph=True)
    assert_same_gradients(compiled, lambda x: torch.sin(x) ** 3, x)


def test_ops_inside_kernels(registry: Registry, ns: str, exp: Any) -> None:
    """A kernel that calls another op: that one's formula does not count, the outer one's does."""

    @registry.custom_op(f"{ns}::outer", mutates_args=())
    def outer(x: Tensor) -> Tensor:
        return exp(x) * 2

    outer.register_autograd(
        lambda ctx, grad: grad * ctx.saved_tensors[0],
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
    )
    assert_same_gradients(outer, lambda x: torch.exp(x) * 2, torch.rand(3))
