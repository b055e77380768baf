"""NVIDIA Warp: kernels over arrays, on the CPU and on GPUs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

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
    cpu = warp.get_device("cpu")

    @functools.wraps(kernel.func)
    def launch(dim: int | Sequence[int], /, *inputs: Any) -> None:
        device = next((value.device for value in inputs if isinstance(value, warp.array)), cpu)
        stream = warp.stream_from_torch(warp.device_to_torch(device)) if device.is_cuda else None
        warp.launch(kernel, dim=dim, inputs=inputs, device=device, stream=stream)

    arguments = Arguments(launch, "Warp", names=["dim", *[each.label for each in parameters]])
    types = {each.label: getattr(each.type, "dtype", None) for each in parameters}
    scalars = {name: getattr(kind, "_wp_scalar_type_", kind) for name, kind in types.items() if kind}
    dtypes = {name: warp.dtype_to_torch(scalar) for name, scalar in scalars.items()}

    def array(name: str, tensor: Tensor) -> Any:
        tensor, wanted = arguments.plain(name, tensor, ("cpu", "cuda")), dtypes.get(name)
        if wanted is None:
            raise arguments.refusal(name, "the kernel takes no array here", got="a tensor")
        if wanted != tensor.dtype:
            raise arguments.wrong_dtype(name, tensor, f"{name}.to({wanted})", expected=str(wanted))
        return warp.from_torch(tensor, dtype=types[name], requires_grad=False)

    return arguments.adapter(array, lambda value, hint: value)
