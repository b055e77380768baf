"""The memory behind tensors: what is in it, and which tensors share it.

Values are compared as the integers their bytes make, so that NaN equals itself, 0.0 differs from
-0.0, and dtypes for which torch has no arithmetic are compared like any other.
"""

from __future__ import annotations

import itertools

import torch

from customops import _torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Where in its storage a strided tensor starts and ends."""
    start = int(tensor.storage_offset()) * tensor.element_size()
    if tensor.numel() == 0 or tensor.is_contiguous():
        return start, start + tensor.numel() * tensor.element_size()
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + int(last + 1) * tensor.element_size()


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds its elements by strides, and not quantized."""
    return tensor.layout is torch.strided and not tensor.is_quantized


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """May two elements lie at the same place?"""
    reach = 0
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and step <= reach:
            return True
        reach += step * (size - 1)
    return False


def is_addressable(tensor: torch.Tensor) -> bool:
    """Does a storage hold the elements? Backends written in Python may have one of no bytes, and data elsewhere."""
    if tensor.layout is not torch.strided or tensor.is_nested or not _torch.memory.has_storage(tensor):
        return False
    return byte_range(tensor)[1] <= tensor.untyped_storage().nbytes()


def parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The addressable tensors that hold the data of `tensor`: itself, or what it is made of."""
    wrapped = _torch.for_checks.wrapped_by(tensor)
    if wrapped is not None:
        return [part for inner in wrapped for part in parts(inner)]
    return [part for part in _torch.memory.sparse_parts(tensor) or [tensor] if is_addressable(part)]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of an addressable tensor as integers; shares its memory."""
    width, size, stride = tensor.element_size(), tuple(tensor.shape), tensor.stride()
    offset = tensor.storage_offset()
    if width not in _INTEGERS:  # complex128: two words an element
        words = width // 8
        width, size, offset = 8, (*size, words), offset * words
        stride = (*(step * words for step in stride), 1)
    with torch.no_grad():
        integers = torch.empty(0, dtype=_INTEGERS[width], device=tensor.device)
        return integers.set_(tensor.untyped_storage(), offset, size, stride)


def share_storage(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Do two tensors, fake ones included, use the same storage, or bytes in common under two storages?

    No is the answer for wrapper subclasses: jagged tensors share their offsets, which are no data.
    """
    pair = (first, second)
    if any(_torch.for_checks.wrapped_by(tensor) is not None for tensor in pair):
        return False
    found = [filter(_torch.memory.has_storage, _torch.memory.sparse_parts(tensor) or [tensor]) for tensor in pair]
    one_storages, other_storages = (set(map(_torch.memory.storage_id, tensors)) for tensors in found)
    if not one_storages.isdisjoint(other_storages):
        return True
    if any(map(_torch.fakes.is_abstract, pair)):
        return False
    addresses: list[list[tuple[int, int]]] = []  # where in memory the elements start and end
    for tensor in pair:
        bases = [(part.untyped_storage().data_ptr(), byte_range(part)) for part in parts(tensor)]
        addresses.append([(base + start, base + end) for base, (start, end) in bases if base and end > start])
    return any(one < other_end and other < end for (one, end), (other, other_end) in itertools.product(*addresses))


def share_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Like `share_storage`, but a tensor without elements shares nothing."""
    # Without a guard on a size that is not known.
    if any(isinstance(size, int) and size == 0 for size in (*first.shape, *second.shape)):
        return False
    return share_storage(first, second)


def overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Do two tensors have an element in common? Slices of one buffer share its storage without overlapping."""
    if first is second or _torch.for_checks.wrapped_by(first) is not None:
        return first is second
    for one, two in itertools.product(parts(first), parts(second)):
        (start, end), (other_start, other_end) = byte_range(one), byte_range(two)
        is_near = start < other_end and other_start < end
        if not is_near or _torch.memory.storage_id(one) != _torch.memory.storage_id(two):
            continue
        if one.element_size() != two.element_size():
            return True  # not worth telling apart
        lowest = min(start, other_start) // one.element_size()
        taken = torch.zeros(max(end, other_end) // one.element_size() - lowest, dtype=torch.bool)
        taken[torch.arange(len(taken)).as_strided(one.shape, one.stride(), one.storage_offset() - lowest)] = True
        if taken.as_strided(two.shape, two.stride(), two.storage_offset() - lowest).any():
            return True
    return False
