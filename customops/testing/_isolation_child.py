"""What runs in the other process."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from customops.testing._isolation_outcome import GRACE, LATE, STARTING, IsolationError, add_note

#: What the fresh interpreter runs.
PROGRAM = "import sys; from customops.testing._isolation_child import child; child(sys.argv[1])"


def child(directory: str) -> None:
    place = Path(directory)
    paths, limit, work = pickle.loads((place / "tasks").read_bytes())
    _set_alarm(limit + STARTING)  # for when the parent is no more
    sys.path[:] = list(dict.fromkeys([*paths, *sys.path]))
    setup, tasks, timeout, fork = pickle.loads(work)
    if setup is not None:
        if fork:
            _set_alarm(timeout + STARTING)
        outcome = _attempt(setup)
        if outcome[1] is not None:
            _save(place / "setup", *outcome)
            return
    _set_alarm(limit + STARTING)
    (place / "ready").touch()
    for i, task in enumerate(tasks):
        if fork:
            fork_and_wait(task, place / str(i), timeout)
        else:
            _save(place / str(i), *_attempt(task))


def _set_alarm(seconds: float) -> None:
    if hasattr(signal, "setitimer"):  # not on Windows
        signal.setitimer(signal.ITIMER_REAL, seconds)


def _attempt(function: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    try:
        return function(), None
    except BaseException as error:
        return None, error


def fork_and_wait(function: Callable[[], Any], place: Path, timeout: float) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        _be_the_fork(function, place, timeout)
    place.with_suffix(".code").write_text(str(_wait(child, timeout + GRACE)))


def _be_the_fork(function: Callable[[], Any], place: Path, timeout: float) -> NoReturn:
    try:
        for stream, suffix in ((1, ".out"), (2, ".err")):
            os.dup2(os.open(place.with_suffix(suffix), os.O_CREAT | os.O_WRONLY), stream)
        _set_alarm(timeout)
        _save(place, *_attempt(function))
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # never back into the loop that forks
    os._exit(0)


def _wait(child: int, limit: float) -> int:
    """The exit code of a fork. One that does not heed its alarm is killed; so is one at a Ctrl-C here."""
    end, pause, running, status = time.monotonic() + limit, 0.0005, True, 0
    try:
        while running and time.monotonic() < end:
            time.sleep(pause)
            pause = min(2 * pause, 0.01)
            ended, status = os.waitpid(child, os.WNOHANG)
            running = not ended
    finally:
        if running:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return LATE if running else os.waitstatus_to_exitcode(status)


def _save(path: Path, value: Any, error: BaseException | None) -> None:
    """Write the outcome; one that cannot be pickled is told as text."""
    if error is not None:
        text = "".join(traceback.format_exception(error))
        add_note(error, f"in the child process:\n{text}")
    try:
        data = pickle.dumps((value, error))
        pickle.loads(data)  # an exception may well be pickled and not be made again
    except Exception as problem:
        what = traceback.format_exc() if error is None else "".join(traceback.format_exception(error))
        kind = "value" if error is None else f"error ({type(error).__name__}: {error})"
        data = pickle.dumps((None, IsolationError(f"the {kind} cannot be sent: {problem}", stderr=what)))
    temporary = path.with_suffix(".partial")
    temporary.write_bytes(data)
    temporary.rename(path)
