"""The types of arguments and returns: a row for each, with all that the package knows of it.

A type is added by adding a row to `_rows`. What a rule asks of a type (how its default is written, what a kernel may
return, whether the dispatcher hands on the same object) is a field of the row, read where it is needed.
"""

from __future__ import annotations

import collections.abc
import enum
import functools
import numbers
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any, List, NamedTuple, Optional, Union

import torch
from torch import SymBool, SymFloat, SymInt, Tensor

from customops import _torch
from customops._schema.named import Named

# ----------------------------------------------------------------------------------------------------------------------
# Single default values: how a schema writes them, how it hands them back, and which of them it cannot hold

_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n"}


def literal(value: Any) -> str | None:
    """A number, a bool or a string as schema text, or None where the schema language has no word for it."""
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, float):
        # The parser has no inf or nan, and refuses numbers too small to have all their digits.
        return repr(value) if value == 0 or sys.float_info.min <= abs(value) <= sys.float_info.max else None
    if isinstance(value, complex):
        return f"{value.imag!r}j" if value.real == 0 else None
    if isinstance(value, int):
        return str(int(value))
    return quoted(value) if isinstance(value, str) else None


def quoted(value: Any) -> str:
    """A string, or the text of an object, as a string of a schema."""
    characters = [
        _ESCAPES.get(char) or (char if char.isprintable() else "".join([f"\\{byte:03o}" for byte in char.encode()]))
        for char in str(value)
    ]
    return f'"{"".join(characters)}"'


def dtype_from(value: Any) -> Any:
    """The dtype behind the number by which the dispatcher holds it."""
    return _torch.schema.dtypes_by_number()[value] if isinstance(value, int) else value


def plain_number(value: Any) -> int | float:
    """A number of a subclass (a member of an IntEnum, a numpy float64) as a plain one. A bool stays one."""
    if isinstance(value, bool):
        return value
    return float(value) if isinstance(value, float) else int(value)


def int_problem(value: Any) -> str | None:
    """Why the dispatcher cannot hold an int, or None; a number of another type is for others to judge."""
    if not isinstance(value, int) or -(2**63) <= value < 2**63:
        return None
    return "the dispatcher's integers have 64 bits"


def float_problem(value: int | float) -> str | None:
    """The same for a float."""
    return "the number is too large for a float" if isinstance(value, int) and abs(value) > sys.float_info.max else None


