"""The file of expected failures: its form, what it means in a run, and how a run writes it."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from helpers.projects import Project

from customops_pytest.expected import Expected, ExpectedError, Key, Mark

FEW = ("--customops-checks", "test_schema,test_faketensor")
FILE = "customops_expected.toml"

HEAD = (
    "# Checks of ops that are expected to fail. `pytest --customops-update` writes this file; reasons are yours to "
    "write.\n"
)
FLIP = """
[[xfail]]
op = "NS::flip"
check = "test_faketensor"
input = "sample1"
reason = "strides"
"""
FLIP_CALLED = FLIP.replace("sample1", "x: float32 2d")
TEST = "import torch\nimport OPS as ops\n\ndef test_flip():\n    ops.flip(torch.ones(2, 3))\n"


# The file --------------------------------------------------------------------------------------------------------


def test_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / FILE
    path.write_text(FLIP + FLIP.replace("xfail", "skip").replace('input = "sample1"', "test = 'T.test_a'"))
    assert list(Expected.load(str(path)).entries.values()) == [
        Mark.of(Key("NS::flip", "test_faketensor", "sample1"), "strides"),
        Mark.of(Key("NS::flip", "test_faketensor", test="T.test_a"), "strides", "skip"),
    ]
    assert not Expected.load(str(tmp_path / "none.toml")).entries


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[xfail]\n", "is not TOML"),
        ("version = 1\n", "holds other things"),
        ("[[xpass]]\nop = 'a::b'\n", "holds other things"),
        ("[xfail]\nop = 'a::b'\n", "holds other things"),
        (FLIP.replace('reason = "strides"\n', ""), "it has no reason"),
        (FLIP.replace('"strides"', '""'), "a field is empty"),
        (FLIP.replace("faketensor", "faketensors"), "there is no check test_faketensors"),
        (FLIP.replace('input = "sample1"\n', ""), "either input or test"),
        (FLIP + "test = 'T.test_a'\n", "either input or test"),
        (FLIP + "kind = 'a'\n", "it has kind"),
        (FLIP + FLIP, "two things of one check"),
    ],
)
def test_other_forms_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / FILE
    path.write_text(text)
    with pytest.raises(ExpectedError, match=message) as raised:
        Expected.load(str(path))
    assert raised.value.where == str(path)


def test_removed_checks_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / FILE
    path.write_text(FLIP + FLIP.replace("faketensor", "first_calls"))
    expected = Expected.load(str(path))
    assert [key.check for key in expected.entries] == ["test_faketensor"]
    expected.update({}, [])
    assert "first_calls" not in path.read_text()
    dictionary = {"NS::flip": {"T.test_first_calls__test_a": {"comment": "", "status": "xfail"}}}
    (tmp_path / "failures.json").write_text(json.dumps({"_version": 1, "data": dictionary}, indent=2) + "\n")
    assert not Expected.load(str(tmp_path / "failures.json")).entries


def test_a_failures_dict_with_a_test_of_no_check_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "failures.json"
    entries = {"NS::flip": {"Flip.test_flip": {"comment": "", "status": "xfail"}}}
    document = {"_description": "", "_version": 1, "data": entries}
    path.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")
    with pytest.raises(ExpectedError, match="the name of a test in the failures dict begins with no check") as raised:
        Expected.load(str(path))
    assert (raised.value.op, raised.value.got) == ("NS::flip", "Flip.test_flip")
    assert raised.value.expected == "TestClass.check__test"
    assert raised.value.where == str(path)


def test_it_is_updated_and_keeps_what_people_wrote(tmp_path: Path) -> None:
    path = tmp_path / FILE
    by_hand = "\n# this one is for Ada\n" + FLIP.lstrip().replace('"strides"', '"""two\nlines"""  # why')
    path.write_text("# ours\n" + FLIP.replace("flip", "gone") + by_hand)
    expected = Expected.load(str(path))
    new = Key("NS::a", "test_schema", 'x: float32 2d, by: "\\"')
    expected.update({new: 'a "reason"\nand \x7f more'}, [Key("NS::gone", "test_faketensor", "sample1")])
    text = path.read_text()
    assert text.startswith("# ours\n")
    assert text.endswith(by_hand)
    entries = Expected.load(str(path)).entries
    assert [key.op for key in entries] == ["NS::a", "NS::flip"]
    assert entries[new].reason == 'a "reason"\nand \x7f more'
    assert expected.update({}, []) == str(path)
    assert path.read_text() == text
    assert [other.name for other in tmp_path.iterdir()] == [FILE]


def test_several_may_write_it_at_once(tmp_path: Path) -> None:
    path = str(tmp_path / FILE)
    suites = [Expected.load(path) for _ in range(8)]
    keys = [Key(f"ns::op{i}", "test_schema", "sample1") for i in range(8)]
    threads = [
        threading.Thread(target=suite.update, args=({key: "r"}, [])) for suite, key in zip(suites, keys, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(Expected.load(path).entries) == keys
    assert Path(path).read_text().startswith(HEAD)


# In a run --------------------------------------------------------------------------------------------------------


def test_what_is_expected_may_fail(project: Project) -> None:
    project.write(FILE, FLIP)
    said = project.run("--customops", project.ops, *FEW, "-rx", status=0)
    assert "8 passed, 1 skipped, 1 xfailed" in said
    assert "strides" in said


def test_and_has_to(project: Project) -> None:
    project.write(FILE, FLIP + FLIP.replace("faketensor", "schema"))
    said = project.run("--customops", project.ops, *FEW, status=1)
    assert "expected to fail in this test, and does not: NS::flip: test_schema (strides)" in said
    assert "FAILED OPS::NS::flip[sample1-test_schema]" in said


def test_what_is_skipped_does_not_run(project: Project) -> None:
    project.write("pytest.ini", "[pytest]\npythonpath = .\ncustomops_expected = mine.toml\n")
    project.write("mine.toml", FLIP.replace("xfail", "skip"))
    outcomes = project.outcomes("--customops", project.ops, *FEW)
    assert outcomes["OPS::NS::flip[sample1-test_faketensor]"] == "skipped"


def test_an_entry_for_a_sample_that_is_gone(project: Project) -> None:
    project.write(FILE, FLIP + FLIP.replace("sample1", "sample3") + FLIP.replace("flip", "of_another_suite"))
    said = project.run("--customops", project.ops, *FEW, status=1)
    assert "NS::flip: test_faketensor is expected to fail on sample3, but the op has no such sample" in said
    assert "another" not in said
    project.run("--customops", project.ops, *FEW, "--customops-update", status=0)
    assert project.read(FILE).count("[[xfail]]") == 2


def test_kinds_of_calls(project: Project) -> None:
    project.write("test_own.py", TEST)
    project.write(FILE, FLIP_CALLED)
    said = project.run("--customops-mode", *FEW, status=0)
    assert "1 passed, 1 failed as expected" in said
    project.write(FILE, FLIP_CALLED + FLIP_CALLED.replace("faketensor", "schema"))
    said = project.run("--customops-mode", *FEW, status=1)
    assert "NS::flip: test_schema on x: float32 2d is expected to fail, and does not" in said


def test_calls_in_one_test(project: Project) -> None:
    project.write("test_own.py", TEST + TEST.partition("\n\n")[2].replace("test_flip", "test_other"))
    project.write(FILE, FLIP.replace('input = "sample1"', 'test = "test_other"'))
    said = project.run("--customops-mode", *FEW, status=1)
    assert "FAILED test_own.py::test_flip" in said  # and not the other, although that is checked apart
    assert "1 failed, 1 passed" in said
    project.write(
        FILE,
        project.read(FILE)
        + FLIP.replace("faketensor", "schema").replace("input", "test").replace("sample1", "test_other"),
    )
    said = project.run("--customops-mode", *FEW, "-k", "other", status=1)
    assert "expected to fail in this test, and does not: NS::flip: test_schema (strides)" in said


def test_a_run_writes_the_file(project: Project) -> None:
    project.write("test_own.py", TEST)
    project.write(FILE, HEAD + FLIP.replace("faketensor", "schema") + FLIP_CALLED.replace("faketensor", "schema"))
    arguments = ("--customops", project.ops, "--customops-mode", *FEW, "test_own.py")
    said = project.run(*arguments, "--customops-update", status=0)
    assert "customops_expected.toml: 2 new expected failures, 2 removed" in said
    reason = "the fake impl promises what the operator does not return: output 0: Stride mismatch"
    assert project.read(FILE) == HEAD + (FLIP + FLIP_CALLED).replace("strides", reason)
    project.run(*arguments, status=0)
    assert "is as it should be" in project.run(*arguments, "--customops-update", status=0)


def test_a_failures_dict_of_torch_is_read_and_converted(project: Project) -> None:
    entries = {
        "NS::flip": {
            "Flip.test_faketensor__test_flip": {"comment": "", "status": "xfail"},
            "Flip.test_schema__test_flip": {"comment": "slow", "status": "skip"},
        }
    }
    document = {"_description": "", "_version": 1, "data": entries}
    project.write("failures.json", json.dumps(document, indent=2, sort_keys=True) + "\n")
    project.write(
        "test_own.py",
        "import unittest, torch\nimport OPS as ops\n\nclass Flip(unittest.TestCase):\n"
        "    def test_flip(self): ops.flip(torch.ones(2, 3))\n",
    )
    arguments = ("--customops-mode", *FEW, "--customops-expected")
    said = project.run(*arguments, "failures.json", status=0)
    assert "1 kind of input: 1 failed as expected" in said
    said = project.run(*arguments, "failures.json", "--customops-update", status=0)
    assert "it has those of failures.json: name it with --customops-expected" in said
    assert project.read("failures.toml") == HEAD + (
        '\n[[xfail]]\nop = "NS::flip"\ncheck = "test_faketensor"\ntest = "Flip.test_flip"\n'
        'reason = "from failures.json"\n'
        '\n[[skip]]\nop = "NS::flip"\ncheck = "test_schema"\ntest = "Flip.test_flip"\nreason = "slow"\n'
    )
    assert "1 failed as expected" in project.run(*arguments, "failures.toml", status=0)


def test_a_bad_file_ends_the_run(project: Project) -> None:
    project.write(FILE, "[[xfail]]\n")
    assert "an expected failure is not complete" in project.run("--customops", project.ops, status=4)


@pytest.mark.process
@pytest.mark.slow
def test_xdist(project: Project) -> None:
    """Workers send what they found to the one process that judges and writes."""
    project.write("test_own.py", TEST)
    arguments = ("--customops", project.ops, "--customops-mode", *FEW, "test_own.py", "-n", "1")
    said = project.run_process(*arguments, "--customops-update", status=0)
    assert "9 passed, 1 skipped, 1 xfailed" in said
    assert "NS::flip  1 call, 1 kind of input: 1 passed, 1 failed as expected\n" in said
    assert "customops_expected.toml: 2 new expected failures, 0 removed" in said
    assert project.read(FILE).count("[[xfail]]") == 2


def test_an_op_without_arguments(project: Project) -> None:
    project.write(
        "test_own.py",
        """
