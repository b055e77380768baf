"""Default values of arguments: which ones a type takes, and their forms in a schema, in the dispatcher and in a kernel.

The row of the type says it for a single value (`types`); here are None and lists.
"""

from __future__ import annotations

from typing import Any

from customops._schema.types import ROWS, item_type, row_of


def default_problem(type_: str, default: Any) -> str | None:
    """Why `default` is no value of schema type `type_`, or None."""
    if default is None:
        return None if type_.endswith("?") else f"None is not a {type_}: make the type Optional[...]"
    base = type_.removesuffix("?")
    item = item_type(base)
    if item is not None:
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


def dispatched(type_: str, default: Any) -> Any:
    """`default` as the dispatcher hands it over where a later argument is given: ``3`` for a float is ``3.0``."""
    return _converted(row_of(type_).canonical_default, default)


def python_default(type_: str, value: Any) -> Any:
    """A default that the dispatcher holds, in the form in which kernels receive it: dtypes and devices as objects."""
    return _converted(row_of(type_).read_default, value)


def _converted(convert: Any, value: Any) -> Any:
    """A value, or each one of a list, in another form; None stays None. A list becomes a tuple, which cannot change."""
    if isinstance(value, (list, tuple)):
        return tuple(_converted(convert, item) for item in value)
    return value if convert is None or value is None else convert(value)
