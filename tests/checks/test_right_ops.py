"""Right ops as libraries have them, which `customops.check` took for broken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import customops
from customops.checks import NotExercised, Trial, aot_dispatch, repeat
from customops.checks._trial import resolve

Define = Callable[..., Any]


@pytest.fixture
def op(registry: customops.Registry, ns: str) -> Define:
    def define(fn: Any, **options: Any) -> Any:
        made = registry.custom_op(f"{ns}::right", fn, mutates_args=(), **options)
        made.register_fake(fn)
        return made

    return define


def assert_right(op: Any, *args: Any) -> None:
    report = customops.check(op, [args])
    assert not report.failures, str(report)


def test_integers_whose_width_is_part_of_the_result(op: Define) -> None:
    def to_float(x: Tensor) -> Tensor:
        return x.to(torch.float32) / torch.iinfo(x.dtype).max

    assert_right(op(to_float), torch.tensor([3, 172], dtype=torch.uint8))


def test_one_placeholder_for_absent_results(op: Define) -> None:
    empty = torch.empty(0)

    def with_sum(x: Tensor, want: bool) -> tuple[Tensor, Tensor]:
        return x * 2, x.sum() if want else empty

    trial = Trial(resolve(op(with_sum)), (torch.randn(3), False))
    repeat._check_released(trial)


def test_gradients_of_one_element_with_odd_strides(op: Define) -> None:
    def doubled(x: Tensor) -> Tensor:
        torch._check(x.dim() == 2 and x.stride(-1) == 1, lambda: "the last dimension has to be contiguous")
        return x * 2

    made = op(doubled)
    made.register_autograd(lambda ctx, grad: made(grad.contiguous()))
    assert_right(made, torch.randn(4, 6))


def test_cancellation_without_a_vmap_rule(op: Define) -> None:
    def row_sum(x: Tensor) -> Tensor:
        return x.sum(-1)

    x = torch.randn(4, 129)
    assert_right(op(row_sum), x - x.mean(-1, keepdim=True))


def test_a_backward_that_refuses_to_be_traced(op: Define) -> None:
    made = op(torch.sin, schema="(Tensor x) -> Tensor")

    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if type(grad) is not Tensor:
            raise NotImplementedError("runs in NumPy, and cannot be traced")
        return grad * torch.from_numpy(np.cos(ctx.saved_tensors[0].detach().numpy()))

    made.register_autograd(
        backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs), once_differentiable=True
    )
    with pytest.raises(NotExercised, match="refuses"):
        aot_dispatch.check_backward(Trial(resolve(made), (torch.randn(3),)))
