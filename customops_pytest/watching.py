"""``--customops-mode``: the ops that tests call are checked, when the test that called them is over."""

from __future__ import annotations

import time
from collections.abc import Generator

import pytest

from customops import CustomOpsError
from customops._describe.description import place_of_others
from customops._describe.render import described
from customops.checking.report import fault_text
from customops.checks import DEFAULT_CHECKS
from customops.checks._outcome import in_short
from customops.testing.watch import Call, Watch, checked, why_unchecked
from customops_pytest.expected import Key, marks_of, names_of
from customops_pytest.session import Session, problem_first, quiet, session_of

#: What was found in a test that nobody expected. Of an op, a check and a problem one kind of call is told.
_FAULTS = pytest.StashKey[dict[tuple[str, ...], str]]()


class Watching:
    """The hooks."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._seen: set[tuple[str, str]] = set()  #: kinds of calls that were checked

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        if item.get_closest_marker("customops"):  # a check by itself
            return (yield)
        expected, tests = self.session.expected, names_of(item)
        marks_of(item, expected)  # a bad marker is told before the test runs
        # Of what is expected in this one test, nothing can be said by what happened in another.
        of_this_test = {key.op for key in expected.entries if key.test in tests}
        known = {kind for kind in self._seen if kind[0] not in of_this_test}
        watch = Watch(self.session.wants, known)
        try:
            with watch:
                return (yield)
        finally:
            if self.session.mode == "sample":
                self._seen |= known
            self._judge(item, watch)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        faults = item.stash.get(_FAULTS, None)
        if call.when == "call" and faults:
            text = "\n\n".join(faults.values())
            if report.passed:
                report.outcome, report.longrepr = "failed", text
            else:  # it has something of its own to say, which must not hide this
                report.sections.append(("customops", text))
                if not report.failed:
                    self.session.found.faults.append(f"{item.nodeid} is {report.outcome}, and calls ops that are wrong")
        return report

    # After a test -------------------------------------------------------------------------------------------

    def _judge(self, item: pytest.Item, watch: Watch) -> None:
        found, start = self.session.found, time.perf_counter()
        faults = item.stash[_FAULTS] = {}
        for op, count in watch.made.items():
            found.rows[op].calls += count
        found.left_out.update(watch.left_out)
        for call in watch.calls:
            with quiet():
                reason = why_unchecked(call)
            if reason is None:
                self._check(item, call)
            else:
                found.left_out[reason] += 1
        for mark in marks_of(item, self.session.expected):
            if (problem := self.session.judge(mark)) is not None:
                faults[problem,] = problem
        found.seconds += time.perf_counter() - start

    def _check(self, item: pytest.Item, call: Call) -> None:
        session, trial, op, kind = self.session, call.trial, call.trial.name, call.kind
        row = session.found.rows[op]
        row.kinds.add(kind)
        for check in session.checks or DEFAULT_CHECKS:
            key = Key(op, check, kind)
            mark = session.mark_for(item, key)
            if mark is not None and mark.status == "skip":
                continue
            with quiet():
                outcome = checked(call, check)
                # An op that gives back what it got once cannot be called again, which is no fault of it.
                is_over = outcome.status == "failed" and why_unchecked(call) is not None
            if is_over:
                session.found.left_out["the op refused the same inputs when it was called again"] += 1
                return
            if outcome.status == "not exercised":
                row.counts[outcome.status] += 1
                continue
            is_failure = outcome.status == "failed"
            row.counts["passed"] += not is_failure
            if mark is not None:
                mark.note(is_failure)
                if mark.key == key:
                    session.found.tried[key, is_failure] += 1  # other tests may make calls of this kind
            if not is_failure:
                continue
            error = outcome.error
            assert error is not None
            problem = error.problem if isinstance(error, CustomOpsError) else in_short(error, 200)
            if session.may_fail(key, mark, problem):
                row.counts["failed as expected"] += 1
                continue
            row.counts["failed"] += 1
            row.failed.append(f"{check} on {kind}  ({item.nodeid})")
            place = trial.custom_op.source if trial.custom_op is not None else place_of_others(op)
            arguments = ", ".join(f"{name}={described(value)}" for name, value in trial.arguments.items())
            text = problem_first(fault_text(check, error, place, kind=kind, call=f"{op}({arguments})"))
            item.stash[_FAULTS].setdefault((op, check, problem), text)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Watching(session_of(config)), "customops_watching")
