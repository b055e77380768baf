"""vmap: how the op runs on batched tensors.

A rule is ``rule(info, in_dims, *args, **kwargs) -> (result, out_dims)``. `STRATEGIES` are rules for ops whose authors
need not write one, under the names (and with the meaning) that ``jax.pure_callback`` gives them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from customops import _compat
from customops._call import Fn, Shorter, bind_kernel, filler
from customops._definition import Definition, Undo
from customops._schema import Schema
from customops._slots import Slots
from customops.errors import DefinitionError, UnsupportedError


class VmapRule:
    """The batching rule of one op; without one, torch calls the op once for each element and says so."""

    def __init__(self, definition: Definition) -> None:
        self.definition = definition
        self._slots: Slots[None, Fn] = Slots(self._install_trampoline)

    def install(self, definition: Definition) -> None:
        """The rule goes in only if there is one: torch's fallback runs where nothing is installed."""
        self.definition = definition
        self._slots.reset()

    def register(self, rule: Fn | str) -> Undo:
        fn = _strategy(rule, self.definition) if isinstance(rule, str) else rule
        schema, ours = self.definition.schema, self.definition.library is not None
        bound = bind_kernel(fn, schema, str(self.definition.name), "vmap rule", "info", "in_dims", warn=ours)
        return self._slots.set(None, _Shorter(bound, schema) if isinstance(bound, Shorter) else bound)

    def _install_trampoline(self, _: None, apart: bool) -> Undo:
        return self.definition.impl(_trampoline(self._slots, self.definition), "FuncTorchBatched", apart=apart)


def _trampoline(slots: Slots[None, Fn], definition: Definition) -> Callable[..., Any]:
    """The function at the key of batched tensors."""
    overload, fill, operands = definition.overload, filler(definition.schema), _Operands(definition.schema)

    def vmap(*args: Any, **kwargs: Any) -> Any:
        if fill is not None:
            args, kwargs = fill(args, kwargs)
        if not operands.names:
            return _compat.call_vmap_rule(slots.values[None], overload, args, kwargs)
        rule = functools.partial(operands.call_rule, slots.values[None])
        values, others = operands.join(args, kwargs)
        return _compat.call_vmap_rule(rule, functools.partial(operands.call, overload), values, others)

    return _compat.outside_dynamo(vmap)


