"""The fast path: kernels that may be called without going through the dispatcher again."""

from __future__ import annotations

import weakref
from typing import Any

from customops import _compat
from customops._dispatch.registrations import lock

__tracebackhide__ = True  # pytest leaves the frames out


class FastPath:
    """Key set, as a number -> the current kernel, or None; the key sets that were not seen yet are missing."""

    def __init__(self) -> None:
        #: Has the op been called with tangents? See `OperatorHandle.saw_tangents`.
        self.tangents_seen = False
        self.at_autograd: dict[int, Any] = {}
        self.of_tensors: dict[tuple[int, int], Any] = {}
        #: For calls in compiled graphs: device key -> the same.
        self.in_graphs: dict[str, Any] = {}

    def clear(self) -> None:
        self.in_graphs.clear()
        self.at_autograd.clear()
        self.of_tensors.clear()


#: By the name of the op: objects of several registries may stand for one op.
_fast_paths: weakref.WeakValueDictionary[str, FastPath] = weakref.WeakValueDictionary()


def _forget_fast_path(qualname: str | None) -> None:
    """A kernel was registered outside customops, for an op or (None) for any."""
    with lock:
        for table in [_fast_paths.get(qualname)] if qualname is not None else list(_fast_paths.values()):
            if table is not None:
                table.clear()


_compat.libraries.watch_registrations(_forget_fast_path)
