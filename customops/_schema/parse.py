"""Schemas from text, and from torch's FunctionSchema objects."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from customops import _compat
from customops._schema.defaults import python_default
from customops._schema.model import ALIAS, REQUIRED, Alias, Argument, Return, Schema
from customops.errors import SchemaError, brief


def check_nameless(text: str, op: str) -> None:
    """Raise SchemaError unless `text` starts with the arguments."""
    if not isinstance(text, str) or not text.lstrip().startswith("("):
        raise SchemaError(
            'expected schema to look like "(Tensor x) -> Tensor": the name is given already',
            op=op,
            got=brief(text, limit=500),
            fix='schema="(Tensor x) -> Tensor", with parentheses around the arguments',
        )


def parse(text: str) -> Schema:
    """The `Schema` of ``(args) -> returns`` or ``name(args) -> returns``.

    Raises:
        SchemaError: torch's parser refuses the text.
    """
    named = text if not text.lstrip().startswith("(") else "op" + text
    try:
        parsed = _compat.schemas.parse_schema(named)
    except (RuntimeError, IndexError, UnicodeError) as error:
        raise SchemaError(
            f"the schema cannot be parsed: {_reason(error, named)}",
            got=repr(text),
            fix='a schema looks like "(Tensor x, float scale=1.0) -> Tensor"',
        ) from error
    return from_dispatcher(parsed)


def _reason(error: Exception, schema: str) -> str:
    """The reason in an error of torch's parser, with the word that it points at."""
    if isinstance(error, IndexError):
        return "a number in it is out of range"
    if isinstance(error, UnicodeError) or (not str(error) and not schema.isascii()):  # empty on Python 3.10
        return "names must be ASCII"
    text = str(error).rpartition("please report a bug to PyTorch. ")[2]  # what an internal assert says after its own
    lines = [line for line in text.splitlines() if line.strip()]
    reason = lines[0].removesuffix(" here:").rstrip(" :") if lines else "syntax error"
    for line, below in itertools.pairwise(lines):
        if "<--- HERE" in below:
            return f"{reason} at {line[below.index('~') :][:20]!r}"
    return reason


def from_dispatcher(parsed: Any) -> Schema:
    """The `Schema` of torch's FunctionSchema object."""
    # torch's printed form is the only exact source of types (its type objects say `int` for SymInt).
    arguments_text, returns_text = _split_schema(str(parsed))
    if "..." in (*_split_commas(arguments_text), *_returns_of(returns_text)):
        raise SchemaError("a schema with ... is not supported", got=str(parsed), fix="write every argument out")
    types = [_type_of(part) for part in _split_commas(arguments_text) if part != "*"]
    arguments = tuple(
        Argument(
            *_split_alias(type_text),
            name=argument.name,
            default=python_default(type_text, argument.default_value) if argument.has_default_value() else REQUIRED,
            kwarg_only=argument.kwarg_only,
        )
        for type_text, argument in zip(types, parsed.arguments, strict=True)
    )
    returns = [_split_alias(_type_of(part, named=bool(ret.name)))
               for part, ret in zip(_returns_of(returns_text), parsed.returns, strict=True)]  # fmt: skip
    return Schema(arguments, tuple(Return(*typed) for typed in returns))


def _split_schema(text: str) -> tuple[str, str]:
    """``name(ARGS) -> RETURNS`` -> (ARGS, RETURNS)."""
    start = text.index("(")
    end = next(i for i in _top_level(text, start) if text[i] == ")")
    return text[start + 1 : end], text[end + 1 :].removeprefix(" -> ")


def _returns_of(text: str) -> list[str]:
    """The text of each return."""
    return _split_commas(text[1:-1]) if text.startswith("(") else [text]


def _split_commas(text: str) -> list[str]:
    """The parts between commas that stand in no bracket or string."""
    cuts = [-1, *(i for i in _top_level("(" + text, 0, shift=-1) if text[i : i + 1] == ","), len(text)]
    parts = [text[a + 1 : b].strip() for a, b in itertools.pairwise(cuts)]
    return [part for part in parts if part]


def _top_level(text: str, start: int, *, shift: int = 0) -> Iterator[int]:
    """Indices (plus `shift`) of commas directly inside the bracket at `start`, and of the bracket's end."""
    depth, quoted, i = 0, False, start
    while i < len(text):
        char = text[i]
        if quoted:
            i += char == "\\"  # skip the escaped character
            quoted = char != '"'
        elif char == '"':
            quoted = True
        elif char in "([":
            depth += 1
        elif char in ")]":
            depth -= 1
            if depth == 0:
                yield i + shift
                return
        elif char == "," and depth == 1:
            yield i + shift
        i += 1


def _type_of(part: str, *, named: bool = True) -> str:
    """The type in the text of an argument: ``Tensor(a!)[] x=None`` -> ``Tensor(a!)[]``. Only brackets hold spaces."""
    if not named:
        return part
    depth = 0
    for i, char in enumerate(part):
        depth += (char in "([") - (char in ")]")
        if char == " " and depth == 0:
            return part[:i]
    return part


def _split_alias(type_text: str) -> tuple[str, Alias | None]:
    """A type without its alias annotation, and that: ``Tensor(a!)[]`` -> (``Tensor[]``, a!)."""
    match = ALIAS.match(type_text)
    if match is None:
        return type_text, None
    return match[1] + type_text[match.end() :], Alias.parse(match[2])
