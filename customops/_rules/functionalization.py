"""Ops that write, under functionalization (AOTAutograd, torch.compile, export).

Functionalization turns a write into a value: a higher-order op takes the place of the op and returns what it would have
written, and each written argument is replaced by that. torch does so for every op that writes, but in two cases:

- An in-place or out op returns what it was given to write to. Functionalized, its result would be a tensor of its own,
  and nothing would say that it is the memory of the argument: a compiler hands that memory out again while the result
  is still in use. So a variant of the op that only writes, and returns nothing, takes its place, and the result is the
  argument.
- Some calls go through torch's first form of it: see `_compat.functionalization.functionalize`.

Ops that also return lists or numbers are let through: torch's form can do that, but refuses them.

An op that is traceable is not kept whole at all: its function runs in its place, and compilers see what that calls. So
it is under AOTAutograd, the front of inductor. An export keeps the op.
"""

from __future__ import annotations

from typing import Any

from customops import _compat
from customops._dispatch.callbacks import Fn
from customops._dispatch.fill_defaults import filler
from customops._dispatch.operator import OperatorHandle
from customops._dispatch.registrations import lock
from customops._dispatch.results import mutated_results, tensors_in


def bind(operator: OperatorHandle, kernel: Fn | None) -> None:
    """Nothing to register: the schema says what the op writes, and `kernel`, which came with it, what it does."""
    if not operator.has_own_rules:
        return
    rule = None
    if operator.schema.mutated and not operator.schema.is_view:
        if operator.mutation_only is not None:
            _install_kernels(operator.mutation_only, operator)
        elif any(ret.type != "Tensor" for ret in operator.schema.returns):
            _compat.functionalization.allow_any_returns(operator.overload)
        rule = _rule(operator)
    if operator.spec.traceable and kernel is not None:
        rule = _traced_into(operator, kernel, rule or _keep)
    if rule is not None:
        operator.impl_torch_dispatch(_compat.functionalization.FunctionalTensorMode, rule)


def _keep(mode: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
    return mode.__torch_dispatch__(func, types, args, kwargs or {})


def _traced_into(operator: OperatorHandle, kernel: Fn, otherwise: Fn) -> Fn:
    """What FunctionalTensorMode does with a call of an op that is traceable; `otherwise`, where it is kept whole."""
    fill = filler(operator.schema)

    def rule(mode: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        _compat.dynamo.traced(operator.overload, operator.qualname)
        if not _can_trace(operator, kernel, tensors_in((*args, *kwargs.values()))):
            return otherwise(mode, func, types, args, kwargs)
        if not all(map(_compat.functionalization.is_of_torch, types)):
            return NotImplemented  # a subclass has the first say
        if fill is not None:
            args, kwargs = fill(args, kwargs)
        with mode:
            return kernel(*args, **kwargs)

    return rule


def _can_trace(operator: OperatorHandle, kernel: Fn, tensors: Any) -> bool:
    """Is what a call of the op would run its own function, and one that can be traced now?"""
    if not tensors or _compat.triton.interprets() or _compat.triton.keeps_ops():
        return False
    with lock:
        current = operator.kernel_on(_compat.dispatch.device_key(tensors[0].device.type))
    return current is not None and current.registered is kernel


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
