"""Limits of time and memory for calls of an operator."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]


class TookTooLong(BaseException):
    """Raised in a call that ran out of time. (A kernel may well catch an Exception, and go on.)"""


@dataclass(frozen=True)
class Limits:
    """What a call may take.

    Attributes:
        seconds: of time on the clock. It ends calls in the main thread that come back to Python, on Linux and macOS.
        memory: bytes, beyond what the process has.
    """

    seconds: float = 60.0
    memory: int = 16 * 2**30

    @contextlib.contextmanager
    def applied(self, times: float = 1.0) -> Iterator[None]:
        """Within the block; for something that makes many calls, `times` as long."""
        with _memory_limited(self.memory), _time_limited(self.seconds * times):
            yield

    def is_exceeded_by(self, error: BaseException) -> str | None:
        """The limit because of which a call raised `error`, in words."""
        if isinstance(error, TookTooLong):
            return f"the operator does not return within {self.seconds:g} seconds"
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            return f"the operator asks for more than {self.memory / 2**30:g} GiB of memory"
        return None


@contextlib.contextmanager
def _time_limited(seconds: float) -> Iterator[None]:
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not hasattr(signal, "setitimer") or signal.getitimer(signal.ITIMER_REAL)[0]:
        yield  # somebody else's clock is running
        return

    def ring(_number: int, _frame: Any) -> None:
        raise TookTooLong

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _memory_limited(size: int) -> Iterator[None]:
    """Allocations beyond what there is and `size` fail. (Otherwise the system would kill a process, maybe another.)"""
    if resource is None or not hasattr(resource, "RLIMIT_DATA"):
        yield
        return
    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    used = _data_size()
    wanted = used + size
    is_lower = used > 0 and (before == resource.RLIM_INFINITY or before > wanted)
    if is_lower and (hard == resource.RLIM_INFINITY or hard >= wanted):
        resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, hard))


def _data_size() -> int:
    """What counts for the limit, in bytes; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[5]) * resource.getpagesize()
    except OSError:
        return 0
