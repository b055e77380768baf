"""Ops that torch would take apart for the device although the CPU has a kernel for the whole.

``add`` of a device without a kernel for it is ``empty_strided``, then ``add.out``: two calls of Python instead of one;
``native_layer_norm`` is a dozen, and rounds differently. So the fallback is also put where torch has such a composite.
Once a user writes a kernel for any overload of a name, torch's composites of that name are what calls it, and the
shortcuts go: a kernel for ``add.out`` serves ``add`` and ``add_``. That goes for kernels from `torch.library` as well.
"""

from __future__ import annotations

import collections
import contextlib
from typing import Any

from customops.backend import _compat
from customops.backend.fallback import Fallback


class Shortcuts:
    """The ops by family: all overloads of a name, in place or not."""

    def __init__(self, fallback: Fallback, user_kernels: collections.Counter[str]) -> None:
        self.fallback = fallback
        self._kernels = user_kernels
        self.families: dict[str, list[Any]] = collections.defaultdict(list)
        for name in _compat.composites_of_the_cpu():
            op = _compat.find_op(name)
            if op is not None:
                self.families[_family(name)].append(op)
        self._libraries: dict[str, Any] = {}

    def install(self, undo: contextlib.ExitStack) -> None:
        """Install all of them, until `undo` is closed."""
        undo.callback(self._remove_all)
        for family, ops in self.families.items():
            if any(_compat.has_kernel(_compat.full_name(op), "PrivateUse1") for op in ops):
                self._kernels[family] += 1  # somebody's, from before there was a device
            else:
                self._install(family)
        _compat.watch_kernels(undo, self._kernel_of_others)

    def _remove_all(self) -> None:
        while self._libraries:
            _compat.destroy_library(self._libraries.popitem()[1])

    def _kernel_of_others(self, name: str) -> None:
        """Somebody registered a kernel of the device by `torch.library`. It counts for good: its end goes unseen."""
        if name.startswith("aten::"):
            self.kernel_added(name)

    def kernel_added(self, name: str) -> None:
        family = _family(name)
        self._kernels[family] += 1
        library = self._libraries.pop(family, None)
        if library is not None:
            _compat.destroy_library(library)

    def kernel_removed(self, name: str) -> None:
        family = _family(name)
        self._kernels[family] -= 1
        if not self._kernels[family] and family in self.families:
            self._install(family)

    def _install(self, family: str) -> None:
        library = self._libraries[family] = _compat.Library("aten", "IMPL")
        for op in self.families[family]:
            local = _compat.full_name(op).partition("::")[2]
            _compat.impl(library, local, boxed(self.fallback, op), "PrivateUse1")


def boxed(fallback: Fallback, op: Any) -> Any:
    """The fallback as the kernel of one op."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return fallback(op, args, kwargs)

    return _compat.outside_dynamo(kernel)


def _family(name: str) -> str:
    return name.partition(".")[0].removesuffix("_")
