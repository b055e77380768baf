"""Sample inputs of an op, for checks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from customops._dispatch.callbacks import Fn
from customops.errors import CallbackError


class Sample(NamedTuple):
    """Arguments of one call of an op, for checks."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def samples_of(fn: Fn, op: str) -> Iterator[Sample]:
    """What a samples function yields."""
    items = fn()
    if not isinstance(items, Iterable):
        raise CallbackError("the samples function must yield args or (args, kwargs)", op=op, got=type(items).__name__)
    for item in items:
        yield _sample(item, op)


def _sample(item: Any, op: str) -> Sample:
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], tuple) and isinstance(item[1], dict):
        return Sample(*item)
    if isinstance(item, tuple):
        return Sample(item, {})
    raise CallbackError(
        "a sample must be a tuple of arguments, or (args, kwargs)",
        op=op,
        got=type(item).__name__,
        fix="yield (x,) for one argument",
    )
