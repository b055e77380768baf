"""What right ops of this folder ask of their inputs, in kernel and fake alike."""

import torch
from torch import Tensor

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
LIBRARIES: list[torch.library.Library] = []  # a library takes its ops along when it goes


def floating(*tensors: Tensor) -> None:
    """All of one real floating-point dtype."""
    for tensor in tensors:
        if tensor.dtype not in FLOATING or tensor.dtype != tensors[0].dtype:
            raise ValueError(f"expected tensors of one of {FLOATING}, got {[t.dtype for t in tensors]}")


def single(*tensors: Tensor) -> None:
    """All float32, or all float64."""
    for tensor in tensors:
        if tensor.dtype not in (torch.float32, torch.float64) or tensor.dtype != tensors[0].dtype:
            raise ValueError(f"expected tensors of float32 or of float64, got {[t.dtype for t in tensors]}")


def integers(*tensors: Tensor) -> None:
    """All integers, bool not among them."""
    for tensor in tensors:
        if tensor.dtype not in INTEGERS:
            raise ValueError(f"expected integers, got {tensor.dtype}")


def numbers(*tensors: Tensor) -> None:
    """Integers, bool or real floating-point."""
    for tensor in tensors:
        if tensor.dtype not in (torch.bool, *INTEGERS, *FLOATING):
            raise ValueError(f"expected real numbers, got {tensor.dtype}")


def same_shape(*tensors: Tensor) -> None:
    """All of one shape."""
    for tensor in tensors:
        if tensor.shape != tensors[0].shape:
            raise ValueError(f"expected one shape, got {[tuple(t.shape) for t in tensors]}")


def rank(tensor: Tensor, least: int, most: int | None = None) -> None:
    """At least so many dimensions, and at most."""
    if not least <= tensor.dim() <= (64 if most is None else most):
        raise ValueError(f"a tensor of {tensor.dim()} dimensions is not taken")


def dimension(tensor: Tensor, dim: int) -> int:
    """The number of a dimension, counted from the front."""
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(f"there is no dimension {dim} in a tensor of {tensor.dim()} dimensions")
    return dim % tensor.dim()


def unshared(tensor: Tensor) -> None:
    """No two elements in one place, as an expanded tensor has them."""
    if any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise ValueError("a tensor that is expanded cannot be written")


def dense(tensor: Tensor) -> Tensor:
    """A contiguous copy, also of what is contiguous."""
    return tensor.clone(memory_format=torch.contiguous_format)


def library(name: str) -> torch.library.Library:
    """A library for the namespace of the op, kept for good."""
    LIBRARIES.append(torch.library.Library(name.split("::")[0], "FRAGMENT"))
    return LIBRARIES[-1]


def overload(name: str) -> torch._ops.OpOverload:
    """The op of that name."""
    namespace, op = name.split("::")
    return getattr(getattr(torch.ops, namespace), op).default
