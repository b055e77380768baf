"""Defaults of arguments that the dispatcher left out, or holds in another form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from customops._schema.defaults import python_default
from customops._schema.model import Argument, Schema
from customops._schema.types import row_of

__tracebackhide__ = True  # pytest leaves the frames out


#: Puts defaults in: ``(args, kwargs) -> (args, kwargs)``.
Fill = Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]


def filler(schema: Schema) -> Fill | None:
    """A function that puts defaults back, or None for an op without any.

    The dispatcher drops trailing arguments that equal their default, and hands the rest over. Callbacks always get
    them all, in the Python form in which the op's author wrote them.
    """
    if not any(argument.has_default for argument in schema.arguments):
        return None
    defaults = tuple(argument.default for argument in schema.positional)
    keyword_only = schema.keyword_only
    altered = [(i, a) for i, a in enumerate(schema.positional) if is_altered(a)]
    has_lists = any(isinstance(default, tuple) for default in defaults)
    if not (keyword_only or altered or has_lists):
        return lambda args, kwargs: (args + defaults[len(args) :], kwargs)

    def fill(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        filled = [*args, *map(_fresh, defaults[len(args) :])]
        for i, argument in altered:
            filled[i] = in_python_form(argument, filled[i])
        named = {
            a.name: in_python_form(a, kwargs[a.name]) if a.name in kwargs else _fresh(a.default) for a in keyword_only
        }
        return tuple(filled), named

    return fill


def without_defaults(values: tuple[Any, ...], defaults: tuple[Any, ...]) -> tuple[Any, ...]:
    """`values` without those at the end that were left out: they are the objects of `defaults`."""
    count = len(values)
    while count and values[count - 1] is defaults[count - 1]:
        count -= 1
    return values[:count]


def is_altered(argument: Argument) -> bool:
    """Does the dispatcher hold the default in another form than the op's author wrote it?"""
    if argument.default_is_none_in_text:
        return True
    row = row_of(argument.type)
    return row.keeps_default and isinstance(argument.default, row.defaults)


def in_python_form(argument: Argument, value: Any) -> Any:
    """`value` as the dispatcher handed it over; the default, if it stands for that, as its author wrote it."""
    if not is_altered(argument):
        return value
    if argument.default_is_none_in_text:
        return _fresh(argument.default) if value is None else value
    if value is None:
        return None
    same = python_default(argument.type, value) == python_default(argument.type, argument.default)
    return argument.default if same else value


def _fresh(default: Any) -> Any:
    """A list default is a new list in each call, as lists that the dispatcher passes are."""
    return list(default) if isinstance(default, tuple) else default
