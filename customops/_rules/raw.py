"""Kernels of the user's own at dispatch keys, as they are."""

from __future__ import annotations

import functools
from contextlib import ExitStack
from typing import Any

from customops import _compat
from customops._compat.libraries import OpOverload
from customops._dispatch.callbacks import Fn
from customops._dispatch.operator import Definition
from customops._dispatch.registrations import Undo


class RawRule:
    """Kernels of the user's own at dispatch keys, as they are."""

    def __init__(self, definition: Definition) -> None:
        self.definition = definition
        self._kernels: list[_Raw] = []

    def install(self, definition: Definition) -> None:
        self.definition = definition
        for kernel in self._kernels:
            kernel.undos = self._at_all_keys(kernel)

    def register(self, keys: tuple[str, ...], fn: Fn) -> Undo:
        """Put `fn` at all of the keys, or at none."""
        kernel = _Raw(keys, fn)
        kernel.undos = self._at_all_keys(kernel)
        self._kernels.append(kernel)
        self.definition.recompile()  # at some keys, tracing goes through it
        return functools.partial(self._take_back, kernel)

    def traced(self) -> list[Any]:
        """The kernels that tracing may go through, and their keys."""
        return [(kernel.keys, kernel.fn) for kernel in self._kernels]

    def _at_all_keys(self, kernel: _Raw) -> ExitStack:
        with ExitStack() as undos:  # if torch refuses a key, the others are taken back
            for key in kernel.keys:
                fn = kernel.fn
                if key == "CompositeImplicitAutograd":  # compilers trace it in the place of the op
                    fn = functools.partial(_call_traced, self.definition.overload, str(self.definition.name), fn)
                undos.callback(self.definition.impl(fn, key, apart=True, raw=True))
            return undos.pop_all()

    def _take_back(self, kernel: _Raw) -> None:
        if kernel in self._kernels:
            self._kernels.remove(kernel)
            kernel.undos.close()
            self.definition.recompile()


def _call_traced(overload: OpOverload, op: str, fn: Fn, /, *args: Any, **kwargs: Any) -> Any:
    _compat.dynamo.traced(overload, op)
    return fn(*args, **kwargs)


class _Raw:
    """A kernel, and how to take it back from where it is."""

    def __init__(self, keys: tuple[str, ...], fn: Fn) -> None:
        self.keys, self.fn = keys, fn
        self.undos = ExitStack()
