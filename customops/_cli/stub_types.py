"""Types and default values of a schema, as a stub writes them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

import torch

from customops._schema.codecs import Codec, SequenceCodec
from customops._schema.defaults import dispatched
from customops._schema.model import Argument, Return
from customops._schema.types import item_type

#: What stands for a type of an argument, in the place of its name. What is not here, and no list, is of any type.
_TYPES = {
    "Tensor": "Tensor",
    "SymInt": "int | SymInt",
    "int": "int",
    "float": "float",
    "bool": "bool",
    "Scalar": "int | float | complex",
    "complex": "complex",
    "str": "str",
    "ScalarType": "torch.dtype",
    "Device": "torch.device | str",
    "Layout": "torch.layout",
    "MemoryFormat": "torch.memory_format",
    "Generator": "torch.Generator",
    "QScheme": "torch.qscheme",
    "Stream": "torch.Stream",
}
#: The same for a return, where it is another.
_RETURNED = {"SymInt": "int", "Device": "torch.device"}
#: A default of which only is known that there is one.
UNKNOWN = "..."
#: For a list of a length the dispatcher takes one number of these, too.
_REPEATED = ("int[", "float[")


def argument_type(argument: Argument, codec: Codec | None) -> str:
    """What can be given for an argument; `codec` says how the parameter that it is of travels."""
    choices = _choices(codec)
    return _type(
        argument.type, _TYPES, "Sequence", f"Literal[{', '.join(map(expression, choices))}]" if choices else ""
    )


def return_type(returns: tuple[Return, ...]) -> str:
    types = [_returned(each.type) for each in returns]
    if not types:
        return "None"
    return types[0] if len(types) == 1 else f"tuple[{', '.join(types)}]"


def _returned(type_: str) -> str:
    if type_.startswith("(") and type_.endswith(")") and "," not in type_:
        return f"tuple[{_returned(type_[1:-1])}]"
    return _type(type_, _TYPES | _RETURNED, "list")


def _type(type_: str, types: dict[str, str], container: str, item: str = "") -> str:
    """A type of a schema; `item`, if given, is what stands for its innermost type."""
    if type_.endswith("?"):
        inner = _type(type_[:-1], types, container, item)
        return inner if inner == "Any" else f"{inner} | None"
    of = item_type(type_)
    if of is None:
        return item or types.get(type_, "Any")
    inner = _type(of, types, container, item)
    alone = f"{inner} | " if type_.startswith(_REPEATED) and not type_.endswith("[]") else ""
    return f"{alone}{container}[{inner}]"


def _choices(codec: Codec | None) -> Iterable[Any]:
    if isinstance(codec, SequenceCodec):
        return _choices(codec.item)
    return () if codec is None else codec.choices


def default_of(argument: Argument) -> str:
    return expression(dispatched(argument.type, argument.default))


def expression(value: Any) -> str:
    """A value as Python source, in the form that formatters give it."""
    if isinstance(value, (list, tuple)):
        items = [expression(item) for item in value]
        if UNKNOWN in items:
            return UNKNOWN
        return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else f'float("{value}")'
    if isinstance(value, complex):
        return f"complex({expression(value.real)}, {expression(value.imag)})"
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, torch.device):
        return f'torch.device("{value}")'
    if isinstance(value, int) and not isinstance(value, bool):
        return str(int(value))
    if value is None or isinstance(value, (bool, torch.dtype, torch.layout, torch.memory_format)):
        return str(value)
    return UNKNOWN


def quoted(text: str) -> str:
    """A string as source: in the quotes of which it has fewer, double ones if it has as many."""
    quote = "'" if text.count('"') > text.count("'") else '"'
    return quote + escaped(text).replace(quote, "\\" + quote) + quote


def docstring(text: str) -> list[str]:
    """The lines of a docstring. Quotes are escaped where they would end it, or touch those that do."""
    first, *others = (escaped(line).rstrip(" ") for line in text.split("\n"))
    if not others:
        return ['"""' + re.sub('"{3,}|^"+|"+$', _escaped_quotes, first) + '"""']
    others = [re.sub('"{3,}', _escaped_quotes, line) for line in others]
    return ['"""' + re.sub('"{3,}|^"+', _escaped_quotes, first), *others, '"""']


def _escaped_quotes(quotes: re.Match[str]) -> str:
    return '\\"' * len(quotes[0])


def escaped(text: str) -> str:
    """Text without backslashes of its own, and without what cannot be printed."""
    return "".join(c if c.isprintable() and c != "\\" else c.encode("unicode_escape").decode() for c in text)
