"""The fixtures `opcheck` and `customops_check`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

import customops
from customops import CustomOpDef
from customops.checking.report import Report
from customops.checks import DEFAULT_CHECKS, UsageError
from customops.checks._outcome import leave_frames_out
from customops.checks._trial import resolve
from customops_pytest.expected import Key, marks_of
from customops_pytest.session import session_of

__tracebackhide__ = True  # pytest leaves the frames out


class _Checker:
    """What is expected to fail in a test."""

    #: How it is called, for messages.
    call: str

    def __init__(self, item: pytest.Item) -> None:
        self.session, self.item = session_of(item.config), item
        marks_of(item, self.session.expected)  # a bad marker raises before the test runs

    def _judge(self, op: str, results: Mapping[str, str | Exception]) -> None:
        unexpected: dict[str, Exception] = {}
        for check, result in results.items():
            key = Key(op, check, test=self.item.nodeid.partition("[")[0])
            mark = self.session.mark_for(self.item, key)
            if mark is not None:
                mark.note(isinstance(result, Exception))
            if isinstance(result, Exception):
                problem = str(getattr(result, "problem", "")) or type(result).__name__
                if not self.session.may_fail(key, mark, problem):
                    unexpected[check] = result
        if unexpected:
            text = "\n\n".join(f"{check} failed with {error}" for check, error in unexpected.items())
            for error in unexpected.values():
                leave_frames_out(error)
            raise customops.errors.OpCheckError(f"{self.call}: {text}") from next(iter(unexpected.values()))

    def finish(self) -> None:
        """Fail if something is expected to fail that does not. (With ``--customops-mode`` that is seen to.)"""
        for mark in marks_of(self.item, self.session.expected) if self.session.mode is None else ():
            problem = self.session.judge(mark)
            if problem is not None:
                pytest.fail(problem, pytrace=False)


class OpCheck(_Checker):
    """`customops.opcheck`, with what is expected to fail in a test."""

    call = "opcheck(op, ...)"

    def __call__(
        self,
        op: Any,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        test_utils: str | Sequence[str] = DEFAULT_CHECKS,
        atol: float | None = None,
        rtol: float | None = None,
    ) -> dict[str, str | Exception]:
        """Check an operator on one set of inputs, or, without `args`, on each of its samples.

        Args:
            op, args, kwargs, test_utils, atol, rtol: as of `customops.opcheck`.

        Returns:
            "SUCCESS" or the exception, for each check; on several samples the first exception.

        Raises:
            OpCheckError: checks fail that are not expected to. Its cause is what the first of them found.
            UsageError: there are no `args`, and the op has no samples.
        """
        if args is not None:
            inputs = [(args, kwargs or {})]
        else:
            inputs = [(each.args, each.kwargs) for each in op.samples()] if isinstance(op, CustomOpDef) else []
            if not inputs or kwargs:
                raise UsageError(
                    "there are no inputs to check the operator on",
                    op=str(resolve(op).name()),
                    argument="args",
                    fix="opcheck(op, (x, y)), or attach some with @op.register_samples",
                )
        found: dict[str, str | Exception] = {}
        for given in inputs:
            results = customops.opcheck(op, *given, test_utils=test_utils, raise_exception=False, atol=atol, rtol=rtol)
            self._judge(str(resolve(op).name()), results)
            found |= {check: result for check, result in results.items() if found.get(check, "SUCCESS") == "SUCCESS"}
        return found


class DerivedCheck(_Checker):
    """`customops.check`, with what is expected to fail in a test."""

    call = "customops.check(op, ...)"

    def __call__(self, op: Any, samples: Iterable[Any] | None = None, **options: Any) -> Report:
        """Check an operator on inputs that are derived from samples, by default those of the op.

        Args:
            op, samples, options: as of `customops.check`.

        Returns:
            The report.

        Raises:
            OpCheckError: checks fail that are not expected to. Its cause is what the first of them found.
            UsageError: there are no samples.
        """
        report = customops.check(op, samples, **options)
        results: dict[str, str | Exception] = {result.check: "SUCCESS" for result in report.results}
        results |= {failure.check: failure.error for failure in reversed(report.failures)}
        self._judge(report.op, results)
        return report
