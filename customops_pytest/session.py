"""The state of one run, which the parts of the plugin share: options, expected failures, and findings.

Under xdist each worker has a `Session`, and sends what it found to the one of the controlling process, which alone
judges, writes the file and speaks.
"""

from __future__ import annotations

import collections
import contextlib
import fnmatch
import logging
import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from customops import CustomOpsError
from customops._cli.targets import in_short
from customops._describe.render import plural
from customops.checks import CHECKS, DEFAULT_CHECKS
from customops_pytest.expected import Expected, Key, Mark, marks_of


@dataclass
class Row:
    """The findings of ``--customops-mode`` about one op."""

    calls: int = 0  #: of tests
    kinds: set[str] = field(default_factory=set)  #: of the calls that were checked
    #: Of checks: "passed", "failed", "failed as expected", "not exercised".
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    failed: list[str] = field(default_factory=list)  #: a line for each failure that was not expected


@dataclass
class Found:
    """The findings of a run; each worker of xdist sends its own."""

    #: Failures that no one expected -> what is wrong, where the file is updated.
    new: dict[Key, str] = field(default_factory=dict)
    #: Entries that a single check or test refuted.
    refuted: set[Key] = field(default_factory=set)
    #: Entries for kinds of calls, and whether a call failed -> how many calls did so.
    tried: collections.Counter[tuple[Key, bool]] = field(default_factory=collections.Counter)
    #: The ops that tests called with ``--customops-mode``, why calls were not checked, and how long checks took.
    rows: collections.defaultdict[str, Row] = field(default_factory=lambda: collections.defaultdict(Row))
    left_out: collections.Counter[str] = field(default_factory=collections.Counter)
    seconds: float = 0.0
    #: Checks that were too slow for all that the effort tries.
    incomplete: set[str] = field(default_factory=set)
    #: Faults that make the run fail although no test failed.
    faults: list[str] = field(default_factory=list)

    def add(self, other: Found) -> None:
        """Add the findings of another process."""
        self.new = other.new | self.new
        self.refuted |= other.refuted
        self.tried.update(other.tried)
        for op, theirs in other.rows.items():
            row = self.rows[op]
            row.calls += theirs.calls
            row.kinds |= theirs.kinds
            row.counts.update(theirs.counts)
            row.failed += theirs.failed
        self.left_out.update(other.left_out)
        self.seconds += other.seconds
        self.incomplete |= other.incomplete
        self.faults += [fault for fault in other.faults if fault not in self.faults]


