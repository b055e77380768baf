"""Memory: which tensors share a storage, and which elements have bytes in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast

import torch

from customops._torch.trees import tensors_in

__tracebackhide__ = True  # pytest leaves the frames out

_C: Any = torch._C

#: Without: results that alias an argument are not found
#: ``any_alias(args, kwargs, outputs)``: whether an output shares memory with an input or with another output.
any_alias: Callable[..., bool] = _C._any_output_is_alias_to_input_or_output
#: How many tensors and Python objects hold the storage at an address.
storage_uses: Callable[[int], int] = _C._storage_Use_Count


def outputs_share_memory(inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> bool:
    """Return whether an output is, or shares a storage or its start address with, an input or another output."""
    seen = {id(tensor) for tensor in tensors_in(inputs)}
    for tensor in tensors_in(outputs):
        if id(tensor) in seen:
            return True
        seen.add(id(tensor))
    given, made = _parts(inputs), _parts(outputs)
    if any_alias(tuple(given), {}, tuple(made)):
        return True
    addresses = {*map(_address, given)}
    for address in map(_address, made):
        if address is not None and address in addresses:
            return True
        addresses.add(address)
    return False


def _address(tensor: torch.Tensor) -> int | None:
    """Return the address of the first element of a tensor, or None without elements or a storage."""
    start = _C._data_address(tensor) if has_storage(tensor) and tensor.numel() else 0
    return start + int(tensor.storage_offset()) * tensor.element_size() if start else None


def memory_id(tensor: torch.Tensor) -> int:
    """Return a number for the memory of a tensor, which its views share."""
    return storage_id(tensor) if tensor.layout is torch.strided and not tensor.is_nested else id(tensor)


def memory_or_id(tensor: torch.Tensor) -> int:
    """Return `memory_id`, or the id of a tensor without a storage, as those of functorch are."""
    return memory_id(tensor) if has_storage(tensor) else id(tensor)


def _parts(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return the strided tensors that hold the values of tensors. (Results of torch's ops share sparse indices.)"""
    parts = [part for tensor in tensors_in(values) for part in sparse_parts(tensor)[-1:] or [tensor]]
    return [part for part in parts if part.layout is torch.strided and not part.is_nested]


def sparse_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that a sparse tensor consists of, its values last."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]  # the public names refuse uncoalesced tensors
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []


def storage_id(tensor: torch.Tensor) -> int:
    return cast(int, tensor.untyped_storage()._cdata)


#: Source for generated functions: whether no other tensor shares the memory of a tensor.
OWNS_STORAGE = "($s := {}.untyped_storage()).resizable() and $uses($s._cdata) == 2"
#: Source for generated functions: whether a tensor is a negative view, or zeros without memory.
IS_LAZY = "({0}.is_neg() or {0}._is_zerotensor())"


def is_lazy(tensor: torch.Tensor | None) -> bool:
    """Return whether a tensor is a negative view, or zeros without memory."""
    return tensor is not None and (tensor.is_neg() or tensor._is_zerotensor())


#: Whether a tensor has a storage.
has_storage: Callable[[torch.Tensor], bool] = _C._has_storage


class _Extent(NamedTuple):
    """The place of a tensor's bytes: the first one, and size and step of each dimension, wide ones first."""

    first: int
    dims: tuple[tuple[int, int], ...]

    @property
    def last(self) -> int:
        return self.first + sum((size - 1) * step for size, step in self.dims)


def overlap(one: torch.Tensor, other: torch.Tensor, first: int, first_of_other: int) -> bool:
    """Return whether two strided tensors, whose first bytes are at these addresses, may have a byte in common."""
    if not one.numel() or not other.numel():
        return False
    return not _are_disjoint(_extent(one, first), _extent(other, first_of_other))


def may_overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors, which may be fake, may have an element in common."""
    if memory_or_id(one) != memory_or_id(other):
        return False
    numbers = [n for x in (one, other) for n in (x.storage_offset(), *x.shape, *x.stride())]
    if not all(type(number) is int for number in numbers):
        return True  # symbols
    first, first_of_other = (int(x.storage_offset()) * x.element_size() for x in (one, other))
    return overlap(one, other, first, first_of_other)


def _extent(tensor: torch.Tensor, first: int) -> _Extent:
    width = tensor.element_size()
    dims = [(size, step * width) for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    return _Extent(first, (*sorted(dims, key=lambda dim: -dim[1]), (width, 1)))


def _are_disjoint(one: _Extent, other: _Extent) -> bool:
    """Return whether two extents are known to be apart, as are two parts of rows of equal width."""
    if one.last < other.first or other.last < one.first:
        return True
    if not one.dims or not other.dims or one.dims[0][1] != other.dims[0][1] or one.dims[0][1] == 0:
        return False
    width, base = one.dims[0][1], min(one.first, other.first)
    inner = [_Extent((each.first - base) % width, each.dims[1:]) for each in (one, other)]
    return all(each.last < width for each in inner) and _are_disjoint(*inner)
