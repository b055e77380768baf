"""NumPy, and what compiles functions of arrays, as Numba."""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, overload

import numpy
import torch
from torch import Tensor

from customops.errors import KernelError, innermost, name_of, where
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
    convert = functools.partial(_array, arguments, arguments.check_names(writable, "writable"))
    hints = _return_hints(fn)

    @functools.wraps(fn)
    def kernel(*args: Any, **kwargs: Any) -> Any:
        positional, named = arguments.each(convert, args, kwargs)
        value = fn(*positional, **named)
        if not isinstance(value, (tuple, list)):
            return _tensor(fn, hints, value)
        each = hints if isinstance(hints, tuple) and len(hints) == len(value) else (None,) * len(value)
        converted = [_tensor(fn, hint, item) for hint, item in zip(each, value, strict=True)]
        return converted if isinstance(value, list) else tuple(converted)

    return kernel


def _array(arguments: Arguments, writable: frozenset[str], tensor: Tensor, name: str) -> Any:
    """The memory of a tensor as an array."""
    tensor = arguments.plain(tensor, name, ("cpu",))
    try:
        array = tensor.numpy()
    except TypeError:
        raise arguments.wrong_dtype(
            name, tensor, f"{name}.float(), and the result .to({name}.dtype)", expected="a dtype that NumPy has"
        ) from None
    if name not in writable:
        array.flags.writeable = False
    return array


def _return_hints(fn: Callable[..., Any]) -> Any:
    """The hint of what a function returns, or the tuple of the hints of what it returns several of."""
    try:
        hint = typing.get_type_hints(innermost(fn)).get("return")
    except (NameError, TypeError):  # of a name that is not there: `custom_op` says so. Or of something else than hints
        return None
    return typing.get_args(hint) if typing.get_origin(hint) is tuple else hint


def _tensor(fn: Callable[..., Any], hint: Any, value: Any) -> Any:
    """An array as a tensor of the same memory; a scalar as a number, where the hint is one."""
    if isinstance(value, numpy.generic) and hint in (bool, int, float, complex):
        return value.item()
    if isinstance(value, numpy.generic):
        value = numpy.asarray(value)
    if not isinstance(value, numpy.ndarray):
        return value
    if not value.flags.writeable and value.base is not None:
        raise _no_tensor(fn, "the array is read-only: it is a view of an argument, or is broadcast", value)
    try:
        return torch.from_numpy(value)
    except (TypeError, ValueError) as error:
        raise _no_tensor(fn, f"no tensor can be this array: {' '.join(str(error).split())}", value) from None


def _no_tensor(fn: Callable[..., Any], problem: str, value: Any) -> KernelError:
    return KernelError(
        problem,
        op=name_of(fn),
        got=f"dtype {value.dtype}, shape {value.shape}, strides {value.strides}",
        where=where(fn),
        fix="return array.copy(), or array.astype(...) for the dtype",
    )
