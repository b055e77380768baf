"""NumPy, and what compiles functions of arrays, as Numba."""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, overload

import numpy
import torch
from torch import Tensor

from customops._places import innermost, name_of, where
from customops.errors import ArgumentError, KernelError
from customops.languages import Arguments

F = TypeVar("F", bound=Callable[..., Any])


@overload
def from_numpy(fn: F, /, *, writable: str | Iterable[str] = ()) -> F: ...
@overload
def from_numpy(fn: None = None, /, *, writable: str | Iterable[str] = ()) -> Callable[[F], F]: ...
def from_numpy(fn: Any = None, /, *, writable: str | Iterable[str] = ()) -> Any:
    """Wrap a function of NumPy arrays so that it takes and returns CPU tensors.

    Functions made by ``numba.njit`` and ``numba.vectorize`` are supported too.

    The arrays share the memory of the tensors and have their strides. They are read-only, except those named in
    `writable`; a write to a read-only array raises. If `fn` returns a NumPy scalar, the result is a 0-dimensional
    tensor, or a Python number if the return hint of `fn` is a number.

    Args:
        fn: takes arrays for tensors, and other arguments unchanged, and returns new arrays. Without it, a decorator is
            returned. If `fn` has the type hints of an op, the result has them too.
        writable: names of the arguments that `fn` writes to, as in the op's ``mutates_args``. A function that Numba
            compiled for explicit types does not take read-only arrays: name all of its array arguments here.

    Raises:
        ArgumentError: `writable` names an argument that `fn` does not have.
        UnsupportedError: in a call, a tensor is on another device, or NumPy does not have its dtype (bfloat16).
        KernelError: in a call, `fn` returns an array that cannot become a tensor: it has negative strides, is
            read-only, or has a dtype that torch does not have.

    Example:
        >>> @custom_op("mylib::sin", mutates_args=())
        ... @from_numpy
        ... def sin(x: Tensor) -> Tensor:
        ...     return np.sin(x)
    """
    if fn is None:
        return functools.partial(from_numpy, writable=writable)
    arguments = Arguments(fn, "NumPy")
    names = frozenset((writable,) if isinstance(writable, str) else writable)
    if arguments.names and (unknown := names - set(arguments.names)):
        problem = "writable names a parameter that the function does not have"
        expected, got = f"some of {', '.join(arguments.names)}", ", ".join(sorted(unknown))
        raise ArgumentError(problem, op=name_of(fn), argument="writable", expected=expected, got=got)

    def array(name: str, tensor: Tensor) -> Any:
        try:
            made = (tensor.detach() if tensor.requires_grad else tensor).numpy()
        except (TypeError, RuntimeError) as error:
            arguments.plain(name, tensor, ("cpu",))
            if isinstance(error, RuntimeError):
                raise
            fix = f"{name}.float(), and the result .to({name}.dtype)"
            raise arguments.wrong_dtype(name, tensor, fix, expected="a dtype that NumPy has") from None
        if name not in names:
            made.setflags(False)  # type: ignore[call-arg]  # by position: a fifth of the time
        return made

    try:
        hints = typing.get_type_hints(innermost(fn)).get("return")
    except (NameError, TypeError):  # of a name that is not there: `custom_op` says so. Or of something else than hints
        hints = None
    if typing.get_origin(hints) is tuple:
        hints = typing.get_args(hints)
    return arguments.adapter(array, functools.partial(_tensor, fn), hints)


def _tensor(fn: Callable[..., Any], value: Any, hint: Any) -> Any:
    """An array as a tensor of the same memory; a scalar as a number, where the hint is one."""
    if isinstance(value, numpy.generic):
        if hint in (bool, int, float, complex):
            return value.item()
        value = numpy.asarray(value)
    if not isinstance(value, numpy.ndarray):
        return value
    problem = "the array is read-only: it is a view of an argument, or is broadcast"
    if value.flags.writeable or value.base is None:
        try:
            return torch.from_numpy(value)
        except (TypeError, ValueError) as error:
            problem = f"no tensor can be this array: {' '.join(str(error).split())}"
    got = f"dtype {value.dtype}, shape {value.shape}, strides {value.strides}"
    fix = "return array.copy(), or array.astype(...) for the dtype"
    raise KernelError(problem, op=name_of(fn), got=got, where=where(fn), fix=fix)
