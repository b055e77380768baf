"""``pytest --customops TARGET``: each check of each sample of each op is a test, ``ns::op[sample1-test_gradients]``."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from customops import CustomOpDef, CustomOpsError, Sample
from customops._cli.targets import TargetError, error_text, expand, in_short, load, trace
from customops.checking._check import INPUTS, SampleChecks
from customops_pytest.expected import Key
from customops_pytest.session import problem_first, quiet, session_of

Op = CustomOpDef[Any, Any]


class Fault(Exception):
    """A check of an op failed. Its text is what `customops.check` says of it."""


class OpsOf(pytest.Collector):
    """The ops that a target defines."""

    def __init__(self, *, target: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.target, self.state = target, session_of(self.config)
        self._current: tuple[tuple[str, int], SampleChecks] | None = None

    def collect(self) -> Iterator[pytest.Item]:
        ops: dict[str, Op] = {}
        if str(self.config.rootpath) not in sys.path:
            sys.path.append(str(self.config.rootpath))  # as it is for `python -m pytest` there
        try:
            for part in expand(self.target):
                loaded = load(part)
                ops |= {op._qualname: op for op in loaded.ops}
                if loaded.walked:
                    self.state.notes.append(f"{part} itself defines no op; imported {in_short(loaded.walked)}")
        except TargetError as error:
            raise self.CollectError(str(error)) from None
        if not ops:
            raise self.CollectError(f"{self.target} defines no op itself: name the module or file that does")
        wanted = [op for op in ops.values() if self.state.wants(op._qualname)]
        if not wanted:
            raise self.CollectError(f"{self.target}: no op matches --customops-ops {', '.join(self.state.patterns)}")
        for op in wanted:
            problem, count, checks = None, 0, self.state.checks
            try:
                count = len(samples_of(op))
                checks = checks or SampleChecks.names(op, self.state.effort)
            except (Exception, SystemExit) as error:
                problem = error
            if problem is not None or not count:
                yield self._item(NoSamples, "samples", op=op, problem=problem)
                continue
            for number in range(count):
                for check in (INPUTS, *checks):
                    yield self._item(CheckItem, f"sample{number + 1}-{check}", op=op, number=number, check=check)

    def _item(self, cls: type[OpItem], what: str, *, op: Op, **kwargs: Any) -> pytest.Item:
        name = f"{op._qualname}[{what}]"
        # The id as text: pytest reads back from text what failed last.
        return cls.from_parent(self, name=name, nodeid=f"{self.nodeid}::{name}", op=op, **kwargs)

    def checks_of(self, op: Op, number: int) -> SampleChecks:
        """The checks of one sample; the latest is kept, since pytest runs one after the other."""
        key = (op._qualname, number)
        if self._current is None or self._current[0] != key:
            self._current = (key, SampleChecks(op, samples_of(op)[number], number, self.state.effort))
        return self._current[1]


class OpItem(pytest.Item):
    """A test of an op."""

    parent: OpsOf

    def __init__(self, *, op: Op, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.op, self.state = op, self.parent.state
        self.add_marker("customops")

    def reportinfo(self) -> tuple[str, int | None, str]:
        file, _, line = self.op.source.rpartition(":")
        return (file, int(line) - 1, self.name) if os.path.exists(file) else (str(self.path), None, self.name)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> str:
        error = excinfo.value
        return str(error) if isinstance(error, Fault) else error_text(error)


class NoSamples(OpItem):
    """An op without samples is skipped; it fails if the function that makes them raises."""

    def __init__(self, *, problem: BaseException | None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.problem = problem

    def runtest(self) -> None:
        if self.problem is None:
            pytest.skip(f"no samples; attach some with @{self.op.__name__}.register_samples ({self.op.source})")
        if isinstance(self.problem, CustomOpsError):
            raise self.problem
        raise Fault(f"{self.op._qualname}: the samples function raises\n{trace(self.problem)}")


class CheckItem(OpItem):
    """One check, on all that is derived from one sample."""

    def __init__(self, *, number: int, check: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.number, self.check = number, check
        self.key = Key(self.op._qualname, check, f"sample{number + 1}")
        self.mark = self.state.mark_for(self, self.key)

    def setup(self) -> None:
        if self.mark is not None and self.mark.status == "skip":
            pytest.skip(self.mark.reason)

    def runtest(self) -> None:
        checks = self.parent.checks_of(self.op, self.number)
        with quiet():
            report = checks.report(self.check)
        if not report.complete:
            self.state.found.incomplete.add(f"{self.name}: {report._shortfall()}")
        if not report.failures:
            if self.check != INPUTS and not report.count("passed"):
                reasons = dict.fromkeys(result.reason for result in report.results if result.reason)
                pytest.skip("; ".join(list(reasons)[:2]) or f"the op fails on the sample: see {INPUTS}")
            if self.mark is not None:
                self.mark.note(failed=False)
                if (problem := self.state.judge(self.mark)) is not None:
                    raise Fault(problem)
            return
        items = [item for item in self.session.items if isinstance(item, CheckItem) and item.parent is self.parent]
        others = {item.check for item in items if item.op is self.op and item.number == self.number}
        cause = None if self.check == INPUTS else checks.explained_by(self.check, others)
        if cause is not None and self.mark is None:
            pytest.skip(f"{cause} fails, which may be the cause")
        problem = report.failures[0].problem
        if self.state.may_fail(self.key, self.mark, problem):
            pytest.xfail(self.mark.reason if self.mark is not None else problem)
        faults = "\n\n".join(problem_first(str(failure)) for failure in report.failures)
        raise Fault(f"{faults}\n  again:    pytest --customops {self.parent.target} -k '{self.name}'")


def samples_of(op: Op) -> list[Sample]:
    """The samples of an op: the same in each run and each process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return op.samples()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Why ops could not be collected is said in the short summary, too, which shows a text alone."""
    report = yield
    if isinstance(collector, OpsOf) and report.failed:
        report.longrepr = str(report.longrepr)
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the ops to what pytest collected; -k, -m, --lf and --deselect come later."""
    state = session_of(config)
    for target in dict.fromkeys(config.option.customops):
        # A module as it is named; a file or folder from the root directory, whatever directory it was named in.
        path = Path(config.invocation_params.dir, target)
        nodeid = os.path.relpath(path, config.rootpath).replace(os.sep, "/") if path.exists() else target
        items += session.genitems(OpsOf.from_parent(session, name=target, nodeid=nodeid, target=target))
    # Entries for samples that an op of this run does not have:
    known = {item.key for item in items if isinstance(item, CheckItem)}
    tried = {(key.op, key.check) for key in known}
    for key in state.expected.entries:
        if key.input.startswith("sample") and (key.op, key.check) in tried and key not in known:
            if state.updates:
                state.found.refuted.add(key)
            else:
                expected = f"{key.check} is expected to fail on {key.input}"
                state.found.faults.append(f"{key.op}: {expected}, but the op has no such sample")


def pytest_configure(config: pytest.Config) -> None:
    session_of(config)
