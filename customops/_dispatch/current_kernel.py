"""`CurrentKernel`: the user's kernel that generated functions call; and observers, who see kernels and calls.

Generated functions read `CurrentKernel.fn` in each call, and an op's object its ``_entry``. Without observers, these
are the user's function and torch's, so that a call costs no more. `observe` wraps all of them, and unwraps them. While
a profiler records, generated functions call `CurrentKernel.named` instead of `fn`.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from customops import _torch
from customops._dispatch.callbacks import Fn
from customops._dispatch.registrations import lock
from customops._places import location_of
from customops._schema.model import Schema

__tracebackhide__ = True  # pytest leaves the frames out


class Observer(Protocol):
    """Who is to see kernels run, or calls of op objects."""

    def around_kernel(self, current: CurrentKernel, fn: Fn) -> Fn:
        """What is called in the place of a kernel: `fn` itself, if its runs are not to be seen."""

    def around_call(self, op: Any, fn: Fn) -> Fn:
        """What a call of an op's object comes to, in the place of `fn`."""


#: Those who observe now, the innermost first.
observers: list[Observer] = []
#: What they put functions around: ``_look_for_observers()`` is called when observers came or went.
_observables: weakref.WeakSet[Any] = weakref.WeakSet()


def add_observable(observable: Any) -> None:
    with lock:
        _observables.add(observable)


def start(observer: Observer) -> None:
    """Let `observer` see all kernels and calls, in all threads."""
    with lock:
        observers.append(observer)
        _tell_all()


def stop(observer: Observer) -> None:
    with lock:
        if observer in observers:
            observers.remove(observer)
            _tell_all()


@contextmanager
def observe(observer: Observer) -> Iterator[None]:
    """`start`, and `stop` on exit."""
    start(observer)
    try:
        yield
    finally:
        stop(observer)


def _tell_all() -> None:
    for observable in list(_observables):
        observable._look_for_observers()


def observed_call(op: Any, fn: Fn) -> Fn:
    """`fn`, or what observers put around it."""
    for observer in observers:
        fn = observer.around_call(op, fn)
    return fn


class CurrentKernel:
    """The user's kernel that a generated function calls. Registering again, or switching off, changes `fn`.

    Attributes:
        fn: what is called: the user's function, or what observers put around it.
        fn_if_allocated: called instead of `fn` if a graph allocated the out tensors: there is less to check.
        registered: the user's function.
        op, device_type, schema: of what it is the kernel; None stands for all devices without one of their own.
        name: the name by which it was registered, if it is one of several; "" else.
        direct: the generated function, for a call on the fast path: it skips the keys between autograd and the device.
        unchecked: has no result of it been checked yet?
        inspected: what is called in the place of the user's function until a call passes; None from then on.
    """

    __slots__ = ("__weakref__", "_inspect", "_named", "device_type", "direct", "fn", "fn_if_allocated", "inspected",
                 "name", "op", "registered", "schema", "unchecked")  # fmt: skip

    def __init__(
        self,
        fn: Fn,
        op: str = "",
        device_type: str | None = None,
        schema: Schema | None = None,
        inspect: Callable[[CurrentKernel, bool], Fn | None] = lambda current, compiled: None,
        name: str = "",
    ) -> None:
        self.op, self.device_type, self.schema, self._inspect, self.name = op, device_type, schema, inspect, name
        self.direct: Fn | None = None
        self.set(fn)
        add_observable(self)

    def set(self, fn: Fn) -> None:
        self.registered = fn
        self.unchecked = True
        self.inspect(compiled=False)

    def inspect(self, *, compiled: bool) -> None:
        """Let the next calls be inspected until one passes. `compiled`: a compiler relies on the fake impl."""
        self.inspected = self._inspect(self, compiled)
        self._look_for_observers()

    def passed(self) -> None:
        self.inspected = None
        self._look_for_observers()

    def _look_for_observers(self) -> None:
        fn = self.inspected or self.registered
        for observer in observers if not hasattr(fn, "chooser") else ():  # else they see what is chosen
            fn = observer.around_kernel(self, fn)
        self.fn, self.fn_if_allocated = fn, getattr(fn, "call_if_allocated", fn)
        self._named: Fn | None = None

    def named(self) -> Fn:
        """Return `fn` for a call while a profiler records: in a range ``ns::op[cuda: file.py:12]`` or ``ns::op[name]``.

        "default" stands for the kernel of all devices without a kernel of their own.
        """
        if self._named is None:
            place = os.path.basename(location_of(self.registered))
            shown = self.name or f"{self.device_type or 'default'}: {place}"
            chooser = getattr(self.fn, "chooser", None)
            in_range = _torch.dispatcher.in_named_range
            self._named = in_range(self.fn, self.op, f"{self.op}[{shown}]") if chooser is None else chooser.call_named
        return self._named
