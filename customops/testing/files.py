"""Files that several processes write: one at a time, and never seen half written."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import uuid
from collections.abc import Iterator

if sys.platform == "win32":
    import msvcrt

    def _lock(descriptor: int) -> bool:
        """Wait for the lock, for 10 seconds at most; False if it was not had."""
        try:
            msvcrt.locking(descriptor, msvcrt.LK_LOCK, 1)
        except OSError:
            return False
        return True
else:
    import fcntl

    def _lock(descriptor: int) -> bool:
        """Wait for the lock. It goes when the descriptor is closed, also by the end of a process that was killed."""
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return True


@contextlib.contextmanager
def exclusive(path: str) -> Iterator[None]:
    """Only one thread of one process at a time is inside, for one path. Puts a file beside it meanwhile."""
    lock = os.path.realpath(path) + ".lock"
    descriptor = _locked(lock)
    try:
        yield
    finally:
        _release(lock, descriptor)


def _locked(lock: str) -> int:
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        # Whoever had it before removed the file: the lock counts only on the file that now has the name.
        if _lock(descriptor) and _is_at(lock, descriptor):
            return descriptor
        os.close(descriptor)


def _is_at(path: str, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _release(lock: str, descriptor: int) -> None:
    if sys.platform == "win32":
        os.close(descriptor)  # an open file cannot be removed, one that another process has opened stays
        with contextlib.suppress(OSError):
            os.remove(lock)
    else:
        os.remove(lock)
        os.close(descriptor)


def replace(path: str, text: str) -> None:
    """Write a file such that a reader gets the old text or the new."""
    path = os.path.realpath(path)
    temporary = f"{path}.{uuid.uuid4().hex}.tmp"
    try:
        with open(temporary, "x", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileNotFoundError):
            shutil.copymode(path, temporary)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)
        raise
