"""`customops.recording.record` and `log`: the calls that they see, from all entry points, and the cost when off."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode

import customops
from customops import Mut, Registry
from customops._dispatch import current_kernel
from customops.errors import AliasError, ArgumentError

HERE = __file__


def scale(x: Tensor, by: float = 2.0) -> Tensor:
    if by == 7:
        raise ValueError("seven")
    return x * by if by != 1 else x


@pytest.fixture
def op(registry: Registry, ns: str) -> Any:
    op = registry.custom_op(f"{ns}::scale", scale, mutates_args=())
    op.register_fake(lambda x, by: torch.empty_like(x))
    op.register_autograd(lambda ctx, grad: (grad * 2, None))
    op.register_vmap("sequential")
    return op


def line() -> int:
    """The line of the caller."""
    return sys._getframe(1).f_lineno


def test_a_call_of_the_object(op: Any) -> None:
    x = torch.ones(2, 3, dtype=torch.float64).t()
    with customops.recording.record() as calls:
        result, here = op(x, by=3.0), line()
    assert torch.equal(result, x * 3)
    (call,) = calls
    tensor = call.arguments["x"]
    assert (tensor.shape, tensor.strides, tensor.dtype) == ((3, 2), (1, 3), "float64")
    assert (tensor.device, tensor.layout, tensor.requires_grad) == ("cpu", "strided", False)
    assert call.arguments["by"] == "3.0"
    assert call.caller == f"{HERE}:{here}"
    assert (call.kernel, call.where) == ("scale", f"{HERE}:{scale.__code__.co_firstlineno}")
    assert (call.through, call.runs, call.error) == ("object", 1, "")
    assert 0 < call.kernel_seconds <= call.seconds
    assert call.thread == threading.current_thread().name


def test_other_ways_to_the_kernel(op: Any) -> None:
    x = torch.ones(2, requires_grad=True)
    with customops.recording.record() as calls:
        getattr(torch.ops, op._definition.name.namespace).scale(x)
        torch.vmap(op)(torch.ones(3, 2))
        op(x).sum().backward()
    assert [(call.through, call.runs) for call in calls] == [("dispatcher", 1), ("object", 3), ("object", 1)]


@pytest.mark.compile
def test_calls_inside_a_kernel_of_the_same_op(registry: Registry, ns: str) -> None:
    def halve(x: Tensor) -> Tensor:
        time.sleep(0.01)
        return x.clone() if len(x) == 1 else getattr(torch.ops, ns).halve(x[: len(x) // 2])

    op = registry.custom_op(f"{ns}::halve", halve, mutates_args=())
    with customops.recording.record() as calls:
        op(torch.ones(4))
    assert [call.arguments["x"].shape for call in calls] == [(1,), (2,), (4,)]
    assert [(call.runs, call.through) for call in calls] == [(1, "dispatcher"), (1, "dispatcher"), (1, "object")]
    assert all(call.kernel_seconds <= call.seconds for call in calls)


def test_calls_of_graphs(op: Any) -> None:
    graph = torch.fx.symbolic_trace(lambda x: getattr(torch.ops, op._qualname.partition("::")[0]).scale(x))
    with customops.recording.record() as calls:
        _, here = graph(torch.ones(2)), line()
    (call,) = calls
    assert (call.through, call.caller) == ("graph", f"{HERE}:{here}")
    assert call.line().endswith(f"{os.path.basename(HERE)}:{here} in a graph")


def test_calls_of_compiled_code(op: Any) -> None:
    compiled = torch.compile(lambda x: op(x) + 1, fullgraph=True)
    compiled(torch.ones(3))
    with customops.recording.record() as calls:
        compiled(torch.ones(3))
        compiled(torch.ones(4))  # compiled anew, with dynamic sizes
        here = line() - 1
    assert {call.through for call in calls} == {"graph"}
    assert [call.arguments["x"].shape for call in calls] == [(3,), (4,)]
    assert calls[-1].kernel == "scale"
    assert calls[-1].caller == f"{HERE}:{here}" or ".py:" in calls[-1].caller


def test_bypass(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::scale", scale, mutates_args=(), bypass=True)
    op(torch.ones(2))
    with customops.recording.record() as calls:
        op(torch.ones(2))
    assert [call.kernel for call in calls] == ["scale"]


def test_fake_tensors_run_no_kernel(op: Any) -> None:
    with FakeTensorMode() as mode, customops.recording.record() as calls:
        op(mode.from_tensor(torch.ones(2)))
    assert [(call.kernel, call.runs) for call in calls] == [("", 0)]
    assert "-> no kernel" in str(calls[0])


def test_calls_that_raise(op: Any) -> None:
    with customops.recording.record() as calls:
        with pytest.raises(ValueError, match="seven"):
            op(torch.ones(2), 7.0)
        with pytest.raises(AliasError, match=f"scale .*{os.path.basename(HERE)}"):  # after the kernel
            op(torch.ones(2), 1.0)
    assert [call.error.partition("(")[0] for call in calls] == ["ValueError", "AliasError"]


def test_ops_of_others_are_seen_through_their_object(foreign: Any, lib: Any) -> None:
    with customops.recording.record() as calls:
        foreign(torch.ones(2))
        getattr(torch.ops, lib.ns).foreign(torch.ones(2))
    assert [(call.op, call.kernel) for call in calls] == [(foreign._qualname, "")]


def test_only_some_ops(op: Any, registry: Registry, ns: str) -> None:
    other = registry.custom_op(f"{ns}::other", scale, mutates_args=())
    for chosen, names in (
        (op, [op._qualname]),
        (f"{ns}::o*", [other._qualname]),
        ([op, other._qualname], [op._qualname, other._qualname]),
        ("nobody::*", []),
    ):
        with customops.recording.record(chosen) as calls:
            op(torch.ones(1)), other(torch.ones(1))
        assert [call.op for call in calls] == names
    for wrong in ([3], "scale", f"{ns}.scale"):  # no op is called like that
        with pytest.raises(ArgumentError, match="ops are given as"), customops.recording.record(wrong):
            pass


def test_a_new_kernel_and_a_new_op_are_seen(op: Any, registry: Registry, ns: str) -> None:
    def other(x: Tensor, by: float) -> Tensor:
        return x + by

    with customops.recording.record() as calls:
        op.register_kernel("cpu", other)
        assert op(torch.ones(1)).item() == 3
        registry.custom_op(f"{ns}::late", scale, mutates_args=())(torch.ones(1))
    assert [call.kernel for call in calls] == ["other", "scale"]
    assert calls[0].device_type == "cpu"


def test_an_op_that_writes_is_described_as_it_was(registry: Registry, ns: str) -> None:
    def grow(x: Mut[Tensor], xs: list[Tensor]) -> None:
        x.resize_(4)

    op = registry.custom_op(f"{ns}::grow", grow)
    with customops.recording.record() as calls:
        op(torch.ones(2), [torch.ones(1), torch.ones(2, 2)])
    assert str(calls[0].arguments["x"]) == "float32[2]"
    assert [str(item) for item in calls[0].arguments["xs"]] == ["float32[1]", "float32[2, 2]"]


def test_function_modes_are_not_asked(op: Any) -> None:
    asked: list[str] = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append(func.__name__)
            return func(*args, **(kwargs or {}))

    x = torch.ones(2)
    with Mode():
        op(x)
        plain = list(asked)
        asked.clear()
        with customops.recording.record():
            op(x)
    assert asked == plain


def test_layouts_without_strides(op: Any, registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::rows", lambda x: x.shape[0], schema="(Tensor x) -> SymInt")
    with customops.recording.record() as calls:
        op(torch.ones(2, 2).to_sparse())
    assert (calls[0].arguments["x"].layout, calls[0].arguments["x"].strides) == ("sparse_coo", ())


def test_all_threads(op: Any) -> None:
    threads = [threading.Thread(target=op, args=(torch.ones(1),), name=f"t{i}") for i in range(4)]
    with customops.recording.record() as calls:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(call.thread for call in calls) == ["t0", "t1", "t2", "t3"]
    assert {call.runs for call in calls} == {1}


def test_two_recordings_at_once(op: Any) -> None:
    with customops.recording.record() as outer:
        with customops.recording.record() as inner:
            op(torch.ones(1))
        op(torch.ones(1))
    assert (len(outer), len(inner)) == (2, 1)
    assert {call.kernel for call in [*outer, *inner]} == {"scale"}


def test_limit(op: Any) -> None:
    with customops.recording.record(limit=2) as calls:
        for _ in range(5):
            op(torch.ones(1))
    assert (len(calls), calls.dropped) == (2, 3)
    assert calls.summary().endswith("3 more calls were not kept")


def test_nothing_is_left_when_it_is_off(op: Any) -> None:
    """What a call runs is then just what it ran before: no test in a call, and no function more."""
    kernel = op._definition.newest_kernels()["CompositeExplicitAutograd"].current_kernel
    kernel.passed()  # else the first call is inspected
    before = op._entry
    with customops.recording.record(), pytest.raises(ValueError, match="seven"):
        op(torch.ones(1), 7.0)
    with customops.recording.record():
        assert kernel.fn is not scale
        assert op._entry is not before
    assert kernel.fn is kernel.registered is scale
    assert op._entry == before
    assert not current_kernel.observers


# How it is shown -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [75, 120])
def test_summary(op: Any, width: int) -> None:
    with customops.recording.record() as calls:
        op(torch.ones(1)), op(torch.ones(1))
    lines = calls.summary(width).splitlines()
    assert lines[0].split() == ["op", "kernel", "calls", "time", "in", "kernels", "raised"]
    assert lines[2].split()[:3] == [op._qualname, "scale", "2"]
    assert max(map(len, lines)) <= width
    assert json.loads(calls.to_json())[0]["arguments"]["x"]["shape"] == [1]
    assert calls.of(op) == list(calls)
    assert repr(calls) == "<Recording of 2 calls>"


def test_lines(op: Any, caplog: pytest.LogCaptureFixture) -> None:
    for level, parts in (
        ("calls", ["scale(x: float32[1])", "at "]),
        ("kernels", ["-> scale (", "at "]),
        ("times", ["us, kernel "]),
    ):
        caplog.clear()
        with caplog.at_level(logging.INFO), customops.recording.log(level, op):  # type: ignore[arg-type]
            op(torch.ones(1))
        (record,) = caplog.records
        assert record.name == "customops.calls"
        for part in parts:
            assert part in record.getMessage()
    with pytest.raises(ArgumentError, match="there is no such level"), customops.recording.log("all"):  # type: ignore[arg-type]
        pass


@pytest.mark.process
def test_the_environment_turns_it_on(tmp_path: Any) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import torch, customops\nfrom torch import Tensor\n"
        "def double(x: Tensor) -> Tensor: return x * 2\n"
        "op = customops.custom_op('t_env::double', double, mutates_args=())\nop(torch.ones(2))\n"
    )
    for value, expected in (
        ("kernels", "customops: t_env::double(x: float32[2])  -> double (program.py:3)  at program.py:5\n"),
        ("", ""),
    ):
        environment = os.environ | {"CUSTOMOPS_LOG": value, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, program], capture_output=True, text=True, env=environment, cwd=tmp_path, check=True
        )
        assert done.stderr == expected


def test_lines_go_to_the_stderr_of_their_time(op: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("customops.calls")
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    for _ in range(2):
        said = io.StringIO()
        with contextlib.redirect_stderr(said), customops.recording.log():
            op(torch.ones(2))
        assert said.getvalue().startswith(f"customops: {op._qualname}(x: float32[2])")
        said.close()


def test_a_wrong_value_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUSTOMOPS_LOG", "loud")
    with pytest.raises(ArgumentError, match="argument: CUSTOMOPS_LOG"):
        customops.recording._calls.log_as_environment_says()
