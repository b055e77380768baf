"""What the parts of the plugin share in one run: the options, what is expected to fail, and what came of it.

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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from customops import CustomOpsError
from customops._describe.render import plural
from customops.checks import CHECKS
from customops_pytest.expected import Expected, Key, Mark

_FILE = "customops_expected.toml"
_SENT = "customops"


@dataclass
class Findings:
    """What a run found that is to be written, or judged when all of it is over.

    Attributes:
        new: failures that no one expected -> what is wrong, where the file is updated.
        refuted: entries that were found to be wrong by themselves.
        tried: entries for kinds of calls, and whether a call failed -> how many calls did so.
    """

    new: dict[Key, str] = field(default_factory=dict)
    refuted: set[Key] = field(default_factory=set)
    tried: collections.Counter[tuple[Key, bool]] = field(default_factory=collections.Counter)

    def all_refuted(self) -> list[Key]:
        """Entries that were tried, and of which nothing failed."""
        passed = {key for key, failed in self.tried if not failed and (key, True) not in self.tried}
        return sorted(self.refuted | passed)

    def add(self, other: Findings) -> None:
        """Take over what another process found."""
        self.new = other.new | self.new
        self.refuted |= other.refuted
        self.tried.update(other.tried)


@dataclass
class Row:
    """What ``--customops-mode`` saw of one op.

    Attributes:
        calls: how often tests called it.
        kinds: the kinds of calls that were checked.
        counts: of checks: "passed", "failed", "failed as expected", "not exercised".
        failed: one line for each failure that was not expected.
    """

    calls: int = 0
    kinds: set[str] = field(default_factory=set)
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    failed: list[str] = field(default_factory=list)

    def add(self, other: Row) -> None:
        """Take over what another process saw of it."""
        self.calls += other.calls
        self.kinds |= other.kinds
        self.counts.update(other.counts)
        self.failed += other.failed

    def __str__(self) -> str:
        order = ("passed", "failed", "failed as expected", "not exercised")
        said = ", ".join(f"{self.counts[what]} {what}" for what in order if self.counts[what])
        return f"{plural(self.calls, 'call')}, {plural(len(self.kinds), 'kind')} of input: {said or 'nothing checked'}"


@dataclass
class Watched:
    """What ``--customops-mode`` saw of all ops that tests called.

    Attributes:
        rows: by name.
        left_out: why calls were not checked -> how many.
        seconds: that the checks took.
    """

    rows: dict[str, Row] = field(default_factory=lambda: collections.defaultdict(Row))
    left_out: collections.Counter[str] = field(default_factory=collections.Counter)
    seconds: float = 0.0

    def add(self, other: Watched) -> None:
        """Take over what another process saw."""
        for op, row in other.rows.items():
            self.rows[op].add(row)
        self.left_out.update(other.left_out)
        self.seconds += other.seconds

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


class Session:
    """One run of pytest.

    Attributes:
        effort: of ``--customops-effort``.
        checks: those of ``--customops-checks``; none if it is not given.
        expected: what is expected to fail.
        updates: is the file to be written, instead of tests to fail?
        findings, watched: what came of it so far.
        faults: what makes the run fail although no test did.
        said: what became of the file.
    """

    def __init__(self, config: pytest.Config) -> None:
        options = config.option
        self.config = config
        self.effort = options.customops_effort
        self.checks = tuple(_words(options.customops_checks))
        self.patterns = tuple(_words(options.customops_ops))
        self.updates: bool = options.customops_update
        self.findings = Findings()
        self.watched = Watched()
        self.faults: list[str] = []
        self.said: str | None = None
        unknown = [name for name in self.checks if name not in CHECKS]
        if unknown:
            raise pytest.UsageError(f"--customops-checks: no check {', '.join(unknown)}; there are {', '.join(CHECKS)}")
        try:
            self.expected = Expected.load(self._path())
        except (CustomOpsError, OSError) as error:
            raise pytest.UsageError(f"--customops-expected: {error}") from None

    def _path(self) -> str:
        given = self.config.option.customops_expected
        if given:
            return os.path.join(self.config.invocation_params.dir, given)
        return os.path.join(self.config.rootpath, self.config.getini("customops_expected") or _FILE)

    def wants(self, op: str) -> bool:
        """Is an op one of those of ``--customops-ops``?"""
        return not self.patterns or any(fnmatch.fnmatchcase(op, pattern) for pattern in self.patterns)

    def judge(self, mark: Mark) -> str | None:
        """What is wrong with a mark whose checks ran, and none failed; an entry is noted if the file is updated."""
        if not mark.passed or mark.failed:
            return None
        if mark.entry is not None and self.updates:
            self.findings.refuted.add(mark.entry.key)
            return None
        return f"expected to fail in this test, and does not: {mark}"

    # Hooks --------------------------------------------------------------------------------------------------

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Of xdist: a worker is done."""
        sent = getattr(node, "workeroutput", {}).get(_SENT)
        if sent:
            findings, watched, faults = pickle.loads(sent)
            self.findings.add(findings)
            self.watched.add(watched)
            self.faults += [fault for fault in faults if fault not in self.faults]

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output: dict[str, Any] | None = getattr(self.config, "workeroutput", None)
        if output is not None:
            self.watched.rows = dict(self.watched.rows)  # the default of a defaultdict cannot be pickled
            output[_SENT] = pickle.dumps((self.findings, self.watched, self.faults))  # xdist sends plain types alone
            return
        refuted = self.findings.all_refuted()
        if self.updates:
            self._update(refuted)
        else:
            self.faults += [
                f"{key.op}: {key.check} on {key.input or key.test} is expected to fail, and does not" for key in refuted
            ]
        if self.faults and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _update(self, refuted: list[Key]) -> None:
        if not self.findings.new and not refuted and not self.expected.is_json:
            self.said = f"{self._shown(self.expected.path)} is as it should be"
            return
        path = self._shown(self.expected.update(self.findings.new, refuted))
        self.said = f"{path}: {plural(len(self.findings.new), 'new expected failure')}, {len(refuted)} removed"
        if self.expected.is_json:
            self.said += f"; it has those of {self._shown(self.expected.path)}: name it with --customops-expected"

    def _shown(self, path: str) -> str:
        return os.path.relpath(path, self.config.invocation_params.dir)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        lines = [*self.watched.lines(self.config.option.customops_mode)]
        lines += self.faults
        if self.faults:
            lines.append(f"so the run fails; see {self._shown(self.expected.path)}, which --customops-update writes")
        lines += [self.said] if self.said else []
        if lines:
            terminalreporter.section("customops", sep="=", red=bool(self.faults))
            for line in lines:
                terminalreporter.write_line(line)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """A block in which nothing is logged: what torch logs while it is traced says nothing of a failure."""
    before, trace = logging.root.manager.disable, logging.getLogger("torch.__trace")
    handlers, trace.handlers = trace.handlers, []  # it goes by these alone, and pytest has added its own
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
        trace.handlers = handlers


def _words(values: Iterable[str]) -> list[str]:
    return [word.strip() for value in values for word in value.split(",") if word.strip()]


_KEY = pytest.StashKey[Session]()


def session_of(config: pytest.Config) -> Session:
    """The `Session` of this run."""
    if _KEY not in config.stash:
        config.stash[_KEY] = Session(config)
        config.pluginmanager.register(config.stash[_KEY], "customops_session")
    return config.stash[_KEY]


def pytest_configure(config: pytest.Config) -> None:
    session_of(config)
