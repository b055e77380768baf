"""What the tests of kernels share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from customops import Registry


def run_at(op: Any, key: str, *args: Any, **kwargs: Any) -> Any:
    """Run the kernel that sits at a dispatch key, whatever the device of the tensors: no hardware is needed."""
    keyset = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    return op._opoverload.redispatch(keyset, *args, **kwargs)


def constant(value: float) -> Callable[[Tensor], Tensor]:
    """A kernel that can be told from others."""
    return lambda x: torch.full_like(x, value)


def which(op: Any, key: str = "CPU") -> float:
    """The value that the kernel at `key` gives."""
    result: float = run_at(op, key, torch.zeros(())).item()
    return result


def define(registry: Registry, ns: str, fn: Any = None, **options: Any) -> Any:
    options = {"schema": "(Tensor x) -> Tensor", "mutates_args": ()} | options
    return registry.custom_op(f"{ns}::f", fn or constant(0), **options)


def located(fn: Any) -> str:
    """How errors name a function."""
    return f"{fn.__name__} ({fn.__code__.co_filename}:{fn.__code__.co_firstlineno})"
