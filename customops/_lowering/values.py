"""What generated functions call: tensors or numbers, and the errors for values that do not fit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from customops._dispatch.results import describe
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
    return ArgumentError(
        "an argument has a value that the signature does not allow",
        op=op,
        argument=path,
        expected=expected,
        got=brief(value),
    )


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
