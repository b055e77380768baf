"""What ``--customops-mode`` saw, in numbers, for the summary."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from customops._describe.render import plural


@dataclass
class Row:
    """One op.

    Attributes:
        calls: how often tests called it.
        kinds: the kinds of calls that were checked.
        passed, expected, not_exercised: numbers of checks.
        failed: one line for each failure that was not expected.
    """

    calls: int = 0
    kinds: set[str] = field(default_factory=set)
    passed: int = 0
    expected: int = 0
    not_exercised: int = 0
    failed: list[str] = field(default_factory=list)

    def add(self, other: Row) -> None:
        """Take over what another process saw of it."""
        self.calls += other.calls
        self.kinds |= other.kinds
        self.passed += other.passed
        self.expected += other.expected
        self.not_exercised += other.not_exercised
        self.failed += other.failed

    def __str__(self) -> str:
        counts = {
            "passed": self.passed,
            "failed": len(self.failed),
            "failed as expected": self.expected,
            "not exercised": self.not_exercised,
        }
        said = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        return f"{plural(self.calls, 'call')}, {plural(len(self.kinds), 'kind')} of input: {said or 'nothing checked'}"


@dataclass
class Watched:
    """All ops that tests called.

    Attributes:
        rows: by name.
        left_out: why calls were not checked -> how many.
        seconds: that the checks took.
    """

    rows: dict[str, Row] = field(default_factory=lambda: collections.defaultdict(Row))
    left_out: collections.Counter[str] = field(default_factory=collections.Counter)
    seconds: float = 0.0

    def to_plain(self) -> Any:
        """As lists and dicts."""
        rows = {op: asdict(row) | {"kinds": sorted(row.kinds)} for op, row in self.rows.items()}
        return {"rows": rows, "left_out": dict(self.left_out), "seconds": self.seconds}

    def add(self, plain: Any) -> None:
        """Take over what another process saw."""
        for op, row in plain["rows"].items():
            self.rows[op].add(Row(**row | {"kinds": set(row["kinds"])}))
        self.left_out.update(plain["left_out"])
        self.seconds += plain["seconds"]

    def lines(self, mode: str | None) -> Iterator[str]:
        """The summary of a run in this mode; nothing without one."""
        if mode is None:
            return
        if not self.rows:
            yield f"--customops-mode={mode}: no test called an op (those of torch are not counted)"
        width = max(map(len, self.rows), default=0)
        for op, row in sorted(self.rows.items()):
            yield f"{op:<{width}}  {row}"
            for failure in row.failed:
                yield f"  FAILED {failure}"
        for reason, count in sorted(self.left_out.items()):
            yield f"not checked: {plural(count, 'call')}: {reason}"
        kinds = sum(len(row.kinds) for row in self.rows.values())
        yield f"{plural(len(self.rows), 'op')}, {plural(kinds, 'kind')} of input, {self.seconds:.1f} s for the checks"
