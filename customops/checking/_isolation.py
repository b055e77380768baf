"""A run in forks of this process: a kernel that ends the process is a fault, and the run goes on without that step."""

from __future__ import annotations

import faulthandler
import os
import pickle
import re
import signal
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from customops import _torch
from customops._places import is_users
from customops.checking._faults import exceeds
from customops.checking._run import INPUTS, Run, Step
from customops.checks import UsageError
from customops.checks._outcome import raised_at
from customops.checks._trial import Trial
from customops.errors import CheckError, brief
from customops.testing.isolation import IsolationError, in_fork

__tracebackhide__ = True  # pytest leaves the frames out

_TIMEOUT = 600.0  #: seconds for a whole run
_CRASHES = 8  #: after so many nothing is derived any more


def can_fork() -> bool:
    """Return True if this process can be forked: the platform has `os.fork`, and CUDA is not in use."""
    return hasattr(os, "fork") and not torch.cuda.is_initialized()


def is_isolated(isolate: bool | None, trial: Trial) -> bool:
    """Is the operator to be run in a process of its own? Where nothing is said, if its kernel may end the process."""
    if isolate is not None:
        return isolate
    is_foreign = not trial.is_builtin and not _torch.dispatcher.runs_python(trial.name)
    return is_foreign and can_fork()


def isolated(run: Run) -> Iterator[Step]:
    """Make `run` in forks of this process; a step that ended one is a fault, and left out in the next."""
    if not hasattr(os, "fork"):
        raise UsageError("isolate=True needs os.fork, which this platform lacks", argument="isolate")
    if torch.cuda.is_initialized():
        problem = "isolate=True forks the process, which CUDA does not survive once it is in use"
        fix = "call check(..., isolate=True) before anything uses CUDA, or with tensors on the CPU"
        raise UsageError(problem, argument="isolate", fix=fix)
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory) / "step"
        while True:
            yield 0, 1, "in a process of its own"
            done = in_fork(lambda: _child(run, place), max(_TIMEOUT, 10 * run.limits.seconds))
            error = done.error
            if isinstance(error, IsolationError) and error.returncode is None and place.exists():
                problem = f"the operator does not return within {run.limits.seconds:g} seconds"
                error = exceeds(problem, error, run.op, run.source)
            elif isinstance(error, IsolationError) and error.returncode is not None:
                got, line = error.args[0].splitlines()[0], _line_of_crash(error.stderr)
                fix = "check the arguments before using them, and raise an error: torch._check(...)"
                error = CheckError("the operator ends the process", op=run.op, got=got, where=line, fix=fix)
            if not isinstance(error, CheckError) or not place.exists():  # or it ended before anything was tried
                run.given = done.get()
                return
            # The next fork leaves out what ended this one, and in the end all that is derived.
            run.avoided[pickle.loads(place.read_bytes())] = error
            if len(run.avoided) == _CRASHES:
                run.samples_only = True
                run.left_out.append(f"derived inputs left out: {_CRASHES} of them ended the process")
            elif len(run.avoided) > 2 * _CRASHES:
                raise UsageError("the operator ends the process on its samples", op=run.op, got=error.got)


def _child(run: Run, place: Path) -> Any:
    faulthandler.disable()  # a library may have put a handler in its place
    faulthandler.enable(2)  # says on stderr which line a crash was in
    torch.set_num_threads(1)  # the threads of the parent are not there
    signal.signal(signal.SIGINT, lambda *_: None)  # a Ctrl-C is for the parent, which ends this process

    def announce(check: str, case: int) -> None:
        place.write_bytes(pickle.dumps((check, case)))
        # Unlike what `Limits` do, this ends C++ code, too: it ends the process.
        signal.setitimer(signal.ITIMER_REAL, run.limits.seconds * (1 if check == INPUTS else 10))

    run.announce = announce
    try:
        for _ in run.steps():
            pass
    except Exception:
        raise
    except BaseException as error:  # the operator's
        problem = f"the operator raises {type(error).__name__}, which ends the program"
        fix = f"raise another error: {type(error).__name__} passes by `except Exception`"
        raise CheckError(problem, op=run.op, got=brief(error), where=raised_at(error), fix=fix) from None
    return run.outcome()


def _line_of_crash(stderr: str) -> str | None:
    """``name (file:line)`` of the innermost frame of the user's code in what `faulthandler` prints, if there is one."""
    traceback = stderr.rpartition("Fatal Python error")[2]
    for file, line, name in re.findall(r'^  File "(.+)", line (\d+) in (\S+)$', traceback, re.MULTILINE):
        is_standard = file.startswith(sysconfig.get_path("stdlib") + os.sep) and "site-packages" not in file
        if is_users(file) and not is_standard:
            return f"{name} ({file}:{line})"
    return None
