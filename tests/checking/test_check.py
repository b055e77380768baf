"""`customops.check` as a whole: what it takes, what it runs, what it reports."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.warm import PYTHON
from torch import Tensor

import customops
from customops import CustomOpDef, Registry, _torch
from customops._cli.check import check_one, line_of
from customops.checking import _run
from customops.checks import CHECKS, UsageError
from customops.checks._inputs import alone
from customops.checks._table import RETIRED
from customops.testing.isolation import in_fork


@pytest.fixture
def double(registry: Registry, ns: str) -> CustomOpDef[Any, Any]:
    """A right op."""

    @registry.custom_op(f"{ns}::double", mutates_args=())
    def double(x: Tensor) -> Tensor:
        return x * 2

    double.register_fake(lambda x: torch.empty_like(x))
    double.register_autograd(lambda ctx, grad: grad * 2)
    return double


@pytest.fixture
def scaled(registry: Registry, ns: str) -> CustomOpDef[Any, Any]:
    """An op whose fake gives contiguous strides."""

    @registry.custom_op(f"{ns}::scaled", mutates_args=())
    def scaled(x: Tensor) -> Tensor:
        return x * 2

    scaled.register_fake(lambda x: x.new_empty(x.shape))
    return scaled


def test_a_right_op_passes(double: CustomOpDef[Any, Any]) -> None:
    report = customops.check(double, [(torch.randn(3, 4),)])
    assert report.passed
    assert not report.failures
    report.raise_on_failure()
    assert report.by_check().keys() - {"inputs"} <= CHECKS.keys()


def test_one_fault_is_reported_once_with_a_small_input(scaled: CustomOpDef[Any, Any]) -> None:
    report = customops.check(scaled, [(torch.randn(5, 6, 7),)], only="test_faketensor")
    (failure,) = report.failures
    assert failure.check == "test_faketensor"
    assert "Stride mismatch" in failure.problem
    assert failure.inputs > 1
    assert failure.args[0].numel() <= 8
    assert not failure.args[0].is_contiguous()


def test_samples_are_those_of_the_op(double: CustomOpDef[Any, Any]) -> None:
    with pytest.raises(UsageError, match="there are no samples"):
        customops.check(double)

    @double.register_samples
    def _() -> Any:
        yield (torch.randn(3),)
        yield (torch.randn(2, 2),), {}

    report = customops.check(double, effort="quick")
    assert {"sample 1", "sample 2"} <= {result.input for result in report.results}


def test_a_tuple_is_one_sample(double: CustomOpDef[Any, Any]) -> None:
    report = customops.check(double, (torch.randn(3),), only="test_schema", effort="quick")
    assert report.passed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"samples": [torch.ones(2)]}, "a sample is a tuple of arguments"),
        ({"samples": [(torch.ones(2),)], "effort": "some"}, "no such effort"),
        ({"samples": [(torch.ones(2),)], "only": "test_all"}, "there is no such check"),
        ({"samples": [(torch.ones(2),)], "skip": ["test_all"]}, "there is no such check"),
        ({"samples": [(torch.ones(2),)], "only": "test_first_calls"}, "there is no such check(.|\n)*use test_state"),
    ],
)
def test_what_makes_no_sense_is_refused(double: CustomOpDef[Any, Any], arguments: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        customops.check(double, **arguments)


def test_a_removed_check_can_be_skipped(double: CustomOpDef[Any, Any]) -> None:
    report = customops.check(double, [(torch.randn(3),)], only="test_schema", skip=["test_first_calls", *RETIRED])
    assert report.passed
    assert not any("skip=" in reason for reason in report.left_out)
    assert {*RETIRED.values()} <= {*CHECKS}
    assert not {*RETIRED} & {*CHECKS}


def test_only_and_skip(double: CustomOpDef[Any, Any]) -> None:
    report = customops.check(double, [(torch.randn(3),)], only=["test_schema", "test_faketensor"], skip="test_schema")
    assert report.by_check().keys() - {"inputs"} == {"test_faketensor"}
    assert any("only=" in reason for reason in report.left_out)


def test_a_sample_that_fails_is_a_fault(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::raises", mutates_args=())
    def raises(x: Tensor) -> Tensor:
        raise ValueError("no")

    report = customops.check(raises, [(torch.randn(3),)])
    (failure,) = report.failures
    assert (failure.check, failure.problem) == ("inputs", "the operator itself fails on its sample")
    assert "ValueError: no" in str(failure)


def test_what_the_op_rejects_is_no_fault(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::even", mutates_args=())
    def even(x: Tensor) -> Tensor:
        torch._check(x.shape[0] % 2 == 0, lambda: "an even number of rows, please")
        return x.clone()

    @even.register_fake
    def _(x: Tensor) -> Tensor:
        torch._check(x.shape[0] % 2 == 0, lambda: "an even number of rows, please")
        return torch.empty_like(x)

    report = customops.check(even, [(torch.randn(4, 3),)], only=["test_schema", "test_faketensor"])
    assert report.passed
    assert "an even number of rows" in str([r.reason for r in report.results if r.status == "rejected"])


@pytest.mark.parametrize("mistake", [lambda x: undefined_name, lambda x: torch.zero_like(x), lambda x: x.sums()])  # type: ignore[name-defined]  # noqa: F821
@pytest.mark.parametrize("condition", ["dtype", "branch"])
def test_a_name_that_is_not_there_is_no_refusal(registry: Registry, ns: str, condition: str, mistake: Any) -> None:
    def kernel(x: Tensor) -> Tensor:
        if x.dtype == torch.float64 if condition == "dtype" else x.dim() == 2 and x.shape[1] == 37:
            return mistake(x)  # type: ignore[no-any-return]
        return x * 2

    op = registry.custom_op(f"{ns}::f", kernel, mutates_args=())
    op.register_fake(torch.empty_like)
    report = customops.check(op, [(torch.randn(3, 4),)], only="test_schema")
    assert [each.problem for each in report.failures] == ["the code of the kernel is wrong: a name is not there"]
    assert report.failures[0].error.fix == "correct the name"


def test_a_number_that_numpy_makes_of_an_array_is_no_refusal(registry: Registry, ns: str) -> None:
    """Twice an array without dimensions is a number, which has no such method."""

    def doubled_in_place(x: Tensor) -> Tensor:
        doubled = x.detach().numpy() * 2
        return torch.from_numpy(doubled.__iadd__(0))

    def at_least_one(x: Tensor) -> Tensor:
        if not x.dim():
            raise AttributeError("x needs a dimension")
        return x * 2

    def check(fn: Any) -> customops.checking.Report:
        op = registry.custom_op(f"{ns}::{fn.__name__}", fn, mutates_args=())
        op.register_fake(torch.empty_like)
        return customops.check(op, [(torch.randn(3),)], only="test_schema")

    (failure,) = check(doubled_in_place).failures
    assert failure.problem == "the code of the kernel is wrong: a name is not there"
    assert "'numpy.float32' object has no attribute '__iadd__'" in str(failure.error.got)
    assert "np.asarray(...)" in str(failure.error.fix)
    assert failure.args[0].dim() == 0
    report = check(at_least_one)
    assert report.passed
    assert "x needs a dimension" in str(report)


def test_an_aten_op() -> None:
    report = customops.check(torch.ops.aten.mul.Tensor, [(torch.randn(3), torch.randn(3))])
    assert report.passed, str(report)


def test_an_op_of_torch_library() -> None:
    @torch.library.custom_op("checking::torchs", mutates_args=())
    def torchs(x: Tensor) -> Tensor:
        return x * 2

    torchs.register_fake(lambda x: torch.empty_like(x, dtype=torch.float64))
    report = customops.check(torchs, [(torch.randn(3),)], effort="quick")
    assert [failure.check for failure in report.failures] == ["test_faketensor"]


def test_inputs_stay_as_they_are(double: CustomOpDef[Any, Any]) -> None:
    x = torch.randn(3, 4)
    before, state = x.clone(), torch.get_rng_state()
    customops.check(double, [(x,)])
    assert torch.equal(x, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert not x.requires_grad


@pytest.mark.process
def test_a_crash_is_a_fault_where_isolated(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::crashes", mutates_args=())
    def crashes(x: Tensor) -> Tensor:
        if x.numel() == 0:
            ctypes.string_at(0)
        return x.clone()

    crashes.register_fake(lambda x: torch.empty_like(x))
    report = customops.check(crashes, [(torch.randn(3),)], only="test_faketensor", isolate=True)
    assert {failure.problem for failure in report.failures} == {"the operator ends the process"}
    assert "SIGSEGV" in str(report)
    assert any(result.status == "passed" for result in report.results)


def test_one_cause_is_told_by_one_check(registry: Registry, ns: str) -> None:
    kept: dict[Any, Tensor] = {}

    @registry.custom_op(f"{ns}::kept", mutates_args=())
    def op(x: Tensor) -> Tensor:
        out = kept.setdefault((x.shape, x.dtype, x.stride()), torch.empty_like(x))
        return out.copy_(x * 2).detach()

    op.register_fake(lambda x: torch.empty_like(x))
    op.register_vmap(lambda info, in_dims, x: (op(x), in_dims[0]))
    report = customops.check(op, [(torch.randn(3, 4),)])
    assert [failure.check for failure in report.failures] == ["test_state"]
    assert "test_state failed, which may be the cause" in str(report)


@pytest.mark.parametrize(
    ("sample", "got"),
    [
        ((torch.ones(2), 3), "too many: 2 positional arguments, of 1"),
        (((torch.ones(2),), {"k": 1}), "unknown: k"),
        (((), {}), "missing: x"),
        (((torch.ones(2),), {"x": torch.ones(2)}), "given twice: x"),
    ],
)
def test_samples_have_the_arguments_of_the_op(double: CustomOpDef[Any, Any], sample: Any, got: str) -> None:
    with pytest.raises(UsageError, match="a sample does not fit the operator") as caught:
        customops.check(double, [sample])
    assert caught.value.got == got


@pytest.mark.parametrize("reference", [3, lambda x, y: x, lambda x: x.no_such_method()])
def test_a_reference_takes_the_samples(double: CustomOpDef[Any, Any], reference: Any) -> None:
    with pytest.raises(UsageError, match="the reference function fails on a sample"):
        customops.check(double, [(torch.ones(2),)], reference=reference)


def test_an_op_that_ends_the_program(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::ends", mutates_args=())
    def ends(x: Tensor) -> Tensor:
        if x.dtype is torch.float64:
            raise SystemExit(1)
        return x.clone()

    ends.register_fake(lambda x: torch.empty_like(x))
    report = customops.check(ends, [(torch.randn(3),)], effort="quick")
    assert "the operator exits the program, with sys.exit()" in {failure.problem for failure in report.failures}


def test_what_a_quick_run_leaves_out(double: CustomOpDef[Any, Any]) -> None:
    left_out = customops.check(double, [(torch.ones(2),)], effort="quick").left_out
    (normal,) = [text for text in left_out if text.endswith('(effort="normal" runs them)')]
    (thorough,) = [text for text in left_out if text.endswith('(effort="thorough" runs them)')]
    assert "test_vmap" in normal
    assert "test_exported" in thorough


def test_what_else_can_be_done_about_a_derived_input(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::rows", mutates_args=())
    def rows(x: Tensor) -> Tensor:
        return x.sum(0)

    rows.register_fake(lambda x: x.new_empty(x.shape[-1]))
    report = customops.check(rows, [(torch.randn(3, 4),)], only="test_faketensor")
    assert any("constraints= of register_samples" in failure.error.fix for failure in report.failures)
    line = rows._rules.fake.fn.__code__.co_firstlineno
    assert all(f"{__file__}:{line}" in failure.error.where for failure in report.failures)


def halves(x: Tensor, w: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return left * right * w


@pytest.mark.parametrize("constraint", [None, lambda x: x.shape[-1] % 4 == 0])
def test_a_smaller_input_shows_the_same_fault(registry: Registry, ns: str, constraint: Any) -> None:
    """Its `backward` forgets `w`, and cannot split a row of one element, which is another fault."""
    op = registry.custom_op(f"{ns}::halves", halves, mutates_args=())
    op.register_fake(lambda x, w: x.new_empty((*x.shape[:-1], x.shape[-1] // 2)))

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, w = ctx.saved_tensors
        left, right = x.chunk(2, -1)
        return torch.cat([grad * w * right, grad * w * left], -1), None

    op.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    op.register_samples(constraints=() if constraint is None else (constraint,))(
        lambda: [(torch.randn(4, 8, requires_grad=True), torch.randn(4, requires_grad=True))]
    )
    failure = customops.check(op, only=["test_gradients"]).failures[0]
    assert "returned None for an argument that needs a gradient" in str(failure)
    assert failure.input == "sample 1, simplified"
    assert failure.args[0].shape == ((1, 2) if constraint is None else (1, 4))


@pytest.mark.parametrize("effort", ["quick", "normal"])
def test_a_reference_is_compared_at_any_effort(registry: Registry, ns: str, effort: Any) -> None:
    op = registry.custom_op(f"{ns}::f", lambda x: x.sin() + 1, schema="(Tensor x) -> Tensor")
    op.register_fake(torch.empty_like)
    report = customops.check(op, (torch.randn(3),), reference=torch.sin, effort=effort)
    assert [failure.check for failure in report.failures] == ["test_kernels"]
    assert customops.check(op, (torch.randn(3),), reference=lambda x: x.sin() + 1, effort=effort).passed


def test_what_is_rejected_says_why(registry: Registry, ns: str) -> None:
    def even(x: Tensor) -> Tensor:
        torch._check_value(x.shape[0] % 2 == 0, lambda: "an even number of rows")
        return x * 2

    op = registry.custom_op(f"{ns}::even", even, mutates_args=())
    op.register_fake(even)
    report = customops.check(op, (torch.randn(4, 3),), effort="quick")
    assert "rejected: ValueError: an even number of rows" in str(report)


def test_progress_is_shown_where_asked(double: CustomOpDef[Any, Any], capsys: pytest.CaptureFixture[str]) -> None:
    customops.check(double, [(torch.randn(3),)], only="test_schema", progress=True)
    assert "test_schema" in capsys.readouterr().err
    customops.check(double, [(torch.randn(3),)], only="test_schema")
    assert capsys.readouterr().err == ""


@pytest.mark.process
def test_an_op_that_often_crashes_is_reported(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::crashes", mutates_args=())
    def crashes(x: Tensor) -> Tensor:
        if x.shape != (3, 4) or x.dtype is not torch.float32 or not x.is_contiguous():
            ctypes.string_at(0)
        return x.clone()

    crashes.register_fake(lambda x: torch.empty_like(x))
    report = customops.check(crashes, [(torch.randn(3, 4),)], only="test_faketensor", isolate=True)
    assert [failure.problem for failure in report.failures] == ["the operator ends the process"]
    assert any("derived inputs" in reason for reason in report.left_out)
    assert any(result.status == "passed" and result.input == "sample 1" for result in report.results)


@pytest.mark.process
def test_warnings_are_no_refusals_in_a_process_of_its_own(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::warns", mutates_args=())
    def warns(x: Tensor) -> Tensor:
        warnings.warn("odd", stacklevel=1)
        return x.clone()

    warns.register_fake(lambda x: torch.empty_like(x))
    report = customops.check(warns, [(torch.randn(3),)], only="test_faketensor", isolate=True)
    assert report.passed, str(report)


@pytest.mark.process
def test_a_crash_in_a_check_is_reported_beside_other_faults(registry: Registry, ns: str) -> None:
    calls: list[Tensor] = []

    @registry.custom_op(f"{ns}::late", mutates_args=())
    def late(x: Tensor) -> Tensor:
        calls.append(x)
        if len(calls) > 100:  # in the checks, after the inputs were probed
            ctypes.string_at(0)
        return x.clone()

    late.register_fake(lambda x: x.new_empty(x.shape))
    only = ["test_faketensor", "test_vmap", "test_aot_dispatch_dynamic"]
    report = customops.check(late, [(torch.randn(3, 4),)], only=only, isolate=True)
    assert "the operator ends the process" in {failure.problem for failure in report.failures}


def test_what_was_left_out_is_in_the_verdict(
    registry: Registry, ns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    op = registry.custom_op(f"{ns}::copy", torch.clone, schema="(Tensor x) -> Tensor", mutates_args=())
    op.register_fake(torch.empty_like)
    op.register_samples(lambda: [(torch.ones(2),)])
    assert customops.check(op, effort="quick", only="test_schema").complete
    monkeypatch.setitem(_run._LATE, "quick", -1.0)
    report = customops.check(op, effort="quick", only=["test_schema", "test_writes"])
    assert report.incomplete == ("2 checks left out (-1 s): test_schema, test_writes",)
    assert not report.complete
    assert report.to_dict()["complete"] is False
    assert "nothing was tried, incomplete: 2 checks left out (-1 s) (" in str(report)
    monkeypatch.setitem(_run._LATE, "quick", 10.0)
    monkeypatch.setitem(_run._SLOW, "quick", -1.0)
    report = customops.check(op, effort="quick")
    assert {text.partition(" left out")[0] for text in report.incomplete} >= {"inputs"}
    line = line_of(check_one(op, {"effort": "quick", "isolate": False}), 100)
    assert line.startswith("ok")
    assert "incomplete: inputs left out (-1 s)" in line


def test_loading_counts_for_no_check(registry: Registry, ns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new process takes seconds to load what fakes need, more than a check has at effort "quick"."""
    load, start = _torch.fakes.fake_mode, time.process_time()

    def load_slowly() -> Any:
        while time.process_time() < start + 0.3:
            pass
        return load()

    monkeypatch.setattr(_torch.fakes, "fake_mode", load_slowly)
    monkeypatch.setitem(_run._SLOW, "quick", 0.2)
    op = registry.custom_op(f"{ns}::copy", torch.clone, schema="(Tensor x) -> Tensor", mutates_args=())
    op.register_fake(torch.empty_like)
    assert customops.check(op, [(torch.ones(2),)], effort="quick", only="test_faketensor", isolate=False).complete


