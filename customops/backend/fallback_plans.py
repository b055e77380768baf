"""How an op of the device is run by the CPU's kernel: read off its schema once, then followed in each call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from customops.backend import _compat
from customops.backend.substitutes import SUBSTITUTES

#: Arguments that are CPU tensors by right, whatever their shape.
ON_CPU = {
    "aten::index.Tensor": {"indices"},
    "aten::index.Tensor_out": {"indices"},
    "aten::_unsafe_index.Tensor": {"indices"},
    "aten::index_put": {"indices"},
    "aten::index_put_": {"indices"},
    "aten::_index_put_impl_": {"indices"},
    "aten::_unsafe_index_put": {"indices"},
}

#: Arguments that an op writes to and returns, without its schema saying so.
RETURNED = {"aten::_copy_from": 1, "aten::_copy_from_and_resize": 1}


@dataclass(frozen=True)
class FallbackPlan:
    """What the schema of an op says about running it on the CPU. Arguments are known by position or name."""

    op: Any
    name: str
    run: Callable[..., Any]  #: the op itself, or what stands in for it where the CPU has no kernel
    is_view: bool
    writes: tuple[int | str, ...]
    outs: tuple[str, ...]
    tensors: frozenset[int | str]  #: arguments of type Tensor, of which a number has to be made one
    on_cpu: frozenset[int | str]
    device: int | str | None
    generator: int | str | None
    draws: bool  #: draws random numbers, and takes no generator
    returns: tuple[int | str | None, ...]  #: the written argument that a return is, or None for a new value
    types: tuple[str, ...]  #: of the returns, as torch writes them: Tensor, List[Tensor], Optional[Tensor], number


def plan_of(op: Any) -> FallbackPlan:
    schema = _compat.schema_of(op)
    name = _compat.full_name(op)
    keys: dict[Any, int | str] = {}
    for position, argument in enumerate(schema.arguments):
        keys[argument.name] = argument.name if argument.kwarg_only else position
    written = [argument for argument in schema.arguments if _is_written(argument)]
    devices = [keys[a.name] for a in schema.arguments if "Device" in str(a.type)]
    generators = [keys[a.name] for a in schema.arguments if "Generator" in str(a.type)]
    by_right = ON_CPU.get(name, set())
    return FallbackPlan(
        op=op,
        name=name,
        run=SUBSTITUTES.get(name, op),
        is_view=any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns),
        writes=tuple(keys[argument.name] for argument in written),
        outs=tuple(a.name for a in schema.arguments if a.is_out and str(a.type) == "Tensor"),
        tensors=frozenset(
            keys[a.name]
            for a in schema.arguments
            if str(a.type) in ("Tensor", "Optional[Tensor]") and not _compat.accepts_numbers(op)
        ),
        on_cpu=frozenset(keys[argument] for argument in by_right),
        device=devices[0] if devices else None,
        generator=generators[0] if generators else None,
        draws=not generators and torch.Tag.nondeterministic_seeded in op.tags,
        returns=(RETURNED[name],) if name in RETURNED else tuple(_returned(r, written, keys) for r in schema.returns),
        types=tuple(str(r.type) for r in schema.returns),
    )


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _returned(value: Any, written: list[Any], keys: dict[Any, int | str]) -> int | str | None:
    if not _is_written(value):
        return None
    before = value.alias_info.before_set
    return next((keys[a.name] for a in written if a.alias_info.before_set == before), None)
