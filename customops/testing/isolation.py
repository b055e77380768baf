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
    """Run a function, Python code, or a Python file in a new interpreter process.

    Args:
        target: a module-level function (not a lambda or a nested function), which is found by its file and name, or a
            `functools.partial` of one. Or a program: a file, given as a `pathlib.Path` or a one-line string that ends
            in ``.py``; any other string is Python code. The value of a program is that of its variable ``result``.
        args: arguments of the function. These and its value are pickled. Return ``x.cpu()`` if this process does not
            have the device of a tensor.
        timeout: seconds after which the process and its child processes are killed.
        cwd: the working directory of the process. A file is looked up from the directory of this process.
        env: variables to set in addition to the environment of this process.

    Returns:
        The value, and the output of the process.

    Raises:
        CustomOpsError: another process cannot find the function, there is no such file, or a program got arguments.
        IsolationError: the process died (for example of a segfault), or timed out.
        BaseException: the exception of the function or program, with the traceback of the child process in its notes.
            ``sys.exit(0)`` ends a program normally.
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
    """Run functions without arguments, each in a fork of a new interpreter process in which `setup` has run.

    Use `functools.partial` to bind arguments. Functions do not see changes that others make to their process, and one
    that dies does not affect the others. `setup` must not start threads (a backward does), because they do not survive
    a fork. On platforms without fork (Windows), each function has its own interpreter.

    Args:
        functions: module-level functions, as for `run_isolated`.
        setup: a function to run first, in the process that is forked.
        timeout: seconds for each function. A function that takes longer is killed; the others continue.
        cwd, env: as for `run_isolated`.

    Returns:
        An `Isolated` for each function, in order. Errors of the functions are not raised.

    Raises:
        Exception: the exception that `setup` raised.
        IsolationError: the process died or timed out in `setup`.
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
