"""Storages: which tensors share memory, and which hold any."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, cast

import torch

from customops._compat.tracing import _fake_tensor

_C: Any = torch._C

__tracebackhide__ = True  # pytest leaves the frames out


#: ``any_alias(args, kwargs, outputs)``: does an output share memory with an input or with another output?
any_alias: Callable[..., bool] = _C._any_output_is_alias_to_input_or_output

#: How many tensors and Python objects hold the storage at an address.
storage_uses: Callable[[int], int] = _C._storage_Use_Count


def outputs_share_memory(inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> bool:
    """Is an output an input or another output, or does it share a storage or the address where it starts with one?"""
    seen = {id(tensor) for tensor in _tensors(inputs)}
    for tensor in _tensors(outputs):
        if id(tensor) in seen:
            return True
        seen.add(id(tensor))
    given, made = _parts(inputs), _parts(outputs)
    return any_alias(tuple(given), {}, tuple(made)) or share_data(given, made)


def share_data(inputs: Iterable[torch.Tensor], outputs: Iterable[torch.Tensor]) -> bool:
    """Does an output start at the address of an input or of another output?"""
    seen = {address for tensor in inputs for address in _address(tensor)}
    for tensor in outputs:
        for address in _address(tensor):
            if address in seen:
                return True
            seen.add(address)
    return False


def _address(tensor: torch.Tensor) -> list[int]:
    """Where the elements of a tensor start; of none, if it has no elements or no storage."""
    start = _C._data_address(tensor) if has_storage(tensor) and tensor.numel() else 0
    return [start + int(tensor.storage_offset()) * tensor.element_size()] if start else []


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Tensors, and those in lists."""
    for value in values:
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, torch.Tensor):
                yield item


def _parts(values: Iterable[Any]) -> list[torch.Tensor]:
    """The strided tensors that hold the values of tensors. Sparse ones share their indices in torch's own ops, too."""
    return [part for tensor in _tensors(values) for part in sparse_parts(tensor)[-1:] or [tensor] if _is_strided(part)]


def _is_strided(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def sparse_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a sparse one is made of, its values last."""
    if tensor.layout is torch.sparse_coo:
        return coo_parts(tensor)
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []


def storage_id(tensor: torch.Tensor) -> int:
    return cast(int, tensor.untyped_storage()._cdata)


def is_abstract(tensor: torch.Tensor) -> bool:
    """Does the tensor hold no data of its own: meta, fake, or wrapped by a functorch transform?"""
    return tensor.is_meta or _fake_tensor.is_fake(tensor) or _C._functorch.is_functorch_wrapped_tensor(tensor)


def wrapped_by(tensor: Any) -> list[torch.Tensor] | None:
    """The tensors inside a wrapper subclass, or None for other tensors."""
    if not torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor):
        return None
    return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]


def coo_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [tensor._indices(), tensor._values()]  # the public names refuse uncoalesced tensors


def has_storage(tensor: torch.Tensor) -> bool:
    return bool(_C._has_storage(tensor))


# Which elements have bytes in common ----------------------------------------------------------------------------


class _Extent(NamedTuple):
    """Where the bytes of a tensor lie: the first one, and size and step of each dimension, wide ones first."""

    first: int
    dims: tuple[tuple[int, int], ...]

    @property
    def last(self) -> int:
        return self.first + sum((size - 1) * step for size, step in self.dims)


def overlap(one: torch.Tensor, other: torch.Tensor, first: int, first_of_other: int) -> bool:
    """May two strided tensors, whose first bytes are at these addresses, have a byte in common?"""
    if not one.numel() or not other.numel():
        return False
    return not _are_disjoint(_extent(one, first), _extent(other, first_of_other))


def _extent(tensor: torch.Tensor, first: int) -> _Extent:
    width = tensor.element_size()
    dims = [(size, step * width) for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    return _Extent(first, (*sorted(dims, key=lambda dim: -dim[1]), (width, 1)))


def _are_disjoint(one: _Extent, other: _Extent) -> bool:
    """Are these certainly apart? Else within rows of one width, as the parts of a fused projection are."""
    if one.last < other.first or other.last < one.first:
        return True
    if not one.dims or not other.dims or one.dims[0][1] != other.dims[0][1] or one.dims[0][1] == 0:
        return False
    width, base = one.dims[0][1], min(one.first, other.first)
    inner = [_Extent((each.first - base) % width, each.dims[1:]) for each in (one, other)]
    return all(each.last < width for each in inner) and _are_disjoint(*inner)
