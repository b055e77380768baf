"""The scopes that end registrations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar

from customops._dispatch.registrations import Registration, lock

#: The open scopes of this thread or task, outermost first: the registry, and what undoes, newest first and all of it
#: even if one raises.
_scopes: ContextVar[tuple[tuple[object, ExitStack], ...]] = ContextVar("customops.scopes", default=())


@contextmanager
def open_scope(owner: object) -> Iterator[None]:
    """On exit, unregister what `record_in_scope` was given in this thread or task, inside the context."""
    undos = ExitStack()
    token = _scopes.set((*_scopes.get(), (owner, undos)))
    try:
        yield
    finally:
        _scopes.reset(token)
        with lock:
            undos.close()


def in_scope(owner: object) -> bool:
    """Is a scope of the registry `owner` open here?"""
    return any(registry is owner for registry, _ in _scopes.get())


def record_in_scope(owner: object, registration: Registration) -> bool:
    """Unregister something when the innermost open scope of the registry `owner` ends; is there one?"""
    for registry, undos in reversed(_scopes.get()):
        if registry is owner:
            undos.callback(registration.unregister)
            return True
    return False
