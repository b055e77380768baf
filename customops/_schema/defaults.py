"""Defaults of arguments: fill in those that the dispatcher leaves out, or passes in another form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from customops._schema.model import Argument, Schema
from customops._schema.types import converted, row_of

__tracebackhide__ = True  # pytest leaves the frames out

#: Fills in defaults: ``(args, kwargs) -> (args, kwargs)``.
Fill = Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]


def filler(schema: Schema) -> Fill | None:
    """Return a function that fills in defaults, or None for an op without defaults.

    The dispatcher drops trailing arguments that equal their default. Callbacks get all arguments, in the Python form in
    which the op's author wrote them.
    """
    if True not in [argument.has_default for argument in schema.arguments]:
        return None
    defaults = tuple([argument.default for argument in schema.positional])
    keyword_only = schema.keyword_only
    altered = [(i, a) for i, a in enumerate(schema.positional) if a.has_default and is_altered(a)]
    has_lists = tuple in map(type, defaults)
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


def completer(schema: Schema) -> Fill:
    """Return a function that fills in defaults, and passes by position what a call passes by name."""
    fill = filler(schema)
    by_keyword = {argument.name for argument in schema.keyword_only}

    def complete(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = list(args)
        for argument in schema.positional[len(args) :]:
            if argument.name not in kwargs and not argument.has_default:
                break
            given.append(kwargs.get(argument.name, _fresh(argument.default)))
        named = {name: value for name, value in kwargs.items() if name in by_keyword}
        return fill(tuple(given), named) if fill is not None else (tuple(given), named)

    return complete


def without_defaults(values: tuple[Any, ...], defaults: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return `values` without trailing values that are the objects of `defaults`: the call left these out."""
    count = len(values)
    while count and values[count - 1] is defaults[count - 1]:
        count -= 1
    return values[:count]


def is_altered(argument: Argument) -> bool:
    """Return whether the dispatcher has the default in another form than the op's author wrote it."""
    if argument.default_is_none_in_text:
        return True
    row = row_of(argument.type)
    return row.keeps_default and isinstance(argument.default, row.defaults)


def in_python_form(argument: Argument, value: Any) -> Any:
    """Return the default as its author wrote it if `value`, from the dispatcher, stands for it; else `value`."""
    if not is_altered(argument):
        return value
    if argument.default_is_none_in_text:
        return _fresh(argument.default) if value is None else value
    if value is None:
        return None
    read = row_of(argument.type).read_default
    return argument.default if converted(read, value) == converted(read, argument.default) else value


def _fresh(default: Any) -> Any:
    """Return a default: a new list for a list, as the dispatcher passes."""
    return list(default) if isinstance(default, tuple) else default
