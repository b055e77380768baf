"""Ops that write, under functionalization and selective checkpointing."""

from __future__ import annotations

import contextlib
import importlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
import torch.fx.traceback
import torch.utils.checkpoint
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch._subclasses.functional_tensor import FunctionalTensorMode as FunctionalTensorMode

from customops._torch.fakes import known

__tracebackhide__ = True  # pytest leaves the frames out


#: Without: ops that mutate arguments cannot be compiled, or checkpointed selectively
def is_of_torch(cls: type) -> bool:
    """Return whether tracing itself makes tensors of this class."""
    return cls is torch.Tensor or issubclass(cls, (FakeTensor, FunctionalTensor))


#: Whether a call of an op of this package is being functionalized in this context.
_functionalizing: ContextVar[bool] = ContextVar("customops.functionalizing", default=False)


def functionalize(mode: Any, overload: OpOverload, types: Any, args: Any, kwargs: Any, mutated: Sequence[Any]) -> Any:
    """Call an op that mutates some of its arguments, `mutated`, under FunctionalTensorMode, as torch does.

    torch's second form passes the bases of views, and how to make the views of them. A call that mutates nothing has no
    base, and for a view of another dtype than its base, the second form assumes the same dtype. These calls use the
    first form, which passes the arguments as they are, and accepts only ops that return new tensors.
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


#: The ops that return lists or numbers and can be functionalized: only a check of torch keeps its form from that.
allowed: weakref.WeakSet[OpOverload] = weakref.WeakSet()
#: Allow the functionalization of an op that writes, and returns new tensors, lists of them or numbers.
allow_any_returns: Callable[[OpOverload], None] = allowed.add


def allow_returns(functional: Any) -> None:
    """Let torch's form for ops that write accept the `allowed` ops."""
    may = functional.can_auto_functionalize

    def can_auto_functionalize(op: Any) -> bool:
        return may(op) or (isinstance(op, OpOverload) and op in allowed)

    functional.can_auto_functionalize = can_auto_functionalize


def correct_slices(functional: Any) -> None:
    """Let torch's form for ops that write accept views of inputs that have an offset.

    torch mistakes the offset of a view in the storage for the offset in the base, which can have an offset, too:
    ``kv[1]``, passed to a compiled function. The write is then lost. For other ops, torch's behavior does not change.
    """
    slice_of = functional.try_use_slice

    def try_use_slice(base: Any, tensor: Any) -> Any:
        """Return ``(dim, start, end)`` of a view that is a slice of its base, or None."""
        found = slice_of(base, tensor)
        if found is None or not _functionalizing.get():
            return found
        dim, offset = found[0], tensor.storage_offset() - base.storage_offset()
        step, size = tensor.stride()[dim], tensor.size()[dim]
        if not known(offset % step == 0):
            return None
        start = offset // step
        inside = known(start >= 0) and known(start + size <= base.size()[dim])
        return (dim, start, start + size) if inside else None

    functional.try_use_slice = try_use_slice


#: Names that torch's handlers of functionalized calls use for parameters of their own. They take the arguments of an op
#: by name beside these, so an op cannot have arguments of these names there.
RESERVED = frozenset({"self", "mode", "interpreter", "ctx", "_mutable_op"})


#: The modes of checkpoints that are selective or compiled: for the forward pass, and for its repetition.
checkpoint_modes: tuple[type, ...] = (
    torch.utils.checkpoint._CachingTorchDispatchMode,
    torch.utils.checkpoint._CachedTorchDispatchMode,
)


@contextlib.contextmanager
def saved_for_backward(mode: Any) -> Iterator[None]:
    """Context manager: in a compiled checkpoint, save what is traced inside, so that backward does not repeat it."""
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
