"""Ops with an out variant."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from customops import Registry


def axpy(x: Tensor, by: float, y: Tensor) -> Tensor:
    return x * by + y


def axpy_out(x: Tensor, by: float, y: Tensor, *, out: Tensor) -> None:
    torch.add(y, x, alpha=by, out=out)


def define_axpy(registry: Registry, ns: str, out: Any = axpy_out, **options: Any) -> Any:
    """``x * by + y``, of a tensor, a number and a tensor."""
    op = registry.custom_op(f"{ns}::axpy", axpy, mutates_args=())
    op.register_fake(lambda x, by, y: torch.empty_like(x))
    op.register_out(out, **options)
    return op


def bounds(xs: list[Tensor], dim: int = 0, *, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    x = torch.stack(xs) * scale
    return x.amin(dim), x.amax(dim)


def bounds_out(xs: list[Tensor], dim: int = 0, *, scale: float = 1.0, out: tuple[Tensor, Tensor]) -> Any:
    x = torch.stack(xs) * scale
    torch.amin(x, dim, out=out[0])
    torch.amax(x, dim, out=out[1])
    return out


def bounds_fake(xs: list[Tensor], dim: int, *, scale: float) -> tuple[Tensor, Tensor]:
    size = [len(xs), *xs[0].shape]
    del size[dim]
    return xs[0].new_empty(size), xs[0].new_empty(size)


def define_bounds(registry: Registry, ns: str) -> Any:
    """The least and the largest, with a list, a default, a keyword and two results."""
    op = registry.custom_op(f"{ns}::bounds", bounds, mutates_args=())
    op.register_fake(bounds_fake)
    op.register_out(bounds_out)
    return op
