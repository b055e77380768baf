"""test_gradients where there is a reference function: its gradients are those of the operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.formulas_under_test import op_of, saved, trial_of

import customops
from customops.checks import NotExercised
from customops.checks.gradients import check_gradients as check
from customops.errors import CheckError

R = torch.randn
ONE, TWO = "(Tensor x) -> Tensor", "(Tensor x, Tensor y) -> Tensor"
DIFFERS = "the operator has other gradients than its reference function"


def check_with(reference: Callable[..., Any], op: Any, *args: Any) -> None:
    check(replace(trial_of(op, *args), reference=reference))


def test_where_finite_differences_say_nothing(ns: str) -> None:
    def noisy(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1e-3 * (x * 1e7).sin().detach()

    wrong = op_of(ns, ONE, noisy, lambda ctx, g: g * 3)
    with pytest.raises(NotExercised, match="not smooth"):
        check(trial_of(wrong, R(3)))
    with pytest.raises(CheckError, match=DIFFERS) as caught:
        check_with(noisy, wrong, R(3))
    assert caught.value.argument == "x"
    assert "test_reference_gradients" in str(caught.value.expected)
    check_with(noisy, op_of(ns, ONE, noisy, lambda ctx, g: g * 2), R(3))


def test_one_of_two_inputs(ns: str) -> None:
    def steps(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * y + 1e-3 * (x * 1e7).sin().detach() + 1e-3 * (y * 1e7).sin().detach()

    wrong = op_of(ns, TWO, steps, saved(lambda g, x, y: (g * y, None)))
    with pytest.raises(CheckError, match=DIFFERS) as caught:
        check_with(steps, wrong, R(3), R(3))
    assert caught.value.argument == "y"
    check_with(steps, wrong, R(3).requires_grad_(), R(3))  # the sample asks for no gradient of y
    check_with(steps, op_of(ns, TWO, steps, saved(lambda g, x, y: (g * y, g * x))), R(3), R(3))


def test_writes(registry: customops.Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::double_", mutates_args=("x",))
    def double_(x: torch.Tensor) -> None:
        x.mul_(2)

    def reference(x: torch.Tensor) -> None:
        x.mul_(2)

    double_.register_autograd(lambda ctx, g: g * 3)
    with pytest.raises(CheckError):
        check_with(reference, double_, R(3))
    double_.register_autograd(lambda ctx, g: g * 2)
    check_with(reference, double_, R(3))


def test_kinks_and_ties(ns: str) -> None:
    relu = op_of(ns, ONE, torch.relu, saved(lambda g, x: g * (x >= 0)))
    check_with(lambda x: x.clamp(min=0) * 1, relu, torch.zeros(3))
    largest = op_of(ns, ONE, torch.amax, saved(lambda g, x: g * (x == x.max()) / (x == x.max()).sum()))
    check_with(lambda x: x.max(0).values, largest, torch.ones(4))


@pytest.mark.parametrize("reference", [torch.round, lambda x: x.detach().round(), lambda x: torch.tensor(1.0)])
def test_references_without_a_gradient(ns: str, reference: Callable[..., Any]) -> None:
    straight_through = op_of(ns, ONE, torch.round, lambda ctx, g: g)
    with pytest.raises(NotExercised, match="chose"):
        check_with(reference, straight_through, R(3))


def test_an_op_for_its_backward(ns: str) -> None:
    with pytest.raises(NotExercised, match="as it is"):
        check_with(torch.clone, op_of(ns, ONE, torch.clone, lambda ctx, g: -g), R(3))


def test_functions_of_symmetric_matrices(ns: str) -> None:
    def cholesky(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.cholesky(x)

    def lower(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            (found,) = torch.autograd.grad(torch.linalg.cholesky(leaf), leaf, g)
        return 2 * found.tril() - found.diag().diag()

    root = R(3, 3)
    check_with(cholesky, op_of(ns, ONE, cholesky, saved(lower)), root @ root.T + 3 * torch.eye(3))


def test_by_check(ns: str) -> None:
    def noisy(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1e-3 * (x * 1e7).sin().detach()

    op = op_of(ns, ONE, noisy, lambda ctx, g: g * 3)
    report = customops.check(op, [(R(3),)], reference=noisy, only="test_gradients")
    assert DIFFERS in {failure.problem for failure in report.failures}
    right = op_of(ns, ONE, torch.sin, saved(lambda g, x: g * x.cos()))
    assert customops.check(right, [(R(3),)], reference=torch.sin, only="test_gradients").passed
