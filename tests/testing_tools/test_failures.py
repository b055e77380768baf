"""The failures file: its form, its validation, and its safety when several write it."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from helpers.damaged import damaged
from helpers.warm import PYTHON

from customops.testing import (
    DEFAULT_TEST_UTILS,
    FailuresDict,
    FailuresDictError,
    failures,
    validate_failures_dict_structure,
)

ROOT = Path(__file__).parents[2]


def entry(status: str = "xfail", comment: str = "") -> dict[str, str]:
    return {"comment": comment, "status": status}


@pytest.fixture(autouse=True)
def _not_accepting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_OPCHECK_ACCEPT", raising=False)
    monkeypatch.delenv("CUSTOMOPS_OPCHECK_ACCEPT", raising=False)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "failures.json"


# The file -------------------------------------------------------------------------------------------------------


@pytest.mark.parity(92)
def test_format_of_the_file(path: Path) -> None:
    FailuresDict(path, {"ns::b": {"T.test_schema__test_x": entry()}, "ns::a": {"T.z": entry(), "T.y": entry()}}).save()
    text = path.read_text()
    document = json.loads(text)
    assert sorted(document) == ["_description", "_version", "data"]
    assert document["_version"] == 1
    assert document["data"]["ns::b"] == {"T.test_schema__test_x": {"comment": "", "status": "xfail"}}
    assert text == json.dumps(document, indent=2, sort_keys=True) + "\n"


@pytest.mark.parity(92)
def test_what_was_saved_is_loaded(path: Path) -> None:
    data = {"ns::f": {"T.test_schema__test_x": entry("skip", "why: é")}}
    FailuresDict(path, data).save()
    assert FailuresDict.load(path).data == data


@pytest.mark.parity(92)
@pytest.mark.parametrize("edit", [str.strip, lambda text: text.replace("  ", " "), lambda text: text + "\n"])
def test_loading_verifies_the_format(path: Path, edit: Any) -> None:
    FailuresDict(path, {"ns::f": {"T.test_schema__test_x": entry()}}).save()
    path.write_text(edit(path.read_text()))
    with pytest.raises(FailuresDictError, match="is not formatted") as caught:
        FailuresDict.load(path)
    assert isinstance(caught.value, RuntimeError)
    assert "PYTORCH_OPCHECK_ACCEPT=1" in str(caught.value)


@pytest.mark.parity(92)
@pytest.mark.parametrize("switch", ["PYTORCH_OPCHECK_ACCEPT", "CUSTOMOPS_OPCHECK_ACCEPT"])
def test_accepting_puts_the_format_right(path: Path, monkeypatch: pytest.MonkeyPatch, switch: str) -> None:
    FailuresDict(path, {"ns::f": {"T.test_schema__test_x": entry()}}).save()
    text = path.read_text()
    path.write_text(json.dumps(json.loads(text)))
    monkeypatch.setenv(switch, "1")
    FailuresDict.load(path)
    assert path.read_text() == text


def test_file_of_another_tool_keeps_its_description(path: Path) -> None:
    document = {"_description": "from torch", "_version": 1, "data": {"ns::f": {}}}
    path.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")
    failures = FailuresDict.load(path)
    failures.set_status("ns::g", "T.test_schema__test_x", "xfail")
    failures.save()
    saved = json.loads(path.read_text())
    assert saved["_description"] == "from torch"
    assert saved["data"] == {"ns::f": {}, "ns::g": {"T.test_schema__test_x": entry()}}


@pytest.mark.parametrize("create_file", [True, False])
def test_missing_file(path: Path, create_file: bool) -> None:
    if not create_file:
        with pytest.raises(FileNotFoundError):
            FailuresDict.load(path)
        return
    assert FailuresDict.load(path, create_file=True).data == {}
    assert FailuresDict.load(str(path)).data == {}


def test_empty_file_is_an_empty_dict(path: Path) -> None:
    path.write_text("")
    assert FailuresDict.load(path).data == {}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<<<<<<< ours", "not JSON"),
        ("[]", 'no dict "data"'),
        ('{"_version": 1}', 'no dict "data"'),
        ('{"data": {}}', "another version"),
        ('{"_version": 2, "data": {}}', "another version"),
    ],
)
def test_damaged_file(path: Path, text: str, problem: str) -> None:
    path.write_text(text)
    with pytest.raises(FailuresDictError, match=problem):
        FailuresDict.load(path)
    with pytest.raises(FailuresDictError, match=problem):
        FailuresDict(path, {"ns::f": {"T.t": entry()}}).save()
    assert path.read_text() == text


def test_damaged_in_any_way(path: Path) -> None:
    FailuresDict(path, {"ns::f": {"T.test_schema__test_x": entry("xfail", "é")}}).save()
    refused = 0
    for data in damaged(path.read_text()):
        path.write_bytes(data)
        try:
            failures = FailuresDict.load(path)
        except FailuresDictError:
            refused += 1
        else:  # other entries, but entries
            assert all(
                isinstance(x, str) for tests in failures.data.values() for one in tests.values() for x in one.values()
            )
            failures.set_status("ns::g", "T.t", "xfail")
            failures.save()
    assert refused > 300


# Statuses -------------------------------------------------------------------------------------------------------


def test_status() -> None:
    failures = FailuresDict("", {"ns::f": {"T.a": entry("skip", "slow")}})
    assert failures.get_status("ns::f", "T.a") == "skip"
    assert failures.get_status("ns::f", "T.b") == failures.get_status("ns::g", "T.a") == "xsuccess"
    failures.set_status("ns::f", "T.a", "xfail")
    failures.set_status("ns::g", "T.a", "xfail", comment="new")
    assert failures.data == {"ns::f": {"T.a": entry("xfail", "slow")}, "ns::g": {"T.a": entry("xfail", "new")}}


def test_expected_success_leaves_nothing_behind() -> None:
    failures = FailuresDict("", {"ns::f": {"T.a": entry()}})
    failures.set_status("ns::f", "T.a", "xsuccess")
    failures.set_status("ns::g", "T.a", "xsuccess")
    assert failures.data == {}


def test_unknown_status_is_refused() -> None:
    with pytest.raises(FailuresDictError, match="got status=success"):
        FailuresDict("", {}).set_status("ns::f", "T.a", "success")


# Validation -----------------------------------------------------------------------------------------------------


class Case:
    def test_delayed_error(self) -> None: ...


def validate(test_name: str, status: str = "xfail", **more: str) -> None:
    failures = FailuresDict("", {"ns::f": {test_name: {**entry(status), **more}}})
    validate_failures_dict_structure(failures, DEFAULT_TEST_UTILS, Case)


@pytest.mark.parity(93)
@pytest.mark.parametrize(
    "test_name",
    [
        "Case.test_schema__test_delayed_error",
        "Case.test_schema__test_delayed_error[a.b-0.5]",
        "Another.test_schema__test_of_it",
    ],
)
def test_valid_entries(test_name: str) -> None:
    validate(test_name)


@pytest.mark.parity(93)
def test_bad_status() -> None:
    with pytest.raises(RuntimeError, match="got status=success"):
        validate("Case.test_aot_dispatch_dynamic__test_delayed_error", "success")


@pytest.mark.parity(93)
@pytest.mark.parametrize(
    "name", ["test_aot_dispatch__test_delayed_error", "test_delayed_error", "test_schema_test_delayed_error"]
)
def test_name_of_no_check(name: str) -> None:
    with pytest.raises(RuntimeError, match="should begin with one of"):
        validate(f"Case.{name}")


@pytest.mark.parity(93)
def test_test_that_is_not_there() -> None:
    with pytest.raises(RuntimeError, match="does not exist on the TestCase"):
        validate("Case.test_aot_dispatch_dynamic__test_delayed_error_nopenopenope")


def test_other_keys() -> None:
    with pytest.raises(RuntimeError, match="keys"):
        validate("Case.test_schema__test_delayed_error", reason="none")


# Several writers ------------------------------------------------------------------------------------------------


def test_writers_lose_nothing(path: Path) -> None:
    FailuresDict(path, {"ns::old": {"T.a": entry(), "T.b": entry()}}).save()
    one, two = FailuresDict.load(path), FailuresDict.load(path)
    one.set_status("ns::f", "T.a", "xfail")
    one.set_status("ns::old", "T.a", "xsuccess")
    two.set_status("ns::g", "T.a", "skip", comment="why")
    two.data["ns::old"]["T.b"] = entry("skip")  # by hand, as moved code may
    one.save()
    two.save()
    expected = {"ns::old": {"T.b": entry("skip")}, "ns::f": {"T.a": entry()}, "ns::g": {"T.a": entry("skip", "why")}}
    assert FailuresDict.load(path).data == two.data == expected


def test_threads_lose_nothing(path: Path) -> None:
    def write(i: int) -> None:
        failures = FailuresDict.load(path, create_file=True)
        for k in range(5):
            failures.set_status(f"ns::f{i}", f"T.t{k}", "xfail")
            failures.save()

    threads = [threading.Thread(target=write, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    data = FailuresDict.load(path).data
    assert {name: len(tests) for name, tests in data.items()} == {f"ns::f{i}": 5 for i in range(8)}
    assert os.listdir(path.parent) == [path.name]


WRITER = """
import sys
from customops.testing.failures import FailuresDict
failures = FailuresDict.load(sys.argv[1], create_file=True)
print("ready", flush=True)
sys.stdin.readline()
for k in range(30):
    failures.set_status("ns::shared", f"T.{sys.argv[2]}_{k}", "xfail")
    failures.save()
