"""How an op of the device is run by the CPU's kernel: read off its schema once, then followed in each call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from customops._schema.model import Return, Schema
from customops._schema.parse import from_dispatcher
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
    schema: Schema
    run: Callable[..., Any]  #: the op itself, or what stands in for it where the CPU has no kernel
    is_view: bool
    writes: tuple[int | str, ...]  #: the mutated arguments
    outs: tuple[str, ...]
    tensors: frozenset[int | str]  #: arguments of type Tensor, of which a number has to be made one
    on_cpu: frozenset[int | str]
    device: int | str | None
    generator: int | str | None
    draws: bool  #: draws random numbers, and takes no generator
    returns: tuple[int | str | None, ...]  #: the mutated argument that a return is, or None for a new value


def plan_of(op: Any) -> FallbackPlan:
    """The plan of an op."""
    schema, name = from_dispatcher(_compat.schema_of(op)), _compat.full_name(op)
    keys = {a.name: a.name if a.kwarg_only else position for position, a in enumerate(schema.arguments)}
    devices = [keys[a.name] for a in schema.arguments if a.type.startswith("Device")]
    generators = [keys[a.name] for a in schema.arguments if a.type.startswith("Generator")]
    tensors = [] if _compat.accepts_numbers(op) else [keys[a.name] for a in schema.arguments if a.is_tensor]
    return FallbackPlan(
        op=op,
        name=name,
        schema=schema,
        run=SUBSTITUTES.get(name, op),
        is_view=schema.is_view,
        writes=tuple(keys[argument.name] for argument in schema.mutated),
        outs=tuple(a.name for a in schema.mutated if a.kwarg_only and a.type == "Tensor"),
        tensors=frozenset(tensors),
        on_cpu=frozenset(keys[argument] for argument in ON_CPU.get(name, ())),
        device=devices[0] if devices else None,
        generator=generators[0] if generators else None,
        draws=not generators and torch.Tag.nondeterministic_seeded in op.tags,
        returns=(RETURNED[name],) if name in RETURNED else tuple(_returned(r, schema, keys) for r in schema.returns),
    )


def _returned(value: Return, schema: Schema, keys: dict[str, int | str]) -> int | str | None:
    """The mutated argument of the same alias set as a return."""
    if not value.is_mutated:
        return None
    return next((keys[a.name] for a in schema.mutated if a.alias == value.alias), None)
