"""Who owns an op and its registrations, and the scopes that end them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

from customops._compat.libraries import Library
from customops._dispatch.registrations import Registration, Undo, lock
from customops._dispatch.spec import OpSpec
from customops.errors import UnregisteredError


class Owner(Protocol):
    """What an op tells whoever owns it: a `Registry`."""

    def record(self, registration: Registration) -> bool:
        """Something was registered on an op. Will it be unregistered when a scope ends?"""

    def add(self, spec: OpSpec, rules: Any = None, make: Any = ...) -> Any:
        """Define an op whose name is free."""

    def enter(self, op: Any, undo: Undo) -> None:
        """An op was defined; `undo` undoes it."""

    def apply_settings(self, op: Any) -> None:
        """Apply the options set by `Registry.configure` to an op."""

    def find(self, qualname: str) -> Any:
        """The op of a name, if this owner or the default one has it."""

    def remove(self, op: Any) -> None:
        """Remove an op, or raise UnregisteredError if it is not there any more."""

    def drop(self, op: Any, error: UnregisteredError | None = None) -> bool:
        """Remove an op if it is there; was it? Calling it raises `error` from then on."""

    def restore(self, op: Any) -> None:
        """Put a removed op back, with the rules it had."""

    def library_destroyed(self, op: Any, library: Library) -> None:
        """The library of an op was destroyed, by whomever."""

    def reduce(self, qualname: str) -> tuple[Any, ...]:
        """How an op is pickled."""


class Scope(NamedTuple):
    """An open `Registry.scope`."""

    owner: Owner
    undos: ExitStack  # newest first, all of them even if one raises


#: The open scopes of this thread or task, outermost first.
_scopes: ContextVar[tuple[Scope, ...]] = ContextVar("customops.scopes", default=())


@contextmanager
def open_scope(owner: Owner) -> Iterator[None]:
    """On exit, unregister what `record_in_scope` was given in this thread or task, inside the context."""
    scope = Scope(owner, ExitStack())
    token = _scopes.set((*_scopes.get(), scope))
    try:
        yield
    finally:
        _scopes.reset(token)
        with lock:
            scope.undos.close()


@contextmanager
def outside_scopes() -> Iterator[None]:
    """What is registered in the context ends with no scope that is open now."""
    token = _scopes.set(())
    try:
        yield
    finally:
        _scopes.reset(token)


def in_scope(owner: Owner) -> bool:
    """Is a scope of `owner` open here?"""
    return any(scope.owner is owner for scope in _scopes.get())


def record_in_scope(owner: Owner, registration: Registration) -> bool:
    """Unregister something when the innermost open scope of `owner` ends; is there one?"""
    scope = next((scope for scope in reversed(_scopes.get()) if scope.owner is owner), None)
    if scope is not None:
        scope.undos.callback(registration.unregister)
    return scope is not None
