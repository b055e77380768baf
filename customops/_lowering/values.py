"""What generated functions call: tensors or numbers, and the errors for values that do not fit."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from customops import _compat
from customops._dispatch.results import describe
from customops._schema.nodes import split
from customops.errors import ArgumentError, KernelError, brief, where

__tracebackhide__ = True  # pytest leaves the frames out


def tensor_of(value: Any) -> Any:
    """A tensor, or None for a number."""
    return value if isinstance(value, Tensor) else None


def number_of(value: Any) -> Any:
    """A number, or None for a tensor."""
    return None if isinstance(value, Tensor) else value


def bad_argument(op: str) -> Callable[[Any, str, str], ArgumentError]:
    """What makes the error for an argument with a value that its type does not allow."""
    return functools.partial(_bad_argument, op)


def _bad_argument(op: str, value: Any, path: str, expected: str) -> ArgumentError:
    if is_dynamo_compiling():  # which cannot trace the making of the error
        problem = "an argument has a value that the signature does not allow"
        _compat.dynamo.stop_tracing(problem, op, f"pass {expected}", path, expected)
    return ArgumentError(
        "an argument has a value that the signature does not allow",
        op=op,
        argument=path,
        expected=expected,
        got=brief(value),
        fix=_fix(type(value), expected),
    )


def _fix(cls: type, expected: str) -> str:
    """What to do about a value, which may be of a class that has the name of the one that is expected."""
    if cls.__module__ == "builtins" or not re.match(rf"(one of )?{re.escape(cls.__name__)}\b", expected):
        return f"pass {expected}"
    return f"define the op again: {cls.__module__}.{cls.__qualname__} was defined again after it"


def absent(op: str) -> Callable[[str, str], Any]:
    """What raises the error for None in the place of a value, in the lowered form."""
    return functools.partial(_absent, op)


def _absent(op: str, path: str, expected: str) -> Any:
    raise _bad_argument(op, None, path, expected)


@dataclass(frozen=True)
class Lists:
    """Makes a list of lists. The dispatcher does not look at their lengths."""

    path: str
    op: str

    def __call__(self, items: list[Any], lengths: list[int] | None) -> list[list[Any]]:
        if lengths is None or any(length < 0 for length in lengths) or sum(lengths) != len(items):
            raise ArgumentError(
                "the lengths of the lists do not add up to the number of items",
                op=self.op,
                argument=self.path,
                expected=f"lengths that add up to {len(items)}",
                got=brief(lengths),
            )
        return list(split(items, lengths))


def misfit(op: str, role: str, fn: Callable[..., Any]) -> Callable[[Any, str, str], KernelError]:
    """What makes the error for a result, or part of one, that is not what the signature says."""
    return functools.partial(_misfit, op, role, fn)


def _misfit(op: str, role: str, fn: Callable[..., Any], value: Any, path: str, expected: str) -> KernelError:
    return KernelError(
        f"the {role} returned something that does not fit the signature",
        op=op,
        argument=f"return{path}" if path else None,
        expected=expected,
        got=describe(value),
        where=where(fn),
    )
