"""What the ops of the corpus are written with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_alive: list[torch.library.Library] = []  # an op ends with its library


def define(
    qualname: str,
    schema: str,
    kernel: Callable[..., Any],
    *,
    fake: Callable[..., Any] | None = None,
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., Any] | None = None,
    tags: tuple[torch.Tag, ...] = (),
) -> torch._ops.OpOverload:
    """Define an op with `torch.library`, by its schema without a name, and give its overload."""
    namespace, name = qualname.split("::")
    library = torch.library.Library(namespace, "FRAGMENT")
    _alive.append(library)
    library.define(name + schema, tags=tags)
    library.impl(name, kernel, "CompositeExplicitAutograd" if fake is None else "CPU")
    if fake is not None:
        torch.library.register_fake(qualname, fake, lib=library)
    if backward is not None:
        torch.library.register_autograd(qualname, backward, setup_context=setup_context, lib=library)
    overload: torch._ops.OpOverload = getattr(getattr(torch.ops, namespace), name).default
    return overload


def require(condition: bool, message: str) -> None:
    """Refuse an input, in a kernel as in its fake."""
    if not condition:
        raise ValueError(message)


def floats(*tensors: Tensor, dims: int | None = None, least: int = 0) -> None:
    """Refuse other dtypes than float32 and float64, mixed ones, and other numbers of dimensions."""
    first = tensors[0]
    for tensor in tensors:
        require(tensor.dtype in (torch.float32, torch.float64), "float32 or float64 is needed")
        require(tensor.dtype == first.dtype, "one dtype is needed")
        require(dims is None or tensor.dim() == dims, f"{dims} dimensions are needed")
        require(tensor.dim() >= least, f"{least} dimensions are needed")


def alike(*tensors: Tensor) -> None:
    """Refuse shapes that differ, and what `floats` refuses."""
    floats(*tensors)
    require(all(tensor.shape == tensors[0].shape for tensor in tensors), "one shape is needed")


def dense(value: Tensor) -> Tensor:
    """A contiguous copy."""
    return value.clone(memory_format=torch.contiguous_format)


def save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """The `setup_context` of an op that has tensors alone."""
    ctx.save_for_backward(*inputs)


def memory(tensor: Tensor, count: int, start: int | None = None) -> Tensor:
    """What a loop over a pointer reads: `count` elements as they lie in memory, from where the tensor begins.

    Past the end of the memory the last element is repeated, where a compiled kernel reads what is there.
    """
    whole = torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
    first = tensor.storage_offset() if start is None else start
    return whole[torch.arange(first, first + count).clamp(max=max(len(whole) - 1, 0))]