def test_waiting_takes_no_processor_time(registry: Registry, ns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a loaded machine, or where the op waits, as much is tried."""

    def fn(x: Tensor) -> Tensor:
        time.sleep(0.02)
        return x.clone()

    op = registry.custom_op(f"{ns}::waits", fn, mutates_args=())
    monkeypatch.setitem(_run._SLOW, "quick", 0.2)
    report = customops.check(op, [(torch.ones(2, 3),)], effort="quick", only="test_schema")
    assert report.complete, report
    assert report.seconds > 0.2


def test_what_fails_with_gradients_alone_is_rejected() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    report = customops.check(torch.ops.aten.sum.default, [(x,)], only="test_schema", effort="thorough")
    assert not report.failures, str(report)


def test_an_op_that_raises_what_ends_programs(registry: Registry, ns: str) -> None:
    class Ends(BaseException):
        pass

    def stops(x: Tensor) -> Tensor:
        if x.numel() == 0:
            raise KeyboardInterrupt
        if not x.is_contiguous():
            raise Ends("here")
        return x * 2

    op = registry.custom_op(f"{ns}::stops", stops, mutates_args=())
    op.register_fake(torch.empty_like)
    report = customops.check(op, [(torch.randn(3, 4),)], only="test_faketensor", isolate=True)
    problems = {failure.problem: str(failure.error) for failure in report.failures}
    assert problems.keys() == {
        "the operator raises KeyboardInterrupt, which ends the program",
        "the operator raises Ends, which ends the program",
    }
    assert all(f"stops ({__file__}:" in text for text in problems.values())
    assert report.by_check()["test_faketensor"]  # which went on


@pytest.mark.process
def test_a_ctrl_c_ends_an_isolated_check(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        """
import os, signal, time, torch, customops
signal.signal(signal.SIGINT, signal.default_int_handler)  # nohup ignores it
def slow(x: torch.Tensor) -> torch.Tensor:
    open("pid.partial", "w").write(str(os.getpid()))
    os.rename("pid.partial", "pid")
    time.sleep(60)
    return x * 2
op = customops.custom_op("ctrl_c::slow", slow, mutates_args=())
customops.check(op, [(torch.ones(2),)], isolate=True)
"""
    )
    with subprocess.Popen(
        [PYTHON, program], cwd=tmp_path, start_new_session=True, stderr=subprocess.PIPE, text=True
    ) as process:
        while not (tmp_path / "pid").exists():
            assert process.poll() is None
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to both
        _, errors = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in errors
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_checks_in_two_threads_leave_the_program_as_it_was(double: CustomOpDef[Any, Any]) -> None:
    def work() -> None:
        for _ in range(3):
            reports.append(customops.check(double, [(torch.randn(3, 4, generator=torch.Generator()),)], effort="quick"))
            customops.opcheck(double, (torch.ones(2),), test_utils=("test_schema", "test_faketensor"))

    reports: list[Any] = []
    torch.manual_seed(7)
    before = (torch.get_rng_state().tolist(), torch.get_default_dtype(), torch.get_num_threads())
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (torch.get_rng_state().tolist(), torch.get_default_dtype(), torch.get_num_threads()) == before
    assert len(reports) == 9
    assert all(report.passed for report in reports)


def test_a_fork_beside_a_check_can_check(double: CustomOpDef[Any, Any]) -> None:
    with alone():
        seen: list[Any] = []
        thread = threading.Thread(
            target=lambda: seen.append(in_fork(lambda: customops.opcheck(double, (torch.ones(2),)), 30).get())
        )
        thread.start()
        thread.join()
    assert set(seen[0].values()) == {"SUCCESS"}
