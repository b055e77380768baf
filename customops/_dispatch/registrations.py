"""Registrations: the newest one counts, and each can be unregistered."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from customops import _torch
from customops._torch.library import Library
from customops.errors import user_source

__tracebackhide__ = True  # pytest leaves the frames out


#: Held while the dispatcher or a registry is changed: there is one dispatcher, so there is one lock.
lock = threading.RLock()

if hasattr(os, "register_at_fork"):  # else a child has it held forever by a thread that it does not have
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)

#: Undoes something.
Undo = Callable[[], object]


def nothing() -> None:
    """Undoes nothing."""


class Registration:
    """Something that was registered. Rules, scopes and ``lib=`` share the object."""

    def __init__(self, undo: Undo = nothing) -> None:
        self._undo = undo

    def unregister(self) -> None:
        """A second time does nothing."""
        undo, self._undo = self._undo, nothing
        undo()

    def keep(self) -> None:
        """Nobody will unregister it."""

    def end_with(self, lib: Library) -> None:
        """Unregister it when `lib` is destroyed."""
        _torch.library.on_library_destroyed(lib, functools.partial(self._end, weakref.ref(lib)))

    def _end(self, library: weakref.ref[Library]) -> None:
        lent = library()
        if lent is None or not _torch.library.library_alive(lent):  # else the interpreter exits
            with lock:
                self.unregister()


class RegistrationGroup(Registration):
    """Registrations that were made together."""

    def __init__(self, members: list[Registration]) -> None:
        super().__init__()
        self.members = members

    def unregister(self) -> None:
        for member in self.members:
            member.unregister()

    def keep(self) -> None:
        for member in self.members:
            member.keep()


K = TypeVar("K")
V = TypeVar("V")


class _Entry(Registration, Generic[K, V]):
    """The registration of a value for a key; `source` is the ``file:line`` of it, "" for what comes with the op."""

    def __init__(self, slots: Slots[K, V], key: K, value: V, source: str = "") -> None:
        self.slots, self.key, self.value, self.source = slots, key, value, source

    def unregister(self) -> None:
        slots, key = self.slots, self.key
        entries = slots._entries[key]
        if self not in entries:
            return
        entries.remove(self)
        if entries:
            slots.values[key] = entries[-1].value
        else:
            del slots.values[key]
            if slots._uninstall.get(key, nothing) is not nothing:
                slots._uninstall.pop(key)()
        slots._changed()

    def keep(self) -> None:
        """What it overrides will not be seen again."""
        entries = self.slots._entries[self.key]
        del entries[: entries.index(self)]


class Slots(Generic[K, V]):
    """key -> what the user registered for it: the newest registration counts.

    A key's function in the dispatcher is installed once, with the first registration, and reads `values` when it is
    called: registering again is an assignment. Registrations can be unregistered in any order.

    Args:
        install: ``install(key, own_library)`` installs the function of a key, and returns how to uninstall it.
        changed: called after each change of `values`.
    """

    def __init__(self, install: Callable[[K, bool], Undo], changed: Callable[[], object] = nothing) -> None:
        self.values: dict[K, V] = {}
        self._install = install
        self._changed = changed
        self._entries: dict[K, list[_Entry[K, V]]] = {}  # newest last
        self._uninstall: dict[K, Undo] = {}

    def source(self, key: K) -> str:
        """``file:line`` where what counts for a key was registered; "" if it came with the op, or is not there."""
        entries = self._entries.get(key)
        return entries[-1].source if entries else ""

    def preset(self, key: K, value: V) -> None:
        """Enter a value that comes with the op."""
        self._entries[key] = [_Entry(self, key, value)]
        self.values[key] = value

    def reset(self, with_op: Iterable[K] = ()) -> None:
        """Put everything into an op. The functions of `with_op` are part of the op, and stay as long as it does."""
        self._uninstall = {}
        for key in with_op:
            self._install(key, False)
            self._uninstall[key] = nothing
        for key in self.values:
            self._ensure(key)
        if self.values:
            self._changed()

    def set(self, key: K, value: V, source: str | None = None) -> Registration:
        """Register a value for a key, at a ``file:line``; None: where the user's code is now."""
        entry = _Entry(self, key, value, user_source() if source is None else source)
        self._entries.setdefault(key, []).append(entry)
        self.values[key] = value
        try:
            self._ensure(key)
        except BaseException:
            entry.unregister()
            raise
        self._changed()
        return entry

    def _ensure(self, key: K) -> None:
        if key not in self._uninstall:
            self._uninstall[key] = self._install(key, True)
