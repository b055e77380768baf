"""`log`: a line for each call, in the logger ``customops.calls``."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from customops._dispatch.current_kernel import observe, start
from customops.errors import ArgumentError
from customops.logging._calls import LEVELS, Call, Level
from customops.logging._watch import Ops, Watcher

logger = logging.getLogger("customops.calls")

_VARIABLE = "CUSTOMOPS_LOG"


@contextmanager
def log(level: Level = "calls", ops: Ops = None, *, synchronize: bool = False) -> Iterator[None]:
    """Log a line for each call inside the context, in all threads, to the logger ``customops.calls`` (level INFO).

    If neither this logger nor one above it has a handler, the lines go to stderr.

    Args:
        level: how much a line contains. "calls": the arguments and the caller. "kernels": also the kernel that ran.
            "times": also the duration of the call and of the kernel.
        ops, synchronize: as in `record`.

    Raises:
        ArgumentError: there is no such level.
    """
    with observe(_watcher(level, ops, synchronize, "level")):
        yield


def log_as_environment_says() -> None:
    """Log from now on what ``CUSTOMOPS_LOG`` asks for.

    Raises:
        ArgumentError: it has an invalid value.
    """
    start(_watcher(os.environ[_VARIABLE], None, False, _VARIABLE))


def _watcher(level: Any, ops: Ops, synchronize: bool, argument: str) -> Watcher:
    if level not in LEVELS:
        raise ArgumentError(
            "there is no such level of logging",
            argument=argument,
            expected=" or ".join(map(repr, LEVELS)),
            got=repr(level),
        )
    if not logger.hasHandlers():
        handler = _Stderr()
        handler.setFormatter(logging.Formatter("customops: %(message)s"))
        logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    return Watcher(functools.partial(_write, level), ops, synchronize=synchronize)


class _Stderr(logging.Handler):
    """Writes to what `sys.stderr` is when a line comes: the one of now may be closed, or be put back, before that."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


def _write(level: Level, call: Call, given: Any) -> None:
    logger.info("%s", call.line(level))
