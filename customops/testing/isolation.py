"""A process of its own for what cannot be undone, or may end the process: a device registration, a segfault.

`run_isolated` runs one function, piece of code or file in a fresh interpreter. `run_each_isolated` runs many functions
after one set-up, each in a fork of the same fresh interpreter, so that importing torch is paid once.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from customops.errors import CustomOpsError
from customops.testing._isolation_child import PROGRAM, fork_and_wait
from customops.testing._isolation_outcome import (
    GRACE,
    LATE,
    STARTING,
    Isolated,
    IsolationError,
    _failure,
    load,
    outcome,
    outcome_of_fork,
    read,
)
from customops.testing._isolation_target import _program, sendable


def run_isolated(
    target: Callable[..., Any] | str | os.PathLike[str],
    /,
    *args: Any,
    timeout: float = 120.0,
    cwd: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
) -> Isolated:
    """Run a function, code, or a file in a fresh interpreter.

    Args:
        target: a function of a module (not a lambda or a nested one), found there by file and name, or a
            `functools.partial` of one. Or a program, whose value is what it leaves in the name ``result``: a file, as
            a `pathlib.Path` or a string of one line that ends in ``.py``; any other string is Python code.
        args: arguments of the function; these and its value are pickled. Return ``x.cpu()``, not tensors of a device
            that this process does not have.
        timeout: seconds after which the process is killed, and what it started with it.
        cwd: where it runs. A file is looked up from the directory of this process.
        env: set on top of the environment of this process.

    Returns:
        The value, and what was printed.

    Raises:
        CustomOpsError: another process cannot find the function, or there is no such file.
        IsolationError: the process died (of a segfault, say), or ran out of time.
        BaseException: what the function raised, or the program (``sys.exit(0)`` is its end); its traceback there is in
            the notes of the exception.
    """
    if isinstance(target, (str, os.PathLike)):
        if args:
            raise CustomOpsError("only a function takes arguments", got=f"{len(args)} for a program")
        task: Callable[[], Any] = _program(target)
    else:
        task = functools.partial(sendable(target), *args)
    (done,) = _run([task], None, timeout, cwd, env, fork=False)
    done.get()
    return done


def run_each_isolated(
    functions: Iterable[Callable[[], Any]],
    *,
    setup: Callable[[], Any] | None = None,
    timeout: float = 120.0,
    cwd: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
) -> list[Isolated]:
    """Run functions without arguments, each in a fork of a fresh interpreter in which `setup` has run.

    `functools.partial` binds arguments to one. What one does to its process the next does not see, and one that dies
    is an error of its own. `setup` must start no threads (a backward does): they do not survive a fork. Where there is
    no fork (Windows), each has its own interpreter.

    Args:
        timeout: seconds for each. One that takes longer is killed; the others are not concerned.

    Returns:
        One for each function, in order; none of the errors is raised.

    Raises:
        Exception: what `setup` raised.
        IsolationError: the process died or ran out of time in `setup`.
    """
    tasks = [sendable(function) for function in functions]
    first = sendable(setup) if setup is not None else None
    if hasattr(os, "fork"):
        return _run(tasks, first, timeout, cwd, env, fork=True)
    return [done for task in tasks for done in _run([task], first, timeout, cwd, env, fork=False)]


def _run(
    tasks: Sequence[Callable[[], Any]],
    setup: Callable[[], Any] | None,
    timeout: float,
    cwd: str | os.PathLike[str] | None,
    env: Mapping[str, str] | None,
    *,
    fork: bool,
) -> list[Isolated]:
    # What the child left running may hold its files open, and Windows does not delete such files.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        place = Path(directory)
        # Each fork has a limit of its own; this is for what hangs where none should.
        whole = (timeout + STARTING) * 2 + (timeout + GRACE) * len(tasks) if fork else timeout
        # In two steps: the tasks may need the path to be read.
        work = pickle.dumps((setup, list(tasks), timeout, fork))
        (place / "tasks").write_bytes(pickle.dumps((list(sys.path), whole, work)))
        environment = {**os.environ, **(env or {})}
        # The package may be there only because this process has its directory on the path.
        root = str(Path(__file__).parents[2])
        environment["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [environment.get("PYTHONPATH")])])
        code = _run_session(place, whole, cwd, environment)
        stdout, stderr = read(place / "all.out"), read(place / "all.err")
        if (place / "setup").exists():
            raise load(place / "setup", stdout, stderr).error or IsolationError("the set-up failed")
        if not fork:
            return [outcome(place / str(i), whole, code, stdout, stderr) for i in range(len(tasks))]
        if not (place / "ready").exists():
            raise _failure(timeout + STARTING, code, stdout, stderr)
        return [outcome_of_fork(place / str(i), timeout, code) for i in range(len(tasks))]


def _run_session(place: Path, limit: float, cwd: str | os.PathLike[str] | None, environment: Mapping[str, str]) -> int:
    """The exit code of the child, which is over when it ends: what it started may go on, and hold its output open."""
    command = [sys.executable, "-X", "faulthandler", "-c", PROGRAM, str(place)]
    with (place / "all.out").open("wb") as out, (place / "all.err").open("wb") as err:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,  # so that it can be killed with all that it started
        )
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return LATE
    finally:
        # It is out of time, or this process got a Ctrl-C; or a fork was out of time, in a process that it waited for.
        if process.poll() is None or any(read(path) == str(LATE) for path in place.glob("*.code")):
            _kill_session(process)


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()


def in_fork(function: Callable[[], Any], timeout: float) -> Isolated:
    """Call a function in a fork of this process, and bring back what it returned, raised or printed."""
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory) / "outcome"
        fork_and_wait(function, place, timeout)
        return outcome_of_fork(place, timeout)
