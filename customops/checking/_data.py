"""What `customops.check` found, as plain data; `report.Report` shows it."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from customops.errors import CheckError

Status = Literal["passed", "failed", "rejected", "not exercised"]


@dataclass(frozen=True)
class Result:
    """One check on one input.

    Attributes:
        check: a key of `customops.checks.CHECKS`, or "inputs" for an input that the operator rejects.
        status: "passed", "failed", "rejected" or "not exercised".
        input: how the input was derived: ``"sample 1"``, ``"sample 1, x: transposed"``.
        seconds: the duration, in seconds.
        reason: why the check had nothing to test, and which inputs would exercise it. For a rejected input, the error
            that the kernel raised.
    """

    check: str
    status: Status
    input: str
    seconds: float = 0.0
    reason: str | None = None


@dataclass(frozen=True)
class Fault:
    """A fault that one check found; for the attributes see `Failure`."""

    op: str
    check: str
    error: CheckError
    input: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    inputs: int = 1
    source: str | None = None

    @property
    def problem(self) -> str:
        """What is wrong, in one sentence."""
        return self.error.problem


@dataclass(frozen=True)
class Findings:
    """What a run found; for the attributes see `Report`."""

    op: str
    effort: str
    results: tuple[Result, ...]
    failures: Sequence[Fault]
    left_out: tuple[str, ...] = ()
    seconds: float = 0.0
    source: str | None = field(default=None, compare=False)

    @property
    def passed(self) -> bool:
        """True if no check failed and at least one passed."""
        return not self.failures and any(result.status == "passed" for result in self.results)

    def count(self, status: Status) -> int:
        """The number of results with this status."""
        return sum(result.status == status for result in self.results)

    def by_check(self) -> dict[str, list[Result]]:
        """The results of each check, in the order in which they ran."""
        found: dict[str, list[Result]] = collections.defaultdict(list)
        for result in self.results:
            found[result.check].append(result)
        return dict(found)
