"""The failures file: which generated tests are known to fail for which operators.

It is JSON, kept beside the tests and in one form, so that changes of it are easy to review::

    {
      "_description": "...",
      "_version": 1,
      "data": {
        "ns::op": {
          "TestClass.test_schema__test_name": {"comment": "why", "status": "xfail"}
        }
      }
    }

(with one key a line). A test that is not in it has to pass. "xfail" has to fail, "skip" is not checked.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import json
import os
import re
import shutil
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from customops.errors import CustomOpsError, brief

if sys.platform == "win32":
    import msvcrt

    def _lock(descriptor: int) -> bool:
        """Wait for the lock, for 10 seconds at most; False if it was not had."""
        try:
            msvcrt.locking(descriptor, msvcrt.LK_LOCK, 1)
        except OSError:
            return False
        return True
else:
    import fcntl

    def _lock(descriptor: int) -> bool:
        """Wait for the lock. It goes when the descriptor is closed, also by the end of a process that was killed."""
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return True


@contextlib.contextmanager
def exclusive(path: str) -> Iterator[None]:
    """Only one thread of one process at a time is inside, for one path. Puts a file beside it meanwhile."""
    lock = os.path.realpath(path) + ".lock"
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        # Whoever had it before removed the file: the lock counts only on the file that now has the name.
        if _lock(descriptor):
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.stat(lock), os.fstat(descriptor)):
                    break
        os.close(descriptor)
    try:
        yield
    finally:
        if sys.platform == "win32":
            os.close(descriptor)  # an open file cannot be removed, one that another process has opened stays
            with contextlib.suppress(OSError):
                os.remove(lock)
        else:
            os.remove(lock)
            os.close(descriptor)


def rewrite(path: str, change: Callable[[str], str]) -> None:
    """Write what `change` makes of the text of a file, "" if there is none, while no other process does the same."""
    with exclusive(path):
        exists = os.path.exists(path)
        before = read(path) if exists else ""
        text = change(before)
        if text != before or not exists:
            replace(path, text)


def replace(path: str, text: str) -> None:
    """Write a file such that a reader gets the old text or the new."""
    path = os.path.realpath(path)
    temporary = f"{path}.{uuid.uuid4().hex}.tmp"
    try:
        with open(temporary, "x", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileNotFoundError):
            shutil.copymode(path, temporary)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)
        raise


def is_set(name: str) -> bool:
    """Is a switch of the environment on, by the name that torch's generated tests give it, or with CUSTOMOPS in it?"""
    return "1" in map(os.environ.get, (f"PYTORCH_{name}", f"CUSTOMOPS_{name}"))


def accepts_changes() -> bool:
    """Are failures files to be updated to what happens, instead of tests to fail?"""
    return is_set("OPCHECK_ACCEPT")


#: {operator: {"TestClass.check__test": {"comment": ..., "status": ...}}}
FailuresDictData = dict[str, dict[str, dict[str, str]]]
TEST_OPTIONS = ("xfail", "skip", "xsuccess")
VERSION = 1
DESCRIPTION = (
    "Known failures of the tests that customops.testing.generate_opcheck_tests makes. "
    "Run them with PYTORCH_OPCHECK_ACCEPT=1 to update this file."
)


class FailuresDictError(CustomOpsError, RuntimeError):
    """A failures file cannot be used: it is damaged, has another format, or does not match the tests."""


class FailuresDict:
    """The contents of a failures file.

    Several processes and threads can update one file: `save` writes the changes made to this object since it was last
    loaded or saved, and merges the changes that others made to the file in the meantime.

    Attributes:
        path: the file.
        data: its entries, as ``{operator: {"TestClass.check__test": {"comment": ..., "status": ...}}}``.
    """

    def __init__(self, path: str | os.PathLike[str], data: FailuresDictData) -> None:
        self.path = os.fspath(path)
        self.data = data
        self._saved: FailuresDictData = {}
        self._lock = threading.RLock()

    @staticmethod
    def load(path: str | os.PathLike[str], *, create_file: bool = False) -> FailuresDict:
        """Read a file. With `create_file`, create it if it does not exist.

        Raises:
            FailuresDictError: it is not a failures file, or not in the format that `save` writes. (With
                PYTORCH_OPCHECK_ACCEPT=1 the format is corrected instead.)
        """
        result = FailuresDict(path, {})
        if create_file and not os.path.exists(path):
            result.save()
            return result
        text = read(result.path)
        document = _parse(result.path, text)
        result.data, result._saved = document["data"], copy.deepcopy(document["data"])
        written = _text(document)
        if text != written and text.strip():
            if not accepts_changes():
                lines = difflib.unified_diff(text.splitlines(), written.splitlines(), "is", "should be", lineterm="")
                problem = "the failures file is not formatted as it is written:\n" + "\n".join(list(lines)[:60])
                fix = "apply the difference, or run the tests with PYTORCH_OPCHECK_ACCEPT=1"
                raise FailuresDictError(problem, where=result.path, fix=fix)
            result.save()
        return result

    def save(self) -> None:
        """Write the changes of this object to the file, and read the changes that others made to the file."""
        data: FailuresDictData = {}

        def merged(before: str) -> str:
            document = _parse(self.path, before)
            data.update(_merge(document["data"], self._saved, self.data))
            return _text(document | {"data": data})

        with self._lock:
            rewrite(self.path, merged)
            self.data, self._saved = data, copy.deepcopy(data)

    def get_status(self, qualname: str, test_name: str) -> str:
        """The expected status of a test: "xfail", "skip", or "xsuccess" if it must pass."""
        with self._lock:
            return self.data.get(qualname, {}).get(test_name, {}).get("status", "xsuccess")

    def set_status(self, qualname: str, test_name: str, status: str, *, comment: str | None = None) -> None:
        """Set the expected status of a test. Without `comment`, an existing comment is kept."""
        if status not in TEST_OPTIONS:
            raise _bad_status(qualname, status)
        with self._lock:
            tests = self.data.get(qualname, {})
            if status == "xsuccess":
                if tests.pop(test_name, None) and not tests:
                    del self.data[qualname]
                return
            entry = self.data.setdefault(qualname, tests).setdefault(test_name, {"comment": ""})
            entry["status"] = status
            if comment is not None:
                entry["comment"] = comment


