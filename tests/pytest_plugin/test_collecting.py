"""``pytest --customops``: what is collected, under which ids, and how it is shown."""

from __future__ import annotations

import pytest
from helpers.projects import Project

from customops.checking import _run

FEW = ("--customops-checks", "test_schema,test_faketensor")

FAILURE = """\
the fake impl promises what the operator does not return: output 0: Stride mismatch
  check:    test_faketensor
  input:    sample 1, simplified ({inputs} of this kind)
  call:     op(float32[2, 2] = [[1.0, 2.0], [3.0, 4.0]])
  expected: (1, 2) (the operator)
  got:      (2, 1) (its fake impl)
"""


def test_each_op_sample_and_check_is_a_test(project: Project) -> None:
    project.write("test_own.py", "def test_own(): pass")
    assert project.outcomes("--customops", f"{project.ops}.py", *FEW) == {
        "OPS.py::NS::double[sample1-inputs]": "passed",
        "OPS.py::NS::double[sample1-test_schema]": "passed",
        "OPS.py::NS::double[sample1-test_faketensor]": "passed",
        "OPS.py::NS::double[sample2-inputs]": "passed",
        "OPS.py::NS::double[sample2-test_schema]": "passed",
        "OPS.py::NS::double[sample2-test_faketensor]": "passed",
        "OPS.py::NS::flip[sample1-inputs]": "passed",
        "OPS.py::NS::flip[sample1-test_schema]": "passed",
        "OPS.py::NS::flip[sample1-test_faketensor]": "failed",
        "OPS.py::NS::bare[samples]": "skipped",
    }


def test_a_failure_is_shown_as_check_shows_it(project: Project) -> None:
    said = project.run("--customops", f"{project.ops}.py", "--customops-ops", "*::flip", *FEW, status=1)
    assert FAILURE.format(inputs="3 inputs") in said
    assert "Traceback" not in said
    assert "faketensor.py" not in said  # no frame of the checker
    assert "again:    pytest --customops OPS.py -k 'NS::flip[sample1-test_faketensor]'" in said
    assert "FAILED OPS.py::NS::flip[sample1-test_faketensor] - the" in said


def test_the_command_that_is_shown_selects_the_test(project: Project) -> None:
    name = f"{project.ns}::flip[sample1-test_faketensor]"
    assert project.outcomes("--customops", f"{project.ops}.py", "-k", name) == {
        "OPS.py::NS::flip[sample1-test_faketensor]": "failed"
    }


def test_modules_folders_and_packages_are_targets(project: Project) -> None:
    project.write("lib_NS/kernels/one.py".replace("NS", project.ns), "import OPS")
    package = f"pkg_{project.ns}"
    project.write(f"src/{package}/__init__.py", f"import {package}.ops")
    project.write(f"src/{package}/ops.py", "import torch\nfrom customops import custom_op\n")
    (project.pytester.path / f"src/{package}/ops.py").write_text(
        (project.pytester.path / f"{project.ops}.py").read_text().replace(project.ns, f"{project.ns}_p")
    )
    quick = ("--customops-checks", "test_schema", "--collect-only", "-q")
    module = project.run("--customops", project.ops, *quick, status=0)
    assert "OPS::NS::double[sample1-test_schema]" in module
    folder = project.run("--customops", "src", "--customops", project.ops, *quick, status=0)
    assert "src::NS_p::flip[sample1-test_schema]" in folder
    assert "OPS::NS::double[sample1-test_schema]" in folder


@pytest.mark.parametrize("target", ["PKG", "PKG/"])
def test_a_package_that_imports_nothing_is_walked(project: Project, target: str) -> None:
    package = f"pkg_{project.ns}"
    project.write(f"{package}/__init__.py", "")
    (project.pytester.path / f"{project.ops}.py").rename(project.pytester.path / package / "inner.py")
    target = target.replace("PKG", package)
    said = project.run("--customops", target, "--customops-checks", "test_schema", "--collect-only", status=0)
    assert "pkg_NS itself defines no op; imported pkg_NS.inner" in said
    assert "NS::flip[sample1-test_schema]" in said


def test_samples_parametrize_a_test(project: Project) -> None:
    """pytest 9.2 warns about iterators."""
    project.write(
        "test_own.py",
        "import pytest\nimport OPS as ops\n\n@pytest.mark.parametrize('sample', ops.double.samples(), ids=str)\n"
        "def test_double(sample, opcheck): opcheck(ops.double, sample.args, sample.kwargs)\n",
    )
    assert "2 passed" in project.run("-W", "error", status=0)


def test_tests_are_collected_too_if_they_are_named_or_the_option_is_always_on(project: Project) -> None:
    project.write("test_own.py", "def test_own(): pass")
    options = ("--customops-ops", "*::bare")
    assert "2 tests collected" in project.run("--customops", project.ops, *options, "test_own.py", "--collect-only")
    assert "1 test collected" in project.run("--customops", project.ops, *options, "--collect-only")
    ini = (project.pytester.path / "pytest.ini").read_text()
    project.write("pytest.ini", ini.replace("--strict-markers", "--strict-markers --customops OPS"))
    assert "2 tests collected" in project.run(*options, "--collect-only")


