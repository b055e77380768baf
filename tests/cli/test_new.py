"""``customops new``: what it writes works as written, and it overwrites nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.command_line import ROOT, Command
from helpers.covers import beyond


def written(run: Command, what: str, name: str) -> None:
    """Write it into ``project``, and look at what there is."""
    code, out, err = run("new", what, name, "project")
    assert (code, err) == (0, "")
    assert out.endswith('next: cd project && pip install -e ".[test]" && pytest\n')
    assert {line.removeprefix("wrote project/") for line in out.splitlines() if line.startswith("wrote")} == {
        str(path.relative_to("project")) for path in Path("project").rglob("*") if path.is_file()
    }
    assert not [path for path in Path("project").rglob("*") if path.is_file() and "NAME" in path.read_text()]


@pytest.mark.process
@pytest.mark.parametrize("installed", [beyond(False), True])
def test_the_device_works_as_written(run: Command, here: Path, installed: bool) -> None:
    """Its tests pass; once it is installed, they have `import torch` make it, whatever is imported first."""
    written(run, "device", "fresh_npu")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    if installed:
        install = "pip install --quiet --no-index --no-deps --no-build-isolation --target site ./project".split()
        subprocess.run([sys.executable, "-m", *install], check=True)
        environment["PYTHONPATH"] += f"{os.pathsep}{here / 'site'}"
    program = [sys.executable, "-m", "pytest", "-W", "error", "-rs", "-p", "no:cacheprovider"]
    done = subprocess.run(program, cwd="project", env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("20 passed" if installed else "17 passed, 3 skipped") in done.stdout


@pytest.mark.process
@pytest.mark.parametrize(
    "command", ["pytest tests", beyond("pytest --customops fresh_ns"), beyond("customops check fresh_ns")]
)
def test_the_package_works_as_written(run: Command, here: Path, command: str) -> None:
    written(run, "package", "fresh_ns")
    program = [sys.executable, "-m", *command.split(), *(["--effort=quick"] if "check" in command else [])]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(program, cwd="project", env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("what", "name", "cure"),
    [
        ("device", "npu2", "fix:      name it 'npu'"),
        ("device", "My-2nd_Device", "fix:      name it 'my_nd_device'"),
        ("device", "cuda0", "expected: a string of a-z and _ (no digits)\n  got:      'cuda0'"),
        ("device", "abs", "got:      torch.abs, Tensor.abs"),
        ("device", "xpu", "fix:      choose another name"),
        ("device", "json", "json_device is free"),
        ("device", "there", "there exists, and no file is overwritten; name another folder: new device there DIR"),
        ("device", "sin1", "got:      'sin1'"),
        ("package", "My-Lib", "my_lib does"),
        ("package", "JSON!", "no keyword of Python"),
        ("package", "3d", "no keyword of Python; d does"),
        ("package", "class", "no keyword of Python"),
        ("package", "aten", "aten_ops is free"),
        ("package", "json", "json_ops is free"),
        ("package", "there", "name another folder: new package there DIR"),
    ],
)
def test_names_that_are_refused(
    run: Command, here: Path, capsys: pytest.CaptureFixture[str], what: str, name: str, cure: str
) -> None:
    Path("there").mkdir()
    with pytest.raises(SystemExit) as exit_:
        run("new", what, name)
    assert exit_.value.code == 2
    assert capsys.readouterr().err.rstrip().endswith(cure)
    assert [path.name for path in here.iterdir()] == ["there"]
    assert not list(Path("there").iterdir())
