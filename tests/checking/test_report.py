"""Reports: as text, JSON, JUnit XML, HTML; and the scripts that show one fault by themselves."""

from __future__ import annotations

import json
import pickle
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import torch
from helpers.warm import PYTHON

from customops.checking import Failure, Report, Result
from customops.errors import CheckError, OpCheckError

OPS = """
import torch
from torch import Tensor
from customops import custom_op

@custom_op("reported::scaled", mutates_args=())
def scaled(x: Tensor, w: list[Tensor], *, dtype: torch.dtype = torch.float32) -> Tensor:
    return x * 2

@scaled.register_fake
def _(x, w, dtype):
    return x.new_empty(x.shape)
"""


def failure(**fields: Any) -> Failure:
    error = CheckError("it is <wrong>", op="ns::op", expected="1", got="2", fix="make it right")
    given: dict[str, Any] = {"op": "ns::op", "check": "test_schema", "error": error, "input": "sample 1, x: transposed"}
    return Failure(**given | {"args": (torch.zeros(2, 3).t(),), "kwargs": {"dim": 1}} | fields)


def report(*failures: Failure) -> Report:
    results = (
        Result("test_schema", "failed" if failures else "passed", "sample 1", 0.25, None),
        Result("test_vmap", "not exercised", "sample 1", 0.0, "the op has no vmap rule"),
        Result("inputs", "rejected", "sample 1, x: int64", 0.0, "TypeError: no"),
    )
    return Report("ns::op", "normal", results, failures, ("test_exported",), 0.5, "ops.py:3")


def test_text() -> None:
    text = str(report(failure(inputs=2)))
    assert text.startswith("ns::op: 1 fault (1 input, 1 more rejected by the operator; normal effort, 0.5 s)")
    assert (
        """\
1. test_schema: it is <wrong>
  input:    sample 1, x: transposed (2 inputs of this kind)
  call:     op(float32[3, 2] strides=[1, 3] = [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]], dim=1)
  expected: 1
  got:      2
  fix:      make it right
"""
        in text
    )
    assert "test_vmap    not exercised: the op has no vmap rule" in text
    assert text.endswith("left out: test_exported")


def test_a_report_without_failures() -> None:
    assert str(report()).startswith("ns::op: no fault found")
    assert report().passed
    report().raise_on_failure()
    nothing = Report("ns::op", "quick", (Result("test_vmap", "not exercised", "sample 1"),), ())
    assert not nothing.passed
    assert str(nothing).startswith("ns::op: nothing was tried")


def test_failures_are_raised() -> None:
    with pytest.raises(OpCheckError, match=r"customops\.check found 2 faults") as caught:
        report(failure(), failure(check="test_vmap")).raise_on_failure()
    assert isinstance(caught.value.__cause__, CheckError)
    assert "make it right" in str(caught.value)


def test_json() -> None:
    data = json.loads(report(failure()).to_json())
    assert (data["op"], data["passed"], data["left_out"]) == ("ns::op", False, ["test_exported"])
    assert data["failures"][0]["problem"] == "it is <wrong>"
    assert [result["status"] for result in data["results"]] == ["failed", "not exercised", "rejected"]


def test_junit() -> None:
    broken = failure(error=CheckError("it is <wrong> \x00", op="ns::op"))
    suite = ET.fromstring(report(broken).to_junit_xml().split("?>", 1)[1])[0]
    assert {key: suite.attrib[key] for key in ("tests", "failures", "skipped", "errors")} == {
        "tests": "2",
        "failures": "1",
        "skipped": "1",
        "errors": "0",
    }
    assert [case.attrib["name"] for case in suite] == ["test_schema", "test_vmap"]
    assert suite[0][0].tag == "failure"
    assert suite[1][0].tag == "skipped"


def test_junit_has_faults_of_inputs() -> None:
    suite = ET.fromstring(report(failure(check="inputs")).to_junit_xml().split("?>", 1)[1])[0]
    assert suite.attrib["failures"] == "1"
    assert [case.attrib["name"] for case in suite if case.find("failure") is not None] == ["inputs"]


def test_reports_can_be_pickled() -> None:
    before = report(failure())
    assert str(pickle.loads(pickle.dumps(before))) == str(before)