def validate_failures_dict_structure(failures: FailuresDict, test_utils: Sequence[str], testcase: type) -> None:
    """Raise FailuresDictError if an entry cannot belong to a generated test.

    Args:
        failures: the entries to validate. For entries of other test classes, the name of the original test is not
            validated.
        test_utils: the names of the checks for which tests are generated.
        testcase: the class in which they are generated.
    """
    for qualname, tests in failures.data.items():
        for test_name, entry in tests.items():
            if set(entry) != {"comment", "status"}:
                problem = f"in the failures file, {test_name} has other keys than it should"
                got = ", ".join(entry) or "none"
                raise FailuresDictError(problem, op=qualname, expected="comment and status", got=got)
            if entry["status"] not in TEST_OPTIONS:
                raise _bad_status(qualname, entry["status"])
            test_class, _, generated = test_name.partition(".")
            check = next((name for name in test_utils if generated.startswith(f"{name}__")), None)
            if check is None:
                problem = f"in the failures file, the name of the test {test_name!r} should begin with one of "
                problem += f"{', '.join(test_utils)} (after the name of its class)"
                raise FailuresDictError(problem, op=qualname)
            original = re.sub(r"\[.*\]$", "", generated.removeprefix(f"{check}__"), flags=re.DOTALL)
            if test_class == testcase.__name__ and not hasattr(testcase, original):
                problem = f"in the failures file, {test_name!r} is {check} on {original}, which does not exist on the "
                fix = "correct the entry if the test was renamed, remove it if it is gone"
                raise FailuresDictError(f"{problem}TestCase {test_class}", op=qualname, fix=fix)


def _bad_status(qualname: str, status: Any) -> FailuresDictError:
    problem = f"in the failures file, got status={status}"
    return FailuresDictError(problem, op=qualname, expected=", ".join(TEST_OPTIONS))


def read(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        try:
            return file.read()
        except UnicodeDecodeError as error:
            raise FailuresDictError("the failures file is not UTF-8", where=path, got=str(error)) from error


def _parse(path: str, text: str) -> dict[str, Any]:
    if not text.strip():
        return {"_description": DESCRIPTION, "_version": VERSION, "data": {}}
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FailuresDictError("the failures file is not JSON", where=path, got=str(error)) from error
    if not isinstance(document, dict) or not isinstance(document.get("data"), dict):
        raise FailuresDictError('the failures file has no dict "data"', where=path)
    if document.get("_version") != VERSION:
        problem = "the failures file is of another version"
        got = repr(document.get("_version"))
        raise FailuresDictError(problem, where=path, expected=f'"_version": {VERSION}', got=got)
    for qualname, tests in document["data"].items():
        entries = tests.values() if isinstance(tests, dict) else [None]
        if not all(isinstance(entry, dict) and all(isinstance(x, str) for x in entry.values()) for entry in entries):
            problem = "in the failures file, an operator has other entries than it should"
            expected = '{"TestClass.check__test": {"comment": "...", "status": "..."}}'
            raise FailuresDictError(problem, op=qualname, where=path, expected=expected, got=brief(tests, 200))
    return document


def _text(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=2, sort_keys=True) + "\n"


def _merge(theirs: FailuresDictData, base: FailuresDictData, ours: FailuresDictData) -> FailuresDictData:
    """`theirs`, with what `ours` changed in `base`."""
    merged, before, now = (
        {(qualname, name): entry for qualname, tests in data.items() for name, entry in tests.items()}
        for data in (theirs, base, ours)
    )
    for key in before.keys() | now.keys():
        if key not in now:
            merged.pop(key, None)
        elif now[key] != before.get(key):
            merged[key] = now[key]
    # An operator without entries is kept where someone wrote it down: it makes a test of its tag.
    result: FailuresDictData = {name: {} for name in [*theirs, *ours] if not theirs.get(name) and not base.get(name)}
    for (qualname, test_name), entry in merged.items():
        result.setdefault(qualname, {})[test_name] = copy.copy(entry)
    return result
