"""What the tests of in-place and out ops share."""

from __future__ import annotations

from typing import Any, Tuple

import torch
from torch import Tensor

from customops import Registry, Tag

INPLACE, OUT = Tag.inplace, Tag.out


def sincos(x: Tensor, *, sin: Tensor, cos: Tensor) -> Tuple[Tensor, Tensor]:
    sin.copy_(x.sin())
    cos.copy_(x.cos())
    return sin, cos


def double(x: Tensor, *, out: Tensor) -> Tensor:
    return torch.mul(x, 2, out=out)


def define_double(registry: Registry, ns: str, fn: Any = double, **options: Any) -> Any:
    return registry.custom_op(f"{ns}::double", fn, **{"mutates_args": {"out"}, "tags": OUT} | options)


def define_sincos(registry: Registry, ns: str, fn: Any = sincos, **options: Any) -> Any:
    return registry.custom_op(f"{ns}::sincos", fn, **{"mutates_args": {"sin", "cos"}, "tags": OUT} | options)


def aliases(op: Any) -> tuple[list[Any], list[Any]]:
    """The write alias sets of the arguments that have one, and of the returns."""
    schema = op._opoverload._schema
    found = []
    for items in (schema.arguments, schema.returns):
        infos = [item.alias_info for item in items if item.alias_info is not None]
        assert all(info.is_write for info in infos)
        found.append([info.before_set for info in infos])
    return found[0], found[1]
