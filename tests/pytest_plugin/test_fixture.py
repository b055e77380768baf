"""The fixture `opcheck`, the marker, and a run that uses nothing of the plugin."""

from __future__ import annotations

import pytest
from helpers.projects import Project, plugin

HEAD = "import pytest, torch\nimport OPS as ops\n"
FAKE = '@pytest.mark.customops_xfail("NS::flip", "test_faketensor", reason="strides")\n'


def test_opcheck(project: Project) -> None:
    project.write(
        "test_own.py",
        HEAD
        + """
def test_right(opcheck):
    found = opcheck(ops.double, (torch.ones(2),), test_utils="test_schema")
    assert found == {"test_schema": "SUCCESS"}
    assert set(opcheck(ops.double, test_utils=["test_schema", "test_faketensor"]).values()) == {"SUCCESS"}

def test_wrong(opcheck):
    opcheck(ops.flip, (torch.ones(2, 3),), test_utils="test_faketensor")

def test_samples(opcheck):
    opcheck(ops.flip, test_utils="test_faketensor")

def test_no_samples(opcheck):
    opcheck(ops.bare)
""",
    )
    said = project.run(status=1)
    assert "1 passed" in said
    assert "3 failed" in said
    assert said.count("opcheck(op, ...): test_faketensor failed with NS::flip: the fake impl promises") == 2
    assert "faketensor.py" not in said
    assert "there are no inputs to check the operator on" in said


def test_derived_inputs(project: Project) -> None:
    chosen = "only=['test_schema', 'test_faketensor'], effort='quick'"
    project.write(
        "test_own.py",
        HEAD
        + f"""
def test_right(customops_check):
    report = customops_check(ops.double, {chosen})
    assert report.passed

def test_wrong(customops_check):
    customops_check(ops.flip, [(torch.ones(2, 3),)], {chosen})

def test_no_samples(customops_check):
    customops_check(ops.bare)
"""
        + FAKE
        + f"def test_expected(customops_check):\n    assert customops_check(ops.flip, {chosen}).failures\n",
    )
    said = project.run(status=1)
    assert "2 passed" in said
    assert "2 failed" in said
    assert "customops.check(op, ...): test_faketensor failed with NS::flip: the fake impl promises" in said
    assert "there are no samples to derive inputs from" in said
    assert "_check.py" not in said  # the lines of the error, and not those of the checker


def test_the_marker_is_strict(project: Project) -> None:
    project.write(
        "test_own.py",
        HEAD
        + FAKE
        + "def test_wrong(opcheck):\n    assert opcheck(ops.flip)['test_faketensor'] != 'SUCCESS'\n"
        + FAKE.replace("flip", "double")
        + "def test_right(opcheck):\n    opcheck(ops.double)\n"
        + FAKE.replace("faketensor", "schema")
        + "def test_another(opcheck):\n    opcheck(ops.flip, test_utils='test_faketensor')\n",
    )
    said = project.run(status=1)
    assert "expected to fail in this test, and does not: NS::double: test_faketensor (strides)" in said
    assert "ERROR test_own.py::test_right" in said
    assert "FAILED test_own.py::test_another" in said
    assert "1 failed, 2 passed, 1 error" in said


def test_the_marker_acts_on_the_mode(project: Project) -> None:
    project.write(
        "test_own.py",
        HEAD
        + FAKE.replace("NS::flip", "NS::*")
        + "def test_wrong():\n    ops.flip(torch.ones(2, 3))\n"
        + FAKE
        + "def test_right():\n    ops.flip(torch.ones(1, 3))\n"
        + FAKE
        + "def test_not_called():\n    pass\n",
    )
    arguments = ("--customops-mode=all", "--customops-checks", "test_faketensor")
    said = project.run(*arguments, status=1)
    assert "FAILED test_own.py::test_right - expected to fail in this test" in said
    assert "1 failed, 2 passed" in said


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        ("()", "it has to name an op"),
        ('("NS::flip")', "it takes a reason="),
        ('("NS::flip", reason="")', "it takes a reason="),
        ('("NS::flip", "test_all", reason="why")', "there is no check test_all"),
    ],
)
def test_a_marker_that_makes_no_sense(project: Project, mark: str, message: str) -> None:
    test = f"@pytest.mark.customops_xfail{mark}\ndef test_a(opcheck): pass\n"
    project.write("test_own.py", HEAD + test)
    said = project.run(status=1)
    assert f"the marker customops_xfail cannot be read: {message}" in said
    assert 'fix:      @pytest.mark.customops_xfail("ns::op", "test_faketensor", reason="why")' in said


def test_the_fixture_writes_the_file(project: Project) -> None:
    project.write("test_own.py", HEAD + "\ndef test_wrong(opcheck):\n    opcheck(ops.flip)\n")
    project.run("--customops-update", status=0)
    assert 'test = "test_own.py::test_wrong"' in project.read("customops_expected.toml")
    project.run(status=0)


def test_off(project: Project) -> None:
    """``-p no:customops`` leaves no option, marker or fixture."""
    project.write("test_own.py", "def test_a(opcheck): pass\n")
    off = ("-p", "no:customops") if not plugin() else ()
    result = project.pytester.runpytest_inprocess(*off)
    result.stdout.fnmatch_lines(["*fixture 'opcheck' not found*"])
    assert project.pytester.runpytest_inprocess(*off, "--customops", project.ops).ret == pytest.ExitCode.USAGE_ERROR


def test_without_options_nothing_is_loaded_or_said(project: Project) -> None:
    project.write(
        "test_own.py",
        "def test_a(request):\n    names = [name for name, _ in request.config.pluginmanager.list_name_plugin()]\n"
        "    assert not [name for name in names if name.startswith('customops_') and 'plugin' not in name]\n",
    )
    said = project.run("-q", status=0)
    assert "1 passed" in said
    assert "customops" not in said.replace("customops_", "")