import torch

@torch.library.custom_op("NS::make", mutates_args=())
def make() -> torch.Tensor:
    return torch.zeros(3)

make.register_fake(lambda: torch.zeros(4))

def test_make():
    make()
""",
    )
    mode = ("--customops-mode", "--customops-checks", "test_faketensor")
    project.run(*mode, "--customops-update", status=0)
    assert "1 failed as expected" in project.run(*mode, status=0)


@pytest.mark.parametrize("options", [(), ("--continue-on-collection-errors",)])
def test_an_update_removes_nothing_if_something_was_not_collected(project: Project, options: tuple[str, ...]) -> None:
    """The entry is about an input that no longer fails, and the other target cannot be imported."""
    project.write(FILE, FLIP.replace("flip", "double"))
    project.write("raises.py", "1 / 0")
    arguments = ("--customops", project.ops, "--customops", "raises.py", *FEW, "--customops-update", *options)
    said = project.run(*arguments)
    assert "nothing is removed, since not all could be collected" in said
    assert "cannot be imported: ZeroDivisionError" in said.partition("short test summary info")[2]
    assert "is as it was" in said or options
    assert 'op = "NS::double"' in project.read(FILE)
    assert ('op = "NS::flip"' in project.read(FILE)) == bool(options)  # what fails is added
    said = project.run("--customops", project.ops, *FEW, "--customops-update", status=0)
    assert 'op = "NS::double"' not in project.read(FILE)
