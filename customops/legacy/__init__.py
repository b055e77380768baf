"""Torch's older API for custom ops, whose functions take the qualified name of an op.

It is for existing code; use `customops.custom_op` in new code. The object layer is in `customops.legacy.objects`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.library import get_ctx as get_ctx

from customops._dispatch.callbacks import Fn
from customops.legacy import objects

__all__ = ["custom_op", "get_ctx", "impl", "impl_abstract", "impl_backward", "impl_save_for_backward"]

_TAGS = (torch.Tag.needs_fixed_stride_order,)


def custom_op(qualname: str, func_or_schema: Fn | str | None = None) -> Any:
    """Define an op by the type hints of a function, or by a schema. The function is returned, and is never called.

    Example:
        >>> @custom_op("mylib::sine")
        ... def sine(x: Tensor) -> Tensor:
        ...     raise NotImplementedError
    """
    if func_or_schema is None:
        objects.name_to_define(qualname)
        return partial(custom_op, qualname)
    if isinstance(func_or_schema, str):
        objects.define(qualname, None, func_or_schema, _TAGS)
        return None
    objects.define(qualname, func_or_schema, None, _TAGS)
    return func_or_schema


def impl(qualname: str, *, device_types: str | Iterable[str] = ("cpu", "cuda"), func: Fn | None = None) -> Any:
    """Register the kernel of an op for "cpu", "cuda", or both. See `customops.legacy.objects.CustomOp.impl`."""
    return _decorator(lambda fn: _find(qualname).impl(device_types)(fn), func)


def impl_abstract(qualname: str, *, func: Fn | None = None) -> Any:
    """Register the fake impl of an op. It replaces an earlier one."""
    return _decorator(lambda fn: _find(qualname)._replace_abstract(fn), func)


def impl_save_for_backward(qualname: str, *, func: Fn | None = None) -> Any:
    """Register ``fn(inputs, output)`` for an op. It returns what backward needs."""
    return _decorator(lambda fn: _find(qualname).impl_save_for_backward()(fn), func)


def impl_backward(qualname: str, output_differentiability: list[bool] | None = None, *, func: Fn | None = None) -> Any:
    """Register ``fn(ctx, saved, *grads)`` for an op. It returns a dict of gradients by name of the input."""
    return _decorator(lambda fn: _find(qualname).impl_backward(output_differentiability)(fn), func)


def _destroy(qualname: str) -> None:
    """Remove an op that was defined here; its name is free again."""
    objects.find(qualname)._destroy()


def _find(qualname: str) -> objects.CustomOp:
    return objects.find(qualname, also_others=True)


def _decorator(register: Callable[[Fn], Fn], fn: Fn | None) -> Any:
    return register if fn is None else register(fn)
