"""Repro scripts: their text, and that they reproduce."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch
from helpers.warm import PYTHON

from customops.checks import schema_check
from customops.testing import OpCheckError, OpCheckMode, generate_repro
from customops.testing import watch as repro_module

ROOT = Path(__file__).parents[2]
SIN = torch.ops.aten.sin.default


WITH_DATA = """\
# =========================================================
# BEGIN REPRO SCRIPT
# =========================================================
import torch
from customops import opcheck

# Make sure you have loaded the library that contains the op
# via an import or torch.ops.load_library(...)
op = torch.ops.aten.sin.default

args, kwargs = torch.load("repro.pt")
opcheck(op, args, kwargs, test_utils="test_schema")
# =========================================================
# END REPRO SCRIPT
# =========================================================
"""


WITHOUT_DATA = WITH_DATA.replace(
    'args, kwargs = torch.load("repro.pt")',
    """\
# If you rerun your test with PYTORCH_OPCHECK_PRINT_BETTER_REPRO=1
# we will fill them in same (args, kwargs) as in your test
args = ()  # args to the operator
kwargs = {}  # kwargs to the operator""",
)


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / repro_module.DIRECTORY


@pytest.mark.parity(94)
def test_text_with_data(directory: Path) -> None:
    script = generate_repro("test_schema", SIN, (torch.ones(2),), {}, save_data=True, dry_run=True)
    assert re.sub(r'torch\.load\(".*\.pt"\)', 'torch.load("repro.pt")', script) == WITH_DATA


@pytest.mark.parity(94)
def test_text_without_data() -> None:
    assert generate_repro("test_schema", SIN, (torch.ones(2),), {}, save_data=False) == WITHOUT_DATA


@pytest.mark.parity(94)
def test_dry_run_writes_nothing(directory: Path) -> None:
    generate_repro("test_schema", SIN, (torch.ones(2),), {}, save_data=True, dry_run=True)
    generate_repro("test_schema", SIN, (torch.ones(2),), {}, save_data=False)
    assert not directory.exists()


def test_each_script_has_a_file_of_its_own(directory: Path) -> None:
    for _ in range(5):
        generate_repro("test_schema", SIN, (torch.ones(2),), {"x": 1}, save_data=True)
    files = list(directory.glob("repro_*.pt"))
    assert len(files) == 5
    args, kwargs = torch.load(files[0])
    assert torch.equal(args[0], torch.ones(2))
    assert kwargs == {"x": 1}


def test_overload_is_named() -> None:
    script = generate_repro("test_schema", torch.ops.aten.add.Tensor, (), {}, save_data=False)
    assert "\nop = torch.ops.aten.add.Tensor\n" in script


def test_path_of_any_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", 'C:\\tmp\\"é😀')
    script = generate_repro("test_schema", SIN, (), {}, save_data=True, dry_run=True)
    assert 'C:\\tmp\\"é😀' in eval(re.findall(r"torch\.load\((.*)\)", script)[0])


DEFINE = """\
import torch
lib = torch.library.Library("testing_repro", "FRAGMENT")
lib.define("halve(Tensor x) -> Tensor")
lib.impl("halve", lambda x: x.mul_(0.5).clone() if bool((x != 0).any()) else x.clone(), "CPU")
"""


def failing(monkeypatch: pytest.MonkeyPatch) -> str:
    """The script in the error of a failing generated test."""
    monkeypatch.setenv("PYTORCH_OPCHECK_PRINT_BETTER_REPRO", "1")
    with torch.library._scoped_library("testing_repro", "FRAGMENT") as lib:
        lib.define("halve(Tensor x) -> Tensor")
        lib.impl("halve", lambda x: x.mul_(0.5).clone() if bool((x != 0).any()) else x.clone(), "CPU")
        mode = OpCheckMode(
            ["testing_repro"], "test_schema", schema_check, None, "T.test_schema__test_x", "failures.json"
        )
        with pytest.raises(OpCheckError) as caught, mode:
            torch.ops.testing_repro.halve(torch.ones(3))
    return str(caught.value)


@pytest.mark.process
@pytest.mark.parity(94)
def test_script_reproduces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    message = failing(monkeypatch)
    script = message[message.index("# ====") :]
    run = subprocess.run([PYTHON, "-c", DEFINE + script], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 1
    assert "OpCheckError" in run.stderr
    assert "Argument x is not defined as mutable but was mutated" in run.stderr


def test_saved_are_the_inputs_before_the_call(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    failing(monkeypatch)
    (file,) = directory.glob("repro_*.pt")
    args, kwargs = torch.load(file)
    assert torch.equal(args[0], torch.ones(3))
    assert kwargs == {}


def test_nothing_is_saved_unless_asked(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    monkeypatch.setattr("os.environ", {})

    def fail(op: object, args: object, kwargs: object) -> None:
        raise ValueError("no")

    with (
        pytest.raises(OpCheckError, match="BETTER_REPRO=1"),
        OpCheckMode(["aten"], "test_schema", fail, None, "T.t", ""),
    ):
        SIN(torch.ones(2))
    assert not directory.exists()


def test_inputs_that_cannot_be_saved_do_not_hide_the_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUSTOMOPS_OPCHECK_PRINT_BETTER_REPRO", "1")
    monkeypatch.setattr("torch.save", lambda *args: 1 / 0)

    def fail(op: object, args: object, kwargs: object) -> None:
        raise ValueError("the finding")

    with pytest.raises(OpCheckError, match=r"the finding[\s\S]*cannot be saved: ZeroDivisionError") as caught:
        with OpCheckMode(["aten"], "test_schema", fail, None, "T.t", ""):
            SIN(torch.ones(2))
    assert "BEGIN REPRO SCRIPT" in str(caught.value)
