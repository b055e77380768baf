"""test_modes: operators that go by how they are called."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.libraries import Ops

from customops.checks import NotExercised, Trial, modes
from customops.errors import CheckError

aten = torch.ops.aten


def by_type(x: torch.Tensor) -> torch.Tensor:
    if type(x) is not torch.Tensor:
        raise TypeError("a tensor is needed")
    return x.clone()


def in_inference_mode(x: torch.Tensor) -> torch.Tensor:
    return x.half().float() if torch.is_inference_mode_enabled() else x.clone()


def below_no_grad(x: torch.Tensor) -> torch.Tensor:
    return x.clone() if torch.is_grad_enabled() else x + 1


def by_thread(x: torch.Tensor) -> torch.Tensor:
    return x.clone() if threading.current_thread() is threading.main_thread() else x + 1


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (by_type, "fails on"),
        (in_inference_mode, "another result in inference mode"),
        (below_no_grad, "another result below"),
        (by_thread, "another result when called from another thread"),
    ],
)
def test_faults(define: Ops, x: torch.Tensor, kernel: Callable[..., Any], message: str) -> None:
    with pytest.raises(CheckError, match=message) as caught:
        modes.check(Trial(define("f(Tensor x) -> Tensor", kernel), (x,)))
    assert caught.value.fix


@pytest.mark.parametrize("kernel", [torch.clone, torch.sin, lambda x: torch.tensor(x.numpy() + 1)])
def test_right_kernels(define: Ops, x: torch.Tensor, kernel: Callable[..., Any]) -> None:
    modes.check(Trial(define("f(Tensor x) -> Tensor", kernel), (x,)))


def test_a_write(define: Ops, x: torch.Tensor) -> None:
    modes.check(Trial(define("f(Tensor(a!) x) -> ()", lambda x: (x.add_(1), None)[1]), (x,)))


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.add_.Tensor, (torch.randn(4, 3), torch.randn(4, 3))),
        (aten.native_dropout.default, (torch.randn(4, 3), 0.5, True)),
        (aten.nonzero.default, (torch.randn(4, 3),)),
        (aten.cat.default, ([torch.randn(4, 3), torch.randn(4, 3)],)),
        (aten.select.int, (torch.randn(4, 3), 0, 1)),
    ],
)
def test_operators_of_torch(op: Any, args: tuple[Any, ...]) -> None:
    modes.check(Trial(op, args))


def test_nothing_to_try(define: Ops, x: torch.Tensor) -> None:
    calls: list[None] = []

    def counting(x: torch.Tensor) -> torch.Tensor:
        calls.append(None)
        return x + len(calls)

    with pytest.raises(NotExercised, match="two calls"):
        modes.check(Trial(define("f(Tensor x) -> Tensor", counting), (x,)))
