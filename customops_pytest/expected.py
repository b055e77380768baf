"""Checks that are expected to fail: a file that several suites can share and a run can update, and markers of tests.

    [[xfail]]
    op = "mylib::flip"
    check = "test_faketensor"
    input = "sample1"
    reason = "the fake impl promises contiguous strides"

An ``[[xfail]]`` has to fail, a ``[[skip]]`` is not run. `input` is a sample, or a kind of call as ``--customops-mode``
names it. Instead of it, `test` names a test, for all calls of the op there. A marker says the same of one test::

    @pytest.mark.customops_xfail("mylib::flip", "test_faketensor", reason="strides, see #12")
"""

from __future__ import annotations

import fnmatch
import itertools
import json
import os
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import pytest

from customops import CustomOpsError
from customops.checking._check import INPUTS
from customops.checks import CHECKS, UsageError
from customops.checks._table import RETIRED
from customops.testing import FailuresDict, failures

Status = Literal["xfail", "skip"]
STATUSES: tuple[Status, ...] = ("xfail", "skip")

_HEAD = """\
# Checks of ops that are expected to fail. `pytest --customops-update` writes this file; reasons are yours to write.
"""
_FIX = (
    'write [[xfail]] or [[skip]], and below it op = "...", check = "...", input = "..." or test = "...", reason = "..."'
)


class ExpectedError(CustomOpsError):
    """A file of expected failures cannot be used."""


class Key(NamedTuple):
    """The subject of an entry."""

    op: str
    check: str
    input: str = ""
    test: str = ""


@dataclass
class Mark:
    """Checks of an op that are expected to fail, or are not run, and how they went."""

    op: str  #: its name, or a pattern
    checks: tuple[str, ...]  #: their names; none for all
    reason: str
    status: Status = "xfail"
    key: Key | None = None  #: of the entry of the file that it is from
    failed: int = 0
    passed: int = 0

    @staticmethod
    def of(key: Key, reason: str, status: Status = "xfail") -> Mark:
        return Mark(key.op, (key.check,), reason, status, key)

    def covers(self, op: str, check: str) -> bool:
        return fnmatch.fnmatchcase(op, self.op) and (not self.checks or check in self.checks)

    def note(self, failed: bool) -> None:
        """Count a check that the mark covers."""
        self.failed, self.passed = self.failed + failed, self.passed + (not failed)

    def toml(self) -> str:
        """Return the entry of the file."""
        assert self.key is not None
        lines = [f"[[{self.status}]]"]
        for name, value in (self.key._asdict() | {"reason": self.reason}).items():
            if value:  # a basic string of TOML: what JSON escapes is escaped alike there, but for DEL
                text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
                lines.append(f"{name} = {text}")
        return "\n".join(lines) + "\n"

    def __str__(self) -> str:
        return f"{self.op}: {', '.join(self.checks) or 'every check'} ({self.reason})"


class Expected:
    """The entries of a file, by what they are about. The file need not exist.

    A failures dict of torch (`is_json`) is read and converted, and never written.
    """

    def __init__(self, path: str, entries: Mapping[Key, Mark]) -> None:
        self.path, self.is_json, self.entries = path, path.endswith(".json"), entries

    @staticmethod
    def load(path: str) -> Expected:
        """Read a file; a missing file has no entries. Raises ExpectedError if it has another form."""
        if not os.path.exists(path):
            return Expected(path, {})
        if path.endswith(".json"):
            return Expected(path, dict(_from_failures_dict(path)))
        return Expected(path, {key: mark for key, (mark, _) in _parsed(path, failures.read(path))[1].items()})

    def update(self, add: Mapping[Key, str], remove: Collection[Key]) -> str:
        """Write new entries with these reasons, and leave out others; returns the path.

        Entries that others wrote meanwhile stay. A comment stays, too, with the entry that follows it. A failures dict
        is converted: the entries go to a TOML file beside it.
        """
        path = self.path if not self.is_json else self.path.removesuffix(".json") + ".toml"

        def updated(before: str) -> str:
            head, entries = _parsed(path, before or _HEAD)
            blocks = {key: f"\n{Mark.of(key, reason).toml()}" for key, reason in add.items()}
            if self.is_json:
                blocks |= {key: f"\n{mark.toml()}" for key, mark in self.entries.items()}
            blocks |= {key: text for key, (_, text) in entries.items()}
            return head + "".join(text for key, text in sorted(blocks.items()) if key not in remove)

        failures.rewrite(path, updated)
        return path


