"""What became of a function that ran in another process, and how it is written down."""

from __future__ import annotations

import pickle
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from customops.errors import CustomOpsError

#: Seconds that importing torch may take on a busy machine.
STARTING = 60.0

#: Seconds that a process has for ending by itself when its alarm rings.
GRACE = 1.0

#: The exit code of a process that ran out of time, whatever ended it.
LATE = -int(getattr(signal, "SIGALRM", 14))


class IsolationError(CustomOpsError, RuntimeError):
    """A child process gave no result: a signal killed it, it timed out, or its result or error cannot be pickled.

    Attributes:
        returncode: the exit code of the process; negative if a signal killed it, None if it timed out.
        stdout, stderr: the output of the process.
    """

    def __init__(self, problem: str, *, returncode: int | None = None, stdout: str = "", stderr: str = "") -> None:
        self.returncode = returncode
        self.stdout = stdout
        self.stderr = stderr
        tail = "\n".join(stderr.rstrip().splitlines()[-30:])
        super().__init__(f"{problem}\n\n{tail}" if tail else problem)


@dataclass(frozen=True)
class Isolated:
    """The outcome of a child process.

    Attributes:
        value: what the function returned.
        error: the exception that it raised, or None.
        stdout, stderr: the output of the process.
    """

    value: Any = None
    error: BaseException | None = None
    stdout: str = ""
    stderr: str = ""

    def get(self) -> Any:
        """Return `value`, or raise `error` if there is one."""
        if self.error is not None:
            raise self.error
        return self.value


def outcome_of_fork(path: Path, timeout: float, default: int = 0) -> Isolated:
    """What a fork left; `default` is the exit code of the process that should have waited for it."""
    code = int(read(path.with_suffix(".code")) or default)
    return outcome(path, timeout, code, read(path.with_suffix(".out")), read(path.with_suffix(".err")))


def outcome(path: Path, timeout: float, code: int, stdout: str, stderr: str) -> Isolated:
    returned = path.exists()
    if returned:
        done = load(path, stdout, stderr)
        if code != LATE or done.error is not None:
            return done
    error = _failure(timeout, code, stdout, stderr, returned=returned)
    return Isolated(error=error, stdout=stdout, stderr=stderr)


def _failure(timeout: float, code: int, stdout: str, stderr: str, *, returned: bool = False) -> IsolationError:
    if code == LATE and returned:
        problem = f"what ran in the child process returned, but the process did not end within {timeout:g} seconds: "
        problem += "it waits for a thread or a process that was started there"
    elif code == LATE:
        problem = f"the child process ran out of time: it was still running after {timeout:g} seconds"
    elif code < 0:
        problem = f"the child process died of {signal.Signals(-code).name}"
    else:
        problem = f"the child process ended without a result (status {code})"
    return IsolationError(problem, returncode=None if code == LATE else code, stdout=stdout, stderr=stderr)


def load(path: Path, stdout: str, stderr: str) -> Isolated:
    try:
        value, error = pickle.loads(path.read_bytes())
    except Exception as problem:
        error = IsolationError(f"what the child process sent cannot be read here: {problem}", stderr=stderr)
        return Isolated(error=error, stdout=stdout, stderr=stderr)
    return Isolated(value, error, stdout, stderr)


def read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def add_note(error: BaseException, note: str) -> None:
    if sys.version_info >= (3, 11):
        error.add_note(note)
