"""Gradients of ops that also write to a counter, a cache or an output buffer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.autograd.forward_ad
from helpers.compiling import BACKENDS
from helpers.tensors import X, leaf_of
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from customops import Registry
from customops.errors import AutogradError


def save_first(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0])


# A counter or a cache beside what is differentiable -------------------------------------------------------------


@pytest.fixture
def count(registry: Registry, ns: str) -> Any:
    @registry.custom_op(f"{ns}::count", mutates_args={"counter"})
    def count(x: Tensor, counter: Tensor) -> Tensor:
        counter.add_(1)
        return x.sin()

    count.register_fake(lambda x, counter: torch.empty_like(x))
    count.register_autograd(lambda ctx, g: (g * ctx.saved_tensors[0].cos(), None), setup_context=save_first)
    return count


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_a_counter(count: Any, dtype: torch.dtype) -> None:
    counter, x = torch.zeros((), dtype=dtype), leaf_of(X)
    result = count(x, counter)
    result.sum().backward()
    torch.testing.assert_close(x.grad, X.cos())
    assert counter == 1
    assert not counter.requires_grad
    assert counter.is_leaf


def test_a_counter_that_requires_grad(count: Any) -> None:
    for counter in (leaf_of(torch.zeros(())), leaf_of(torch.zeros(())) * 1):
        with pytest.raises(AutogradError, match="its formula gives the new value no gradient") as raised:
            count(leaf_of(X), counter)
        assert raised.value.argument == "counter"
        assert counter == 0  # it was not written
        with torch.no_grad():
            count(leaf_of(X), counter)
        assert counter == 1


def test_checkpointing_writes_again(count: Any) -> None:
    counter, x = torch.zeros(()), leaf_of(X)
    checkpoint(lambda x: count(x, counter), x, use_reentrant=False).sum().backward()
    torch.testing.assert_close(x.grad, X.cos())
    assert counter == 2  # as any write that is run again


# Output buffers -------------------------------------------------------------------------------------------------


@pytest.fixture
def sin_into(registry: Registry, ns: str) -> Any:
    @registry.custom_op(f"{ns}::sin_into", mutates_args={"out", "calls"})
    def sin_into(x: Tensor, out: Tensor, calls: Tensor) -> None:
        out.copy_(x.sin())
        calls.add_(1)

    def backward(ctx: Any, g: Tensor) -> Any:
        return g * ctx.saved_tensors[0].cos(), torch.zeros_like(g), None

    sin_into.register_autograd(backward, setup_context=save_first, nondiff_args="calls")
    return sin_into


@pytest.mark.compile
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_buffer_from_outside(sin_into: Any, backend: str) -> None:
    compiled = torch.compile(sin_into, fullgraph=True, backend=backend)
    x, out, calls = leaf_of(X), torch.zeros(3), torch.zeros(())
    compiled(x, out, calls)
    assert out.requires_grad
    assert not calls.requires_grad
    (out * 3).sum().backward()
    torch.testing.assert_close(x.grad, 3 * X.cos())


def test_the_history_of_a_buffer(sin_into: Any) -> None:
    """What was in it before is overwritten: its gradient is the zeros that the formula says."""
    before, x = leaf_of(X), leaf_of(X)
    out = before * 2
    sin_into(x, out, torch.zeros(()))
    out.sum().backward()
    torch.testing.assert_close(before.grad, torch.zeros(3))
    torch.testing.assert_close(x.grad, X.cos())


def test_a_buffer_that_is_a_view(sin_into: Any) -> None:
    x = leaf_of(X)
    base = torch.zeros(2, 3)
    sin_into(x, base[1], torch.zeros(()))
    assert base.requires_grad
    (base * torch.tensor([[5.0], [7.0]])).sum().backward()
    torch.testing.assert_close(x.grad, 7 * X.cos())
