"""Ops that write, under functionalization (AOTAutograd, torch.compile, export).

Functionalization turns a write into a value: a higher-order op takes the place of the op and returns what it would have
written, and each written argument is replaced by that. torch does so for every op that writes, but in two cases:

- An in-place or out op returns what it was given to write to. Functionalized, its result would be a tensor of its own,
  and nothing would say that it is the memory of the argument: a compiler hands that memory out again while the result
  is still in use. So a variant of the op that only writes, and returns nothing, takes its place, and the result is the
  argument.
- A call that writes nothing, because every optional argument that it could write is None, has no base to start from,
  and inductor fails. Such a call goes through torch's older form, which starts from the arguments themselves.
"""

from __future__ import annotations

from typing import Any

import torch

from customops import _compat
from customops._dispatch.callbacks import Fn
from customops._dispatch.operator import Definition
from customops._dispatch.results import mutated_results
from customops._schema.model import Schema


def install(definition: Definition) -> None:
    """Nothing to register: the schema says what the op writes."""
    if not definition.schema.mutated or definition.schema.is_view or definition.library is None:
        return
    written = mutated_results(definition.schema, definition.tags)
    if written is not None:
        definition.twin = _mutation_only(definition)
    definition.impl_torch_dispatch(_compat.functionalization.FunctionalTensorMode, _rule(definition, written))


def _mutation_only(definition: Definition) -> Definition:
    """The variant of an in-place or out op that returns nothing."""
    name = definition.name._replace(name=f"{definition.name.name}__writes")
    tags = tuple(tag for tag in definition.tags if tag not in (torch.Tag.inplace, torch.Tag.out))
    variant = Definition.define(name, Schema(definition.schema.arguments, ()), tags)
    overload = definition.overload

    def write(*args: Any, **kwargs: Any) -> None:
        overload(*args, **kwargs)

    variant.impl(_compat.dynamo.outside_dynamo(write), "CompositeExplicitAutograd")
    variant.impl_fake(write, __file__)  # the fake of the op has its say
    return variant


def _rule(definition: Definition, written: Fn | None) -> Fn:
    """What FunctionalTensorMode does with a call of the op."""
    overload = definition.overload if definition.twin is None else definition.twin.overload
    schema = definition.schema
    positions = [i for i, argument in enumerate(schema.positional) if argument.is_mutated]
    names = [argument.name for argument in schema.keyword_only if argument.is_mutated]

    def rule(mode: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        values = [args[i] if i < len(args) else None for i in positions] + [kwargs.get(name) for name in names]
        writes_nothing = all(value is None for value in values)
        result = _compat.functionalization.functionalize(
            mode, overload, types, args, kwargs, writes_nothing=writes_nothing
        )
        return result if written is None else written(args, kwargs)

    return rule
