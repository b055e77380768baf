"""The types of arguments and returns: a row for each, with all that the package knows of it.

A type is added by adding a row to `_rows`. What a rule asks of a type (how its default is written, what a kernel may
return, whether the dispatcher hands on the same object) is a field of the row, read where it is needed.
"""

from __future__ import annotations

import collections.abc
import enum
import numbers
import re
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any, List, NamedTuple, Optional, Union

import torch
from torch import SymBool, SymFloat, SymInt, Tensor

from customops import _compat
from customops._named import Named
from customops._schema import literals

#: A type, and one that may be None: the dispatcher takes both of any type.
_ALONE = ("", "?")


class TypeRow(NamedTuple):
    """A type of the schema language: the hints that stand for it, its default values, and its values in a call."""

    #: Its name in a schema.
    schema: str
    #: The Python types that stand for it; none for a type that only ``schema=`` can name.
    hints: tuple[Any, ...] = ()
    #: The forms in which a parameter may have it, as a schema writes them behind the name, from left to right: ``[]``
    #: for a list, ``[]?`` for a list or None, ``?[]`` for a list of optional items.
    forms: tuple[str, ...] = _ALONE
    #: The forms in which a return may have it.
    return_forms: tuple[str, ...] = ()

    #: The types of a default value that the author of an op may write, for one that is not a list.
    defaults: tuple[type, ...] = ()
    #: Why a value of these types cannot be a default all the same, or None.
    default_problem: Callable[[Any], str | None] | None = None
    #: A default as schema text, or None where the schema language has no word for it.
    write_default: Callable[[Any], str | None] = literals.literal
    #: A default as kernels receive it, from what the dispatcher holds after it has read the text.
    read_default: Callable[[Any], Any] | None = None
    #: Has the schema language defaults for lists of it?
    list_defaults: bool = False
    #: A default as the dispatcher would hand it over, from what the author wrote: ``3`` for a float is ``3.0``.
    canonical_default: Callable[[Any], Any] | None = None
    #: Does a default reach callbacks as the author wrote it, also where the dispatcher has it in another form?
    keeps_default: bool = False

    #: The types that a result may have. None: torch is to judge.
    results: tuple[type, ...] | None = None
    #: The exact types of values of which the dispatcher hands on the same object, or an equal one of the same type.
    unchanged: tuple[type, ...] = ()
    #: What else must be true of such a value, as Python; ``{}`` stands for the value, ``$name`` for what is built in.
    unchanged_if: str = ""
    #: The same for a list of such values. None: the dispatcher is to have the last word on lists.
    list_unchanged_if: str | None = None
    #: What is true, as Python, of other values that reach a kernel as `converted` makes them.
    converted_if: str = ""
    converted: Callable[[Any], Any] | None = None

    #: In a stub, the type of an argument in a call through `torch.ops`.
    stub: str = "Any"
    #: The same of a return, if it is another.
    stub_return: str = ""
    #: Does the dispatcher take one for a list of a length?
    repeated: bool = False


