"""What `help`, `inspect.signature` and editors are told of an op."""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Callable
from typing import Any

from customops._schema.model import Argument, Schema

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
