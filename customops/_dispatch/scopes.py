"""The scopes that end registrations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar

from customops._dispatch.registrations import Registration, lock

#: The open scopes of this thread or task, outermost first. The stack of each undoes everything, even if one raises.
_scopes: ContextVar[tuple[tuple[object, ExitStack], ...]] = ContextVar("customops.scopes", default=())


@contextmanager
def open_scope(owner: object) -> Iterator[None]:
    """Context manager that unregisters on exit what `record_in_scope` was given inside, in this thread or task."""
    undos = ExitStack()
    token = _scopes.set((*_scopes.get(), (owner, undos)))
    try:
        yield
    finally:
        _scopes.reset(token)
        with lock:
            undos.close()


def in_scope(owner: object) -> bool:
    """Return whether a scope of the registry `owner` is open here."""
    return any(registry is owner for registry, _ in _scopes.get())


def record_in_scope(owner: object, registration: Registration) -> bool:
    """Unregister with the innermost open scope of the registry `owner`. Return whether one is open."""
    for registry, undos in reversed(_scopes.get()):
        if registry is owner:
            undos.callback(registration.unregister)
            return True
    return False
