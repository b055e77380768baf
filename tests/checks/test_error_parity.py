"""test_errors: fake impls that refuse what the kernel takes, and kernels that fail by accident."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.libraries import Ops

from customops.checks import NotExercised, Trial, faketensor
from customops.errors import CheckError


def run(define: Ops, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    op = define("f(Tensor x, Tensor y) -> Tensor", kernel, fake)
    faketensor.check_errors(Trial(op, (torch.randn(4, 3), torch.randn(4, 3))))


def same_shapes(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if x.shape != y.shape:
        raise ValueError("one shape is needed")
    return torch.empty_like(x)


def same_dtypes(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if x.dtype != y.dtype:
        raise ValueError("one dtype is needed")
    return torch.empty_like(x)


def misspelt(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if x.shape != y.shape:
        raise ValueError(shape_of_x)  # type: ignore[name-defined]  # noqa: F821
    return x + y


def lenient(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.sum() + y.sum()


@pytest.mark.parametrize(
    ("kernel", "fake", "message"),
    [
        (lenient, same_shapes, "refuses a call that the kernel accepts"),
        (lenient, same_dtypes, "refuses a call that the kernel accepts"),
        (misspelt, same_shapes, "a name that is not defined"),
    ],
)
def test_faults(define: Ops, kernel: Callable[..., Any], fake: Callable[..., Any], message: str) -> None:
    with pytest.raises(CheckError, match=message) as caught:
        run(define, kernel, fake)
    assert caught.value.fix


def strict(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    same_shapes(x, y)
    same_dtypes(x, y)
    return x + y


@pytest.mark.parametrize("fake", [same_shapes, same_dtypes, lambda x, y: torch.empty_like(x)])
def test_a_kernel_may_be_stricter(define: Ops, fake: Callable[..., Any]) -> None:
    run(define, strict, fake)


def test_dimensions_out_of_range(define: Ops) -> None:
    def kernel(x: torch.Tensor, dim: int) -> torch.Tensor:
        return x.sum(dim) if -2 <= dim < 2 else x.sum()

    op = define("f(Tensor x, int dim) -> Tensor", kernel, lambda x, dim: x.sum(dim))
    with pytest.raises(CheckError, match="refuses a call that the kernel accepts"):
        faketensor.check_errors(Trial(op, (torch.randn(4, 3), 1)))


def test_an_operator_without_a_fake(define: Ops) -> None:
    op = define("f(Tensor x) -> Tensor", torch.clone)
    faketensor.check_errors(Trial(op, (torch.randn(4, 3),)))


def test_nothing_to_try(define: Ops) -> None:
    with pytest.raises(NotExercised, match="not Python"):
        faketensor.check_errors(Trial(torch.ops.aten.sin.default, (torch.randn(4, 3),)))
