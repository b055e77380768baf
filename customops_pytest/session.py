"""What the parts of the plugin share in one run: the options, what is expected to fail, and what came of it.

Under xdist each worker has a `Session`, and sends what it found to the one of the controlling process, which alone
judges, writes the file and speaks.
"""

from __future__ import annotations

import contextlib
import fnmatch
import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from customops import CustomOpsError
from customops._describe.render import plural
from customops.checks import CHECKS
from customops_pytest.expected import Expected, Key
from customops_pytest.watched import Watched

_FILE = "customops_expected.toml"
_SENT = "customops"


@dataclass
class Findings:
    """What a run found that is to be written, or judged when all of it is over.

    Attributes:
        new: failures that no one expected -> what is wrong, where the file is updated.
        refuted: entries that were found to be wrong by themselves.
        tried: entries for kinds of calls -> how many calls failed, and how many passed.
    """

    new: dict[Key, str] = field(default_factory=dict)
    refuted: set[Key] = field(default_factory=set)
    tried: dict[Key, tuple[int, int]] = field(default_factory=dict)

    def note(self, key: Key, failed: bool) -> None:
        """An entry was tried."""
        before = self.tried.get(key, (0, 0))
        self.tried[key] = (before[0] + failed, before[1] + (not failed))

    def all_refuted(self) -> list[Key]:
        """Entries that were tried, and of which nothing failed."""
        return sorted(self.refuted | {key for key, (failed, passed) in self.tried.items() if passed and not failed})

    def to_plain(self) -> Any:
        """As lists and dicts."""
        return {
            "new": [[*key, problem] for key, problem in self.new.items()],
            "refuted": [list(key) for key in self.refuted],
            "tried": [[*key, *counts] for key, counts in self.tried.items()],
        }

    def add(self, plain: Any) -> None:
        """Take over what another process found."""
        for *key, problem in plain["new"]:
            self.new.setdefault(Key(*key), problem)
        self.refuted |= {Key(*key) for key in plain["refuted"]}
        for *key, failed, passed in plain["tried"]:
            before = self.tried.get(Key(*key), (0, 0))
            self.tried[Key(*key)] = (before[0] + failed, before[1] + passed)


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

    # Hooks --------------------------------------------------------------------------------------------------

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Of xdist: a worker is done."""
        sent = getattr(node, "workeroutput", {}).get(_SENT)
        if sent:
            self.findings.add(sent["findings"])
            self.watched.add(sent["watched"])
            self.faults += [fault for fault in sent["faults"] if fault not in self.faults]

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output: dict[str, Any] | None = getattr(self.config, "workeroutput", None)
        if output is not None:
            plain = {"findings": self.findings.to_plain(), "watched": self.watched.to_plain(), "faults": self.faults}
            output[_SENT] = plain
            return
        refuted = self.findings.all_refuted()
        if self.updates:
            self._update(refuted)
        else:
            self.faults += [f"{_told(key)} is expected to fail, and does not" for key in refuted]
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


def _told(key: Key) -> str:
    return f"{key.op}: {key.check} on {key.input or key.test}"


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
