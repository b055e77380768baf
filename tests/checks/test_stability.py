"""test_stability: formulas that overflow on the way, beside those that do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import customops
from customops.checks import CHECKS, NotExercised, Trial
from customops.checks._runs import attempt
from customops.errors import CheckError

UNSTABLE: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = {
    "log_sum_exp": (lambda x: x.exp().sum(-1).log(), lambda x: x.logsumexp(-1)),
    "tanh": (lambda x: (x.exp() - (-x).exp()) / (x.exp() + (-x).exp()), torch.tanh),
}

#: Right ones that round, overflow, or are steep for reasons of their own.
STABLE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "exp_less_one": lambda x: x.exp() - 1,  # loses digits near zero: some mean it so
    "log_cosh": lambda x: x.abs() + torch.nn.functional.softplus(-2 * x.abs()) - 0.6931471805599453,
    "variance": lambda x: (x * x).mean(-1) - x.mean(-1) ** 2,
    "exp": torch.exp,
    "naive_sigmoid": lambda x: 1 / (1 + (-x).exp()),
    "one_less_cosine": lambda x: 1 - x.cos(),
    "pseudo_huber": lambda x: (1 + x * x).sqrt() - 1,
    "centred": lambda x: x - x.mean(-1, keepdim=True),
    "sine": torch.sin,
    "reciprocal": lambda x: 1 / x,
    "signed_sum": lambda x: x.sum(-1),
    "layer_norm": lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]),
    "rounded": torch.round,
    "eigenvectors": lambda x: torch.linalg.eigh(x[:, :3])[1],
}


def _op(name: str, kernel: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    @customops.custom_op(f"stability::{name}", mutates_args=())
    def op(x: torch.Tensor) -> torch.Tensor:
        return kernel(x).clone()

    return op


def _check(op: Any, *args: Any) -> None:
    CHECKS["test_stability"](Trial(op._opoverload, args))


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", UNSTABLE)
def test_unstable_formulas(name: str, x: torch.Tensor) -> None:
    broken, right = (_op(f"{name}_{i}", kernel) for i, kernel in enumerate(UNSTABLE[name]))
    with pytest.raises(CheckError, match="a result for float32"):
        _check(broken, x)
    _check(right, x)


@pytest.mark.parametrize("name", STABLE)
def test_formulas_with_errors_that_the_inputs_explain(name: str, x: torch.Tensor) -> None:
    _check(_op(name, STABLE[name]), x)


def test_a_sample_of_float64_is_tried_in_float32(x: torch.Tensor) -> None:
    with pytest.raises(CheckError, match="is not finite"):
        _check(_op("of_double", UNSTABLE["log_sum_exp"][0]), x.double())


def test_there_has_to_be_something_to_try(x: torch.Tensor) -> None:
    with pytest.raises(NotExercised, match="no input is a plain tensor of floating point"):
        _check(_op("of_integers", torch.neg), torch.arange(3))
    with pytest.raises(NotExercised, match="not finite"):
        _check(_op("not_finite", torch.neg), x / 0)


def test_inputs_are_left_as_they_are(x: torch.Tensor) -> None:
    before = x.clone()
    op = _op("inputs", torch.neg)
    _check(op, x)
    assert torch.equal(x, before)
    assert attempt(Trial(op._opoverload, (x,))) is not None
