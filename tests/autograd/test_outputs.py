"""Outputs: which are differentiable, undefined gradients, results that are arguments."""

from __future__ import annotations

from typing import Any, Tuple

import pytest
import torch
from helpers.formulas import assert_same_gradients
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


@pytest.mark.compile
def test_outputs_that_are_no_tensors_under_transforms_and_compile(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::op", mutates_args=())
    def op(x: Tensor) -> Tuple[Tensor, int, Tensor, float, bool]:
        return x**3, x.numel(), x.argsort(), 1.5, True

    op.register_fake(lambda x: (torch.empty_like(x), x.numel(), x.new_empty(x.shape, dtype=torch.int64), 1.5, True))
    op.register_autograd(
        lambda ctx, *grads: grads[0] * 3 * ctx.saved_tensors[0] ** 2,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )

    def ours(x: Tensor) -> Tensor:
        cube, n, order, half, flag = op(x)
        return cube[order] * n * half * flag

    def reference(x: Tensor) -> Tensor:
        return (x**3)[x.argsort()] * x.numel() * 1.5

    x = torch.tensor([3.0, 1.0, 2.0])
    for transform in torch.func.jacrev, lambda f: torch.func.jacrev(torch.func.jacrev(f)):
        torch.testing.assert_close(transform(lambda x: ours(x).sum())(x), transform(lambda x: reference(x).sum())(x))
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True, dynamic=True)
    for inputs in x, torch.tensor([5.0, 4.0]):
        assert_same_gradients(compiled, reference, inputs)


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


def test_outputs_without_use_get_zeros(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::op", mutates_args=())
    def op(x: Tensor) -> Tuple[Tensor, Tensor]:
        return x * 2, x.sum() * 3

    seen: list[Any] = []
    op.register_autograd(lambda ctx, g, h: (seen.append((g, h)), g * 2 + h * 3)[1])
    x = leaf(1.0, 2.0)
    op(x)[0].sum().backward()
    op(x)[1].backward()
    assert [(g.tolist(), h.tolist()) for g, h in seen] == [([1.0, 1.0], 0.0), ([0.0, 0.0], 1.0)]
    assert x.grad is not None
    assert x.grad.tolist() == [5.0, 5.0]
    # ... or None, on request, as in autograd.Function.
    seen.clear()
    op.register_autograd(
        lambda ctx, g, h: (seen.append((g, h)), g * 2)[1],
        setup_context=lambda ctx, inputs, output: ctx.set_materialize_grads(False),
    )
    op(x)[0].sum().backward()
    assert seen[0][1] is None


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


def test_integer_inputs_have_no_gradient(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::take", mutates_args=())
    def take(x: Tensor, index: Tensor) -> Tensor:
        return x[index]

    def backward(ctx: Any, grad: Tensor) -> Any:
        (index,) = ctx.saved_tensors
        assert ctx.needs_input_grad == (True, False)
        return torch.zeros(ctx.n).index_add(0, index, grad), None

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.n = inputs[0].numel()
        ctx.save_for_backward(inputs[1])

    take.register_autograd(backward, setup_context=setup_context)
    assert_same_gradients(take, lambda x, i: x[i], torch.rand(4), torch.tensor([2, 0, 2]))
