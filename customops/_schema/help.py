"""What `help`, `inspect.signature` and editors are told of an op."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from customops._schema.model import Argument, Schema

_ANYTHING = inspect.Signature(
    [
        inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL),
        inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD),
    ]
)


def signature_of(fn: Callable[..., Any] | None, schema: Schema) -> inspect.Signature:
    """The signature of an op's function; of an op without one, or if that tells nothing of itself, that of its schema.

    Annotations are then types of the schema.
    """
    try:
        if fn is not None:
            return inspect.signature(fn)
    except (ValueError, TypeError):
        pass
    try:
        return inspect.Signature(
            [_parameter(argument) for argument in schema.arguments], return_annotation=_returns(schema)
        )
    except ValueError:  # a name that is no name in Python, or an order that Python has not
        return _ANYTHING


def _parameter(argument: Argument) -> inspect.Parameter:
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
