"""Registrations: the newest one that was not taken back counts, and each can be taken back."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from customops import _compat
from customops._compat.libraries import Library

__tracebackhide__ = True  # pytest leaves the frames out


#: Held while the dispatcher or a registry is changed: there is one dispatcher, so there is one lock.
lock = threading.RLock()

if hasattr(os, "register_at_fork"):  # else a child has it held forever by a thread that it does not have
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)

#: Takes a registration back.
Undo = Callable[[], object]


def end_with(lib: Library, undo: Undo) -> None:
    """Call `undo` when `lib` is destroyed: with it ends what was registered with ``lib=``."""
    _compat.libraries.on_library_destroyed(lib, functools.partial(_end, undo, weakref.ref(lib)))


def _end(undo: Undo, library: weakref.ref[Library]) -> None:
    lent = library()
    if lent is None or not _compat.libraries.library_alive(lent):  # else the interpreter exits
        with lock:
            undo()


def nothing() -> None:
    """Takes nothing back."""


K = TypeVar("K")

V = TypeVar("V")


class _Entry(Generic[V]):
    """One registration. `undo` leads to what takes it back, for as long as somebody holds that."""

    def __init__(self, value: V) -> None:
        self.value = value
        self.undo: Callable[[], Any] = nothing


class Slots(Generic[K, V]):
    """key -> what the user registered for it: the newest registration that was not taken back.

    A key's trampoline goes in once, with the first registration, and reads `values` when it is called: registering
    again is an assignment. Registrations can be taken back in any order.

    Args:
        install: ``install(key, apart)`` puts the trampoline of a key in, and returns how to take it out.
        changed: called after each change of `values`.
    """

    def __init__(self, install: Callable[[K, bool], Undo], changed: Callable[[], object] = nothing) -> None:
        self.values: dict[K, V] = {}
        self._install = install
        self._changed = changed
        self._entries: dict[K, list[_Entry[V]]] = {}  # newest last
        self._uninstall: dict[K, Undo] = {}

    def preset(self, key: K, value: V) -> None:
        """Enter a value that comes with the op."""
        self._entries[key] = [_Entry(value)]
        self.values[key] = value

    def reset(self, with_op: Iterable[K] = ()) -> None:
        """Put everything into an op. The trampolines of `with_op` are part of the op, and stay as long as it does."""
        self._uninstall = {}
        for key in with_op:
            self._install(key, False)
            self._uninstall[key] = nothing
        for key in self.values:
            self._ensure(key)
        if self.values:
            self._changed()

    def set(self, key: K, value: V) -> Undo:
        """Register a value for a key; calling what is returned takes it back."""
        entry = _Entry(value)
        undo = functools.partial(self._unset, key, entry)
        entry.undo = weakref.ref(undo, functools.partial(self._forget_unreachable, key))
        self._entries.setdefault(key, []).append(entry)
        self.values[key] = value
        try:
            self._ensure(key)
        except BaseException:
            undo()
            raise
        self._changed()
        return undo

    def _ensure(self, key: K) -> None:
        if key not in self._uninstall:
            self._uninstall[key] = self._install(key, True)

    def _forget_unreachable(self, key: K, _: object) -> None:
        """Nobody can take a registration back any more, so what lies below it will not be seen again."""
        with lock:
            entries = self._entries[key]
            lasting = [i for i, entry in enumerate(entries) if entry.undo() is None]
            del entries[: max(lasting, default=0)]

    def _unset(self, key: K, entry: _Entry[V]) -> None:
        entries = self._entries[key]
        if entry not in entries:
            return
        entries.remove(entry)
        if entries:
            self.values[key] = entries[-1].value
        else:
            del self.values[key]
            if self._uninstall.get(key, nothing) is not nothing:
                self._uninstall.pop(key)()
        self._changed()
