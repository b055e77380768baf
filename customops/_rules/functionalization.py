"""Ops that write, under functionalization (AOTAutograd, torch.compile, export).

Functionalization turns a write into a value: a higher-order op takes the place of the op and returns what it would have
written, and each written argument is replaced by that. torch does so for every op that writes, but in two cases:

- An in-place or out op returns what it was given to write to. Functionalized, its result would be a tensor of its own,
  and nothing would say that it is the memory of the argument: a compiler hands that memory out again while the result
  is still in use. So a variant of the op that only writes, and returns nothing, takes its place, and the result is the
  argument.
- Some calls go through torch's first form of it: see `_compat.functionalization.functionalize`.

Ops that also return lists or numbers are let through: torch's form can do that, but refuses them.
"""

from __future__ import annotations

from typing import Any

from customops import _compat
from customops._dispatch.callbacks import Fn
from customops._dispatch.operator import OperatorHandle
from customops._dispatch.results import mutated_results, tensors_in


def bind(operator: OperatorHandle) -> None:
    """Nothing to register: the schema says what the op writes."""
    if not operator.schema.mutated or operator.schema.is_view or not operator.has_own_rules:
        return
    if operator.mutation_only is not None:
        _install_kernels(operator.mutation_only, operator)
    elif any(ret.type != "Tensor" for ret in operator.schema.returns):
        _compat.functionalization.allow_any_returns(operator.overload)
    operator.impl_torch_dispatch(_compat.functionalization.FunctionalTensorMode, _rule(operator))


def _install_kernels(variant: OperatorHandle, operator: OperatorHandle) -> None:
    """The variant of an in-place or out op that returns nothing calls the op."""
    overload = operator.overload

    def write(*args: Any, **kwargs: Any) -> None:
        overload(*args, **kwargs)

    variant.impl(_compat.dynamo.outside_dynamo(write), "CompositeExplicitAutograd")
    variant.impl_fake(write, __file__)  # the fake of the op has its say


def _rule(operator: OperatorHandle) -> Fn:
    """What FunctionalTensorMode does with a call of the op."""
    overload = operator.overload if operator.mutation_only is None else operator.mutation_only.overload
    mutated = mutated_results(operator.schema, operator.tags)
    schema = operator.schema
    positions = [i for i, argument in enumerate(schema.positional) if argument.is_mutated]
    names = [argument.name for argument in schema.keyword_only if argument.is_mutated]

    def rule(mode: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        values = [args[i] if i < len(args) else None for i in positions] + [kwargs.get(name) for name in names]
        result = _compat.functionalization.functionalize(mode, overload, types, args, kwargs, tensors_in(values))
        return result if mutated is None else mutated(args, kwargs)

    return rule
