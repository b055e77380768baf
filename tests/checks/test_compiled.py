"""test_compiled, test_inductor and test_exported: operators that compile to something else than they are."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.libraries import Ops

from customops.checks import NotExercised, Trial, compiled
from customops.errors import CheckError

pytestmark = [pytest.mark.compile]

CHECKS = [compiled.check, compiled.inductor_check, compiled.export_check]


@pytest.mark.parametrize("check", CHECKS)
def test_a_kernel_that_goes_by_what_was_traced(define: Ops, x: torch.Tensor, check: Callable[..., None]) -> None:
    traced: list[None] = []

    def fake(x: torch.Tensor) -> torch.Tensor:
        traced.append(None)
        return torch.empty_like(x)

    op = define("f(Tensor x) -> Tensor", lambda x: x + len(traced), fake)
    if check is compiled.export_check:  # all calls come after the trace
        check(Trial(op, (x,)))
        return
    with pytest.raises(CheckError, match=r"another result under torch\.compile"):
        check(Trial(op, (x,)))


def fails_when_compiled(x: torch.Tensor) -> torch.Tensor:
    if isinstance(x.shape[0], torch.SymInt):
        raise ValueError("a number is needed")
    return torch.empty_like(x)


@pytest.mark.parametrize("check", CHECKS)
def test_a_fake_that_fails(define: Ops, x: torch.Tensor, check: Callable[..., None]) -> None:
    with pytest.raises(CheckError, match="fails on a function that calls the operator"):
        check(Trial(define("f(Tensor x) -> Tensor", torch.clone, fails_when_compiled), (x,)))


@pytest.mark.parametrize("check", CHECKS)
def test_right_operators(define: Ops, x: torch.Tensor, check: Callable[..., None]) -> None:
    op = define("f(Tensor x, float by, bool negate) -> Tensor", lambda x, by, negate: x * (-by if negate else by))
    torch.library.register_fake(op, lambda x, by, negate: torch.empty_like(x), lib=define.lib)
    check(Trial(op, (x, 2.0, True)))
    write = define("h(Tensor(a!) x) -> ()", lambda x: (x.add_(1), None)[1], lambda x: None)
    check(Trial(write, (x,)))
    check(Trial(torch.ops.aten.cat.default, ([x, x + 1],)))


@pytest.mark.parametrize("check", CHECKS)
def test_nothing_to_try(define: Ops, x: torch.Tensor, check: Callable[..., None]) -> None:
    with pytest.raises(NotExercised, match="tagged"):
        check(Trial(torch.ops.aten.nonzero.default, (x,)))
    with pytest.raises(NotExercised, match="a view"):
        check(Trial(define("f(Tensor(a) x) -> Tensor(a)", lambda x: x[:]), (x,)))


def test_strides_that_only_inductor_relies_on(define: Ops) -> None:
    x = torch.randn(3, 4)
    op = define("f(Tensor x) -> Tensor", lambda x: (x * 2).t().contiguous().t(), torch.empty_like)
    compiled.check(Trial(op, (x,)))
    with pytest.raises(CheckError, match="fails on a function that calls the operator"):
        compiled.inductor_check(Trial(op, (x,)))
    right = define("g(Tensor x) -> Tensor", lambda x: x * 2, torch.empty_like)
    compiled.inductor_check(Trial(right, (x,)))


def test_random_ops_of_torch() -> None:
    compiled.inductor_check(Trial(torch.ops.aten.native_dropout.default, (torch.randn(6), 0.5, True)))


def test_without_a_compiler(define: Ops, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = importlib.import_module("torch._inductor.config")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    op = define("f(Tensor x) -> Tensor", lambda x: x * 2, torch.empty_like)
    without = config.patch({"cpp.cxx": ("no-such-compiler",)})
    with without, pytest.raises(NotExercised, match="a function of plain PyTorch"):
        compiled.inductor_check(Trial(op, (torch.randn(7, 5, 3),)))
    assert config.cpp.cxx != ("no-such-compiler",)
