"""Out variants in inductor.

torch calls the overload of an op with `Tag.out` in its place, and allocates what that writes to. Where the op returns
one tensor, what it writes is wrong for most ops: all tensors first, then all numbers, whatever their order; the tensors
of a list one by one; those given by keyword a second time (2.13, 2.15). Where it returns several, what it writes is
right. So ops of ours that return one go by way of that.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

from customops._compat.late import when_imported
from customops._compat.libraries import OpOverload
from customops._compat.registries import torch_op_of

#: Ops of others that have an out variant of ours.
_planned: weakref.WeakSet[OpOverload] = weakref.WeakSet()

#: Is torch to find the variant of one of our ops?
_looking: ContextVar[bool] = ContextVar("customops.looking_for_out_variant", default=False)


def plan_with(functional: OpOverload) -> None:
    """An op has an out variant of ours."""
    _planned.add(functional)


def _is_ours(overload: Any) -> bool:
    return isinstance(overload, OpOverload) and (
        overload in _planned or hasattr(torch_op_of(overload._name), "_definition")
    )


def _correct(ir: Any) -> None:
    """Let inductor write calls of all out variants as it does those with several results."""
    search: Any = importlib.import_module("torch._library._out_variant")
    search.to_out_variant = _Search(search.to_out_variant)
    multiple = ir.ExternKernelMultiOut
    multiple.try_create = classmethod(_Create(multiple.try_create.__func__))


class _Search:
    """`to_out_variant`, which while inductor lowers a graph finds none for our ops but where `_Create` asks."""

    def __init__(self, original: Callable[[Any], Any]) -> None:
        self.original = original

    def __call__(self, op: Any) -> Any:
        hidden = _is_ours(op) and not _looking.get() and _is_lowering()
        return None if hidden else self.original(op)


def _is_lowering() -> bool:
    """Is inductor at work on a graph?"""
    return hasattr(torch._inductor.virtualized.V.graph, "graph_inputs")


class _Create:
    """`ExternKernelMultiOut.try_create`, also for ops of ours that return one tensor."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original

    def __call__(self, cls: Any, kernel: Any, example_output: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_ours(kernel):
            return self.original(cls, kernel, example_output, *args, **kwargs)
        if kwargs.get("unbacked_bindings"):
            return None  # sizes that the call itself finds out
        is_one = isinstance(example_output, torch.Tensor)
        token = _looking.set(True)
        try:
            made = self.original(cls, kernel, (example_output,) if is_one else example_output, *args, **kwargs)
        finally:
            _looking.reset(token)
        return made[0] if is_one and made is not None else made


when_imported("torch._inductor.ir", _correct)
