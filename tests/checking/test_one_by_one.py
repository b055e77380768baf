"""`SampleChecks`: the checks of one sample, each by itself."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from torch import Tensor

import customops
from customops import Registry, Sample
from customops.checking._check import SampleChecks
from customops.checks import UsageError

SAMPLE = Sample((torch.arange(6.0).reshape(2, 3),), {})


@pytest.fixture
def flat(registry: Registry, ns: str) -> Any:
    """An op with a wrong fake and a wrong gradient."""

    @registry.custom_op(f"{ns}::flat")
    def flat(x: Tensor) -> Tensor:
        return x.t().clone()

    flat.register_fake(lambda x: x.new_empty(x.shape[1], x.shape[0]))
    flat.register_autograd(lambda ctx, grad: grad.t() * 2)
    return flat


def test_each_says_what_check_says(flat: Any) -> None:
    whole = customops.check(flat, [SAMPLE], effort="quick")
    checks = SampleChecks(flat, SAMPLE, 0, "quick")
    names = SampleChecks.names(flat, "quick")
    found = {name: [failure.problem for failure in checks.report(name).failures] for name in reversed(names)}
    assert [problem for name in names for problem in found[name]] == [failure.problem for failure in whole.failures]
    assert {failure.check for failure in whole.failures} == {"test_faketensor", "test_gradients"}


def test_the_checks_of_an_op_with_a_reference(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::copied", copied, reference=lambda x: x * 1)
    assert "test_kernels" in SampleChecks.names(op, "quick")
    report = customops.check(op, [SAMPLE])
    assert {each.check for each in report.results} <= {"inputs", "kernels", *SampleChecks.names(op, "normal")}
    assert "test_aot_dispatch_static" in {each.check for each in report.results}


def copied(x: Tensor) -> Tensor:
    return x.clone()


def test_inputs_are_looked_for_once(registry: Registry, ns: str) -> None:
    calls = []

    @registry.custom_op(f"{ns}::counted")
    def counted(x: Tensor) -> Tensor:
        calls.append(x.shape)
        return x.clone()

    checks = SampleChecks(counted, SAMPLE, 0, "quick")
    checks.report("inputs")
    before = len(calls)
    checks.report("test_autograd_registration")
    checks.report("inputs")
    assert 0 < before == len(calls)


def test_a_report_has_the_number_of_the_sample(flat: Any) -> None:
    (failure,) = SampleChecks(flat, SAMPLE, 4, "quick").report("test_faketensor").failures
    assert failure.input.startswith("sample 5")


def test_a_cause_is_looked_for_among_the_checks_of_a_run(flat: Any) -> None:
    checks = SampleChecks(flat, SAMPLE, 0, "quick")
    assert checks.explained_by("test_symbolic_sizes", ("test_schema", "test_faketensor")) == "test_faketensor"
    assert checks.explained_by("test_symbolic_sizes", ("test_schema",)) is None


def test_a_sample_that_the_op_refuses(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::refuses", lambda x: 1 / 0, schema="(Tensor x) -> Tensor")
    checks = SampleChecks(op, SAMPLE, 0, "quick")
    assert [failure.check for failure in checks.report("inputs").failures] == ["inputs"]
    assert checks.report("test_schema").results == ()
    with pytest.raises(UsageError, match="a sample does not fit"):
        SampleChecks(op, Sample((1, 2), {}), 0, "quick")


@pytest.mark.process
def test_a_kernel_that_ends_the_process_is_a_fault_of_the_inputs(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::dies")
    def dies(x: Tensor) -> Tensor:
        if x.numel() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return x.clone()

    dies.register_fake(torch.empty_like)
    checks = SampleChecks(dies, SAMPLE, 0, "quick")
    checks._is_isolated = True  # as for kernels in C++
    (failure,) = checks.report("inputs").failures
    assert failure.problem == "the operator ends the process"
    assert checks.report("test_faketensor").count("passed")
    assert not checks.report("test_faketensor").failures
