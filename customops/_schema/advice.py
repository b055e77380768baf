"""What to write instead of a type hint that is not supported."""

from __future__ import annotations

import collections.abc
import dataclasses
import types
import typing
from typing import Any, Optional, Union

import torch

from customops._schema.types import SUPPORTED_PARAM_TYPES, lookup, tuple_to_list

#: Types with a close relative in the table.
_RELATIVES: dict[Any, str] = {
    torch.nn.Parameter: "torch.Tensor",
    torch.Size: "Sequence[int]",
    complex: "torch.types.Number",
    bytes: "str",
    object: "torch.Tensor",
    torch.Generator: "torch.Tensor (the generator's state)",
}


def advice(annotation: Any, table: dict[Any, str]) -> str:
    """A sentence with the nearest type that works, or an empty one."""
    if annotation is tuple or typing.get_origin(annotation) is tuple:
        nearest = tuple_to_list(annotation)
        text = "Tuples are not supported here; use a list. " if table is SUPPORTED_PARAM_TYPES else ""
        return f"{text}For example, {show(nearest)}." if lookup(table, nearest) else text.rstrip()
    relative = _nearest(annotation, table)
    return f"The nearest type that works is {relative}." if relative else ""


def _nearest(annotation: Any, table: dict[Any, str]) -> str | None:
    origin, items = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated or origin is typing.Final:
        return show(items[0]) if lookup(table, items[0]) else _nearest(items[0], table)
    if origin is typing.Literal:
        return show(type(items[0])) if lookup(table, type(items[0])) else None
    if isinstance(annotation, type):
        return _nearest_class(annotation, table)
    if isinstance(origin, type) and issubclass(origin, collections.abc.Mapping):
        return _instead_of_dict(items[1] if len(items) == 2 else None, table)
    candidates: list[Any] = []
    if origin in (Union, types.UnionType):
        plain = [item for item in items if item is not type(None)]
        candidates = [types.GenericAlias(list, Optional[item]) for inner in plain for item in typing.get_args(inner)]
        candidates += [torch.types.Number] if set(plain) <= {int, float, bool, complex} else []
        candidates += plain[:1]
    elif isinstance(origin, type) and issubclass(origin, collections.abc.Iterable) and items:
        item = next((i for i in typing.get_args(items[0]) if i is not type(None)), items[0])
        candidates = [types.GenericAlias(list, item)]
    return next((show(candidate) for candidate in candidates if lookup(table, candidate)), None)


def _instead_of_dict(value: Any, table: dict[Any, str]) -> str:
    values = types.GenericAlias(list, value) if value is not None else None
    text = f"{show(values)}, of its values" if lookup(table, values) else "one parameter for each of its values"
    return f"{text}; let a function around the op deal with the dict"


def _nearest_class(annotation: type, table: dict[Any, str]) -> str | None:
    if dataclasses.is_dataclass(annotation):
        return f"one parameter for each of its fields ({', '.join(x.name for x in dataclasses.fields(annotation))})"
    if issubclass(annotation, tuple) and hasattr(annotation, "_fields"):
        return f"one parameter for each of its fields ({', '.join(annotation._fields)})"
    if issubclass(annotation, collections.abc.Mapping):
        return _instead_of_dict(None, table)
    if annotation in _RELATIVES:
        return _RELATIVES[annotation]
    if annotation.__module__.split(".")[0] == "numpy":
        return "torch.Tensor"
    if annotation is list or annotation is set:
        return "list[torch.Tensor]"
    return next((show(base) for base in annotation.__mro__[1:-1] if lookup(table, base)), None)


def show(annotation: Any) -> str:
    """``int`` rather than ``<class 'int'>``; everything else as Python prints it."""
    if isinstance(annotation, type) and not typing.get_origin(annotation):
        module = annotation.__module__
        return annotation.__qualname__ if module == "builtins" else f"{module}.{annotation.__qualname__}"
    return str(annotation)
