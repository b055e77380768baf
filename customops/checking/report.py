"""`Report`: what `customops.check` found, and what it did not try."""

from __future__ import annotations

import collections
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from customops.checking import _html, _junit, _text
from customops.checking._script import script_of
from customops.errors import CheckError, OpCheckError

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
class Failure:
    """One fault: what one check found, on however many inputs.

    Attributes:
        op: qualified name of the operator.
        check: the check that found it.
        error: what it found; `error.problem`, `.argument`, `.expected`, `.got`, `.where` and `.fix` are its parts.
        input: how the smallest input that shows it was made.
        args, kwargs: that input.
        inputs: how many inputs showed the fault.
        source: ``file:line`` of the operator, if it is known.
    """

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

    def script(self) -> str:
        """A Python program that shows the fault by itself, given that what defines the operator can be imported."""
        return script_of(self)

    def save_script(self, path: str | Path) -> Path:
        """Write `script` to a file."""
        path = Path(path)
        path.write_text(self.script())
        return path

    def __str__(self) -> str:
        return _text.failure(self)


@dataclass(frozen=True)
class Report:
    """What `customops.check` found.

    Attributes:
        op: qualified name of the operator.
        effort: "quick", "normal" or "thorough".
        results: one for each check and input, in the order of running.
        failures: one for each fault.
        left_out: what was not tried, and how to have it tried.
        seconds: how long it took.

    Example:
        >>> report = customops.check(op, [(torch.randn(3),)])
        >>> report.raise_on_failure()
    """

    op: str
    effort: str
    results: tuple[Result, ...]
    failures: tuple[Failure, ...]
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

    def raise_on_failure(self) -> None:
        """Raise an OpCheckError that tells all faults; its cause is the first of them.

        Raises:
            OpCheckError: there is a fault.
        """
        if self.failures:
            problem = f"customops.check found {_text.plural(len(self.failures), 'fault')}"
            told = "\n\n".join(str(failure) for failure in self.failures)
            raise OpCheckError(f"{problem}\n\n{told}", op=self.op) from self.failures[0].error

    def __str__(self) -> str:
        return _text.report(self)

    def _repr_html_(self) -> str:
        return _html.report(self)

    def to_dict(self) -> dict[str, Any]:
        """The report as lists, dicts, strings and numbers."""
        return {
            "op": self.op,
            "source": self.source,
            "effort": self.effort,
            "passed": self.passed,
            "seconds": round(self.seconds, 4),
            "failures": [_failure_as_dict(failure) for failure in self.failures],
            "results": [
                {
                    "check": result.check,
                    "status": result.status,
                    "input": result.input,
                    "seconds": round(result.seconds, 6),
                    **({"reason": result.reason} if result.reason else {}),
                }
                for result in self.results
            ],
            "left_out": list(self.left_out),
        }

    def to_json(self, indent: int | None = 2) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=indent)

    def to_junit_xml(self) -> str:
        """The report as a JUnit XML test suite: one test case for each check, a failure for each fault."""
        return _junit.report(self)


def _failure_as_dict(failure: Failure) -> dict[str, Any]:
    error = failure.error
    fields = {name: getattr(error, name) for name in ("argument", "expected", "got", "where", "fix")}
    return {
        "check": failure.check,
        "problem": failure.problem,
        **{name: value for name, value in fields.items() if value},
        "input": failure.input,
        "arguments": _text.arguments(failure),
        "inputs": failure.inputs,
        "script": failure.script(),
    }