def _rows() -> Iterable[TypeRow]:
    group_name = _compat.schemas.group_name_type()
    yield TypeRow(
        "Tensor",
        (Tensor, torch.nn.Parameter),
        forms=(*_ALONE, "[]", "[]?", "?[]", "?[]?"),
        return_forms=("", "[]"),
        results=(Tensor,),
        unchanged=(Tensor, torch.nn.Parameter),
        list_unchanged_if="",
        stub="Tensor",
    )
    integer = TypeRow(
        "SymInt",
        (int,),
        forms=(*_ALONE, "[]", "[]?"),
        return_forms=("",),
        defaults=(int,),
        default_problem=literals.int_problem,
        list_defaults=True,
        canonical_default=int,
        results=(numbers.Integral, SymInt),
        unchanged=(int,),
        unchanged_if="-0x8000000000000000 <= {} <= 0x7FFFFFFFFFFFFFFF",
        list_unchanged_if="(not {} or $min({}) >= -0x8000000000000000 and $max({}) <= 0x7FFFFFFFFFFFFFFF)",
        converted_if="$type({}) is $bool",
        converted=int,
        stub="int | SymInt",
        stub_return="int",
    )
    yield integer
    yield integer._replace(schema="int", hints=(), stub="int", repeated=True)
    yield TypeRow(
        "float",
        (float,),
        forms=(*_ALONE, "[]", "[]?"),
        return_forms=("",),
        defaults=(int, float),
        default_problem=literals.float_problem,
        read_default=float,
        list_defaults=True,
        canonical_default=float,
        results=(numbers.Real, SymFloat, SymInt),
        unchanged=(float,),
        list_unchanged_if="",
        converted_if="$type({}) is $int and -0x20000000000000 <= {} <= 0x20000000000000",
        converted=float,
        stub="float",
        repeated=True,
    )
    yield TypeRow(
        "bool",
        (bool,),
        forms=(*_ALONE, "[]", "[]?"),
        return_forms=("",),
        defaults=(bool,),
        read_default=bool,
        list_defaults=True,
        results=(bool, SymBool),
        unchanged=(bool,),
        list_unchanged_if="",
        stub="bool",
    )
    yield TypeRow(
        "Scalar",
        (torch.types.Number, Union[int, float], Union[int, float, complex], Union[int, float, bool, complex]),
        forms=(*_ALONE, "[]"),
        return_forms=("",),
        defaults=(int, float, bool),
        default_problem=literals.int_problem,
        canonical_default=literals.plain_number,
        results=(numbers.Integral, float, complex, SymInt, SymFloat, SymBool),
        unchanged=(int, float, bool, complex),
        unchanged_if="($type({}) is not $int or -0x8000000000000000 <= {} <= 0x7FFFFFFFFFFFFFFF)",
        stub="int | float | complex",
    )
    yield TypeRow(
        "complex",
        (complex,),
        forms=(*_ALONE, "[]", "[]?"),
        defaults=(int, float, complex),
        list_defaults=True,
        canonical_default=complex,
        results=(numbers.Complex,),
        unchanged=(complex,),
        converted_if="$type({}) is $float",
        converted=complex,
        stub="complex",
    )
    yield TypeRow(
        "str",
        (str,) if group_name is None else (str, group_name),
        forms=(*_ALONE, "[]", "[]?"),
        defaults=(str,),
        default_problem=literals.str_problem,
        canonical_default="".join,
        results=(str,),
        unchanged=(str,),
        unchanged_if="{}.isascii()",
        stub="str",
    )
    yield TypeRow(
        "ScalarType",
        (torch.dtype,),
        forms=(*_ALONE, "[]"),  # a list or None comes as numbers: see `codecs.DtypeCodec`
        defaults=(torch.dtype,),
        write_default=literals.dtype_text,
        read_default=literals.dtype_from,
        list_defaults=True,
        unchanged=(torch.dtype,),
        stub="torch.dtype",
    )
    yield TypeRow(
        "Device",
        (torch.device,),
        defaults=(torch.device, str),
        default_problem=literals.device_problem,
        write_default=literals.quoted,
        read_default=torch.device,
        keeps_default=True,  # a string goes on being one: that is what torch.library passes
        unchanged=(torch.device,),
        stub="torch.device | str",
        stub_return="torch.device",
    )
    yield TypeRow(
        "Layout",
        (torch.layout,),
        defaults=(torch.layout,),
        write_default=literals.enum_text,
        read_default=literals.layout_from,
        list_defaults=True,
        unchanged=(torch.layout,),
        stub="torch.layout",
    )
    yield TypeRow(
        "MemoryFormat",
        (torch.memory_format,),
        defaults=(torch.memory_format,),
        write_default=literals.enum_text,
        read_default=literals.memory_format_from,
        list_defaults=True,
        unchanged=(torch.memory_format,),
        stub="torch.memory_format",
    )
    yield TypeRow("Generator", (torch.Generator,), stub="torch.Generator")
    # Its hint has the name of the class that torch knows (`opaque_type_name`).
    yield TypeRow("customops.Named", unchanged=(Named,), stub="customops.Named")


