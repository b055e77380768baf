"""The checks of an op with several kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.libraries import Ops
from helpers.several import Several, up_to

import customops
from customops import Registry
from customops._cli.check import check_one, line_of
from customops.errors import CheckError


@pytest.mark.slow
def test_an_op_with_several_kernels_passes(registry: Registry, ns: str) -> None:
    several = Several(registry, f"{ns}::f")
    several.add("small", up_to(4))
    several.add("even", lambda x: x.shape[-1] % 2 == 0 if x.dim() else False, key=lambda x: x.shape)

    @several.op.register_samples
    def _() -> object:
        for n in (3, 6, 7):
            yield (torch.randn(2, n, requires_grad=True),)

    for sample in several.op.samples():
        customops.opcheck(several.op._opoverload, sample.args)
    report = customops.check(several.op)
    assert report.passed, report


def found(op: Any, *args: Any) -> CheckError:
    with pytest.raises(customops.errors.OpCheckError) as caught:
        customops.opcheck(op, args, test_utils="test_kernels")
    assert isinstance(caught.value.__cause__, CheckError)
    return caught.value.__cause__


def test_each_kernel_is_compared_where_it_may_run(several: Several) -> None:
    several.add("first", priority=2)
    several.op.register_kernel("cpu", lambda x, by: x * by + (x > 1), name="wrong", when=up_to(4), priority=1)
    customops.opcheck(several.op, (torch.ones(8),), test_utils="test_kernels")  # where it does not run
    error = found(several.op, torch.full((3,), 2.0))
    assert error.problem == "the kernel wrong has other results"
    assert error.expected == "the results of the kernel first"
    assert "test_checks.py" in str(error.where)


def test_a_kernel_that_is_wrong_for_values_of_which_the_sample_has_none(several: Several) -> None:
    several.op.register_kernel("cpu", lambda x, by: x.clamp(min=-5) * by, name="clamps", priority=-1)
    assert found(several.op, torch.ones(3)).problem == "the kernel clamps has other results"


def test_a_predicate_that_says_yes_where_the_kernel_refuses(several: Several) -> None:
    several.add("first", priority=2)

    def even(x: torch.Tensor, by: float) -> torch.Tensor:
        if x.shape[0] % 2:
            raise ValueError("odd")
        return x * by

    several.op.register_kernel("cpu", even, name="even", when=lambda x: x.dim() == 1)
    error = found(several.op, torch.ones(3))
    assert error.problem == "the kernel even fails on inputs that first takes"
    assert error.got == "ValueError: odd"
    assert str(error.fix).startswith("let when= refuse them")


@pytest.mark.compile
def test_a_predicate_that_differs_in_a_trace(several: Several) -> None:
    in_trace = torch._subclasses.fake_tensor.is_fake
    several.add("eager", lambda x: True)
    several.add("asked", lambda x: bool(in_trace(x)), key=None, priority=1)  # by each call, in compiled code, too
    customops.opcheck(several.op, (torch.ones(3),), test_utils="test_kernels")
    several.add("asked", lambda x: False)
    several.add("traced", lambda x: bool(in_trace(x)), key=lambda x: x.shape, priority=1)
    error = found(several.op, torch.ones(3))
    assert error.problem == "compiled code chooses another kernel than a call"
    assert error.got == "traced, and eager in a call"


def test_the_out_variant_has_kernels_of_its_own(several: Several, ns: str) -> None:
    several.op.register_out(lambda x, by, *, out: torch.mul(x, by, out=out))
    wrong = lambda x, by, *, out: torch.mul(x, by + 1, out=out)  # noqa: E731
    out = customops.adopt(f"{ns}::f.out")
    out.register_kernel("cpu", wrong, name="wrong", priority=-1)
    with pytest.raises(customops.errors.OpCheckError, match="the kernel wrong has other results"):
        customops.opcheck(out, (torch.ones(3), 2.0), {"out": torch.empty(3)}, test_utils="test_kernels")


def test_kernels_that_no_input_reached_are_in_the_verdict(several: Several) -> None:
    several.add("small", up_to(4))
    several.add("huge", lambda x: x.numel() > 10**9)
    several.add("gpu", device="cuda")
    several.op.register_samples(lambda: [(torch.ones(2, 8),)])
    for effort in ("quick", "normal"):
        report = customops.check(several.op, effort=effort, only=("test_schema", "test_kernels"))  # type: ignore[arg-type]
        unreached = {result.input for result in report.results if result.check == "kernels"}
        assert unreached == {"kernel huge for cpu", "kernel gpu for cuda"}
        assert "no fault found, kernel huge for cpu, and 1 more not exercised (" in str(report)
        assert str(report).count("no input reached the kernel ") == 2
        assert report.passed
        assert report.complete
    line = line_of(check_one(several.op, {"effort": "quick", "isolate": True}), 120)
    assert line.startswith("ok ")
    assert "kernel huge for cpu, and 1 more not exercised; " in line


def test_a_kernel_for_another_device_that_was_registered_elsewhere(ns: str) -> None:
    ops = Ops(ns)
    op = ops("f(Tensor x) -> Tensor", torch.clone, torch.empty_like)
    report = customops.check(op, [(torch.ones(3),)], only="test_schema")
    assert "kernels" not in report.by_check()
    ops.lib.impl("f", torch.clone, "CUDA")
    report = customops.check(op, [(torch.ones(3),)], only="test_schema")
    assert [result.input for result in report.results if result.check == "kernels"] == ["kernel for cuda"]
    ops.lib._destroy()


def test_a_finding_names_the_kernel_that_ran(several: Several) -> None:
    def writes(x: torch.Tensor, by: float) -> torch.Tensor:
        x.mul_(1)
        return x * by

    def reads_flat(x: torch.Tensor, by: float) -> torch.Tensor:
        return x.as_strided(x.shape, x.new_empty(x.shape).stride()) * by

    several.add("first", priority=2, when=lambda x: x.dim() == 1)
    for check, kernel in (("test_layouts", reads_flat), ("test_schema", writes)):
        several.op.register_kernel("cpu", kernel, name="flat", when=lambda x: x.dim() == 2)
        report = customops.check(several.op, [(torch.randn(3, 4),)], only=check)
        (failure,) = [each for each in report.failures if each.check == check]
        assert str(failure.error.where).startswith(f"the kernel flat, {kernel.__name__} (")


def test_the_call_in_a_finding_is_the_one_that_shows_it(several: Several) -> None:
    """The check tries other values than those of its input."""
    several.op.register_kernel("cpu", lambda x, by: x.clamp(min=-5) * by, name="clamps", priority=-1)
    report = customops.check(several.op, [(torch.full((2,), 1.0),)], only="test_kernels")
    (failure,) = report.failures
    assert "sample 1, simplified, changed by the check (" in str(failure)
    (call,) = [line for line in str(failure).splitlines() if line.startswith("  call: ")]
    assert call == "  call:     op(float32[1] = [-inf])"
    torch.testing.assert_close(failure.args[0], torch.ones(1))  # what the check is given, to find it again
