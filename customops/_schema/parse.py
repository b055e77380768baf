"""Schemas from text, and from torch's FunctionSchema objects."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable
from typing import Any

from customops import _torch
from customops._schema.model import REQUIRED, Alias, Argument, Return, Schema
from customops._schema.types import converted, row_of
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
    """The `Schema` of ``(args) -> returns`` or ``name(args) -> returns``."""
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
    if isinstance(error, UnicodeError):
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
    before, _, returns_text = str(parsed).rpartition(") -> ")
    parts = _split(before.partition("(")[2], ",")
    returns = _split(returns_text[1:-1], ",") if returns_text.startswith("(") else [returns_text]
    if "..." in (*parts, *returns):
        raise SchemaError("a schema with ... is not supported", got=str(parsed), fix="write every argument out")
    arguments = []
    for part, argument in zip([part for part in parts if part != "*"], parsed.arguments, strict=True):
        type_ = _split(part, " ")[0]
        default: Any = REQUIRED
        if argument.has_default_value():
            default = converted(row_of(type_).read_default, argument.default_value)
        type_, alias = _split_alias(type_)
        arguments.append(Argument(type_, alias, argument.name, default, argument.kwarg_only))
    return Schema(tuple(arguments), tuple([Return(*_split_alias(_split(part, " ")[0])) for part in returns]))


def _split(text: str, separator: str) -> list[str]:
    """The parts between separators that stand in no bracket or string, without spaces around them."""
    parts, depth, quoted, escaped = [""], 0, False, False
    for char in text:
        if quoted:
            quoted, escaped = char != '"' or escaped, char == "\\" and not escaped
        elif char == '"':
            quoted = True
        else:
            depth += (char in "([") - (char in ")]")
        if char == separator and depth == 0 and not quoted:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts if part.strip()]


_ALIAS = re.compile(r"(Tensor[?\[\]\d]*)\(([^()]*)\)")  # torch prints Tensor(a!)?[] as Tensor?(a!)[]


def _split_alias(type_text: str) -> tuple[str, Alias | None]:
    """A type without its alias annotation, and that: ``Tensor(a!)[]`` -> (``Tensor[]``, a!)."""
    match = _ALIAS.match(type_text)
    if match is None:
        return type_text, None
    names = match[2].split("->")[0].split("|")
    return match[1] + type_text[match.end() :], Alias(frozenset(name.strip(" !") for name in names), "!" in match[2])


# What `help`, `inspect.signature` and editors are told of an op -------------------------------------------------------


def signature_of(schema: Schema) -> inspect.Signature:
    """The signature of an op without a function. Annotations are types of the schema."""
    texts = [ret.type_text for ret in schema.returns]
    returns = texts[0] if len(texts) == 1 else f"({', '.join(texts)})" if texts else None
    parameters = []
    try:
        for argument in schema.arguments:
            kind = inspect.Parameter.KEYWORD_ONLY if argument.kwarg_only else inspect.Parameter.POSITIONAL_OR_KEYWORD
            default = argument.default if argument.has_default else inspect.Parameter.empty
            parameters.append(inspect.Parameter(argument.name, kind, default=default, annotation=argument.type_text))
        return inspect.Signature(parameters, return_annotation=returns)
    except ValueError:  # a name that is none in Python, or an order that Python has not
        anything = {"args": inspect.Parameter.VAR_POSITIONAL, "kwargs": inspect.Parameter.VAR_KEYWORD}
        return inspect.Signature([inspect.Parameter(name, kind) for name, kind in anything.items()])


def has_signature(fn: Callable[..., Any]) -> bool:
    try:
        return inspect.signature(fn) is not None
    except (ValueError, TypeError):
        return False
