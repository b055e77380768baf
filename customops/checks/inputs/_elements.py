"""New elements from the range of old ones.

A tensor of another size has to be as valid as the one that it is made of: indices that are in range, probabilities that
are positive, offsets that are sorted. So its elements lie between the smallest and the largest of the old ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

#: Elements of a tensor that has none to go by.
_FIRST, _STEP = 0.25, 0.125


def resized(tensor: torch.Tensor, shape: Sequence[int], seed: int = 0) -> torch.Tensor:
    """A contiguous tensor of this shape, with elements like those of `tensor`; no two alike, of floats."""
    count = 1
    for size in shape:
        count *= size
    old = wide(tensor.detach().cpu().resolve_conj().resolve_neg().reshape(-1))
    if not old.numel():
        old = _something(old.dtype)
    new = old.repeat(-(-count // old.numel()))[:count]
    if is_inexact(tensor.dtype):
        new = _jittered(new, old, seed)
    new = new.reshape(tuple(shape))
    if len(shape) and not is_inexact(tensor.dtype) and _is_sorted(old):
        new = new.sort(dim=-1).values
    return new.to(tensor.device, tensor.dtype)


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in a dtype that torch has all functions for, unlike floats of 8 bits and larger unsigned ints."""
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
        return tensor.float()
    is_integer = not (is_inexact(tensor.dtype) or tensor.dtype is torch.bool)
    return tensor.long() if is_integer else tensor


def is_inexact(dtype: torch.dtype) -> bool:
    """Is it a dtype of numbers that are not just integers?"""
    return dtype.is_floating_point or dtype.is_complex


def follow(tensor: torch.Tensor, sizes: dict[int, int]) -> torch.Tensor:
    """Integers that pointed into, or at the end of, a dimension whose size changes go on doing so."""
    if is_inexact(tensor.dtype) or tensor.dtype is torch.bool or not tensor.numel():
        return tensor
    dtype, tensor = tensor.dtype, wide(tensor)
    top = int(tensor.max())
    if top in sizes and _is_sorted(tensor.reshape(-1)):  # offsets: the last one is the size
        new = min(sizes[top], torch.iinfo(dtype).max)
        return torch.where(tensor == top, new, tensor).clamp(max=new).to(dtype)
    above = [size for size in sizes if top < size]
    if not above or int(tensor.min()) < 0:
        return tensor.to(dtype)
    new = sizes[min(above)]
    return tensor.clamp(max=max(new - 1, 0)).to(dtype)


def _something(dtype: torch.dtype) -> torch.Tensor:
    if is_inexact(dtype):
        return (torch.arange(7) * _STEP + _FIRST).to(dtype)
    return torch.zeros(1, dtype=dtype)


def _jittered(new: torch.Tensor, old: torch.Tensor, seed: int) -> torch.Tensor:
    """Each element between two of the old ones, but for masks and the like, and what is not finite."""
    wide = torch.complex128 if new.is_complex() else torch.float64
    values, among = new.to(wide), old.to(wide)
    if old.numel() >= new.numel() or _is_mask(among) or not bool(among.isfinite().all()):
        return new
    generator = torch.Generator().manual_seed(seed)
    share = torch.rand(values.numel(), generator=generator, dtype=torch.float64) * 0.5
    other = among[torch.randint(among.numel(), (values.numel(),), generator=generator)]
    return (values * (1 - share) + other * share).to(new.dtype)


def _is_mask(old: torch.Tensor) -> bool:
    """Are there at most two different elements, and are these whole numbers?"""
    if old.is_complex():
        return False
    return bool((old == old.round()).all()) and old.unique().numel() <= 2


def _is_sorted(old: torch.Tensor) -> bool:
    return old.numel() > 1 and old.dtype is not torch.bool and bool((old[1:] >= old[:-1]).all())
