"""A record of what ran where, for the coverage report."""

from __future__ import annotations

import collections
from dataclasses import dataclass, field


@dataclass
class Journal:
    """How often each op ran in a kernel of the device, in one of the CPU, or raised there."""

    native: collections.Counter[str] = field(default_factory=collections.Counter)
    fallback: collections.Counter[str] = field(default_factory=collections.Counter)
    failed: dict[str, str] = field(default_factory=dict)  #: op -> the first line of its last error

    @property
    def ops(self) -> list[str]:
        return sorted({*self.native, *self.fallback, *self.failed})

    def add(self, other: Journal) -> None:
        self.native.update(other.native)
        self.fallback.update(other.fallback)
        self.failed.update(other.failed)

    def fail(self, op: str, error: BaseException) -> None:
        self.failed[op] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


#: The journal that is being written, or none. There is one device in a process, and it may not be registered yet.
open_journals: list[Journal] = []


def start() -> Journal:
    """Begin a journal; what happens from now on is in it."""
    open_journals[:] = [Journal()]
    return open_journals[0]
