"""test_symbolic_sizes: fake impls that are right for the sizes of the sample alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.libraries import Ops

from customops.checks import NotExercised, Trial, faketensor
from customops.errors import CheckError

aten = torch.ops.aten


def run(op: Any, *args: Any) -> None:
    faketensor.check_symbolic_sizes(Trial(op, args))


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(4, 3)


def by_type(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0] if isinstance(x.shape[0], int) else 4, x.shape[1])


def when_compiling(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape, dtype=torch.half if torch.compiler.is_compiling() else x.dtype)


def strides_by_type(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape) if isinstance(x.shape[0], int) else x.new_empty(x.shape[1], x.shape[0]).t()


@pytest.mark.parametrize(
    ("fake", "message"),
    [
        (by_type, "promises another shape"),
        (when_compiling, "promises another dtype"),
        (strides_by_type, "promises another stride"),
        (lambda x: x.new_empty(4, x.shape[1]), "promises another shape"),
        (lambda x: x.new_empty(int(x.shape[0]), x.shape[1]), "makes a number of a size"),
        (lambda x: x.new_empty(x.shape[0].bit_count() and x.shape), "fails on sizes that are symbols"),
    ],
)
def test_faults(define: Ops, x: torch.Tensor, fake: Callable[..., Any], message: str) -> None:
    with pytest.raises(CheckError, match=message) as caught:
        run(define("f(Tensor x) -> Tensor", torch.clone, fake), x)
    assert caught.value.fix


def branch(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape) if x.shape[0] > 3 else torch.empty_like(x)


def refuse(x: torch.Tensor) -> torch.Tensor:
    torch._check(x.shape[0] % 2 == 0)
    return torch.empty_like(x)


@pytest.mark.parametrize("fake", [torch.empty_like, branch, refuse, lambda x: x.new_empty(tuple(x.shape)), torch.clone])
def test_right_fakes(define: Ops, x: torch.Tensor, fake: Callable[..., Any]) -> None:
    run(define("f(Tensor x) -> Tensor", torch.clone, fake), x)


def test_a_size_the_kernel_insists_on_may_be_a_number(define: Ops, x: torch.Tensor) -> None:
    def kernel(x: torch.Tensor) -> torch.Tensor:
        torch._check(x.shape[0] == 4 and x.shape[1] == 3)
        return x.clone()

    run(define("f(Tensor x) -> Tensor", kernel, lambda x: x.new_empty(int(x.shape[0]), 3)), x)


def test_a_result_for_each_row_makes_a_number_of_a_size(define: Ops, x: torch.Tensor) -> None:
    def fake(x: torch.Tensor) -> list[torch.Tensor]:
        return [x.new_empty(x.shape[1]) for _ in range(int(x.shape[0]))]

    run(define("f(Tensor x) -> Tensor[]", lambda x: [row.clone() for row in x], fake), x)


def test_the_call_of_the_user_is_named(define: Ops, x: torch.Tensor) -> None:
    with pytest.raises(CheckError) as caught:
        run(define("f(Tensor x) -> Tensor", torch.clone, lambda x: x.new_empty(int(x.shape[0]), x.shape[1])), x)
    assert caught.value.where is not None
    assert caught.value.where.startswith(f"{__file__}:")


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.mul.Tensor, (torch.randn(4, 3), torch.randn(3))),
        (aten.mm.default, (torch.randn(4, 3), torch.randn(3, 5))),
        (aten.unbind.int, (torch.randn(4, 3),)),
        (aten.nonzero.default, (torch.randn(4, 3),)),
        (aten.index_put_.default, (torch.randn(4, 3), [torch.tensor([1, 3])], torch.randn(3))),
        (aten.add_.Tensor, (torch.randn(8, 6)[::2, ::2], torch.randn(4, 3))),
        (aten.t_.default, (torch.randn(4, 3),)),
    ],
)
def test_operators_of_torch(op: Any, args: tuple[Any, ...]) -> None:
    run(op, *args)


@pytest.mark.parametrize("x", [torch.randn(()), torch.randn(1, 1), torch.randn(3).to_sparse()])
def test_nothing_to_try(x: torch.Tensor) -> None:
    with pytest.raises(NotExercised):
        run(aten.clone.default, x)
