"""``--customops-mode``: the ops that tests call are checked, when the test that called them is over."""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass, field

import pytest

from customops import CustomOpsError
from customops._describe.description import place_of_others
from customops._describe.render import described
from customops.checking.report import fault_text
from customops.checks import DEFAULT_CHECKS, Outcome
from customops.checks._outcome import in_short
from customops.testing.watch import Call, Watch, checked, why_unchecked
from customops_pytest.expected import Key, Mark, covering, marks_of, names_of
from customops_pytest.session import Session, quiet, session_of


@dataclass
class _Test:
    """One test, and what was found in it that nobody expected."""

    item: pytest.Item
    marks: list[Mark]
    faults: list[str] = field(default_factory=list)
    told: set[tuple[str, str, str]] = field(default_factory=set)  #: of which other kinds are in the summary alone


_TEST = pytest.StashKey[_Test]()


class Watching:
    """The hooks."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.checks = session.checks or DEFAULT_CHECKS
        self._seen: set[tuple[str, str]] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        if item.get_closest_marker("customops"):  # a check by itself
            return (yield)
        test = item.stash[_TEST] = _Test(item, marks_of(item, self.session.expected))
        watch = Watch(self.session.wants, _Known(self.session, names_of(item), self._seen))
        try:
            with watch:
                return (yield)
        finally:
            self._judge(test, watch)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        test = item.stash.get(_TEST, None)
        if call.when == "call" and test is not None and test.faults:
            told = "\n\n".join(test.faults)
            if report.passed:
                report.outcome, report.longrepr = "failed", told
            else:  # it has something of its own to say, which must not hide this
                report.sections.append(("customops", told))
                if not report.failed:
                    self.session.faults.append(f"{item.nodeid} is {report.outcome}, and calls ops that are wrong")
        return report

    # After a test -------------------------------------------------------------------------------------------

    def _judge(self, test: _Test, watch: Watch) -> None:
        watched, start = self.session.watched, time.perf_counter()
        for op, count in watch.made.items():
            watched.rows[op].calls += count
        watched.left_out.update(watch.left_out)
        for call in watch.calls:
            with quiet():
                reason = why_unchecked(call)
            if reason is None:
                self._check(test, call)
            else:
                watched.left_out[reason] += 1
        for mark in test.marks:
            problem = self.session.judge(mark)
            test.faults += [problem] if problem is not None else []
        watched.seconds += time.perf_counter() - start

    def _check(self, test: _Test, call: Call) -> None:
        op, kind = call.trial.name, call.kind
        row = self.session.watched.rows[op]
        row.kinds.add(kind)
        for check in self.checks:
            mark = covering(test.marks, op, check)
            entry = self.session.expected.find(op, check, kind)
            said = mark or entry
            if said is not None and said.status == "skip":
                continue
            with quiet():
                (outcome,) = checked(call, [check])
                # An op that gives back what it got once cannot be called again, which is no fault of it.
                is_over = outcome.status == "failed" and why_unchecked(call) is not None
            if is_over:
                self.session.watched.left_out["the op refused the same inputs when it was called again"] += 1
                return
            if outcome.status == "not exercised":
                row.counts[outcome.status] += 1
                continue
            is_failure = outcome.status == "failed"
            row.counts["passed"] += not is_failure
            if mark is not None:
                mark.note(is_failure)
            elif entry is not None:
                self.session.findings.tried[entry.key, is_failure] += 1
            if is_failure and said is None:
                self._found(test, call, outcome)
            elif is_failure:
                row.counts["failed as expected"] += 1

    def _found(self, test: _Test, call: Call, outcome: Outcome) -> None:
        op, row = call.trial.name, self.session.watched.rows[call.trial.name]
        error = outcome.error
        problem = error.problem if isinstance(error, CustomOpsError) else in_short(error, 200) if error else ""
        if self.session.updates:
            self.session.findings.new[Key(op, outcome.check, call.kind)] = problem
            row.counts["failed as expected"] += 1
            return
        row.counts["failed"] += 1
        row.failed.append(f"{outcome.check} on {call.kind}  ({test.item.nodeid})")
        if (op, outcome.check, problem) not in test.told:
            test.told.add((op, outcome.check, problem))
            test.faults.append(_told(call, outcome))


class _Known:
    """The kinds of calls that need not be checked in a test, as a set has them."""

    def __init__(self, session: Session, names: tuple[str, ...], seen: set[tuple[str, str]]) -> None:
        self.session, self.names, self.seen = session, names, seen
        self.here: set[tuple[str, str]] = set()

    def __contains__(self, kind: tuple[str, str]) -> bool:
        # Of what is expected in this one test, nothing can be said by what happened in another.
        is_apart = self.session.expected.names_test(kind[0], self.names)
        return kind in self.here or (kind in self.seen and not is_apart)

    def add(self, kind: tuple[str, str]) -> None:
        self.here.add(kind)
        if self.session.config.option.customops_mode == "sample":
            self.seen.add(kind)


def _told(call: Call, outcome: Outcome) -> str:
    """The failure as `customops.check` would show it."""
    trial, error = call.trial, outcome.error
    assert error is not None
    place = trial.custom_op.source if trial.custom_op is not None else place_of_others(trial.name)
    arguments = ", ".join(f"{name}={described(value)}" for name, value in trial.arguments.items())
    return fault_text(outcome.check, error, place, kind=call.kind, call=f"{trial.name}({arguments})")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Watching(session_of(config)), "customops_watching")