class Session:
    """One run of pytest: its options, what is expected to fail, and what came of it so far."""

    def __init__(self, config: pytest.Config) -> None:
        options = config.option
        self.config, self.mode = config, options.customops_mode
        self.effort = options.customops_effort
        self.updates = options.customops_update  #: is the file to be written, instead of tests to fail?
        self.checks, self.patterns = (  # none if they are not given
            [word.strip() for value in values for word in value.split(",") if word.strip()]
            for values in (options.customops_checks, options.customops_ops)
        )
        self.found, self._written = Found(), ""
        self.notes: list[str] = []  #: what collecting has to say
        self._misses = False  #: could something not be collected?
        unknown = [name for name in self.checks if name not in CHECKS]
        if unknown:
            raise pytest.UsageError(f"--customops-checks: no check {', '.join(unknown)}; there are {', '.join(CHECKS)}")
        if options.customops_expected:
            path = os.path.join(config.invocation_params.dir, options.customops_expected)
        else:
            name = config.getini("customops_expected") or "customops_expected.toml"
            path = os.path.join(config.rootpath, name)
        try:
            self.expected = Expected.load(path)
        except (CustomOpsError, OSError) as error:
            raise pytest.UsageError(f"--customops-expected: {error}") from None

    def wants(self, op: str) -> bool:
        """Return whether ``--customops-ops`` selects an op."""
        return not self.patterns or any(fnmatch.fnmatchcase(op, pattern) for pattern in self.patterns)

    def mark_for(self, item: pytest.Item, key: Key) -> Mark | None:
        """Return the mark for a check, or None: a marker of the test, or an entry for the test or for the input."""
        of_test = (mark for mark in marks_of(item, self.expected) if mark.covers(key.op, key.check))
        return next(of_test, self.expected.entries.get(key))

    def may_fail(self, key: Key, mark: Mark | None, problem: str) -> bool:
        """Return whether a check may fail. If the file is updated, note a failure that is not expected."""
        if mark is None and self.updates:
            self.found.new[key] = problem
        return mark is not None or self.updates

    def judge(self, mark: Mark) -> str | None:
        """Return what is wrong with a mark whose checks all passed. If the file is updated, note its entry instead."""
        if not mark.passed or mark.failed or mark.status == "skip":
            return None
        if mark.key is not None and self.updates:
            self.found.refuted.add(mark.key)
            return None
        return f"expected to fail in this test, and does not: {mark}"

    # Hooks --------------------------------------------------------------------------------------------------

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._misses |= report.failed

    def pytest_report_collectionfinish(self) -> list[str]:
        return self.notes

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Add the findings of a worker of xdist that is done."""
        sent = getattr(node, "workeroutput", {}).get("customops")
        if sent:
            self.found.add(pickle.loads(sent))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        found, output = self.found, getattr(self.config, "workeroutput", None)
        if output is not None:
            output["customops"] = pickle.dumps(found)  # xdist sends only plain types
            return
        passed = {key for key, failed in found.tried if not failed and (key, True) not in found.tried}
        refuted = sorted(found.refuted | passed)
        if self.updates and self._misses:
            refuted = []  # what was not collected may fail still
        if not self.updates:
            for key in refuted:
                place = key.input or key.test
                found.faults.append(f"{key.op}: {key.check} on {place} is expected to fail, and does not")
        elif not found.new and not refuted and not self.expected.is_json:
            self._written = f"{self._shown(self.expected.path)} is as it {'was' if self._misses else 'should be'}"
        else:
            path = self._shown(self.expected.update(found.new, refuted))
            self._written = f"{path}: {plural(len(found.new), 'new expected failure')}, {len(refuted)} removed"
            if self.expected.is_json:
                of = self._shown(self.expected.path)
                self._written += f"; it has those of {of}: name it with --customops-expected"
        if self.updates and self._misses:
            self._written += "; nothing is removed, since not all could be collected"
        if found.faults and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _shown(self, path: str) -> str:
        return os.path.relpath(path, self.config.invocation_params.dir)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        lines = [*self._lines_of_mode()] if self.mode is not None else []
        lines += sorted(self.found.incomplete)
        lines += self.found.faults
        if self.found.faults:
            lines.append(f"so the run fails; see {self._shown(self.expected.path)}, which --customops-update writes")
        lines += [self._written] if self._written else []
        if lines:
            terminalreporter.section("customops", sep="=", red=bool(self.found.faults))
            for line in lines:
                terminalreporter.write_line(line)

    def _lines_of_mode(self) -> Iterator[str]:
        """Yield the summary of ``--customops-mode``: the ops, their failures, and why calls were not checked."""
        found = self.found
        if not found.rows:
            yield f"--customops-mode={self.mode}: no test called an op (those of torch are not counted)"
        width = max(map(len, found.rows), default=0)
        for op, row in sorted(found.rows.items()):
            order = ("passed", "failed", "failed as expected", "not exercised")
            counts = ", ".join(f"{row.counts[what]} {what}" for what in order if row.counts[what]) or "nothing checked"
            yield f"{op:<{width}}  {plural(row.calls, 'call')}, {plural(len(row.kinds), 'kind')} of input: {counts}"
            yield from (f"  FAILED {failure}" for failure in row.failed)
        for reason, count in sorted(found.left_out.items()):
            yield f"not checked: {plural(count, 'call')}: {reason}"
        made = self.checks or [*DEFAULT_CHECKS]
        if others := [check for check in CHECKS if check not in made]:
            more = ",".join([*made, others[0] if "test_gradients" in made else "test_gradients"])
            yield f"only {', '.join(made)}, and not {in_short(others)}; with others: --customops-checks {more}"
        kinds = sum(len(row.kinds) for row in found.rows.values())
        yield f"{plural(len(found.rows), 'op')}, {plural(kinds, 'kind')} of input, {found.seconds:.1f} s for the checks"


def problem_first(fault: str) -> str:
    """A fault, ``check: problem`` and fields, for which the short summary has little room: the check comes second."""
    head, _, fields = fault.partition("\n")
    check, _, problem = head.partition(": ")
    return "\n".join(filter(None, [problem, f"  check:    {check}", fields]))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Turn off logging: torch logs while it is traced, and none of it explains a failure."""
    before, trace = logging.root.manager.disable, logging.getLogger("torch.__trace")
    handlers, trace.handlers = trace.handlers, []  # it goes by these alone, and pytest has added its own
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
        trace.handlers = handlers


_KEY = pytest.StashKey[Session]()


def session_of(config: pytest.Config) -> Session:
    """The `Session` of this run."""
    if _KEY not in config.stash:
        config.stash[_KEY] = Session(config)
        config.pluginmanager.register(config.stash[_KEY], "customops_session")
    return config.stash[_KEY]


def pytest_configure(config: pytest.Config) -> None:
    session_of(config)
