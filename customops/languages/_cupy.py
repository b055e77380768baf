"""CuPy: functions of its arrays, and kernels written in CUDA C."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import cupy
import torch
from torch import Tensor

from customops.languages._arguments import Arguments, results

F = TypeVar("F", bound=Callable[..., Any])


def from_cupy(fn: F, /) -> F:
    """A function of CuPy arrays, as one of CUDA tensors: `customops.languages.from_numpy` for the GPU.

    Arrays share the memory of the tensors, strides included. CuPy has no arrays that are read-only: that the function
    writes to nothing but what the op declares is for `opcheck` to find out. It runs on torch's current stream, with the
    device of the tensors as the current one.

    Args:
        fn: takes arrays for tensors, everything else as it is, and returns new arrays.

    Raises:
        UnsupportedError: in a call, for a tensor of another device, or of a dtype that CuPy does not have.

    Example:
        >>> @custom_op("mylib::sin", mutates_args=(), device_types="cuda")
        ... @from_cupy
        ... def sin(x: Tensor) -> Tensor:
        ...     return cupy.sin(x)
    """
    arguments = Arguments(fn, "CuPy")

    @functools.wraps(fn)
    def kernel(*args: Any, **kwargs: Any) -> Any:
        tensors: list[Tensor] = []
        given, named = arguments.each(functools.partial(_plain, arguments, tensors), args, kwargs)
        with _current(torch.cuda.current_stream(tensors[0].device if tensors else None)):
            given, named = arguments.each(functools.partial(_array, arguments), tuple(given), named)
            return results(_tensor, fn(*given, **named))

    return kernel  # type: ignore[return-value]


@contextlib.contextmanager
def _current(stream: torch.cuda.Stream) -> Iterator[None]:
    """A stream of torch, and its device, as CuPy's current ones."""
    if hasattr(cupy.cuda.Stream, "from_external"):  # CuPy 14
        same = cupy.cuda.Stream.from_external(stream)
    else:
        same = cupy.cuda.ExternalStream(stream.cuda_stream, stream.device.index)
    with cupy.cuda.Device(stream.device.index), same:
        yield


def _plain(arguments: Arguments, tensors: list[Tensor], tensor: Tensor, name: str) -> Tensor:
    """The tensor for CuPy, which is added to a list."""
    tensors.append(arguments.plain(tensor, name, ("cuda",)))
    return tensors[-1]


def _array(arguments: Arguments, tensor: Tensor, name: str) -> Any:
    try:
        return cupy.from_dlpack(tensor)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        fix = f"{name}.float(), and the result .to({name}.dtype)"
        raise arguments.wrong_dtype(name, tensor, fix, expected=f"what CuPy has ({error})") from error


def _tensor(value: Any) -> Any:
    return torch.from_dlpack(value) if isinstance(value, cupy.ndarray) else value  # type: ignore[attr-defined]
