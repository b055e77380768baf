"""What type checkers know of a callback that fits an op. Nothing here is there at run time but the names.

A callback is called by position where the op's function may be, so its parameters may have other names; it may leave
out those with a default, and need not repeat defaults. No type says all that. These say what it returns, and that it
takes something if the op does: whatever they refuse is wrong. Registration finds out how many parameters there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Concatenate, Literal, Never, ParamSpec, Protocol, TypedDict, TypeVar, overload

import torch
from torch import Tensor

from customops._torch.library import Library

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
R_contra = TypeVar("R_contra", contravariant=True)
R_co = TypeVar("R_co", covariant=True)
F = TypeVar("F", bound=Callable[..., Any])

#: Results that stand for others: a list for a tuple, a dict for a TypedDict, a symbolic number for a number.
Items = list[Any] | tuple[Any, ...] | Mapping[str, Any]
Number = float | torch.SymInt | torch.SymFloat | torch.SymBool


class Returns(Protocol[R_co]):
    """Takes an argument, at least, and returns such a value."""

    def __call__(self, first: Any, /, *args: Any, **kwargs: Any) -> R_co: ...


class Backward(Protocol):
    def __call__(self, ctx: Any, grad: Any, /, *grads: Any, **kwargs: Any) -> Any: ...


class VmapRule(Protocol):
    def __call__(self, info: Any, in_dims: Any, /, *args: Any, **kwargs: Any) -> tuple[Any, Any]: ...


class SetupContext(Protocol[R_contra]):
    """It is called by keyword."""

    def __call__(self, *, ctx: Any, inputs: Any, output: R_contra) -> Any: ...


class SetupContextWithKeywords(Protocol[R_contra]):
    """Of an op with keyword-only arguments."""

    def __call__(self, *, ctx: Any, inputs: Any, keyword_only_inputs: Any, output: R_contra) -> Any: ...


AnySetupContext = SetupContext[R] | SetupContextWithKeywords[R] | None

# Type checkers name these in their messages.
ReturnsTensor = TypeVar("ReturnsTensor", bound=Returns[Tensor])
ReturnsItems = TypeVar("ReturnsItems", bound=Returns[Items])
ReturnsNumber = TypeVar("ReturnsNumber", bound=Returns[Number])
TakesGradients = TypeVar("TakesGradients", bound=Backward)
ResultAndDims = TypeVar("ResultAndDims", bound=VmapRule)
YieldsArguments = TypeVar("YieldsArguments", bound=Callable[[], Iterable[tuple[Any, ...]]])
TakesModeAndCall = TypeVar("TakesModeAndCall", bound=Callable[[Any, Any, Any, Any, Any], Any])

#: Names for `CustomOpDef.register_vmap`.
Strategy = Literal["sequential", "expand_dims", "broadcast_all"]
#: With what a registration ends; None: with the op.
Lib = Library | None


class KernelOptions(TypedDict, total=False):
    """What `register_kernel` takes by keyword."""

    calls_torch: bool
    name: str | None
    when: Callable[..., bool | str] | None
    priority: float
    key: Callable[..., Any] | Literal["arguments"] | None
    lib: Lib


#: Values to try for arguments, of `CustomOpDef.register_samples`.
Vary = Mapping[str, Any] | None


class OpFor(Protocol[R_co]):
    """An op that returns such a value."""

    def _call(self, /, *args: Any, **kwargs: Any) -> R_co: ...


class OnlyNamed(Protocol):
    def __call__(self, **kwargs: Any) -> Any: ...


class OnlyKeywords(Protocol):
    """An op without positional parameters: one that a function of nothing but keywords could stand for."""

    def _replace_by(self, fn: OnlyNamed, /) -> None: ...


class NothingRequired(Protocol):
    """An op that can be called without arguments."""

    def _call(self) -> Any: ...


#: A callback of such an op may have no positional parameter.
MayTakeNothing = OnlyKeywords | NothingRequired


class Decorator(Protocol[P, R]):
    """Takes the callback where it was not given."""

    def _call(self, /, *args: P.args, **kwargs: P.kwargs) -> R: ...

    def _replace_by(self, fn: Callable[P, R], /) -> None: ...

    @overload
    def __call__(self: OpFor[Tensor], fn: ReturnsTensor, /) -> ReturnsTensor: ...
    @overload
    def __call__(self: OpFor[Items], fn: ReturnsItems, /) -> ReturnsItems: ...
    @overload
    def __call__(self: OpFor[float], fn: ReturnsNumber, /) -> ReturnsNumber: ...
    @overload
    def __call__(self, fn: Callable[Concatenate[Any, Q], R], /) -> Callable[Concatenate[Any, Q], R]: ...
    @overload
    def __call__(self: MayTakeNothing, fn: Callable[Q, R], /) -> Callable[Q, R]: ...
    @overload
    def __call__(self: OpFor[Never], fn: F, /) -> F: ...
