"""Registrations: objects that end what was registered, alone, with a library or in a group. And the lock."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterable

from customops import _torch
from customops._torch.library import Library
from customops.errors import RegistrationError, brief

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


def all_or_none(registrations: Iterable[Registration]) -> RegistrationGroup:
    """Registrations that are made one after the other; if one fails, those before it are taken back."""
    made: list[Registration] = []
    try:
        made.extend(registrations)
    except BaseException:
        RegistrationGroup(made).unregister()
        raise
    return RegistrationGroup(made)


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


def check_library(lib: Library | None, namespace: str, op: str) -> None:
    """Raise unless an op, or registrations on it, can end with `lib`."""
    if lib is None:
        return
    if not isinstance(lib, Library):
        raise RegistrationError("lib= must be a torch.library.Library", op=op, got=brief(lib))
    if not _torch.library.library_alive(lib):
        raise RegistrationError("the library given as lib= has been destroyed", op=op)
    if lib.ns != namespace:
        raise RegistrationError(
            "the library given as lib= is of another namespace than the op",
            op=op,
            got=f"a Library of namespace {lib.ns!r}",
            fix=f'Library("{namespace}", "FRAGMENT")',
        )
