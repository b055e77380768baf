"""CuPy: functions of its arrays, and kernels written in CUDA C."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import cupy
import torch
from torch import Tensor

from customops._torch.trees import tensors_in
from customops.languages import Arguments

F = TypeVar("F", bound=Callable[..., Any])


def from_cupy(fn: F, /) -> F:
    """Wrap a function of CuPy arrays so that it takes and returns CUDA tensors.

    It is `customops.languages.from_numpy` for the GPU. The arrays share the memory of the tensors and have their
    strides. CuPy has no read-only arrays, so a write to an argument that the op does not declare as mutated does not
    raise; `opcheck` finds such writes. The function runs on torch's current stream, with the device of the tensors as
    the current device.

    Args:
        fn: takes arrays for tensors, and other arguments unchanged, and returns new arrays.

    Raises:
        UnsupportedError: in a call, a tensor is on another device, or CuPy does not have its dtype.

    Example:
        >>> @custom_op("mylib::sin", mutates_args=(), device_types="cuda")
        ... @from_cupy
        ... def sin(x: Tensor) -> Tensor:
        ...     return cupy.sin(x)
    """
    arguments = Arguments(fn, "CuPy")

    def array(name: str, tensor: Tensor) -> Any:
        tensor = arguments.plain(name, tensor, ("cuda",))
        try:
            return cupy.from_dlpack(tensor)
        except (TypeError, ValueError, RuntimeError, BufferError) as error:
            fix = f"{name}.float(), and the result .to({name}.dtype)"
            raise arguments.wrong_dtype(name, tensor, fix, expected=f"what CuPy has ({error})") from error

    on_arrays = arguments.adapter(array, _tensor)

    @functools.wraps(fn)
    def kernel(*args: Any, **kwargs: Any) -> Any:
        tensors = tensors_in((*args, *kwargs.values()))
        if tensors and not tensors[0].is_cuda:
            arguments.explain(*args, **kwargs)
        stream = torch.cuda.current_stream(tensors[0].device if tensors else None)
        if hasattr(cupy.cuda.Stream, "from_external"):  # CuPy 14
            same = cupy.cuda.Stream.from_external(stream)
        else:
            same = cupy.cuda.ExternalStream(stream.cuda_stream, stream.device.index)
        with cupy.cuda.Device(stream.device.index), same:
            return on_arrays(*args, **kwargs)

    return kernel  # type: ignore[return-value]


def _tensor(value: Any, _hint: Any) -> Any:
    return torch.from_dlpack(value) if isinstance(value, cupy.ndarray) else value  # type: ignore[attr-defined]
