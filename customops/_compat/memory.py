"""Storages: which tensors share memory, and which hold any."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.autograd.forward_ad

from customops._compat.tracing import _fake_tensor

_C: Any = torch._C

__tracebackhide__ = True  # pytest leaves the frames out


#: ``any_alias(args, kwargs, outputs)``: does an output share memory with an input or with another output?
any_alias: Callable[..., bool] = _C._any_output_is_alias_to_input_or_output

#: How many tensors and Python objects hold the storage at an address.
storage_uses: Callable[[int], int] = _C._storage_Use_Count


def outputs_share_memory(inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> bool:
    """Does an output share its storage, or the address where it starts, with an input or another output?"""
    return any_alias(inputs, {}, outputs) or share_data(inputs, outputs)


def share_data(inputs: Iterable[Any], outputs: Iterable[Any]) -> bool:
    """Does an output start at the address of an input or of another output?"""
    seen = {address for value in inputs for address in _addresses(value)}
    for value in outputs:
        for address in _addresses(value):
            if address in seen:
                return True
            seen.add(address)
    return False


def _addresses(value: Any) -> list[int]:
    """The addresses of the elements of a tensor, or of the tensors in a list; of none where there are no elements."""
    items = value if isinstance(value, (list, tuple)) else (value,)
    strided = (x for x in items if isinstance(x, torch.Tensor) and x.layout is torch.strided and not x.is_nested)
    return [address for x in strided if has_storage(x) and (address := _C._data_address(x))]


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