# -- scripts -----------------------------------------------------------------------------------


def inputs_of(script: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a script gives the op."""
    lines = script.split("\nop = ")[1].split("\noutcome = ")[0].split("\n", 1)[1]
    names: dict[str, Any] = {}
    exec("import base64, io, torch\nfrom math import inf, nan\n" + lines, names)
    return names["args"], names["kwargs"]


def same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    details = [
        (t.dtype, t.shape, t.stride(), t.storage_offset(), t.requires_grad, t.is_conj(), t.is_neg(), t.layout)
        for t in (one, other)
    ]
    if one.layout is not torch.strided:
        one, other = one.to_dense(), other.to_dense()
    return details[0] == details[1] and torch.equal(one.nan_to_num(7), other.nan_to_num(7))


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")  # of torch.load, from 2.15 on
@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([1.0, float("nan"), -float("inf")]),
        torch.randn(3, 4).t()[1:],
        torch.randn(2, 3, dtype=torch.bfloat16),
        torch.randn(2, 1).expand(2, 5),
        torch.randn(2, requires_grad=True),
        torch.tensor(True),
        torch.empty(0, 3),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(3, dtype=torch.complex64).conj().imag,
        torch.randn(40, 40),
        torch.tensor([[0.0, 1.0], [0.0, 0.0]]).to_sparse(),
    ],
    ids=[
        *("nan and inf", "transposed", "bfloat16", "expanded", "requires grad", "bool", "empty"),
        *("conjugate", "negative", "large", "sparse"),
    ],
)
def test_a_script_gives_the_same_tensor(tensor: torch.Tensor) -> None:
    args, _ = inputs_of(failure(args=(tensor,), kwargs={}).script())
    if tensor.layout is torch.strided:
        assert same_tensor(args[0], tensor)
    else:
        assert torch.equal(args[0].to_dense(), tensor.to_dense())


def test_a_script_keeps_what_is_shared() -> None:
    x = torch.randn(3)
    args, kwargs = inputs_of(failure(args=(x, [x, x[1:]], None), kwargs={"to": torch.device("cpu"), "k": "a"}).script())
    assert args[0] is args[1][0]
    assert args[1][1].untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr()
    assert args[2] is None
    assert kwargs == {"to": torch.device("cpu"), "k": "a"}


@pytest.mark.process
def test_a_script_shows_the_fault_by_itself(tmp_path: Path) -> None:
    (tmp_path / "reported_ops.py").write_text(OPS)
    program = f"""
import runpy, torch, customops
ops = runpy.run_path({str(tmp_path / "reported_ops.py")!r})
report = customops.check(ops["scaled"], [(torch.randn(3, 4), [torch.ones(2)])], only="test_faketensor")
report.failures[0].save_script({str(tmp_path / "script.py")!r})
"""
    subprocess.run([PYTHON, "-c", program], check=True)
    shown = subprocess.run([PYTHON, str(tmp_path / "script.py")], capture_output=True, text=True)
    assert shown.returncode == 1
    assert "Stride mismatch" in shown.stderr


@pytest.mark.process
def test_a_script_of_a_call_that_fails(tmp_path: Path) -> None:
    (tmp_path / "reported_ops.py").write_text(OPS.replace("return x * 2", "raise ValueError('no such thing')"))
    program = f"""
import runpy, torch, customops
ops = runpy.run_path({str(tmp_path / "reported_ops.py")!r})
report = customops.check(ops["scaled"], [(torch.randn(3, 4), [torch.ones(2)])])
report.failures[0].save_script({str(tmp_path / "script.py")!r})
"""
    subprocess.run([PYTHON, "-c", program], check=True)
    shown = subprocess.run([PYTHON, str(tmp_path / "script.py")], capture_output=True, text=True)
    assert shown.returncode == 1
    assert shown.stderr.rstrip().endswith("ValueError: no such thing")


def test_a_script_can_be_of_an_op_of_unknown_origin() -> None:
    script = failure(op="elsewhere::op.Tensor").script()
    assert "torch.ops.elsewhere.op.Tensor" in script
    assert "import what does" in script
    compile(script, "script", "exec")
