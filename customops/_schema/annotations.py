"""What may stand around a type: `Annotated`, NewType, type aliases and TypeVars; and what customops puts into it."""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import operator
import sys
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, Union

import torch
import typing_extensions
from torch import Tensor

from customops.errors import brief

T = TypeVar("T")


class Mutates:
    """The metadata of `Mut`: the op writes the argument."""


#: ``x: Mut[Tensor]``: the op writes this argument.
Mut = Annotated[T, Mutates]


@dataclass(frozen=True)
class SameAs:
    """In ``-> Annotated[Tensor, SameAs("x")]``: the op returns its argument ``x``, which it mutates.

    The op then has ``torch.Tag.inplace`` if ``x`` is its first argument, or ``torch.Tag.out`` if ``x`` is keyword-only.

    Example:
        >>> @custom_op("mylib::add_")
        ... def add_(x: Mut[Tensor], y: Tensor) -> Annotated[Tensor, SameAs("x")]:
        ...     return x.add_(y)
    """

    argument: str


class Keys(tuple[str, ...]):
    """In ``Annotated[dict[str, Tensor], Keys("q", "k")]``: the dict has exactly these keys.

    Example:
        >>> @custom_op("mylib::total")
        ... def total(parts: Annotated[dict[str, Tensor], Keys("q", "k")]) -> Tensor:
        ...     return parts["q"] + parts["k"]
    """

    __slots__ = ()

    def __new__(cls, *keys: str) -> Keys:
        return super().__new__(cls, keys)

    def __repr__(self) -> str:
        return f"Keys({', '.join(map(repr, self))})"


#: Forms that say of a field whether it is there, or whether it changes.
_QUALIFIERS = {typing.Final, typing_extensions.Required, typing_extensions.NotRequired, typing_extensions.ReadOnly}
_QUALIFIERS |= {getattr(typing, name) for name in ("Required", "NotRequired", "ReadOnly") if hasattr(typing, name)}

_ALIASES = tuple({typing_extensions.TypeAliasType, getattr(typing, "TypeAliasType", typing_extensions.TypeAliasType)})


def strip(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """The type itself, and what `Annotated` says of it. A TypeVar stands for its bound or its constraints."""
    metadata: tuple[Any, ...] = ()
    while True:
        origin = typing.get_origin(hint)
        if origin is Annotated:
            hint, metadata = hint.__origin__, (*hint.__metadata__, *metadata)
        elif origin in _QUALIFIERS:
            (hint,) = typing.get_args(hint)
        elif isinstance(origin, _ALIASES):
            hint = origin.__value__[typing.get_args(hint)]
        elif isinstance(hint, _ALIASES):
            hint = hint.__value__
        elif hasattr(hint, "__supertype__"):
            hint = hint.__supertype__
        elif isinstance(hint, type) and hasattr(hint, "dim_str") and hasattr(hint, "array_type"):  # of jaxtyping
            hint, metadata = hint.array_type, (hint.dim_str, *metadata)
        elif isinstance(hint, TypeVar) and (hint.__bound__ or hint.__constraints__):
            hint = hint.__bound__ or union_of(hint.__constraints__)
        else:
            return hint, metadata


def may_be_absent(hint: Any, otherwise: bool) -> bool:
    """May a TypedDict lack the key of this hint? Its own tables are wrong where annotations are strings."""
    while (origin := typing.get_origin(hint)) is Annotated or origin in _QUALIFIERS:
        name = getattr(origin, "_name", None)
        if name in ("Required", "NotRequired"):
            return bool(name == "NotRequired")
        hint = hint.__origin__ if origin is Annotated else typing.get_args(hint)[0]
    return otherwise


def simplify(hint: Any) -> Any:
    """The type, without what stands around it or around what it is made of."""
    hint, _ = strip(hint)
    origin, items = typing.get_origin(hint), typing.get_args(hint)
    if origin is None or origin is typing.Literal:
        return hint
    simple = tuple(item if item is Ellipsis or isinstance(item, list) else simplify(item) for item in items)
    return with_items(hint, items, simple)


def with_items(hint: Any, items: tuple[Any, ...], new: tuple[Any, ...]) -> Any:
    """A union or a generic type with others in the place of its items; itself, if they are the same."""
    if all(one is other for one, other in zip(items, new, strict=True)):
        return hint
    origin = typing.get_origin(hint)
    return union_of(new) if origin in (Union, types.UnionType) else types.GenericAlias(origin, new)


def annotated(hint: Any, metadata: Iterable[Any]) -> Any:
    return operator.getitem(Annotated, (hint, *metadata))


def union_of(members: Iterable[Any]) -> Any:
    return Union[tuple(members)]  # (there is no other way to write one of any number of members)


def union_members(hint: Any) -> tuple[Any, ...]:
    """The members of a union, those of unions in it too; another type is its only member."""
    bare, metadata = strip(hint)
    items = typing.get_args(bare)
    if typing.get_origin(bare) in (Union, types.UnionType):
        return tuple(dict.fromkeys([member for item in items for member in union_members(item)]))
    if typing.get_origin(bare) is typing.Literal and None in items:
        return typing.Literal[tuple(item for item in items if item is not None)], type(None)
    return (hint if metadata else bare,)


# Types and values as one would write them -----------------------------------------------------------------------------


def show(annotation: Any) -> str:
    """``int`` rather than ``<class 'int'>``; everything else as Python prints it, on one short line."""
    if not isinstance(annotation, type) or typing.get_origin(annotation):
        return brief(annotation, 120)
    module, name = annotation.__module__, annotation.__qualname__
    outer, _, inner = module.rpartition(".")
    if inner.startswith("_") and getattr(sys.modules.get(outer), name, None) is annotation:
        module = outer  # ``pathlib`` where Python 3.13 has a class in ``pathlib._local``
    return name if module == "builtins" else f"{module}.{name}"


def code(hint: Any) -> str:
    """A type as one would write it."""
    origin, items = typing.get_origin(hint), typing.get_args(hint)
    if hint is None or hint is type(None):
        return "None"
    if hint is Ellipsis:
        return "..."
    if hint in (Tensor, torch.types.Number):
        return "Tensor" if hint is Tensor else "torch.types.Number"
    if origin in (Union, types.UnionType):
        return " | ".join(map(code, sorted(items, key=lambda item: item is type(None))))
    if origin is Literal:
        return f"Literal[{', '.join(map(literal, items))}]"
    if origin is Annotated:
        keys = next((item for item in items[1:] if isinstance(item, Keys)), None)
        inner = code(items[0])
        return inner if keys is None else f"Annotated[{inner}, Keys({', '.join(map(literal, keys))})]"
    if origin is not None:
        name = "Sequence" if origin is collections.abc.Sequence else getattr(origin, "__name__", str(origin))
        return f"{name}[{', '.join(map(code, items))}]" if items else name
    if isinstance(hint, type):
        return f"torch.{hint.__name__}" if hint.__module__ == "torch" else hint.__name__
    return str(hint)


def literal(value: Any) -> str:
    """A value as one would write it; ``Config(...)`` of a class."""
    if isinstance(value, str) and type(value) is str:
        return repr(value) if '"' in value else f'"{value}"'
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return f"{type(value).__name__}(...)"
    return brief(value)
