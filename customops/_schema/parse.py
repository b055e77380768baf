"""Schemas from text, and from torch's FunctionSchema objects."""

from __future__ import annotations

import inspect
import itertools
import keyword
from collections.abc import Callable, Iterator
from typing import Any

from customops import _torch
from customops._schema.model import ALIAS, REQUIRED, Alias, Argument, Return, Schema
from customops._schema.types import python_default
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
        parsed = _torch.schema.parse_schema(named)
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


# What `help`, `inspect.signature` and editors are told of an op -------------------------------------------------------

_ANYTHING = inspect.Signature(
    [
        inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL),
        inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD),
    ]
)


def signature_of(schema: Schema) -> inspect.Signature:
    """The signature of an op without a function. Annotations are types of the schema."""
    try:
        parameters = [_parameter(argument) for argument in schema.arguments]
        return inspect.Signature(parameters, return_annotation=_returns(schema))
    except ValueError:  # a name that is none in Python, or an order that Python has not
        return _ANYTHING


def has_signature(fn: Callable[..., Any]) -> bool:
    try:
        return inspect.signature(fn) is not None
    except (ValueError, TypeError):
        return False


def _parameter(argument: Argument) -> inspect.Parameter:
    if keyword.iskeyword(argument.name):  # Python 3.10 takes it
        raise ValueError(argument.name)
    return inspect.Parameter(
        argument.name,
        inspect.Parameter.KEYWORD_ONLY if argument.kwarg_only else inspect.Parameter.POSITIONAL_OR_KEYWORD,
        default=argument.default if argument.has_default else inspect.Parameter.empty,
        annotation=argument.type_text,
    )


def _returns(schema: Schema) -> str | None:
    texts = [ret.type_text for ret in schema.returns]
    if len(texts) == 1:
        return texts[0]
    return f"({', '.join(texts)})" if texts else None
