"""The base of rules: the registrations of one kind for an op, of which the newest applies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, TypeVar

from customops._dispatch.operator import OperatorHandle
from customops._dispatch.registrations import Registration, Undo, all_or_none, nothing
from customops._places import user_source

__tracebackhide__ = True  # pytest leaves the frames out

K = TypeVar("K")

V = TypeVar("V")


class _Entry(Registration, Generic[K, V]):
    """The registration of a value for a key; `source` is the ``file:line`` of it, "" for what comes with the op."""

    def __init__(self, rule: Rule[K, V], key: K, value: V, source: str | None, is_derived: bool = False) -> None:
        self.rule, self.key, self.value, self.is_derived = rule, key, value, is_derived
        self.source = user_source() if source is None else source

    def unregister(self) -> None:
        self.rule._unset(self)

    def keep(self) -> None:  # what it overrides will not be seen again
        entries = self.rule._entries[self.key]
        del entries[: entries.index(self)]


class Rule(Generic[K, V]):
    """The registrations of one kind for an op: key -> value, of which the newest applies.

    A registration by hand, before or after, takes precedence over one that is derived from the reference function.
    The function of a key in the dispatcher is installed with the first registration, and reads `values` when it is
    called: registering again is an assignment. Registrations can be unregistered in any order.
    """

    operator: OperatorHandle
    #: The keys of functions that come with an op of ours, and stay as long as it does.
    _with_op: tuple[K, ...] = ()

    def __init__(self) -> None:
        self.values: dict[K, V] = {}
        self._entries: dict[K, list[_Entry[K, V]]] = {}  # newest last
        self._uninstall: dict[K, Undo] = {}

    def _install(self, key: K, own_library: bool) -> Undo:
        """Install the function of a key, and return how to uninstall it: alone with `own_library`, else with the op."""
        raise NotImplementedError

    def _changed(self) -> None:
        """Follow a change of `values`."""
        self.operator.recompile()

    def traced(self) -> Any:
        """Return what compilers trace through, or decide by; empty if nothing is registered."""
        return self.values

    def bind(self, operator: OperatorHandle) -> None:
        """Install everything in an op."""
        self.operator, self._uninstall = operator, {}
        with_op = self._with_op if operator.has_own_rules else ()
        for key in dict.fromkeys((*with_op, *self.values)):
            undo = self._install(key, key not in with_op)
            self._uninstall[key] = nothing if key in with_op else undo
        if self.values:
            self._changed()

    def source(self, key: K) -> str:
        """Return ``file:line`` of the registration that applies; "" if it came with the op, or there is none."""
        entries = self._entries.get(key)
        return entries[-1].source if entries else ""

    def preset(self, key: K, value: V) -> None:
        """Enter a value that comes with the op."""
        self._entries[key] = [_Entry(self, key, value, "")]
        self.values[key] = value

    def is_derived(self, key: K) -> bool:
        """Return whether the value of a key comes from the reference function."""
        entries = self._entries.get(key)
        return bool(entries and entries[-1].is_derived)

    def set(self, key: K, value: V, source: str | None = None, *, is_derived: bool = False) -> Registration:
        """Register a value for a key. `source`: ``file:line``; None: the line of the user's code that runs."""
        entry = _Entry(self, key, value, source, is_derived)
        entries = self._entries.setdefault(key, [])
        at = sum(each.is_derived for each in entries) if is_derived else len(entries)
        entries.insert(at, entry)
        self.values[key] = entries[-1].value
        try:
            if key not in self._uninstall:
                self._uninstall[key] = self._install(key, True)
            self._changed()
        except BaseException:
            self._unset(entry)
            raise
        return entry

    def set_all(self, keys: Iterable[K], value: V, *, is_derived: bool = False) -> Registration:
        """`set` for several keys; if one fails, for none."""
        return all_or_none(self.set(key, value, is_derived=is_derived) for key in keys)

    def _unset(self, entry: _Entry[K, V]) -> None:
        key, entries = entry.key, self._entries.get(entry.key, [])
        if entry not in entries:
            return
        entries.remove(entry)
        if entries:
            self.values[key] = entries[-1].value
        else:
            del self.values[key], self._entries[key]
            if self._uninstall.get(key, nothing) is not nothing:
                self._uninstall.pop(key)()
        self._changed()
