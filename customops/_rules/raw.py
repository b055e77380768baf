"""Kernels of the user's own at dispatch keys, as they are."""

from __future__ import annotations

import functools
from contextlib import ExitStack
from typing import Any

from customops import _compat
from customops._compat.libraries import OpOverload
from customops._dispatch.callbacks import Fn
from customops._dispatch.operator import OperatorHandle
from customops._dispatch.registrations import Registration
from customops.errors import user_source


class RawRule:
    """Kernels of the user's own at dispatch keys, as they are."""

    operator: OperatorHandle

    def __init__(self) -> None:
        self._kernels: list[_Raw] = []

    def bind(self, operator: OperatorHandle) -> None:
        self.operator = operator
        for kernel in self._kernels:
            kernel.install()

    def register(self, keys: tuple[str, ...], fn: Fn) -> Registration:
        """Put `fn` at all of the keys, or at none."""
        kernel = _Raw(self, keys, fn)
        kernel.install()
        self._kernels.append(kernel)
        self.operator.recompile()  # at some keys, tracing goes through it
        return kernel

    def traced(self) -> list[Any]:
        """The kernels that tracing may go through, and their keys."""
        return [(kernel.keys, kernel.fn) for kernel in self._kernels]

    def _remove(self, kernel: _Raw) -> None:
        if kernel in self._kernels:
            self._kernels.remove(kernel)
            kernel.uninstall.close()
            self.operator.recompile()


def _call_traced(overload: OpOverload, op: str, fn: Fn, /, *args: Any, **kwargs: Any) -> Any:
    _compat.dynamo.traced(overload, op)
    return fn(*args, **kwargs)


class _Raw(Registration):
    """The registration of a kernel at several keys."""

    def __init__(self, rule: RawRule, keys: tuple[str, ...], fn: Fn) -> None:
        super().__init__()
        self.rule, self.keys, self.fn, self.source = rule, keys, fn, user_source()
        self.uninstall = ExitStack()

    def install(self) -> None:
        operator = self.rule.operator
        with ExitStack() as undos:  # if torch refuses a key, it is taken from the others again
            for key in self.keys:
                undos.callback(operator.impl(self._kernel_at(key), key, own_library=True, raw=True))
            self.uninstall = undos.pop_all()

    def _kernel_at(self, key: str) -> Fn:
        if key != "CompositeImplicitAutograd":
            return self.fn
        # Compilers trace such a kernel in the place of the op.
        return functools.partial(_call_traced, self.rule.operator.overload, self.rule.operator.qualname, self.fn)

    def unregister(self) -> None:
        self.rule._remove(self)