"""


@pytest.mark.process
@pytest.mark.parity(92)
def test_processes_lose_nothing(path: Path) -> None:
    command = [PYTHON, "-c", WRITER, str(path)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    writers = [subprocess.Popen([*command, str(i)], **pipes) for i in range(3)]
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        writer.stdin.write("\n")
        writer.stdin.flush()
    for writer in writers:
        writer.communicate()
        assert writer.returncode == 0
    assert len(FailuresDict.load(path).data["ns::shared"]) == 90
    assert os.listdir(path.parent) == [path.name]


def test_failed_write_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FailuresDict(path, {"ns::f": {"T.a": entry()}}).save()
    before = path.read_text()

    def fail(*args: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        FailuresDict(path, {"ns::g": {"T.a": entry()}}).save()
    assert path.read_text() == before
    assert os.listdir(path.parent) == [path.name]


def test_unchanged_file_is_not_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FailuresDict(path, {"ns::f": {"T.a": entry()}}).save()
    monkeypatch.setattr(failures, "replace", None)
    FailuresDict.load(path).save()


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX modes and links")
def test_mode_and_link_are_kept(path: Path, tmp_path: Path) -> None:
    FailuresDict(path, {}).save()
    path.chmod(0o640)
    link = tmp_path / "link.json"
    link.symlink_to(path)
    FailuresDict(link, {"ns::f": {"T.a": entry()}}).save()
    assert link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert "ns::f" in path.read_text()


def test_lock_left_by_a_killed_process_does_not_block(path: Path) -> None:
    Path(f"{path}.lock").touch()
    FailuresDict(path, {}).save()
    assert os.listdir(path.parent) == [path.name]
