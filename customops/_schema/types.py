"""Type hints and the schema types they stand for."""

from __future__ import annotations

import collections.abc
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any, List, NamedTuple, Optional, Union

import torch
from torch import Tensor

from customops import _compat


class _Row(NamedTuple):
    """A Python type, its schema type, and which of its derived forms the dispatcher takes."""

    python: Any
    schema: str
    list_of: bool = False  # T[]
    list_of_optional: bool = False  # T?[]
    optional_list: bool = False  # T[]?, and T?[]? where there is T?[]


def _rows() -> Iterable[_Row]:
    yield _Row(Tensor, "Tensor", list_of=True, list_of_optional=True, optional_list=True)
    yield _Row(int, "SymInt", list_of=True, optional_list=True)
    yield _Row(float, "float", list_of=True, optional_list=True)
    yield _Row(bool, "bool", list_of=True, optional_list=True)
    yield _Row(str, "str")
    yield _Row(torch.types.Number, "Scalar", list_of=True)
    yield _Row(torch.dtype, "ScalarType")
    yield _Row(torch.device, "Device")
    if (group_name := _compat.schemas.group_name_type()) is not None:
        yield _Row(group_name, "str")


def _lists_of(python: Any) -> tuple[Any, ...]:
    return (Sequence[python], List[python], collections.abc.Sequence[python], list[python])


def _param_types() -> dict[Any, str]:
    table: dict[Any, str] = {}
    for row in _rows():
        table[row.python] = row.schema
        table[Optional[row.python]] = f"{row.schema}?"
        lists = {seq: f"{row.schema}[]" for seq in _lists_of(row.python) if row.list_of}
        lists |= {seq: f"{row.schema}?[]" for seq in _lists_of(Optional[row.python]) if row.list_of_optional}
        table |= lists
        table |= {Optional[seq]: f"{text}?" for seq, text in lists.items() if row.optional_list}
    return table


#: Python type of a parameter -> schema type.
SUPPORTED_PARAM_TYPES: dict[Any, str] = _param_types()

#: Python type of a return -> schema type; a tuple of these is several returns.
SUPPORTED_RETURN_TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    List[Tensor]: "Tensor[]",
    list[Tensor]: "Tensor[]",
    int: "SymInt",
    float: "float",
    bool: "bool",
    torch.types.Number: "Scalar",
}

#: Positional-or-keyword and keyword-only parameters have a place in a schema; these have not.
NO_PLACE = {
    inspect.Parameter.VAR_POSITIONAL: "varargs (*{})",
    inspect.Parameter.VAR_KEYWORD: "varkwargs (**{})",
    inspect.Parameter.POSITIONAL_ONLY: "positional-only parameters ({})",
}


def tuple_to_list(tuple_type: Any) -> Any:
    """The list type nearest to a tuple type: ``Tuple[int, int]`` -> ``list[int]``, bare ``Tuple`` -> ``list``."""
    items = typing.get_args(tuple_type)
    if not items:
        return list
    if len(items) == 2 and items[1] is Ellipsis:
        items = items[:1]
    return types.GenericAlias(list, Union[items])


def lookup(table: dict[Any, str], annotation: Any) -> str | None:
    try:
        return table.get(annotation)
    except TypeError:  # an unhashable annotation is no key of the table
        return None


def dispatched(type_: str, default: Any) -> Any:
    """`default` as the dispatcher hands it over where a later argument is given: ``3`` for a float is ``3.0``.

    A device given as a string stays one: that is what torch.library passes.
    """
    base = type_.removesuffix("?")
    if isinstance(default, (list, tuple)):
        return tuple(dispatched(base[:-2], item) for item in default)
    if base == "Scalar" and not isinstance(default, bool):
        base = "float" if isinstance(default, float) else "SymInt"
    convert = PLAIN.get(base)
    return default if default is None or convert is None else convert(default)


#: What makes the plain value of a subclass (a member of an IntEnum, a numpy float64).
PLAIN: dict[str, Callable[[Any], Any]] = {"SymInt": int, "float": float, "str": "".join}
