"""Functions of TVM-FFI: what TVM, TileLang, FlashInfer, CuteDSL and others compile kernels to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import tvm_ffi

from customops.errors import ArgumentError, brief
from customops.languages import Arguments


def from_tvm_ffi(fn: Any, /) -> Callable[..., Any]:
    """Wrap a ``tvm_ffi.Function`` so that it takes tensors. It gets them as DLPack tensors of the same memory.

    Tensors may have any device, dtype and strides; the kernel itself raises for those that it does not support. On a
    GPU it runs on torch's current stream. A returned tensor becomes a torch.Tensor; an array of tensors becomes a
    tuple.

    Args:
        fn: a function of a loaded module (``tvm_ffi.load_module(path).f``), a global one, or one made by a compiler.

    Raises:
        ArgumentError: `fn` is not a ``tvm_ffi.Function``; or, in a call, arguments are passed by keyword.
        UnsupportedError: in a call, the memory of a tensor does not hold its values (it is sparse or conjugated).

    Example:
        >>> add = from_tvm_ffi(tvm_ffi.load_module("add.so").add)
        >>> @custom_op("mylib::add", mutates_args=())
        ... def add_op(x: Tensor, y: Tensor) -> Tensor:
        ...     out = torch.empty_like(x)
        ...     add(x, y, out)
        ...     return out
    """
    if not isinstance(fn, tvm_ffi.Function):
        problem = "from_tvm_ffi takes a function of TVM-FFI"
        fix = "tvm_ffi.load_module(path).name, or tvm_ffi.get_global_func(name)"
        raise ArgumentError(problem, argument="fn", expected="a tvm_ffi.Function", got=brief(fn), fix=fix)
    arguments = Arguments(fn, "TVM-FFI", names=())

    # It takes tensors of torch, also those that require a gradient.
    return arguments.adapter(arguments.plain, _tensors, as_is=True)


def _tensors(value: Any, hint: Any = None) -> Any:
    if isinstance(value, tvm_ffi.Tensor):
        return torch.from_dlpack(value)  # type: ignore[attr-defined]
    if isinstance(value, (tvm_ffi.Array, tvm_ffi.List)):
        return tuple(map(_tensors, value))
    return value
