"""What ops with kernels written by hand share: flat memory, sizes of blocks, guards, and numbers for samples."""

import functools
from typing import Any, Callable

import torch
from torch import Tensor


def rnd(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers, the same in each call."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def ints(low: int, high: int, *shape: int, seed: int = 0, dtype: torch.dtype = torch.int64) -> Tensor:
    """Integers, the same in each call."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, generator=generator).to(dtype)


def ptr(x: Tensor) -> Tensor:
    """What a kernel sees behind `x.data_ptr()`: the memory from the first element on, flat."""
    there = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    return torch.as_strided(x, (there,), (1,))


def cdiv(a: int, b: int) -> int:
    """The quotient, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << max(0, n - 1).bit_length()


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def float_only(fn: Callable, refused: tuple[torch.dtype, ...] = ()) -> Callable:
    """A guard in front of a kernel or fake impl, as libraries of kernels have it."""

    @functools.wraps(fn)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        first = args[0][0] if isinstance(args[0], (list, tuple)) else args[0]
        if not first.is_floating_point() or first.dtype in refused:
            raise TypeError(f"{first.dtype} is not supported")
        return fn(*args, **kwargs)

    return guarded


def numpy_only(fn: Callable) -> Callable:
    """The guard of a kernel in NumPy, which has no bfloat16."""
    return float_only(fn, (torch.bfloat16,))


def contiguous(x: Tensor) -> Tensor:
    """Contiguous, with the strides of a new tensor also where it is empty."""
    return x.contiguous() if x.numel() else x.new_empty(x.shape)


def save_tensors_and_numbers(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """A `setup_context` that saves the tensors, and keeps the rest as `ctx.numbers`."""
    ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))
    ctx.numbers = [x for x in inputs if not isinstance(x, Tensor)]
