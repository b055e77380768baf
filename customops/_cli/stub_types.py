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
from customops._schema.types import item_type, row_of

#: A default of which only is known that there is one.
UNKNOWN = "..."


def argument_type(argument: Argument, codec: Codec | None) -> str:
    """What can be given for an argument; `codec` says how the parameter that it is of travels."""
    choices = ", ".join(map(expression, _choices(codec)))
    return _argument_type(argument.type, f"Literal[{choices}]" if choices else row_of(argument.type).stub)


def _argument_type(type_: str, innermost: str) -> str:
    if type_.endswith("?"):
        return _optional(_argument_type(type_[:-1], innermost))
    item = item_type(type_)
    if item is None:
        return innermost
    each = _argument_type(item, innermost)
    alone = row_of(type_).repeated and not type_.endswith("[]")
    return f"{each} | Sequence[{each}]" if alone else f"Sequence[{each}]"


def return_type(returns: tuple[Return, ...]) -> str:
    types = [_return_type(each.type) for each in returns]
    if not types:
        return "None"
    return types[0] if len(types) == 1 else f"tuple[{', '.join(types)}]"


def _return_type(type_: str) -> str:
    if type_.endswith("?"):
        return _optional(_return_type(type_[:-1]))
    if type_.startswith("(") and type_.endswith(")") and "," not in type_:
        return f"tuple[{_return_type(type_[1:-1])}]"
    item = item_type(type_)
    if item is not None:
        return f"list[{_return_type(item)}]"
    return row_of(type_).stub_return or row_of(type_).stub


def _optional(text: str) -> str:
    return text if text == "Any" else f"{text} | None"


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
