"""Parts that several ops of the corpus share: guards of arguments, flat memory, and numbers for samples."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float64)
HALVES = (torch.float16, torch.bfloat16)
FLOATING = (*HALVES, *FLOATS)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)
NUMBERS = (*FLOATS, *HALVES, *INTEGERS, *COMPLEX)

_LIBRARIES: list[torch.library.Library] = []  # a library removes its ops when it is destroyed

# Define ops with torch.library


def library(name: str) -> torch.library.Library:
    """Return a library for the namespace of an op. The library lives as long as the process."""
    _LIBRARIES.append(torch.library.Library(name.split("::")[0], "FRAGMENT"))
    return _LIBRARIES[-1]


def overload(name: str) -> torch._ops.OpOverload:
    """Return the overload of an op that was defined by its schema."""
    namespace, op = name.split("::")
    return getattr(getattr(torch.ops, namespace), op).default


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
    """Define an op by its schema without a name, and return its overload."""
    name = qualname.split("::")[1]
    owner = library(qualname)
    owner.define(name + schema, tags=tags)
    owner.impl(name, kernel, "CompositeExplicitAutograd" if fake is None else "CPU")
    if fake is not None:
        torch.library.register_fake(qualname, fake, lib=owner)
    if backward is not None:
        torch.library.register_autograd(qualname, backward, setup_context=setup_context, lib=owner)
    return overload(qualname)


# Guards, called by kernel and fake impl alike


def require(condition: bool, message: str) -> None:
    """Raise ValueError unless the condition holds."""
    if not condition:
        raise ValueError(message)


def floats(*tensors: Tensor, dims: int | None = None, least: int = 0) -> None:
    """Require float32 or float64 for all tensors, and the number of dimensions."""
    single(*tensors)
    for tensor in tensors:
        require(dims is None or tensor.dim() == dims, f"{dims} dimensions are needed")
        require(tensor.dim() >= least, f"{least} dimensions are needed")


def alike(*tensors: Tensor) -> None:
    """Require one shape, and float32 or float64 for all tensors."""
    floats(*tensors)
    same_shape(*tensors)


def single(*tensors: Tensor) -> None:
    """Require float32 for all tensors, or float64 for all."""
    for tensor in tensors:
        if tensor.dtype not in FLOATS or tensor.dtype != tensors[0].dtype:
            raise ValueError(f"expected tensors of float32 or of float64, got {[t.dtype for t in tensors]}")


def floating(x: Tensor, name: str = "x") -> None:
    """Require a floating-point tensor."""
    torch._check(x.is_floating_point(), lambda: f"{name} must be of a floating-point dtype, not {x.dtype}")


def one_floating_dtype(*tensors: Tensor) -> None:
    """Require one real floating-point dtype for all tensors."""
    for tensor in tensors:
        if tensor.dtype not in FLOATING or tensor.dtype != tensors[0].dtype:
            raise ValueError(f"expected tensors of one of {FLOATING}, got {[t.dtype for t in tensors]}")


def only_integers(*tensors: Tensor) -> None:
    """Require integers, not bool."""
    for tensor in tensors:
        require_dtype(tensor, INTEGERS)


def real_numbers(*tensors: Tensor) -> None:
    """Require integers, bool or real floating-point numbers."""
    for tensor in tensors:
        require_dtype(tensor, (torch.bool, *INTEGERS, *FLOATING))


def require_dtype(x: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """Require one of these dtypes."""
    if x.dtype not in dtypes:
        raise ValueError(f"expected one of {dtypes}, got {x.dtype}")


def require_same_dtype(*tensors: Tensor) -> None:
    """Require one dtype for all tensors."""
    if len({x.dtype for x in tensors}) > 1:
        raise ValueError(f"expected tensors of one dtype, got {[x.dtype for x in tensors]}")


def same_shape(*tensors: Tensor) -> None:
    """Require one shape for all tensors."""
    for tensor in tensors:
        if tensor.shape != tensors[0].shape:
            raise ValueError(f"expected one shape, got {[tuple(t.shape) for t in tensors]}")


def rank(tensor: Tensor, least: int, most: int | None = None) -> None:
    """Require a number of dimensions between two bounds."""
    if not least <= tensor.dim() <= (64 if most is None else most):
        raise ValueError(f"a tensor of {tensor.dim()} dimensions is not supported")


def dimension(tensor: Tensor, dim: int) -> int:
    """Return a valid dimension, counted from the front."""
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(f"there is no dimension {dim} in a tensor of {tensor.dim()} dimensions")
    return dim % tensor.dim()


def writable(tensor: Tensor) -> None:
    """Refuse an expanded tensor, in which several elements share one place in memory."""
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    require(all(size < 2 or stride > 0 for size, stride in strides), "an expanded tensor cannot be written")


def unshared(tensor: Tensor) -> None:
    """Refuse a tensor with several elements in one place, such as an expanded or unfolded tensor."""
    reach = 0
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            require(step > reach, "a tensor with several elements in one place cannot be written")
            reach += (size - 1) * step


def float_only(fn: Callable, refused: tuple[torch.dtype, ...] = ()) -> Callable:
    """Guard a kernel or fake impl against other dtypes than floating point."""

    @functools.wraps(fn)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        first = args[0][0] if isinstance(args[0], (list, tuple)) else args[0]
        if not first.is_floating_point() or first.dtype in refused:
            raise TypeError(f"{first.dtype} is not supported")
        return fn(*args, **kwargs)

    return guarded


def numpy_only(fn: Callable) -> Callable:
    """Guard a kernel in NumPy, which has no bfloat16."""
    return float_only(fn, (torch.bfloat16,))


def like_single(x: Tensor, *_: object) -> Tensor:
    """Return an empty contiguous tensor with the shape of the first argument: a fake impl."""
    single(x)
    return x.new_empty(x.shape)


# Copies and memory


def dense(value: Tensor) -> Tensor:
    """Return a contiguous copy, also of a contiguous tensor."""
    return value.clone(memory_format=torch.contiguous_format)


def packed(x: Tensor) -> Tensor:
    """Return a contiguous copy, with conjugation and negation resolved."""
    return dense(x.resolve_conj().resolve_neg())


def contiguous(x: Tensor) -> Tensor:
    """Return a contiguous tensor, with the strides of a new tensor also if it is empty."""
    return x.contiguous() if x.numel() else x.new_empty(x.shape)


def memory(tensor: Tensor, count: int, start: int | None = None) -> Tensor:
    """Return `count` elements in the order of memory, from the first element of the tensor.

    Past the end of the storage, the last element is repeated. A compiled kernel would read foreign memory there.
    """
    whole = torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
    first = tensor.storage_offset() if start is None else start
    return whole[torch.arange(first, first + count).clamp(max=max(len(whole) - 1, 0))]


def ptr(x: Tensor) -> Tensor:
    """Return the memory behind `x.data_ptr()` as a flat tensor, up to the end of the storage."""
    there = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    return torch.as_strided(x, (there,), (1,))


# Contexts of backward


def save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Save all inputs of an op that has only tensors."""
    ctx.save_for_backward(*inputs)


def save_tensors_and_numbers(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Save the tensors, and keep the other arguments as `ctx.numbers`."""
    ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))
    ctx.numbers = [x for x in inputs if not isinstance(x, Tensor)]


# Numbers


def rnd(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return normal numbers, the same in each call."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return a random tensor that requires grad."""
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def ints(low: int, high: int, *shape: int, seed: int = 0, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return integers, the same in each call."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, generator=generator).to(dtype)


def cdiv(a: int, b: int) -> int:
    """Return the quotient, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return float64 for float64, and float32 for any other dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def wide(x: Tensor) -> torch.dtype:
    """Return the dtype to compute in, for any floating-point or complex tensor."""
    return torch.promote_types(x.dtype, torch.float32)
