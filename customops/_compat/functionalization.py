"""Functionalization, and the dispatch modes of checkpointing."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import torch.fx.traceback
import torch.utils.checkpoint
from torch._ops import OpOverload
from torch._subclasses.functional_tensor import FunctionalTensorMode as FunctionalTensorMode


def functionalize(mode: Any, overload: OpOverload, types: Any, args: Any, kwargs: Any, *, writes_nothing: bool) -> Any:
    """Call an op that writes under FunctionalTensorMode, as torch does; a call that writes nothing by the older form.

    The older form takes no op that returns anything but new tensors.
    """
    functional = importlib.import_module("torch._higher_order_ops.auto_functionalize")
    if writes_nothing and functional.can_auto_functionalize(overload):
        return functional.do_auto_functionalize(mode, overload, args, kwargs)
    return mode.__torch_dispatch__(overload, types, args, kwargs)


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