#: Name in a schema -> row. A type without a row goes through the dispatcher as torch has it.
ROWS: dict[str, TypeRow] = {row.schema: row for row in _rows()}

_NO_ROW = TypeRow("")


def row_of(type_: str) -> TypeRow:
    """The row of a type, or of its items and theirs: that of ``SymInt`` for ``SymInt[2]?``."""
    return ROWS.get(type_) or ROWS.get(type_.split("[", 1)[0].rstrip("?"), _NO_ROW)


def item_type(type_: str) -> str | None:
    """The type of the items of a list type, ``Tensor?`` of ``Tensor?[]``; None of another type."""
    return type_[: type_.rindex("[")] if type_.endswith("]") else None


# Hints ----------------------------------------------------------------------------------------------------------


def param_hints(row: TypeRow) -> dict[Any, str]:
    """The hints by which a parameter can have the type of a row, and the schema type that each stands for."""
    return _hints(row, row.forms, _sequences_of)


def return_hints(row: TypeRow) -> dict[Any, str]:
    """The same for a return."""
    return _hints(row, row.return_forms, _lists_of)


def _sequences_of(hint: Any) -> tuple[Any, ...]:
    return (typing.Sequence[hint], List[hint], collections.abc.Sequence[hint], list[hint])


def _lists_of(hint: Any) -> tuple[Any, ...]:
    return (List[hint], list[hint])


def _hints(row: TypeRow, forms: Iterable[str], lists_of: Callable[[Any], tuple[Any, ...]]) -> dict[Any, str]:
    table: dict[Any, str] = {}
    for form in forms:
        hints = list(row.hints)
        for part in re.findall(r"\?|\[\]", form):
            hints = [each for hint in hints for each in ((Optional[hint],) if part == "?" else lists_of(hint))]
        table |= dict.fromkeys(hints, row.schema + form)
    return table


#: The schema type for each Python type of a parameter.
SUPPORTED_PARAM_TYPES: dict[Any, str] = {}

#: The schema type for each Python type of a return. A tuple of these types stands for several returns.
SUPPORTED_RETURN_TYPES: dict[Any, str] = {}

for _row in ROWS.values():
    SUPPORTED_PARAM_TYPES |= param_hints(_row)
    SUPPORTED_RETURN_TYPES |= return_hints(_row)


def lookup(table: dict[Any, str], annotation: Any) -> str | None:
    """The schema type of a hint, or None."""
    try:
        return table.get(annotation)
    except TypeError:  # an unhashable annotation is no key of the table
        return None


def param_type(annotation: Any) -> str | None:
    """The schema type of a hint of a parameter, or None."""
    known = lookup(SUPPORTED_PARAM_TYPES, annotation)
    if known is None and not (isinstance(annotation, type) and issubclass(annotation, enum.Enum)):
        # Enums are opaque types of some versions of torch. Here all have the same schema, with the member's name.
        return _compat.schemas.opaque_type_name(annotation)
    return known


def hint_of(type_: str) -> Any:
    """The hint that stands for a type of the schema: ``list[int]`` rather than one of the other sequences."""
    if type_.endswith("?"):
        return Optional[hint_of(type_[:-1])]
    known = [hint for hint, text in SUPPORTED_PARAM_TYPES.items() if text == type_]
    lists = [hint for hint in known if typing.get_origin(hint) is list and str(hint).startswith("list")]
    return next(iter(lists or known), type_)


def return_type(annotation: Any) -> str | None:
    """The schema type of a hint of a return, or None."""
    return lookup(SUPPORTED_RETURN_TYPES, annotation) or _compat.schemas.opaque_type_name(annotation, as_return=True)


def tuple_to_list(tuple_type: Any) -> Any:
    """The list type that corresponds to a tuple type: ``list[int]`` for ``Tuple[int, int]``, ``list`` for ``Tuple``."""
    items = typing.get_args(tuple_type)
    if not items:
        return list
    if len(items) == 2 and items[1] is Ellipsis:
        items = items[:1]
    return types.GenericAlias(list, Union[items])
