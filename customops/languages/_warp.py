"""NVIDIA Warp: kernels over arrays, on the CPU and on GPUs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import warp
from torch import Tensor

from customops.errors import ArgumentError, brief
from customops.languages import Arguments


def from_warp(kernel: Any, /) -> Callable[..., None]:
    """Make a function that launches a Warp kernel: ``launch(dim, *args)``, with tensors for the arrays.

    The arrays share the memory of the tensors and have their strides, so the kernel can write to the tensors. It runs
    on their device; on a GPU, on torch's current stream. For an array of vectors or matrices, the last dimensions of
    the tensor hold their elements.

    Args:
        kernel: a kernel made by ``warp.kernel``, without generic type hints.

    Raises:
        ArgumentError: `kernel` is something else.
        UnsupportedError: in a call, a tensor does not have the dtype of the array.

    Example:
        >>> launch = from_warp(axpy_kernel)
        >>> @custom_op("mylib::axpy", mutates_args=("y",))
        ... def axpy(a: float, x: Tensor, y: Tensor) -> None:
        ...     launch(x.numel(), a, x, y)
    """
    if not isinstance(kernel, warp.Kernel):
        raise ArgumentError("from_warp takes a kernel of Warp", argument="kernel", got=brief(kernel))
    warp.init()
    parameters = kernel.adj.args
    arguments = Arguments(kernel.func, "Warp", names=[each.label for each in parameters])
    types = {each.label: getattr(each.type, "dtype", None) for each in parameters}

    def array(tensor: Tensor, name: str) -> Any:
        tensor, kind = arguments.plain(tensor, name, ("cpu", "cuda")), types.get(name)
        if kind is None:
            raise arguments.refusal(name, "the kernel takes no array here", got="a tensor")
        wanted = warp.dtype_to_torch(getattr(kind, "_wp_scalar_type_", kind))
        if wanted != tensor.dtype:
            raise arguments.wrong_dtype(name, tensor, f"{name}.to({wanted})", expected=str(wanted))
        return warp.from_torch(tensor, dtype=kind, requires_grad=False)

    @functools.wraps(kernel.func)
    def launch(dim: int | Sequence[int], /, *args: Any) -> None:
        inputs, _ = arguments.each(array, args, {})
        device = next((value.device for value in args if isinstance(value, Tensor)), torch.device("cpu"))
        stream = warp.stream_from_torch(device) if device.type == "cuda" else None
        warp.launch(kernel, dim=dim, inputs=inputs, device=warp.device_from_torch(device), stream=stream)

    return launch
