"""test_uninitialized_memory: every element of a result was written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.numeric_checks import Finds
from torch import Tensor

import customops
from customops.checks import repeat

aten = torch.ops.aten


@pytest.fixture
def op(registry: customops.Registry, ns: str) -> Finds:
    return Finds(repeat.check_memory, registry, ns)


def doubled(x: Tensor) -> Tensor:
    return x * 2


def blocks(x: Tensor) -> Tensor:
    result = torch.empty_like(x)
    whole = x.numel() // 4 * 4
    result.view(-1)[:whole] = x.reshape(-1)[:whole]
    return result


def test_a_tail(op: Finds) -> None:
    op.passes(blocks, torch.randn(8))
    op.finds(blocks, torch.randn(5), match="memory that was never written")
    op.finds(blocks, torch.arange(5), match="memory that was never written")


def test_a_tail_in_numpy(op: Finds) -> None:
    def shifted(x: Tensor) -> Tensor:
        result = np.empty(x.shape, np.float32)
        result[1:] = x.numpy()[:-1]
        return torch.from_numpy(result)

    op.finds(shifted, torch.randn(5), match="memory that was never written")
    assert np.empty.__module__ == "numpy"


def test_a_sum_that_starts_anywhere(op: Finds) -> None:
    def accumulated(x: Tensor) -> Tensor:
        return torch.empty_like(x).add_(x)

    op.finds(accumulated, torch.randn(5), match="memory that was never written")


def test_what_no_step_writes(op: Finds) -> None:
    def last_state(steps: Tensor) -> Tensor:
        state = torch.empty(steps.shape[1:])
        for i, step in enumerate(steps):
            state.copy_(step if i == 0 else state + step)
        return state

    op.passes(last_state, torch.randn(4, 3))
    op.finds(last_state, torch.randn(0, 3), match="memory that was never written")


def test_a_work_space_beside_empty_inputs(op: Finds) -> None:
    def workspace(x: Tensor) -> Tensor:
        return torch.empty(x.shape[1:])

    op.passes(workspace, torch.randn(0, 3))


def test_work_spaces(op: Finds) -> None:
    def workspace(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    def with_workspace(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, torch.empty(5)

    op.passes(workspace, torch.randn(5))
    op.passes(with_workspace, torch.randn(5))
    op.has_nothing(aten.empty_like.default, torch.randn(5))


def test_results_with_nan(op: Finds) -> None:
    def nothing(x: Tensor) -> Tensor:
        return torch.full_like(x, float("nan"))

    op.passes(nothing, torch.randn(3))


def test_settings_are_put_back(op: Finds) -> None:
    before: Any = torch.utils.deterministic
    filling = before.fill_uninitialized_memory
    op.passes(doubled, torch.randn(3))
    assert not torch.are_deterministic_algorithms_enabled()
    assert before.fill_uninitialized_memory is filling


def steps(x: Tensor, steps: int) -> Tensor:
    result = x.new_empty(x.shape)
    result[steps:] = x[: len(x) - steps]
    return result


def steps_cleared(x: Tensor, steps: int) -> Tensor:
    result = x.new_zeros(x.shape)
    result[steps:] = x[: len(x) - steps]
    return result


def counts(x: Tensor, lengths: Tensor) -> Tensor:
    result = x.new_empty(len(lengths))
    if int(lengths.sum()) != len(x):
        raise ValueError("the lengths do not make up x")
    for i, part in enumerate(x.split(lengths.tolist())):
        if len(part):
            result[i] = part.sum()
    return result


@pytest.mark.parametrize(
    ("fn", "args"), [(steps, (torch.randn(6), 0)), (counts, (torch.randn(6), torch.tensor([2, 1, 3])))]
)
def test_numbers_and_counts_that_decide_what_is_written(op: Finds, fn: Any, args: tuple[Any, ...]) -> None:
    report = customops.check(op.define(fn), [args], only=["test_uninitialized_memory"])
    assert [failure.check for failure in report.failures] == ["test_uninitialized_memory"]


def test_a_negative_number_is_not_made_up(op: Finds) -> None:
    report = customops.check(op.define(steps_cleared), [(torch.randn(6), 0)], only=["test_uninitialized_memory"])
    assert not report.failures
