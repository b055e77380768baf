"""`Report`: what `customops.check` found, and what it did not try."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from customops._describe.screen import plural
from customops.checking import _html, _junit, _text
from customops.checking._data import Fault, Findings
from customops.checking._script import script_of
from customops.errors import OpCheckError


@dataclass(frozen=True)
class Failure(Fault):
    """One fault that one check found, on one or more inputs.

    Attributes:
        op: qualified name of the operator.
        check: the check that found the fault.
        error: the error; its parts are `error.problem`, `.argument`, `.expected`, `.got`, `.where` and `.fix`.
        input: how the smallest failing input was derived.
        args, kwargs: that input.
        inputs: the number of inputs that show the fault.
        source: ``file:line`` of the operator, if known.
    """

    def script(self) -> str:
        """A Python program that reproduces the fault. The module that defines the operator must be importable."""
        return script_of(self)

    def save_script(self, path: str | Path) -> Path:
        """Write the text of `script` to a file, and return its path."""
        path = Path(path)
        path.write_text(self.script())
        return path

    def __str__(self) -> str:
        return _text.failure(self)


@dataclass(frozen=True)
class Report(Findings):
    """What `customops.check` found.

    Attributes:
        op: qualified name of the operator.
        effort: "quick", "normal" or "thorough".
        results: a `Result` for each check and input, in the order in which they ran.
        failures: a `Failure` for each fault.
        left_out: what was not tried, and which option runs it.
        seconds: the duration of the run, in seconds.
        source: ``file:line`` of the operator, if known.

    Example:
        >>> report = customops.check(op, [(torch.randn(3),)])
        >>> report.raise_on_failure()
    """

    failures: tuple[Failure, ...]

    def raise_on_failure(self) -> None:
        """Raise an OpCheckError that lists all faults. Its cause is the error of the first one.

        Raises:
            OpCheckError: there is at least one fault.
        """
        if self.failures:
            problem = f"customops.check found {plural(len(self.failures), 'fault')}"
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
        """The result of `to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    def to_junit_xml(self) -> str:
        """The report as a JUnit XML test suite: one test case for each check, one failure for each fault."""
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