def _parsed(path: str, text: str) -> tuple[str, dict[Key, tuple[Mark, str]]]:
    """The comment at the head of a file, and its entries, each with its text and what comments stand before it."""
    lines = [line + "\n" for line in text.splitlines()]
    head = [*itertools.takewhile(lambda line: line.startswith("#"), lines)]
    blocks: list[str] = []
    before = ""
    for line in lines[len(head) :]:
        if not line.strip() or line.startswith("#"):
            before += line
            continue
        if line.startswith("[[") or not blocks:
            blocks.append("")
        blocks[-1] += before + line
        before = ""
    try:
        tomllib.loads(text)  # its errors name the lines of the file
        documents = [tomllib.loads(block) for block in blocks]
    except tomllib.TOMLDecodeError as error:
        raise ExpectedError("the file of expected failures is not TOML", where=path, got=str(error)) from None
    entries: dict[Key, tuple[Mark, str]] = {}
    for block, document in zip(blocks, documents, strict=True):
        key, mark = _entry(path, document)
        if key.check in RETIRED:
            continue
        if key in entries:
            raise ExpectedError("the file says two things of one check", op=key.op, where=path, got=mark.toml())
        entries[key] = mark, block
    return "".join(head), entries


def _entry(path: str, document: dict[str, Any]) -> tuple[Key, Mark]:
    status = next((status for status in STATUSES if status in document), None)
    tables = document[status] if status is not None else None
    if status is None or not isinstance(tables, list) or len(tables) != 1 or len(document) != 1:
        got = ", ".join(document)
        raise ExpectedError("the file holds other things than expected failures", where=path, got=got, fix=_FIX)
    fields: dict[str, Any] = tables[0]
    problem = None
    if unknown := set(fields) - {*Key._fields, "reason"}:
        problem = f"it has {', '.join(sorted(unknown))}"
    elif not all(isinstance(value, str) and value for value in fields.values()):
        problem = "a field is empty, or no string"
    elif missing := [name for name in ("op", "check", "reason") if name not in fields]:
        problem = f"it has no {', '.join(missing)}"
    elif ("input" in fields) == ("test" in fields):
        problem = "it has to have either input or test"
    elif fields["check"] not in (*CHECKS, *RETIRED, INPUTS):
        problem = f"there is no check {fields['check']}; there are {', '.join((INPUTS, *CHECKS))}"
    if problem is not None:
        raise ExpectedError(
            f"an expected failure is not complete: {problem}",
            op=str(fields.get("op", "")) or None,
            where=path,
            got=json.dumps(fields, default=str),
            fix=_FIX,
        )
    reason = fields.pop("reason")
    key = Key(**fields)
    return key, Mark.of(key, reason, status)


def _from_failures_dict(path: str) -> Iterator[tuple[Key, Mark]]:
    for op, tests in FailuresDict.load(path).data.items():
        for name, record in tests.items():
            test_class, _, generated = name.partition(".")
            check = next((each for each in (*CHECKS, *RETIRED) if generated.startswith(f"{each}__")), None)
            if check is None:
                problem, form = "the name of a test in the failures dict begins with no check", "TestClass.check__test"
                raise ExpectedError(problem, op=op, where=path, expected=form, got=name)
            key = Key(op, check, test=f"{test_class}.{generated.removeprefix(f'{check}__')}")
            if check not in RETIRED and (status := record.get("status")) in STATUSES:
                yield key, Mark.of(key, record.get("comment") or f"from {os.path.basename(path)}", status)


NAME = "customops_xfail"
_MARKS = pytest.StashKey[list[Mark]]()


def names_of(item: pytest.Item) -> tuple[str, ...]:
    """How a file may name a test: by its id, and as ``Class.test``; with its parameters, and for all of them."""
    function = getattr(item, "originalname", None) or item.name.partition("[")[0]
    test_class = getattr(item, "cls", None)
    short = f"{test_class.__name__}.{function}" if test_class is not None else function
    return item.nodeid, item.nodeid.partition("[")[0], short


def marks_of(item: pytest.Item, expected: Expected) -> list[Mark]:
    """Return the marks of a test: its markers, those of its class and module, and the entries of the file for it."""
    if _MARKS in item.stash:
        return item.stash[_MARKS]
    marks = []
    for marker in item.iter_markers(NAME):
        names, reason, problem = marker.args, marker.kwargs.get("reason"), None
        if not names or not isinstance(names[0], str):
            problem = "it has to name an op"
        elif not isinstance(reason, str) or not reason or set(marker.kwargs) != {"reason"}:
            problem = "it takes a reason=, and nothing else by name"
        elif unknown := [str(name) for name in names[1:] if name not in CHECKS]:
            problem = f"there is no check {', '.join(unknown)}; there are {', '.join(CHECKS)}"
        if problem is not None:
            raise UsageError(
                f"the marker {NAME} cannot be read: {problem}",
                where=item.nodeid,
                fix=f'@pytest.mark.{NAME}("ns::op", "test_faketensor", reason="why")',
            )
        marks.append(Mark(names[0], tuple(names[1:]), str(reason)))
    tests = names_of(item)
    marks += [replace(mark) for key, mark in expected.entries.items() if key.test in tests]
    item.stash[_MARKS] = marks
    return marks
