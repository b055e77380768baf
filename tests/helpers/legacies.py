"""What the tests of customops.legacy share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from customops import legacy
from customops.legacy import objects


def op_of(ns: str, name: str = "foo") -> Any:
    return objects.get_op(f"{ns}::{name}")


def with_formula(ns: str, schema: str, kernel: Any, save: Any, backward: Any, differentiable: Any = None) -> Any:
    """Define ``ns::foo`` with a kernel and a gradient."""
    legacy.custom_op(f"{ns}::foo", schema)
    legacy.impl(f"{ns}::foo", func=kernel)
    legacy.impl_save_for_backward(f"{ns}::foo", func=save)
    legacy.impl_backward(f"{ns}::foo", differentiable, func=backward)
    return op_of(ns)


def sine(ns: str, result: Callable[[Tensor, Tensor], Any] | None = None) -> Any:
    """``ns::foo``: numpy's sine, whose backward returns what `result` makes of (x, grad)."""
    return with_formula(
        ns,
        "(Tensor x) -> Tensor",
        lambda x: torch.from_numpy(np.sin(x.detach().numpy())),
        lambda inputs, output: inputs.x,
        lambda ctx, x, grad: {"x": grad * x.cos()} if result is None else result(x, grad),
    )


def signature(code: str) -> Any:
    names: dict[str, Any] = {}
    exec(f"def foo({code}): pass", names)
    return names["foo"]
