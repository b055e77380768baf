"""`Slots`: what the user registered, key by key, and the trampolines in the dispatcher that read it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from customops._definition import Undo, nothing

K = TypeVar("K")
V = TypeVar("V")


class Slots(Generic[K, V]):
    """key -> what the user registered for it.

    A key's trampoline goes in once, with the first registration, and reads `values` when it is called: registering
    again is an assignment. Registrations can be taken back in any order; what was registered since stays.

    Args:
        install: ``install(key, apart)`` puts the trampoline of a key in, and returns how to take it out.
        changed: called after each change of `values`.
    """

    def __init__(self, install: Callable[[K, bool], Undo], changed: Callable[[], object] = nothing) -> None:
        self.values: dict[K, V] = {}
        self._install = install
        self._changed = changed
        self._uninstall: dict[K, Undo] = {}

    def reset(self, with_op: Iterable[K] = ()) -> None:
        """Fill a fresh definition. The trampolines of `with_op` are part of the op, and stay as long as it does."""
        self._uninstall = {}
        for key in with_op:
            self._install(key, False)
            self._uninstall[key] = nothing
        for key in self.values:
            self._ensure(key)
        self._changed()

    def set(self, key: K, value: V) -> Undo:
        """Register a value for a key; calling what is returned takes it back."""
        before = self.values.get(key)
        self.values[key] = value
        try:
            self._ensure(key)
        except BaseException:
            self._put_back(key, before)
            raise
        self._changed()
        return functools.partial(self._unset, key, value, before)

    def _ensure(self, key: K) -> None:
        if key not in self._uninstall:
            self._uninstall[key] = self._install(key, True)

    def _unset(self, key: K, value: V, before: V | None) -> None:
        if self.values.get(key) is not value:
            return  # somebody, perhaps in another thread, has registered the key since
        self._put_back(key, before)
        if before is None and self._uninstall[key] is not nothing:
            self._uninstall.pop(key)()
        self._changed()

    def _put_back(self, key: K, before: V | None) -> None:
        if before is None:
            del self.values[key]
        else:
            self.values[key] = before
