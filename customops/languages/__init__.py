"""Kernels in other languages: wrap functions that take the arrays of another language, so that they take tensors.

Call a wrapped function in the function of an op, use the wrapper as a decorator, or register the wrapped function as a
kernel. Tensors are not copied: a kernel reads and writes their memory. A tensor raises if the language does not support
its dtype, strides or device.

`Arguments` is what the modules share. Each module is for one language, and imports its package. Names are therefore
imported on first use.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from customops.errors import ArgumentError, UnsupportedError, brief, name_of, where

if TYPE_CHECKING:
    from customops.languages._c import DLTensor, from_c
    from customops.languages._cupy import from_cupy
    from customops.languages._jax import from_jax
    from customops.languages._numpy import from_numpy
    from customops.languages._tvm_ffi import from_tvm_ffi
    from customops.languages._warp import from_warp

__all__ = ["DLTensor", "from_c", "from_cupy", "from_jax", "from_numpy", "from_tvm_ffi", "from_warp"]

#: name -> the module it is in, and what to install for it
_MODULES = {
    "DLTensor": ("_c", "cffi"),
    "from_c": ("_c", "cffi"),
    "from_cupy": ("_cupy", "cupy"),
    "from_jax": ("_jax", "jax"),
    "from_numpy": ("_numpy", "numpy"),
    "from_tvm_ffi": ("_tvm_ffi", "apache-tvm-ffi"),
    "from_warp": ("_warp", "warp-lang"),
}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, package = _MODULES[name]
    try:
        return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    except ModuleNotFoundError as error:
        raise ImportError(f"customops.languages.{name} needs a package: pip install {package} ({error})") from error


class Arguments:
    """Converts the tensors among the arguments of a function of another language."""

    def __init__(self, fn: Callable[..., Any], language: str, names: Iterable[str] | None = None) -> None:
        self.fn, self.language = fn, language
        if not callable(fn):
            raise ArgumentError(f"a kernel of {language} is a function", argument="fn", got=brief(fn))
        if names is None:
            parameters: Iterable[inspect.Parameter] = ()
            with contextlib.suppress(ValueError, TypeError):  # they cannot be known
                parameters = inspect.signature(fn).parameters.values()
            is_open = any(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in parameters)
            names = () if is_open else (each.name for each in parameters)
        self.names = tuple(names)

    def each(
        self, convert: Callable[[Tensor, str], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """The arguments, with ``convert(tensor, name)`` in the place of each tensor, those in lists too."""

        def converted(value: Any, name: str) -> Any:
            if isinstance(value, Tensor):
                return convert(value, name)
            if isinstance(value, (tuple, list)) and any(isinstance(item, Tensor) for item in value):
                return [converted(item, name) for item in value]
            return value

        names = [*self.names, *(f"argument {i}" for i in range(len(self.names), len(args)))]
        positional = [converted(value, name) for value, name in zip(args, names, strict=False)]
        return positional, {name: converted(value, name) for name, value in kwargs.items()}

    def adapter(
        self, convert: Callable[[Tensor, str], Any], convert_back: Callable[[Any, Any], Any], hints: Any = None
    ) -> Callable[..., Any]:
        """The function for tensors: `convert` makes arrays, ``convert_back(value, return_hint)`` tensors again."""

        @functools.wraps(self.fn)
        def kernel(*args: Any, **kwargs: Any) -> Any:
            positional, named = self.each(convert, args, kwargs)
            value = self.fn(*positional, **named)
            if not isinstance(value, (tuple, list)):
                return convert_back(value, hints)
            of_each = hints if isinstance(hints, tuple) and len(hints) == len(value) else (None,) * len(value)
            converted = [convert_back(*pair) for pair in zip(value, of_each, strict=True)]
            return converted if isinstance(value, list) else tuple(converted)

        return kernel

    def plain(self, tensor: Tensor, name: str, devices: tuple[str, ...] = ()) -> Tensor:
        """The tensor without its autograd graph, as the op has a rule of its own; raises if it has no plain memory."""
        if devices and tensor.device.type not in devices:
            problem = f"{self.language} takes tensors of no such device"
            expected = f"a tensor on {' or '.join(devices)}"
            fix = f'{name}.to("{devices[0]}"), or op.register_kernel("{tensor.device.type}", fn)'
            raise self.refusal(name, problem, expected=expected, got=str(tensor.device), fix=fix)
        if tensor.layout != torch.strided:
            got = str(tensor.layout)
            raise self.refusal(name, f"{self.language} takes strided tensors", got=got, fix=f"{name}.to_dense()")
        if tensor.is_conj() or tensor.is_neg():
            resolve = "resolve_conj" if tensor.is_conj() else "resolve_neg"
            raise self.refusal(name, "the memory of a conjugated or negated view is not its values", fix=f"{resolve}()")
        return tensor.detach()

    def refusal(self, name: str, problem: str, **fields: str) -> UnsupportedError:
        return UnsupportedError(problem, op=name_of(self.fn), argument=name, where=where(self.fn), **fields)

    def wrong_dtype(self, name: str, tensor: Tensor, fix: str, **fields: str) -> UnsupportedError:
        problem = f"{self.language} takes no tensor of this dtype here"
        return self.refusal(name, problem, got=str(tensor.dtype), fix=fix, **fields)