def str_problem(value: str) -> str | None:
    """The same for a string."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return "the string holds surrogates, which UTF-8 cannot encode"
    return None


def device_problem(value: torch.device | str) -> str | None:
    """The same for a device, or the name of one."""
    try:
        torch.device(value)
    except RuntimeError:
        return "torch knows no such device"
    except UnicodeEncodeError:
        return str_problem(str(value))
    return None


# Rows -----------------------------------------------------------------------------------------------------------

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
    write_default: Callable[[Any], str | None] = literal
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
    group_name = _torch.schema.group_name_type()
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
        default_problem=int_problem,
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
        default_problem=float_problem,
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
        default_problem=int_problem,
        canonical_default=plain_number,
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
        default_problem=str_problem,
        canonical_default="".join,
        results=(str,),
        unchanged=(str,),
        unchanged_if="{}.isascii()",
        stub="str",
    )
    yield TypeRow(
        "ScalarType",
        (torch.dtype,),
        forms=(*_ALONE, "[]"),  # a list or None comes as numbers: see `structure.DTYPE`
        defaults=(torch.dtype,),
        write_default=lambda dtype: str(dtype).removeprefix("torch."),
        read_default=dtype_from,
        list_defaults=True,
        unchanged=(torch.dtype,),
        stub="torch.dtype",
    )
    yield TypeRow(
        "Device",
        (torch.device,),
        defaults=(torch.device, str),
        default_problem=device_problem,
        write_default=quoted,
        read_default=torch.device,
        keeps_default=True,  # a string goes on being one: that is what torch.library passes
        unchanged=(torch.device,),
        stub="torch.device | str",
        stub_return="torch.device",
    )
    for cls, name in ((torch.layout, "Layout"), (torch.memory_format, "MemoryFormat")):
        yield TypeRow(
            name,
            (cls,),
            defaults=(cls,),
            write_default=_torch.schema.enum_text,
            read_default=functools.partial(_torch.schema.enum_from, name),
            list_defaults=True,
            unchanged=(cls,),
            stub=f"torch.{cls.__name__}",
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


def hints_of(row: TypeRow, *, returns: bool = False) -> dict[Any, str]:
    """The hints by which a parameter, or a return, can have the type of a row; the schema type that each stands for."""
    lists: list[Any] = [List, list] if returns else [typing.Sequence, List, collections.abc.Sequence, list]
    table: dict[Any, str] = {}
    for form in row.return_forms if returns else row.forms:
        hints = list(row.hints)
        for part in re.findall(r"\?|\[\]", form):
            hints = [Optional[x] for x in hints] if part == "?" else [each[x] for x in hints for each in lists]
        table |= dict.fromkeys(hints, row.schema + form)
    return table


#: The schema type for each Python type of a parameter.
SUPPORTED_PARAM_TYPES: dict[Any, str] = {}

#: The schema type for each Python type of a return. A tuple of these types stands for several returns.
SUPPORTED_RETURN_TYPES: dict[Any, str] = {}

for _row in ROWS.values():
    SUPPORTED_PARAM_TYPES |= hints_of(_row)
    SUPPORTED_RETURN_TYPES |= hints_of(_row, returns=True)


def schema_type(annotation: Any, *, returns: bool = False) -> str | None:
    """The schema type of a hint of a parameter, or of a return, or None."""
    try:
        known = (SUPPORTED_RETURN_TYPES if returns else SUPPORTED_PARAM_TYPES).get(annotation)
    except TypeError:  # an unhashable annotation is no key of the table
        known = None
    if known is None and (returns or not (isinstance(annotation, type) and issubclass(annotation, enum.Enum))):
        # Enums are opaque types of some versions of torch. Here all have the same schema, with the member's name.
        return _torch.schema.opaque_type_name(annotation, as_return=returns)
    return known


def hint_of(type_: str) -> Any:
    """The hint that stands for a type of the schema: ``list[int]`` rather than one of the other sequences."""
    if type_.endswith("?"):
        return Optional[hint_of(type_[:-1])]
    known = [hint for hint, text in SUPPORTED_PARAM_TYPES.items() if text == type_]
    lists = [hint for hint in known if typing.get_origin(hint) is list and str(hint).startswith("list")]
    return next(iter(lists or known), type_)


def tuple_to_list(tuple_type: Any) -> Any:
    """The list type that corresponds to a tuple type: ``list[int]`` for ``Tuple[int, int]``, ``list`` for ``Tuple``."""
    items = typing.get_args(tuple_type)
    if not items:
        return list
    if len(items) == 2 and items[1] is Ellipsis:
        items = items[:1]
    return types.GenericAlias(list, Union[items])


# ----------------------------------------------------------------------------------------------------------------------
# Default values of arguments: which ones a type takes, and their forms in a schema, in the dispatcher and in a kernel
# The row of the type says it for a single value; here are None and lists.


def default_problem(type_: str, default: Any) -> str | None:
    """Why `default` is no value of schema type `type_`, or None."""
    if default is None:
        return None if type_.endswith("?") else f"None is not a {type_}: make the type Optional[...]"
    base = type_.removesuffix("?")
    if (item := item_type(base)) is not None:
        if not isinstance(default, (list, tuple)):
            return f"expected a list, got {type(default).__name__}"
        return next((problem for value in default if (problem := default_problem(item, value))), None)
    row = ROWS.get(base)
    if row is None or not isinstance(default, row.defaults):
        return f"a {type(default).__name__} cannot be the default of {'an int' if base == 'SymInt' else f'a {base}'}"
    return row.default_problem(default) if row.default_problem is not None else None


def default_text(type_: str, value: Any) -> str | None:
    """`value` as schema text for an argument of `type_`, or None where the schema language has no word for it."""
    if value is None:
        return "None"
    if not isinstance(value, (list, tuple)):
        return row_of(type_).write_default(value)
    item = item_type(type_)
    if item not in ROWS or not ROWS[item].list_defaults:
        return None
    parts = [default_text(item, each) for each in value]
    return None if None in parts else f"[{', '.join(map(str, parts))}]"


def converted(convert: Callable[[Any], Any] | None, value: Any) -> Any:
    """A default in another form of its row, `canonical_default` or `read_default`; of a list, each item, as a tuple."""
    if isinstance(value, (list, tuple)):
        return tuple(converted(convert, item) for item in value)
    return value if convert is None or value is None else convert(value)
