"""Functionalization, and the dispatch modes of checkpointing."""

from __future__ import annotations

import contextlib
import functools
import importlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch.fx.traceback
import torch.utils.checkpoint
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch._subclasses.functional_tensor import FunctionalTensorMode as FunctionalTensorMode

from customops._compat.late import when_imported


def is_of_torch(cls: type) -> bool:
    """Is this a class of the tensors that tracing itself makes?"""
    return cls is torch.Tensor or issubclass(cls, (FakeTensor, FunctionalTensor))


#: Is a call of one of our ops being functionalized in this context?
_functionalizing: ContextVar[bool] = ContextVar("customops.functionalizing", default=False)


def functionalize(mode: Any, overload: OpOverload, types: Any, args: Any, kwargs: Any, mutated: Sequence[Any]) -> Any:
    """Call an op that mutates some of its arguments, `mutated`, under FunctionalTensorMode, as torch does.

    torch's second form passes the bases of views, and how to make the views of them. Two calls go by its first form,
    which passes the arguments as they are: one that mutates nothing, which has no base to start from, and one that
    mutates a view of another dtype than its base, which the second form takes for one of the same. The first form takes
    no op that returns anything but new tensors.
    """
    functional = importlib.import_module("torch._higher_order_ops.auto_functionalize")
    bases = [functional.get_base(tensor) for tensor in mutated]
    is_cast = any(base is not None and base.dtype != x.dtype for x, base in zip(mutated, bases, strict=True))
    if (is_cast or not mutated) and functional.can_auto_functionalize(overload):
        return functional.do_auto_functionalize(mode, overload, args, kwargs)
    token = _functionalizing.set(True)
    try:
        return mode.__torch_dispatch__(overload, types, args, kwargs)
    finally:
        _functionalizing.reset(token)


#: The ops that may be functionalized though they return lists or numbers. torch's form for ops that write can do that,
#: but is kept from it by a check.
_allowed: weakref.WeakSet[OpOverload] = weakref.WeakSet()


def allow_any_returns(overload: OpOverload) -> None:
    """Let an op that writes, and returns new tensors, lists of them or numbers, be functionalized."""
    _allowed.add(overload)


def _can_auto_functionalize(original: Callable[[Any], bool], op: Any) -> bool:
    return original(op) or (isinstance(op, OpOverload) and op in _allowed)


def _correct(functional: Any) -> None:
    functional.try_use_slice = functools.partial(_try_use_slice, functional.try_use_slice)
    functional.can_auto_functionalize = functools.partial(_can_auto_functionalize, functional.can_auto_functionalize)


def _try_use_slice(original: Callable[..., Any], base: Any, tensor: Any) -> Any:
    """``(dim, start, end)`` of a view that is a slice of its base, or None.

    torch takes the offset of the view into the storage for the offset into the base, which may have one, too: as
    ``kv[1]``, passed to a compiled function. The write then lands elsewhere, or nowhere. Its own answer stays for
    others' ops, whose graphs are to be what they are without this package.
    """
    found = original(base, tensor)
    if found is None or not _functionalizing.get():
        return found
    known = importlib.import_module("torch.fx.experimental.symbolic_shapes").statically_known_true
    dim, offset = found[0], tensor.storage_offset() - base.storage_offset()
    step, size = tensor.stride()[dim], tensor.size()[dim]
    if not known(offset % step == 0):
        return None
    start = offset // step
    inside = known(start >= 0) and known(start + size <= base.size()[dim])
    return (dim, start, start + size) if inside else None


when_imported("torch._higher_order_ops.auto_functionalize", _correct)


#: The modes of selective checkpointing, and of a checkpoint that is compiled: in the forward, and when it is repeated.
checkpoint_modes: tuple[type, ...] = (
    torch.utils.checkpoint._CachingTorchDispatchMode,
    torch.utils.checkpoint._CachedTorchDispatchMode,
)


@contextlib.contextmanager
def saved_for_backward(mode: Any) -> Iterator[None]:
    """Under a checkpoint that is compiled, what is traced inside is saved, and not computed again in the backward."""
    meta = torch.fx.traceback.current_meta
    before = dict(meta)
    meta["ac_graph_id"] = getattr(mode, "ac_graph_id", None)
    meta["recompute"] = torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE
    try:
        yield
    finally:
        for key in ("ac_graph_id", "recompute"):
            meta.pop(key, None)
            meta.update({key: before[key]} if key in before else {})