def test_last_failed_and_markers_select(project: Project) -> None:
    project.write("test_own.py", "def test_own(): pass")
    arguments = ("--customops", project.ops, *FEW)
    project.run(*arguments, status=1)
    assert project.outcomes(*arguments, "--lf") == {"OPS::NS::flip[sample1-test_faketensor]": "failed"}
    assert project.outcomes(*arguments, "test_own.py", "-m", "not customops") == {"test_own.py::test_own": "passed"}


def test_a_check_is_not_told_twice(project: Project) -> None:
    """What fails since the fake impl is wrong is skipped, whether that has run before or not."""
    project.write(
        f"{project.ops}.py",
        """
import torch
from torch import Tensor
from customops import custom_op

@custom_op("NS::wide", mutates_args=())
def wide(x: Tensor) -> Tensor:
    return x * 2

wide.register_fake(lambda x: x.new_empty((*x.shape, 2)))

@wide.register_samples
def _():
    yield (torch.randn(3),)
""",
    )
    checks = "test_faketensor,test_symbolic_sizes"
    arguments = ("--customops", project.ops, "--customops-checks", checks, "-rs")
    said = project.run(*arguments, status=1)
    assert "test_faketensor fails, which may be the cause" in said
    alone = project.outcomes(*arguments, "-k", "symbolic_sizes")
    assert set(alone.values()) == {"failed"}  # where the cause is not among what runs


def test_samples_are_the_same_in_each_test(project: Project) -> None:
    project.write(
        f"{project.ops}.py",
        """
import torch
from torch import Tensor
from customops import custom_op

@custom_op("NS::same", mutates_args=())
def same(x: Tensor) -> Tensor:
    with open("seen", "a") as file:
        print(x.shape, x.sum().item(), file=file)
    return x * 2

same.register_fake(torch.empty_like)

@same.register_samples(fixed=("size", "layout", "dtype", "value"))
def _():
    yield (torch.randn(int(torch.randint(1, 9, ()))),)
""",
    )
    name = f"{project.ns}::same"
    for check in ("test_schema", "test_faketensor"):
        project.run("--customops", project.ops, "-k", f"{name} and {check}", "--customops-checks", check, status=0)
    seen = (project.pytester.path / "seen").read_text().splitlines()
    assert len(set(seen)) == 1


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("--customops", "nothing_here"), 2, "no module named 'nothing_here'"),
        (("--customops", "nothing.py"), 2, "no such file: nothing.py"),
        (("--customops", "empty.py"), 2, "empty.py defines no op itself"),
        (("--customops", "raises.py"), 2, "ZeroDivisionError"),
        (("--customops", "OPS", "--customops-ops", "x::*"), 2, "no op matches --customops-ops x::*"),
        (
            ("--customops", "OPS", "--customops-checks", "test_all"),
            4,
            "--customops-checks: no check test_all; there are test_schema",
        ),
        (("--customops", "OPS", "--customops-effort", "some"), 4, "invalid choice: 'some'"),
        (("--customops-mode", "tests"), 4, "write --customops-mode=sample tests"),
    ],
)
def test_what_makes_no_sense_is_refused(
    project: Project, arguments: tuple[str, ...], status: int, message: str
) -> None:
    project.write("empty.py", "import torch")
    project.write("raises.py", "1 / 0")
    said = project.run(*[argument.replace("OPS", project.ops) for argument in arguments], status=status)
    assert message in said
    if status == 2:
        (summary,) = [line for line in said.splitlines() if line.startswith("ERROR ")]
        assert " - " in summary  # why, in short


def test_samples_that_cannot_be_made_fail(project: Project) -> None:
    text = (project.pytester.path / f"{project.ops}.py").read_text()
    project.write(f"{project.ops}.py", text + "\n\n@bare.register_samples\ndef _():\n    yield 1 / 0\n")
    said = project.run("--customops", project.ops, "--customops-ops", "*::bare", status=1)
    assert "NS::bare: the samples function raises" in said
    assert "yield 1 / 0" in said


def test_a_sample_that_the_op_refuses_is_a_fault_once(project: Project) -> None:
    text = (project.pytester.path / f"{project.ops}.py").read_text()
    project.write(f"{project.ops}.py", text + "\n\n@bare.register_samples\ndef _():\n    yield (torch.ones(2), 3)\n")
    said = project.run("--customops", project.ops, "--customops-ops", "*::bare", *FEW, status=1)
    assert "a sample does not fit the operator" in said


def test_what_was_left_out_of_a_slow_op_is_said(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_run._SLOW, "normal", -1.0)
    said = project.run("--customops", f"{project.ops}.py", "--customops-ops", "*::double", *FEW, status=0)
    assert "NS::double[sample1-inputs]: incomplete: inputs left out (-1 s)" in said
