"""Which checks are expected to fail: by a file that people read, several suites share and a run can update; by markers.

    [[xfail]]
    op = "mylib::flip"
    check = "test_faketensor"
    input = "sample1"
    reason = "the fake impl promises contiguous strides"

An ``[[xfail]]`` has to fail, a ``[[skip]]`` is not run. `input` is a sample, or a kind of call as ``--customops-mode``
names it; in its place `test` may stand, for all calls of the op in that test. A marker says the same of one test::

    @pytest.mark.customops_xfail("mylib::flip", "test_faketensor", reason="strides, see #12")
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import pytest

from customops import CustomOpsError
from customops.checking._check import INPUTS
from customops.checks import CHECKS, UsageError
from customops.testing import FailuresDict, failures

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # which pytest brings along

Status = Literal["xfail", "skip"]
STATUSES: tuple[Status, ...] = ("xfail", "skip")

_HEAD = """\
# Checks of ops that are expected to fail. `pytest --customops-update` writes this file; reasons are yours to write.
"""


class ExpectedError(CustomOpsError):
    """A file of expected failures cannot be used."""


class Key(NamedTuple):
    """What an entry is about."""

    op: str
    check: str
    input: str = ""
    test: str = ""


@dataclass(frozen=True)
class Entry:
    """One expected failure, and why."""

    key: Key
    status: Status
    reason: str

    def __str__(self) -> str:
        fields = [*self.key._asdict().items(), ("reason", self.reason)]
        lines = [f"{name} = {_quoted(value)}" for name, value in fields if value]
        return "\n".join([f"[[{self.status}]]", *lines]) + "\n"


class Expected:
    """The entries of a file.

    Attributes:
        path: the file, which need not exist.
        entries: by what they are about.
    """

    def __init__(self, path: str, entries: Iterable[Entry] = ()) -> None:
        self.path = path
        self.entries = {entry.key: entry for entry in entries}

    @staticmethod
    def load(path: str) -> Expected:
        """Read a file; one that is not there has no entries.

        Raises:
            ExpectedError: it is not in the form that this module writes.
        """
        if not os.path.exists(path):
            return Expected(path)
        if path.endswith(".json"):
            return Expected(path, _from_failures_dict(path))
        return Expected(path, [entry for _, entry in _blocks(path, failures.read(path))])

    @property
    def is_json(self) -> bool:
        """Is it a failures dict of torch? It is read and converted, and never written."""
        return self.path.endswith(".json")

    def find(self, op: str, check: str, input: str, tests: Iterable[str] = ()) -> Entry | None:
        """What is expected of a check of an op, on an input, in a test that has these names."""
        keys = [Key(op, check, input), *(Key(op, check, test=test) for test in tests)]
        return next((self.entries[key] for key in keys if key in self.entries), None)

    def names_test(self, op: str, tests: Collection[str]) -> bool:
        """Is something expected of an op in this one test?"""
        return any(key.op == op and key.test in tests for key in self.entries if key.test)

    def update(self, add: Mapping[Key, str], remove: Collection[Key]) -> str:
        """Write new entries with these reasons, and leave out others; returns the path.

        What others have written meanwhile stays, and so do comments, which belong to the entry that follows. A failures
        dict is converted: the entries go to a TOML file beside it.
        """
        path = self.path if not self.is_json else self.path.removesuffix(".json") + ".toml"

        def updated(before: str) -> str:
            before = before or _HEAD
            blocks = {entry.key: text for text, entry in _blocks(path, before)}
            if self.is_json:
                blocks |= {key: f"\n{entry}" for key, entry in self.entries.items() if key not in blocks}
            for key, reason in add.items():
                blocks.setdefault(key, f"\n{Entry(key, 'xfail', reason)}")
            kept = [text for key, text in sorted(blocks.items()) if key not in remove]
            return "".join([_split(before)[0], *kept])

        failures.rewrite(path, updated)
        return path


def _split(text: str) -> list[str]:
    """The comment at the head of a file, and its entries, each with the comments and empty lines before it."""
    head = re.match(r"(?:#.*\n)*", text)
    start = head.end() if head else 0
    if text.startswith("[["):
        start = 0
    blocks, lines = [], text[start:].splitlines(keepends=True)
    current: list[str] = []
    for i, line in enumerate(lines):
        current.append(line if line.endswith("\n") else f"{line}\n")
        ahead = next((later for later in lines[i + 1 :] if later.strip() and not later.startswith("#")), "")
        is_last = line.strip() and not line.startswith("#") and (not ahead or ahead.startswith("[["))
        if is_last:
            blocks.append("".join(current))
            current = []
    return [text[:start], *blocks]


def _blocks(path: str, text: str) -> list[tuple[str, Entry]]:
    """The entries of a file, each with its text."""
    document = _parsed(path, text)
    blocks = [(block, _parsed(path, block)) for block in _split(text)[1:]]
    entries = [(block, _entry(path, parsed)) for block, parsed in blocks]
    count = sum(len(tables) for tables in document.values() if isinstance(tables, list))
    if set(document) - set(STATUSES) or count != len(entries):
        others = ", ".join(sorted(set(document) - set(STATUSES))) or "an entry that is not a table of its own"
        raise ExpectedError("the file holds other things than expected failures", where=path, got=others, fix=_FIX)
    seen: set[Key] = set()
    for _, entry in entries:
        if entry.key in seen:
            raise ExpectedError("the file says two things of one check", op=entry.key.op, where=path, got=str(entry))
        seen.add(entry.key)
    return entries


_FIX = (
    'write [[xfail]] or [[skip]], and below it op = "...", check = "...", input = "..." or test = "...", reason = "..."'
)


def _parsed(path: str, text: str) -> dict[str, Any]:
    try:
        document: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ExpectedError("the file of expected failures is not TOML", where=path, got=str(error)) from None
    return document


def _entry(path: str, document: dict[str, Any]) -> Entry:
    status = next(iter(document), None)
    tables = document.get(str(status))
    if status not in STATUSES or not isinstance(tables, list) or len(tables) != 1 or len(document) != 1:
        raise ExpectedError("the file holds other things than expected failures", where=path, got=status, fix=_FIX)
    fields: dict[str, Any] = tables[0]
    problem = _problem(fields)
    if problem:
        raise ExpectedError(
            f"an expected failure is not complete: {problem}",
            op=str(fields.get("op", "")) or None,
            where=path,
            got=json.dumps(fields, default=str),
            fix=_FIX,
        )
    reason = fields.pop("reason")
    return Entry(Key(**fields), status, reason)


def _problem(fields: dict[str, Any]) -> str | None:
    unknown = set(fields) - {*Key._fields, "reason"}
    if unknown:
        return f"it has {', '.join(sorted(unknown))}"
    if not all(isinstance(value, str) and value for value in fields.values()):
        return "a field is empty, or no string"
    missing = [name for name in ("op", "check", "reason") if name not in fields]
    if missing:
        return f"it has no {', '.join(missing)}"
    if ("input" in fields) == ("test" in fields):
        return "it has to have either input or test"
    if fields["check"] not in (*CHECKS, INPUTS):
        return f"there is no check {fields['check']}; there are {', '.join((INPUTS, *CHECKS))}"
    return None


def _quoted(text: str) -> str:
    """A basic string of TOML: what JSON escapes is escaped alike there, but for DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _from_failures_dict(path: str) -> Iterable[Entry]:
    for op, tests in FailuresDict.load(path).data.items():
        for name, said in tests.items():
            test_class, _, generated = name.partition(".")
            check = next((each for each in CHECKS if generated.startswith(f"{each}__")), None)
            if check is None:
                raise ExpectedError("a test of the failures dict has none of our checks", op=op, where=path, got=name)
            key = Key(op, check, test=f"{test_class}.{generated.removeprefix(f'{check}__')}")
            status = said.get("status")
            if status in STATUSES:
                reason = said.get("comment") or f"from {os.path.basename(path)}"
                yield Entry(key, status, reason)


