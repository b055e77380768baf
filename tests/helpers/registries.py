"""What the tests of registries share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from customops import Registry
from helpers.functions import add_one


def add_two(x: Tensor) -> Tensor:
    return x + 2


def define(registry: Registry, name: str, fn: Callable[..., Any] = add_one, **options: Any) -> Any:
    return registry.custom_op(name, fn, mutates_args=(), **options)


def state(ns: str) -> dict[str, Any]:
    """All that a registration may leave behind."""
    singleton = torch._library.simple_registry.singleton
    return {
        "dispatcher": sorted(name for name in torch._C._dispatch_get_all_op_names() if name.startswith(f"{ns}::")),
        "torch.ops": sorted(n for n in vars(getattr(torch.ops, ns, None) or object) if not n.startswith("_"))
        if ns in vars(torch.ops)
        else None,
        "opdefs": sorted(name for name in torch._library.custom_ops.OPDEFS if name.startswith(f"{ns}::")),
        "libraries": sorted(name for name in torch._library.custom_ops.OPDEF_TO_LIB if name.startswith(f"{ns}::")),
        "fakes": sorted(n for n, e in singleton._data.items() if n.startswith(f"{ns}::") and e.fake_impl.kernels),
    }
