"""test_first_calls: a call has the result that it has where the operator was not called before."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
from helpers.numeric_checks import Finds
from torch import Tensor

import customops
from customops.checks import first_calls

PROBLEM = "results depend on earlier calls"

pytestmark = pytest.mark.skipif(not first_calls.can_fork(), reason="it needs os.fork")


class Tables:
    """Powers of a base, kept by what `key` makes of size and base."""

    def __init__(self, key: Any) -> None:
        self.key, self.kept = key, {}

    def __call__(self, x: Tensor, base: float) -> Tensor:
        key = self.key(x.shape[-1], base)
        if key not in self.kept:
            self.kept[key] = base ** -torch.arange(x.shape[-1], dtype=torch.float64)
        return (x * self.kept[key]).to(x.dtype)


def define(registry: customops.Registry, ns: str, key: Any) -> Any:
    tables = Tables(key)

    def decayed(x: Tensor, base: float = 2.0) -> Tensor:
        return tables(x, base)

    op = registry.custom_op(f"{ns}::decayed", decayed, mutates_args=())
    op.register_fake(lambda x, base: torch.empty_like(x))
    return op


def test_a_key_that_lacks_a_number(registry: customops.Registry, ns: str) -> None:
    op = define(registry, ns, lambda size, base: size)
    report = customops.check(op, [(torch.randn(3, 6), 2.0)])
    failure = next(each for each in report.failures if each.check == "test_first_calls")
    assert failure.error.problem == PROBLEM
    assert "base=" in failure.input
    assert "key" in str(failure.error.fix)


def test_the_script_of_a_failure_shows_it(registry: customops.Registry, ns: str) -> None:
    """There it is the first call, so others come first."""
    op = define(registry, ns, lambda size, base: size)
    Finds(first_calls.check, registry, ns).finds(op, torch.randn(3, 6), 3.0, match=PROBLEM)


def test_a_whole_key(registry: customops.Registry, ns: str) -> None:
    op = define(registry, ns, lambda size, base: (size, base))
    report = customops.check(op, [(torch.randn(3, 6), 2.0)], only="test_first_calls")
    assert report.passed
    tried = [each for each in report.results if each.check == "test_first_calls"]
    assert len(tried) > 10
    assert {each.status for each in tried} == {"passed"}


def test_a_limit_of_the_first_call(registry: customops.Registry, ns: str) -> None:
    kept: dict[str, float] = {}

    def clamped(x: Tensor, limit: float) -> Tensor:
        limit = kept.setdefault("limit", limit)
        return x.clamp(-limit, limit)

    op = registry.custom_op(f"{ns}::clamped", clamped, mutates_args=())
    op.register_fake(lambda x, limit: torch.empty_like(x))
    assert "test_first_calls" in [each.check for each in customops.check(op, [(torch.randn(9), 1.0)]).failures]


@pytest.mark.parametrize("kept", ["low", "high", "length", "dtype"])
def test_what_the_first_call_was_given(registry: customops.Registry, ns: str, kept: str) -> None:
    """Of inputs that are called in one process, one after the other, the first may not give what the sample gives."""
    first: dict[str, Any] = {}

    def shifted(x: Tensor, low: float = 0.5, high: float = 2.0) -> Tensor:
        given = {"low": low, "high": high, "length": float(x.shape[0]), "dtype": float(x.dtype.itemsize)}
        used = given | {kept: first.setdefault(kept, given[kept])}
        return x * sum(used.values())

    op = registry.custom_op(f"{ns}::shifted", shifted, mutates_args=())
    op.register_fake(lambda x, *_: torch.empty_like(x))
    report = customops.check(op, [(torch.randn(5, 3), 0.5, 2.0)], only="test_first_calls")
    assert [failure.check for failure in report.failures] == ["test_first_calls"]


def test_a_key_with_some_of_the_numbers(registry: customops.Registry, ns: str) -> None:
    """Calls with other numbers than the one that it lacks would keep what that of the sample gives."""
    kept: dict[float, float] = {}

    def corrected(x: Tensor, rate: float = 0.5, step: int = 1, beta: float = 0.9) -> Tensor:
        return x * rate / kept.setdefault(beta, 1 - beta**step)

    op = registry.custom_op(f"{ns}::corrected", corrected, mutates_args=())
    op.register_fake(lambda x, *_: torch.empty_like(x))
    report = customops.check(op, [(torch.randn(5), 0.5, 1, 0.9)], only="test_first_calls")
    assert [failure.check for failure in report.failures] == ["test_first_calls"]
    assert "step=" in report.failures[0].input


def test_a_kernel_that_compiles_once(registry: customops.Registry, ns: str) -> None:
    """Else of the time for a sample nothing would be left for some of its numbers."""
    compiled = list[float]()

    def slow(x: Tensor, low: float = 0.5, high: float = 2.0, n: int = 3) -> Tensor:
        if not compiled:
            end = time.process_time() + 0.4
            while time.process_time() < end:
                compiled.append(0.0)
        return x * low * high * n

    op = registry.custom_op(f"{ns}::slow", slow, mutates_args=())
    op.register_fake(lambda x, *_: torch.empty_like(x))
    report = customops.check(op, [(torch.randn(5, 3), 0.5, 2.0, 3)], only="test_first_calls")
    inputs = [each.input for each in report.results if each.check == "test_first_calls"]
    assert any("n=" in each for each in inputs)
    assert any("low=" in each for each in inputs)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.complex64])
def test_all_dtypes_are_sent(registry: customops.Registry, ns: str, dtype: torch.dtype) -> None:
    op = registry.custom_op(f"{ns}::copy", lambda_copy, mutates_args=())
    op.register_fake(lambda x: torch.empty_like(x))
    report = customops.check(op, [(torch.randn(3).to(dtype),)], only="test_first_calls")
    assert report.passed
    assert [each for each in report.results if each.check == "test_first_calls" and each.status == "passed"]


def lambda_copy(x: Tensor) -> Tensor:
    return x.clone()


def test_a_kernel_that_ends_the_process_ends_no_check(registry: customops.Registry, ns: str) -> None:
    """The fork is not asked again."""
    parent = os.getpid()

    def odd(x: Tensor) -> Tensor:
        if os.getpid() != parent:
            os._exit(1)
        return x.clone()

    op = registry.custom_op(f"{ns}::odd", odd, mutates_args=())
    op.register_fake(lambda x: torch.empty_like(x))
    report = customops.check(op, [(torch.randn(3),)], only="test_first_calls")
    assert not report.failures
    assert [each.status for each in report.results] == ["not exercised"]
