"""Outputs: which are differentiable, undefined gradients, results that are arguments."""

from __future__ import annotations

from typing import Any, Tuple

import pytest
import torch
from helpers.tensors import leaf, slope
from torch import Tensor

from customops import Registry

# Outputs --------------------------------------------------------------------------------------------------------------


def stats_fn(x: Tensor) -> Tuple[Tensor, int, Tensor, float, bool]:
    return x * 2, x.numel(), x.argsort(), x.sum().item(), bool((x > 0).all())


@pytest.fixture
def stats(registry: Registry, ns: str) -> Any:
    return registry.custom_op(f"{ns}::stats", stats_fn, mutates_args=())


def test_outputs_that_are_no_tensors(stats: Any) -> None:
    seen: list[Any] = []

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.number = output[1]
        seen.append(tuple(map(type, output)))

    def backward(ctx: Any, *grads: Any) -> Any:
        seen.append([None if g is None else g.dtype for g in grads])
        return grads[0] * 2 * ctx.number

    stats.register_autograd(backward, setup_context=setup_context)
    x = leaf(3.0, 1.0)
    doubled, number, order, total, positive = stats(x)
    assert (doubled.tolist(), number, order.tolist(), total, positive) == ([6.0, 2.0], 2, [1, 0], 4.0, True)
    assert [type(v) for v in (number, total, positive)] == [int, float, bool]
    assert doubled.requires_grad
    assert not order.requires_grad
    doubled.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [4.0, 4.0]
    assert seen[0] == (Tensor, int, Tensor, float, bool)
    assert seen[1] == [torch.float32, None, torch.int64, None, None]  # zeros, as in torch


def test_only_numbers_come_out(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::op", mutates_args=())
    def total(x: Tensor) -> float:
        return float(x.sum())

    total.register_autograd(lambda ctx, grad: None)
    value = total(leaf(1.0, 2.0))
    assert (type(value), value) == (float, 3.0)


def test_a_tuple_of_one_stays_one(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::op", mutates_args=())
    def op(x: Tensor) -> Tuple[Tensor]:
        return (x * 2,)

    op.register_autograd(lambda ctx, grad: grad * 2)
    result = op(leaf(1.0))
    assert isinstance(result, tuple)
    assert len(result) == 1
    assert slope(lambda x: op(x)[0]) == 2.0


def test_an_output_marked_as_not_differentiable(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::op", mutates_args=())
    def op(x: Tensor) -> Tuple[Tensor, Tensor]:
        return x * 2, x * 3

    op.register_autograd(
        lambda ctx, g, h: g * 2, setup_context=lambda ctx, inputs, output: ctx.mark_non_differentiable(output[1])
    )
    x = leaf(1.0)
    first, second = op(x)
    assert (first.requires_grad, second.requires_grad) == (True, False)
    first.backward()
    assert x.grad is not None
    assert x.grad.item() == 2.0
