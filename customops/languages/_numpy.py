"""NumPy, and what compiles functions of arrays, as Numba."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, overload

import numpy
import torch
from torch import Tensor

from customops.errors import KernelError, name_of, where
from customops.languages._arguments import Arguments, results

F = TypeVar("F", bound=Callable[..., Any])


@overload
def from_numpy(fn: F, /, *, writable: str | Iterable[str] = ()) -> F: ...
@overload
def from_numpy(fn: None = None, /, *, writable: str | Iterable[str] = ()) -> Callable[[F], F]: ...
def from_numpy(fn: Any = None, /, *, writable: str | Iterable[str] = ()) -> Any:
    """A function of NumPy arrays, as one of CPU tensors. Functions of ``numba.njit`` and ``vectorize`` are such, too.

    Arrays share the memory of the tensors, strides included. They are read-only, but for those named in `writable`:
    a write to another raises. A scalar of NumPy that is returned becomes a tensor of no dimensions.

    Args:
        fn: takes arrays for tensors, everything else as it is, and returns new arrays. Without it, a decorator is
            returned. If it has the hints of an op, so has the result.
        writable: the arguments that it writes to; what the op declares in ``mutates_args``. A function that Numba
            compiled for types given by hand takes no array that is read-only: name its arguments here.

    Raises:
        ArgumentError: `writable` names what `fn` does not take.
        UnsupportedError: in a call, for a tensor of another device, or of a dtype that NumPy does not have (bfloat16).
        KernelError: in a call, for an array that no tensor can be: negative strides, read-only, of an odd dtype.

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
    back = functools.partial(_tensor, fn)

    @functools.wraps(fn)
    def kernel(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = arguments.each(convert, args, kwargs)  # type: ignore[assignment]
        return results(back, fn(*args, **kwargs))

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


def _tensor(fn: Callable[..., Any], value: Any) -> Any:
    """An array as a tensor of the same memory."""
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