NAME = "customops_xfail"


@dataclass
class Mark:
    """Checks of an op that are expected to fail in one test, and how they went.

    Attributes:
        op: its name, or a pattern.
        checks: their names; none for all.
        entry: where it is from, if that is the file.
    """

    op: str
    checks: tuple[str, ...]
    reason: str
    status: Status = "xfail"
    entry: Entry | None = None
    failed: int = 0
    passed: int = 0

    def note(self, failed: bool) -> None:
        """A check that it covers was made."""
        self.failed, self.passed = self.failed + failed, self.passed + (not failed)

    def __str__(self) -> str:
        return f"{self.op}: {', '.join(self.checks) or 'every check'} ({self.reason})"


_MARKS = pytest.StashKey[list[Mark]]()


def names_of(item: pytest.Item) -> tuple[str, ...]:
    """How a file may name a test: by its id, and as ``Class.test``; with its parameters, and for all of them."""
    function = getattr(item, "originalname", None) or item.name.partition("[")[0]
    test_class = getattr(item, "cls", None)
    short = f"{test_class.__name__}.{function}" if test_class is not None else function
    return item.nodeid, item.nodeid.partition("[")[0], short


def marks_of(item: pytest.Item, expected: Expected) -> list[Mark]:
    """What is expected to fail in a test: by its markers, those of its class and module, and by the file.

    Raises:
        UsageError: a marker has no op, no reason, or names a check that there is not.
    """
    if _MARKS not in item.stash:
        names = names_of(item)
        entries = [entry for key, entry in expected.entries.items() if key.test in names]
        item.stash[_MARKS] = [_mark(item, mark) for mark in item.iter_markers(NAME)] + [
            Mark(entry.key.op, (entry.key.check,), entry.reason, entry.status, entry) for entry in entries
        ]
    return item.stash[_MARKS]


def covering(marks: Iterable[Mark], op: str, check: str) -> Mark | None:
    """The mark that is about a check of an op."""
    return next(
        (mark for mark in marks if fnmatch.fnmatchcase(op, mark.op) and (not mark.checks or check in mark.checks)), None
    )


def _mark(item: pytest.Item, mark: pytest.Mark) -> Mark:
    names, reason = mark.args, mark.kwargs.get("reason")
    unknown = [str(name) for name in names[1:] if name not in CHECKS]
    problem = None
    if not names or not isinstance(names[0], str):
        problem = "it has to name an op"
    elif not isinstance(reason, str) or not reason or set(mark.kwargs) != {"reason"}:
        problem = "it takes a reason=, and nothing else by name"
    elif unknown:
        problem = f"there is no check {', '.join(unknown)}; there are {', '.join(CHECKS)}"
    if problem:
        raise UsageError(
            f"a marker {NAME} makes no sense: {problem}",
            where=item.nodeid,
            fix=f'@pytest.mark.{NAME}("ns::op", "test_faketensor", reason="why")',
        )
    return Mark(names[0], tuple(names[1:]), str(reason))
