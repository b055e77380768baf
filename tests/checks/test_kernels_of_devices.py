"""test_kernels, and inputs that are derived, on a device written in Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import npy
from helpers.isolated import isolated
from torch import Tensor

import customops
from customops.checks import Trial, kernels, resolve
from customops.checks._trial import Case
from customops.checks.inputs.derive import derive
from customops.errors import CheckError

pytestmark = [pytest.mark.process]

on_npy = isolated(npy.register, imports=["helpers.inductor"])


def scaled(x: Tensor, by: float) -> Tensor:
    return x * by


def with_kernel(name: str, kernel: Callable[..., Any] | None) -> Any:
    op = customops.custom_op(f"on_npy::{name}", scaled, mutates_args=(), device_types="cpu")
    op.register_fake(lambda x, by: x * by)
    if kernel is not None:
        op.register_kernel("npy", kernel)
    return op


def trial_of(op: Any) -> Trial:
    return Trial(resolve(op), (torch.randn(2, 3), 2.0))


def on_device(op: Any) -> list[Case]:
    return [case for case in derive(trial_of(op), effort="quick") if case.kind == "device"]


@on_npy
def test_a_kernel_that_computes_something_else() -> None:
    op = with_kernel("wrong", lambda x, by: x * (by + 1))
    with pytest.raises(CheckError, match="other results on npy than on the CPU") as caught:
        kernels.check(trial_of(op))
    assert "test_kernels_of_devices" in str(caught.value.where)
    report = customops.check(op, trial_of(op).args, only="test_kernels")
    assert [failure.check for failure in report.failures] == ["test_kernels"]


@on_npy
def test_a_kernel_that_is_right() -> None:
    op = with_kernel("right", lambda x, by: x * by)
    kernels.check(trial_of(op))
    report = customops.check(op, trial_of(op).args)
    assert report.passed, str(report)


@on_npy
def test_no_kernel_but_the_fallback() -> None:
    kernels.check(trial_of(with_kernel("fallback", None)))
    kernels.check(Trial(torch.ops.aten.softmax.int, (torch.randn(2, 3), 1)))
    kernels.check(Trial(torch.ops.aten.topk.default, (torch.randn(5), 2)))


@on_npy
def test_inputs_on_the_device() -> None:
    (case,) = on_device(with_kernel("derived", lambda x, by: x * by))
    assert case.label == "on npy"
    assert [tensor.device.type for tensor in case.trial.tensors] == ["npy"]


@on_npy
def test_a_fake_that_forgets_the_device() -> None:
    op = with_kernel("device", lambda x, by: x * by)
    op.register_fake(lambda x, by: torch.empty(x.shape, dtype=torch.result_type(x, by)))
    report = customops.check(op, trial_of(op).args, only="test_faketensor")
    assert "device" in " ".join(str(failure.error) for failure in report.failures)
