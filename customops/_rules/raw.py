"""Kernels of the user's own at dispatch keys, as they are."""

from __future__ import annotations

import functools
from contextlib import ExitStack
from typing import Any

from customops._dispatch.callbacks import Fn
from customops._dispatch.operator import OperatorHandle
from customops._dispatch.registrations import Undo


class RawRule:
    """Kernels of the user's own at dispatch keys, as they are."""

    operator: OperatorHandle

    def __init__(self) -> None:
        self._kernels: list[_Raw] = []

    def bind(self, operator: OperatorHandle) -> None:
        self.operator = operator
        for kernel in self._kernels:
            kernel.undos = self._at_all_keys(kernel)

    def register(self, keys: tuple[str, ...], fn: Fn) -> Undo:
        """Put `fn` at all of the keys, or at none."""
        kernel = _Raw(keys, fn)
        kernel.undos = self._at_all_keys(kernel)
        self._kernels.append(kernel)
        self.operator.recompile()  # at some keys, tracing goes through it
        return functools.partial(self._take_back, kernel)

    def traced(self) -> list[Any]:
        """The kernels that tracing may go through, and their keys."""
        return [(kernel.keys, kernel.fn) for kernel in self._kernels]

    def _at_all_keys(self, kernel: _Raw) -> ExitStack:
        with ExitStack() as undos:  # if torch refuses a key, the others are taken back
            for key in kernel.keys:
                undos.callback(self.operator.impl(kernel.fn, key, apart=True, raw=True))
            return undos.pop_all()

    def _take_back(self, kernel: _Raw) -> None:
        if kernel in self._kernels:
            self._kernels.remove(kernel)
            kernel.undos.close()
            self.operator.recompile()


class _Raw:
    """A kernel, and how to take it back from where it is."""

    def __init__(self, keys: tuple[str, ...], fn: Fn) -> None:
        self.keys, self.fn = keys, fn
        self.undos = ExitStack()