class _Operands:
    """What may be batched: the positional arguments, then the tensors that are keyword-only."""

    def __init__(self, schema: Schema) -> None:
        self.arguments = schema.operands
        self.positional = len(schema.positional)
        self.names = tuple(argument.name for argument in schema.keyword_only_tensors)

    def join(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        others = {name: value for name, value in kwargs.items() if name not in self.names}
        return (*args, *(kwargs[name] for name in self.names)), others

    def call(self, fn: Callable[..., Any], /, *operands: Any, **others: Any) -> Any:
        named = dict(zip(self.names, operands[self.positional :], strict=True))
        return fn(*operands[: self.positional], **named, **others)

    def call_rule(self, rule: Fn, info: Any, in_dims: tuple[Any, ...], /, *operands: Any, **others: Any) -> Any:
        return self.call(functools.partial(rule, info, in_dims), *operands, **others)


class _Shorter:
    """A rule that has no parameter for some arguments with a default; `in_dims` has no entry for them, either."""

    def __init__(self, rule: Shorter, schema: Schema) -> None:
        self.rule = rule
        self.tensors = [argument.name for argument in schema.keyword_only_tensors]

    def __call__(self, info: Any, in_dims: tuple[Any, ...], /, *args: Any, **kwargs: Any) -> Any:
        short, named = self.rule.shorten(args, kwargs)
        of_tensors = zip(self.tensors, in_dims[len(args) :], strict=True)
        dims = (*in_dims[: len(short)], *(dim for name, dim in of_tensors if name in named))
        return self.rule.fn(info, dims, *short, **named)


# Strategies -----------------------------------------------------------------------------------------------------


def _strategy(name: str, definition: Definition) -> Fn:
    if name not in STRATEGIES:
        raise DefinitionError(
            "there is no such vmap strategy",
            op=str(definition.name),
            expected=", ".join(map(repr, STRATEGIES)) + ", or a function",
            got=repr(name),
        )
    if torch.Tag.out in definition.tags:
        raise UnsupportedError(
            "a vmap strategy for an op with torch.Tag.out",
            op=str(definition.name),
            fix="register_vmap(fn), or batch the functional op",
        )
    return _Strategy(STRATEGIES[name], definition)


#: The op, with all that may be batched given by position.
Op = Callable[..., Any]


class _Strategy:
    """A rule made of a strategy and the op it calls."""

    def __init__(self, run: Callable[..., Any], definition: Definition) -> None:
        self.run = run
        self.definition = definition
        self.operands = _Operands(definition.schema)
        self.in_place = torch.Tag.inplace in definition.tags

    def __call__(self, info: Any, in_dims: tuple[Any, ...], /, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self._refuse_unbatched_writes(in_dims)
        operands, others = self.operands.join(args, kwargs)
        op = functools.partial(self.operands.call, self.definition.overload, **others)
        result = self.run(op, info.batch_size, in_dims, operands, str(self.definition.name))
        if self.in_place:
            return args[0], in_dims[0]  # the argument itself, with its batch where it is
        return result, 0

    def _refuse_unbatched_writes(self, in_dims: tuple[Any, ...]) -> None:
        """Each element of the batch would write its own value to one and the same tensor."""
        for argument, dims in zip(self.operands.arguments, in_dims, strict=True):
            if argument.is_written and any(dim is None for dim in (dims if isinstance(dims, list) else [dims])):
                raise UnsupportedError(
                    "vmap over an op that writes to a tensor which is not batched itself",
                    op=str(self.definition.name),
                    argument=argument.name,
                    fix="batch that tensor too, e.g. expand it and clone",
                )


def _sequential(op: Op, size: int, in_dims: Any, operands: tuple[Any, ...], name: str) -> Any:
    """Call the op once for each element of the batch, and stack what it returns."""
    results = []
    for i in range(size):
        select = functools.partial(_select, i)
        results.append(op(*(_map(select, value, dims) for value, dims in zip(operands, in_dims, strict=True))))
    return _stack(results, name)


def _select(i: int, x: Tensor, dim: int | None) -> Tensor:
    return x if dim is None else x.select(dim, i)


def _expand_dims(op: Op, size: int, in_dims: Any, operands: tuple[Any, ...], name: str) -> Any:
    """Call the op once, batches in front; a tensor without one gets a dimension of size 1 there."""
    return op(*(_map(_batch_first, *pair) for pair in zip(operands, in_dims, strict=True)))


def _broadcast_all(op: Op, size: int, in_dims: Any, operands: tuple[Any, ...], name: str) -> Any:
    """Call the op once, batches in front; a tensor without one is expanded to the size of the batch."""

    def expand(x: Tensor, dim: int | None) -> Tensor:
        batched = _batch_first(x, dim)
        return batched.expand(size, *batched.shape[1:])

    return op(*(_map(expand, *pair) for pair in zip(operands, in_dims, strict=True)))


#: name -> what it does with one level of vmap.
STRATEGIES: dict[str, Callable[..., Any]] = {
    "sequential": _sequential,
    "expand_dims": _expand_dims,
    "broadcast_all": _broadcast_all,
}


def _batch_first(x: Tensor, dim: int | None) -> Tensor:
    return x.unsqueeze(0) if dim is None else x.movedim(dim, 0)


def _map(fn: Callable[[Tensor, int | None], Any], value: Any, dims: Any) -> Any:
    """Apply `fn` to a tensor, or to the tensors of a list; other values stay."""
    if isinstance(value, (list, tuple)) and isinstance(dims, (list, tuple)):
        return [_map(fn, item, dim) for item, dim in zip(value, dims, strict=True)]
    return fn(value, dims) if isinstance(value, Tensor) else value


def _stack(results: list[Any], name: str) -> Any:
    """Results of the elements -> the result of the batch, of the same structure."""
    if not results:
        raise UnsupportedError(
            'vmap strategy "sequential" over an empty batch: nothing tells the shape of the result',
            op=name,
            fix='register_vmap("expand_dims"), or a function',
        )
    first = results[0]
    if isinstance(first, Tensor):
        return torch.stack(results)
    if isinstance(first, (list, tuple)):
        return type(first)(_stack(list(items), name) for items in zip(*results, strict=True))
    if any(result != first for result in results):
        raise UnsupportedError(
            "an op under vmap returned numbers that differ between the elements of the batch",
            op=name,
            got=", ".join(map(repr, results[:6])),
            fix="return a tensor instead",
        )
    return first
