"""CuPy: functions of its arrays, and kernels written in CUDA C."""

from __future__ import annotations

import functools
from collections.abc import Callable
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
    convert = functools.partial(_array, arguments)

    @functools.wraps(fn)
    def kernel(*args: Any, **kwargs: Any) -> Any:
        device = next((value.device for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        stream = torch.cuda.current_stream(device)
        args, kwargs = arguments.each(convert, args, kwargs)  # type: ignore[assignment]
        with cupy.cuda.Device(stream.device.index), cupy.cuda.ExternalStream(stream.cuda_stream, stream.device.index):
            return results(_tensor, fn(*args, **kwargs))

    return kernel  # type: ignore[return-value]


def _array(arguments: Arguments, tensor: Tensor, name: str) -> Any:
    tensor = arguments.plain(tensor, name, ("cuda",))
    try:
        return cupy.from_dlpack(tensor)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        fix = f"{name}.float(), and the result .to({name}.dtype)"
        raise arguments.wrong_dtype(name, tensor, fix, expected=f"what CuPy has ({error})") from error


def _tensor(value: Any) -> Any:
    return torch.from_dlpack(value) if isinstance(value, cupy.ndarray) else value  # type: ignore[attr-defined]
