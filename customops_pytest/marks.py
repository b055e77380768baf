"""What is expected to fail in one test: by a marker, or by an entry of the file that names the test.

@pytest.mark.customops_xfail("mylib::flip", "test_faketensor", reason="strides, see #12")
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from customops.checks import CHECKS, UsageError
from customops_pytest.expected import Entry, Expected, Status

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

    def covers(self, op: str, check: str) -> bool:
        """Is it about this check of this op?"""
        return fnmatch.fnmatchcase(op, self.op) and (not self.checks or check in self.checks)

    def note(self, failed: bool) -> None:
        """A check that it covers was made."""
        self.failed, self.passed = self.failed + failed, self.passed + (not failed)

    @property
    def is_refuted(self) -> bool:
        """Did the checks run, and none fail?"""
        return self.passed > 0 and self.failed == 0

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
    return next((mark for mark in marks if mark.covers(op, check)), None)


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
