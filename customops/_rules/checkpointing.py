"""Ops that write, under selective checkpointing, and under a checkpoint that is compiled.

A policy of selective checkpointing may say that what an op returns is saved. When the forward is repeated, the op is
then not run, and what it should have written is not there: the rest reads memory that nobody filled. So an op that
writes is run each time. Where a checkpoint is compiled, the graph has the new values as tensors of their own: these
are saved, because by then the memory that the op read holds what it has written.
"""

from __future__ import annotations

from typing import Any

from customops import _compat
from customops._dispatch.operator import OperatorHandle


def bind(operator: OperatorHandle) -> None:
    """Nothing to register: the schema says what the op writes."""
    if operator.schema.mutated and operator.has_own_rules:
        for mode in _compat.functionalization.checkpoint_modes:
            operator.impl_torch_dispatch(mode, _run)


def _run(mode: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
    with _compat.functionalization.saved_for_backward(mode):
        return func(*args, **(kwargs or {}))
