"""`Row`: an op, calls of it, what they come to in plain torch, and what torch refuses."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import customops

#: The namespace of the ops of the table.
NAMESPACE = "typed_ops"

#: The arguments of a call: ``args, kwargs``.
Call = tuple[tuple[Any, ...], dict[str, Any]]

#: The columns of the table: ways to run an op. Each has a test of its name.
COLUMNS = (
    "eager",
    "torch_ops",
    "fake",
    "aot_eager",
    "inductor",
    "dynamic",
    "export",
    "reverse",
    "forward",
    "vmap",
    "opcheck",
    "default",
    "bypass",
    "pickle",
)


def call(*args: Any, **kwargs: Any) -> Call:
    return args, kwargs


@dataclass(frozen=True)
class Case:
    """One call: each field is a function of the same tensors."""

    arguments: Callable[..., Call]
    #: The same call for ``torch.ops``, written by hand.
    lowered: Callable[..., Call]
    #: The same in plain torch, written without the op.
    expected: Callable[..., Any]


def of(value: Any, lowered: Any, expected: Callable[[Tensor], Any]) -> Case:
    """A call with a tensor and a value; `lowered` is the value for ``torch.ops``, or the whole call."""
    args, kwargs = lowered if _is_call(lowered) else ((lowered,), {})
    return Case(lambda x: call(x, value), lambda x: ((x, *args), kwargs), expected)


def times(by: float, plus: float = 0.0) -> Any:
    """What `of` takes as the expected value."""
    return lambda x: x * by + plus


def _is_call(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], tuple) and isinstance(value[1], dict)


@dataclass(frozen=True)
class Refusal:
    """What torch does not do: a word for the table, and the error, which is no silent wrong value."""

    word: str
    error: type[Exception]
    match: str


#: Of an op that torch exports, but cannot save or load: a list of dtypes, a returned list of numbers or without items.
NOT_SAVED = {"export": Refusal("unsaved", RuntimeError, "serializing")}


def _same_shape(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return torch.empty_like(x)


def _derived(op: Any) -> None:
    """The gradients of the kernel, which is written in torch."""
    op.register_reference(op._init_fn, gives="gradients")
    op.register_vmap("sequential")


@dataclass(frozen=True)
class Row:
    title: str
    fn: Callable[..., Any]
    #: What the signature is in the dispatcher.
    schema: str
    #: Two calls that differ in the value of the type.
    cases: tuple[Case, Case]
    #: None for an op that has one without being given any.
    fake: Callable[..., Any] | None = _same_shape
    rules: Callable[[Any], None] = _derived
    tensors: int = 1
    #: What is returned by ``torch.ops``, of what the op returns.
    flat: Callable[[Any], Any] = lambda result: result
    #: The default value to try, of the last parameter; "none" if it has to be given.
    default: Callable[[], Any] | None = None
    #: What the op with that default comes to.
    by_default: Callable[..., Any] | None = None
    #: Is the other call traced anew where the values are arguments of the compiled function? None if both are alike.
    recompiles: bool | None = True
    refused: Mapping[str, Refusal] = field(default_factory=dict)
    #: Columns that say nothing of this type.
    without: frozenset[str] = frozenset()
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.fn.__name__

    def refusal(self, column: str) -> Refusal | None:
        """What torch, or customops, does instead."""
        return self.refused.get(column)

    def cell(self, column: str) -> str:
        """What stands in the table."""
        refusal = self.refusal(column)
        if refusal is not None:
            return refusal.word
        return "-" if column in self.without or (column == "default" and self.default is None) else "yes"

    def define(self, registry: Any, name: str, fn: Callable[..., Any] | None = None, **options: Any) -> Any:
        op = registry.custom_op(name, fn or self.fn, **{**self.options, **options})
        if self.fake is not None:
            op.register_fake(self.fake)
        self.rules(op)
        return op

    def with_default(self) -> Callable[..., Any]:
        """The function with a default value for its last parameter."""
        assert self.default is not None
        fn: Any = self.fn
        made = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, (self.default(),), fn.__closure__)
        made.__annotations__, made.__module__ = fn.__annotations__, fn.__module__
        if fn.__kwdefaults__ or fn.__code__.co_kwonlyargcount:
            made.__defaults__, made.__kwdefaults__ = (
                None,
                dict(fn.__kwdefaults__ or {}, **{fn.__code__.co_varnames[fn.__code__.co_argcount]: self.default()}),
            )
        return made


def exactly(value: Any, type_: type) -> None:
    """What callbacks see is what the signature says, and nothing like it."""
    assert type(value) is type_, f"{value!r} is a {type(value).__name__}, not a {type_.__name__}"


def inputs(row: Row, size: int = 3) -> list[Tensor]:
    return [torch.linspace(1.0 + i, 2.0 + i, size, dtype=torch.float64) for i in range(row.tensors)]


registry = customops.Registry()


def define_all(rows: Mapping[str, Row]) -> dict[str, Any]:
    return {name: row.define(registry, f"{NAMESPACE}::{name}") for name, row in rows.items()}
