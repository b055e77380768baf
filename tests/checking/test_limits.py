"""Calls that do not return, or take all the memory, are faults; a check of them ends."""

from __future__ import annotations

import ctypes
import signal
import sys
import time

import pytest
import torch
from torch import Tensor

import customops
from customops.checks._limits import Limits

pytestmark = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="it needs setitimer")


def define(registry: customops.Registry, ns: str, odd: object) -> customops.CustomOpDef:
    def scaled(x: Tensor, n: int) -> Tensor:
        if n == 0:
            odd()  # type: ignore[operator]
        return x * n

    op = registry.custom_op(f"{ns}::scaled", scaled, mutates_args=())
    op.register_fake(lambda x, n: torch.empty_like(x))
    return op


def for_ever() -> None:
    while True:
        time.sleep(0.01)


def swallowing() -> None:
    while True:
        try:
            time.sleep(0.01)
        except Exception:
            pass


@pytest.mark.parametrize("odd", [for_ever, swallowing])
def test_a_call_that_does_not_return(registry: customops.Registry, ns: str, odd: object) -> None:
    op = define(registry, ns, odd)
    report = customops.check(op, [(torch.randn(3), 2)], effort="quick", timeout=0.5)
    (failure,) = report.failures
    assert failure.error.problem == "the operator does not return within 0.5 seconds"
    assert failure.input == "sample 1, n=0"
    assert "scaled" in str(failure.error.where) or odd.__name__ in str(failure.error.where)  # type: ignore[attr-defined]
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


@pytest.mark.process
def test_code_in_c_that_does_not_return(registry: customops.Registry, ns: str) -> None:
    """Of a process of its own, which is ended. (`PyDLL` keeps the lock of the interpreter.)"""
    op = define(registry, ns, lambda: ctypes.PyDLL(None).sleep(1000))
    report = customops.check(op, [(torch.randn(3), 2)], effort="quick", timeout=1.0, isolate=True)
    assert [failure.error.problem for failure in report.failures] == ["the operator does not return within 1 seconds"]


@pytest.mark.skipif(sys.platform != "linux", reason="it needs RLIMIT_DATA")
def test_a_call_that_asks_for_all_memory(registry: customops.Registry, ns: str) -> None:
    op = define(registry, ns, lambda: torch.zeros(2**34))
    report = customops.check(op, [(torch.randn(3), 2)], effort="quick", memory=2**30)
    (failure,) = report.failures
    assert failure.error.problem == "the operator asks for more than 1 GiB of memory"


def test_limits_end_with_the_block() -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with Limits(seconds=5.0).applied():
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
