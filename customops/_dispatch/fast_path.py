"""The fast path: kernels that may be called without going through the dispatcher again."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from customops import _compat
from customops._dispatch.registrations import lock

__tracebackhide__ = True  # pytest leaves the frames out


#: Is a call of this kind? The number of its tensors; does one require grad? And the current kernel that it runs.
Kind = tuple[_compat.guards.Look, int, bool, Any]

#: How many kinds of call an op has, and how many of them are looked for in each call.
_KINDS, _RECENT = 32, 3


class FastPath:
    """Which kernel may be called directly. Forgotten with every change of the op's kernels."""

    def __init__(self) -> None:
        #: Has the op been called with tangents? See `OperatorHandle.saw_tangents`.
        self.tangents_seen = False
        #: Key set at Autograd or ADInplaceOrView, as a number -> the current kernel, or None: use the dispatcher.
        #: Those that were not seen yet are missing.
        self.by_keyset: dict[int, Any] = {}
        #: The same by the key of a device, for what is called past the dispatcher, and in compiled graphs.
        self.by_device: dict[str | None, Any] = {}
        self.in_graphs: dict[str, Any] = {}
        #: The kinds of call that go past the dispatcher, by what tells most of them apart.
        self.kinds: dict[Any, list[Kind]] = {}
        #: Those that were looked for last.
        self.recent: tuple[Kind, ...] = ()

    def clear(self) -> None:
        self.by_keyset.clear()
        self.by_device.clear()
        self.in_graphs.clear()
        self.kinds, self.recent = {}, ()

    def kind_of(self, tensors: Sequence[Tensor]) -> Kind | None:
        """The kind of a call with these tensors, which comes first from now on."""
        for kind in self.kinds.get(_key(tensors), ()):
            if kind[0](*tensors):
                self._comes_first(kind)
                return kind
        return None

    def _comes_first(self, kind: Kind) -> None:
        self.recent = (kind, *(each for each in self.recent if each is not kind))[:_RECENT]

    @property
    def is_full(self) -> bool:
        return sum(map(len, self.kinds.values())) >= _KINDS

    def add_kind(self, tensors: Sequence[Tensor], current_kernel: Any) -> bool:
        """Let calls like the one with these tensors run a kernel, if there is room: to look for kinds takes time."""
        looks_same = None if self.is_full else _compat.guards.look_of(tensors)
        if looks_same is None:
            return False
        needs_grad = any(tensor.requires_grad for tensor in tensors)
        kind = (looks_same, len(tensors), needs_grad, current_kernel)
        self.kinds.setdefault(_key(tensors), []).append(kind)
        self._comes_first(kind)
        return True


def _key(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    return tuple([(tensor.dtype, tensor.ndim) for tensor in tensors])


#: By the name of the op: objects of several registries may stand for one op.
_fast_paths: weakref.WeakValueDictionary[str, FastPath] = weakref.WeakValueDictionary()


def _forget_fast_path(qualname: str | None = None) -> None:
    """A kernel was registered outside customops, for an op or for any."""
    with lock:
        for table in [_fast_paths.get(qualname)] if qualname is not None else list(_fast_paths.values()):
            if table is not None:
                table.clear()


_compat.libraries.watch_registrations(_forget_fast_path)
_compat.libraries.watch_loading(_forget_fast_path)
