"""The fast path: kernels that may be called without going through the dispatcher again."""

from __future__ import annotations

import weakref
from typing import Any

from customops import _compat
from customops._dispatch.registrations import lock

__tracebackhide__ = True  # pytest leaves the frames out


class DirectKernels:
    """Key set, as a number -> the cell of a kernel, or None; the key sets that were not seen yet are missing."""

    def __init__(self) -> None:
        #: Has the op been called with tangents? See `OperatorHandle.saw_tangents`.
        self.tangents_seen = False
        self.at_autograd: dict[int, Any] = {}
        self.of_tensors: dict[tuple[int, int], Any] = {}

    def clear(self) -> None:
        self.at_autograd.clear()
        self.of_tensors.clear()


#: By the name of the op: objects of several registries may stand for one op.
_direct: weakref.WeakValueDictionary[str, DirectKernels] = weakref.WeakValueDictionary()


def _forget_direct(qualname: str | None) -> None:
    """Somebody registered a kernel past us, for an op or (None) for we do not know which."""
    with lock:
        for table in [_direct.get(qualname)] if qualname is not None else list(_direct.values()):
            if table is not None:
                table.clear()


_compat.libraries.watch_registrations(_forget_direct)
