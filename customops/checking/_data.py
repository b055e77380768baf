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
        input: how the input was made: ``"sample 1"``, ``"sample 1, x: transposed"``.
        seconds: how long it took.
        reason: why nothing was tried, with what would exercise the check; of a rejected input, what the kernel raised.
    """

    check: str
    status: Status
    input: str
    seconds: float = 0.0
    reason: str | None = None


@dataclass(frozen=True)
class Fault:
    """What one check found, on however many inputs; attributes as of `Failure`."""

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
    """What a run found; attributes as of `Report`."""

    op: str
    effort: str
    results: tuple[Result, ...]
    failures: Sequence[Fault]
    left_out: tuple[str, ...] = ()
    seconds: float = 0.0
    source: str | None = field(default=None, compare=False)

    @property
    def passed(self) -> bool:
        """Did no check fail, and at least one pass?"""
        return not self.failures and any(result.status == "passed" for result in self.results)

    def count(self, status: Status) -> int:
        """How many results have a status."""
        return sum(result.status == status for result in self.results)

    def by_check(self) -> dict[str, list[Result]]:
        """The results of each check, in the order of running."""
        found: dict[str, list[Result]] = collections.defaultdict(list)
        for result in self.results:
            found[result.check].append(result)
        return dict(found)
