"""What the programs of `explained.py` have at hand: torch, and no customops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_leaves, tree_map_only


class Mended(AssertionError):
    """The fault is not there any more."""


def described(value: Any) -> Any:
    """What a fake promises of a tensor."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return tuple(value.shape), value.dtype, value.stride()


def run_fake(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an op on fakes of its tensors."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fakes = tree_map_only(torch.Tensor, lambda t: mode.from_tensor(t, static_shapes=True), (args, kwargs))
    with mode:
        return op(*fakes[0], **fakes[1])


def fake_differs(op: Any, *args: Any, **kwargs: Any) -> None:
    """Shape, dtype or strides of a result are others than its fake has."""
    fake = [described(value) for value in tree_leaves(run_fake(op, *args, **kwargs))]
    real = [described(value) for value in tree_leaves(op(*args, **kwargs))]
    if real == fake:
        raise Mended(f"both are {real}")


def fake_refuses(op: Any, *args: Any, **kwargs: Any) -> None:
    """The kernel takes arguments that the fake refuses."""
    op(*args, **kwargs)
    refuses(lambda: run_fake(op, *args, **kwargs))


def refuses(call: Callable[[], Any]) -> None:
    try:
        call()
    except Exception:
        return
    raise Mended("the call works")


def vmap_differs(function: Callable[..., torch.Tensor], *tensors: torch.Tensor, **dims: Any) -> None:
    """`torch.vmap` returns another shape, dtype or values than a loop along the first dimension."""
    looped = torch.stack([function(*elements) for elements in zip(*tensors, strict=True)])
    mapped = torch.vmap(function, **dims)(*tensors)
    if mapped.shape == looped.shape and mapped.dtype == looped.dtype and torch.equal(mapped, looped):
        raise Mended(f"both are {looped}")


def differ(one: torch.Tensor, other: torch.Tensor) -> None:
    if one.shape == other.shape and torch.allclose(one, other, equal_nan=True):
        raise Mended(f"both are {one}")


def slope(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The derivative at a number, by finite differences in float64."""
    with torch.no_grad():
        x = x.detach().double()
        found: torch.Tensor = (function(x + 1e-6) - function(x - 1e-6)) / 2e-6
        return found
