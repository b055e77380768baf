"""A run in processes of its own: a kernel that ends the process is a fault, and the run goes on without that step."""

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
from customops.checking._run import Run, Step, raised_at
from customops.checks import UsageError
from customops.errors import CheckError, brief, is_users
from customops.testing.isolation import IsolationError, in_fork

_TIMEOUT = 600.0  #: seconds for a whole run
_CRASHES = 8  #: after so many nothing is derived any more


def can_isolate() -> bool:
    """Can this process be forked, with what it has in use?"""
    return hasattr(os, "fork") and not torch.cuda.is_initialized()


def isolated(run: Run) -> Iterator[Step]:
    """Make `run` in forks of this process; a step that ended one is a fault, and left out in the next."""
    if not hasattr(os, "fork"):
        raise UsageError("isolate=True needs os.fork, which this platform lacks", argument="isolate")
    if torch.cuda.is_initialized():
        raise UsageError(
            "isolate=True forks the process, which CUDA does not survive once it is in use",
            argument="isolate",
            fix="call check(..., isolate=True) before anything uses CUDA, or with tensors on the CPU",
        )
    _torch.tensors.fake_mode()  # loads what each fork would load for itself
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory) / "step"
        while True:
            yield Step(0, 1, "in a process of its own")
            done = in_fork(lambda: _child(run, place), _TIMEOUT)
            error = done.error
            if isinstance(error, IsolationError) and error.returncode is not None:
                error = CheckError(
                    "the operator ends the process",
                    op=run.op,
                    got=error.args[0].splitlines()[0],
                    where=_line_of_crash(error.stderr),
                    fix="check the arguments before using them, and raise an error: torch._check(...)",
                )
            if not isinstance(error, CheckError) or not place.exists():  # or it ended before anything was tried
                run.given = done.get()
                return
            # The next fork leaves out what ended this one, and in the end all that is derived.
            run.avoided[pickle.loads(place.read_bytes())] = error
            if len(run.avoided) == _CRASHES:
                run.samples_only = True
                run.left_out.append(f"derived inputs: {_CRASHES} of them ended the process")
            elif len(run.avoided) > 2 * _CRASHES:
                raise UsageError("the operator ends the process on its samples", op=run.op, got=error.got)


def _child(run: Run, place: Path) -> Any:
    faulthandler.disable()  # a library may have put a handler in its place
    faulthandler.enable(2)  # says on stderr which line a crash was in
    torch.set_num_threads(1)  # the threads of the parent are not there
    signal.signal(signal.SIGINT, lambda *_: None)  # a Ctrl-C is for the parent, which ends this process
    run.announce = lambda check, case: place.write_bytes(pickle.dumps((check, case)))
    try:
        for _ in run.steps():
            pass
    except Exception:
        raise
    except BaseException as error:  # the operator's
        raise CheckError(
            f"the operator raises {type(error).__name__}, which ends the program",
            op=run.op,
            got=brief(error),
            where=raised_at(error),
            fix=f"raise another error: {type(error).__name__} passes by `except Exception`",
        ) from None
    return run.outcome()


#: A line of what `faulthandler` prints, the innermost frame first.
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (\S+)$', re.MULTILINE)

_STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep


def _line_of_crash(stderr: str) -> str | None:
    """``name (file:line)`` of the innermost frame of the user's code, if there is one."""
    for file, line, name in _FRAME.findall(stderr.rpartition("Fatal Python error")[2]):
        is_standard = file.startswith(_STANDARD_LIBRARY) and "site-packages" not in file
        if is_users(file) and not is_standard:
            return f"{name} ({file}:{line})"
    return None
