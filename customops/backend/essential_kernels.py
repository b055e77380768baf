"""The kernels without which there is no device: making, copying and resizing tensors, and views."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from customops.backend import _compat
from customops.backend.device_module import Devices
from customops.backend.memory import Memory
from customops.errors import UnsupportedError

#: Ops that change sizes, strides or the storage of a tensor and no data: the CPU's kernels do for any memory.
METADATA = (
    "as_strided",
    "view",
    "view.dtype",
    "unfold",
    "_reshape_alias",
    "set_.source_Storage",
    "set_.source_Storage_storage_offset",
    "set_.source_Tensor",
)

#: Ops that make, copy and resize tensors, by the method of `Essentials` that is their kernel.
ESSENTIAL = {
    "empty.memory_format": "empty",
    "empty_strided": "empty_strided",
    "_copy_from": "copy_from",
    "_copy_from_and_resize": "copy_from_and_resize",
    "resize_": "resize_",
    "set_": "set_to_nothing",
    "_local_scalar_dense": "local_scalar",
    "_to_copy": "to_copy",
    "_has_compatible_shallow_copy_type": "may_take_over",
    "record_stream": "record_stream",
}

#: Ops of pinned memory, by method as well.
PINNING = {"_pin_memory": "pin", "is_pinned": "is_pinned"}

#: All that have to be there.
NEEDED = (*METADATA, *ESSENTIAL, *PINNING)

_TO_COPY: Any = _compat.find_op("aten::_to_copy")


def view_of(name: str) -> Callable[..., Any]:
    """A kernel for an op of `METADATA`."""
    op: Any = _compat.find_op(f"aten::{name}")

    def view(*args: Any, **kwargs: Any) -> Any:
        return _compat.redispatch_to_cpu(op, *args, **kwargs)

    return _compat.outside_dynamo(view)


class Essentials:
    """Kernels over the memory of a device; `table` lists them by op."""

    def __init__(self, memory: Memory, devices: Devices, user_kernels: collections.Counter[str]) -> None:
        self.memory = memory
        self.devices = devices
        self.user_kernels = user_kernels  #: how many there are now, by the name of an op without overload

    def table(self) -> dict[str, Any]:
        return {op: getattr(self, method) for op, method in ESSENTIAL.items()}

    def _index(self, device: torch.device | None) -> int:
        if device is None or device.index is None:
            return self.devices.current
        return self.memory.check_index(device.index)

    def empty(
        self,
        size: Sequence[int],
        *,
        dtype: torch.dtype | None = None,
        layout: torch.layout | None = None,
        device: torch.device | None = None,
        pin_memory: bool | None = None,
        memory_format: torch.memory_format | None = None,
    ) -> Tensor:
        self._check(layout, pin_memory)
        strides: Sequence[int] = _contiguous(size)
        if memory_format not in (None, torch.contiguous_format):
            strides = torch.empty(size, device="meta", memory_format=memory_format).stride()
        return self.memory.empty(size, strides, dtype or torch.get_default_dtype(), self._index(device))

    def empty_strided(
        self,
        size: Sequence[int],
        stride: Sequence[int],
        *,
        dtype: torch.dtype | None = None,
        layout: torch.layout | None = None,
        device: torch.device | None = None,
        pin_memory: bool | None = None,
    ) -> Tensor:
        if layout is not None or pin_memory:
            self._check(layout, pin_memory)
        return self.memory.empty(size, stride, dtype or torch.get_default_dtype(), self._index(device))

    def _check(self, layout: torch.layout | None, pin_memory: bool | None) -> None:
        name = self.memory.name
        if layout not in (None, torch.strided):
            raise UnsupportedError(
                f"a device written in Python holds strided tensors: not layout {layout}",
                op=name,
                fix=f"keep it on the CPU, or call .to_dense() before .to({name!r})",
            )
        if pin_memory:
            raise UnsupportedError(
                "memory of this device cannot be pinned", op=name, fix="make the tensor on the CPU, call .pin_memory()"
            )

    def copy_from(self, source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
        if not (source.is_cpu or target.is_cpu) and self.memory.overlap((target,), (source,)):
            to, from_ = self.memory.lend_together((target, source))
        else:
            to, from_ = self.memory.lend(target), self.memory.lend(source)
        to.copy_(from_)
        return target

    def copy_from_and_resize(self, source: Tensor, target: Tensor) -> Tensor:
        return self.copy_from(source, target.resize_(source.shape))

    def resize_(
        self, tensor: Tensor, size: Sequence[int], *, memory_format: torch.memory_format | None = None
    ) -> Tensor:
        layout = memory_format if memory_format is not torch.preserve_format else None
        plain = torch.empty(size, device="meta", memory_format=layout or torch.contiguous_format)
        needed = (int(tensor.storage_offset()) + plain.numel()) * tensor.element_size()
        storage = tensor.untyped_storage()
        if plain.numel() and needed > storage.nbytes():
            storage = self._grown(tensor, needed)
        tensor.set_(storage, tensor.storage_offset(), plain.size(), plain.stride())
        return tensor

    def set_to_nothing(self, tensor: Tensor) -> Tensor:
        nothing = self.memory.empty((0,), (1,), tensor.dtype, tensor.get_device())
        return tensor.set_(nothing)  # type: ignore[no-any-return, call-overload]

    def _grown(self, tensor: Tensor, nbytes: int) -> torch.UntypedStorage:
        """Storage does not grow in place from Python: a new one, with the old bytes at its start."""
        grown = self.memory.empty((nbytes,), (1,), torch.uint8, tensor.get_device())
        old = tensor.untyped_storage()
        bytes_of_old = self.memory.over(old, tensor.get_device())
        _compat.as_cpu(grown)[: old.nbytes()].copy_(_compat.as_cpu(bytes_of_old))
        return grown.untyped_storage()

    def local_scalar(self, tensor: Tensor) -> Any:
        return self.memory.lend(tensor).item()

    def to_copy(
        self,
        tensor: Tensor,
        *,
        dtype: torch.dtype | None = None,
        layout: torch.layout | None = None,
        device: torch.device | None = None,
        pin_memory: bool | None = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format | None = None,
    ) -> Tensor:
        """``x.to(...)``: a copy made on the CPU, unless making and copying tensors has kernels of the user.

        torch's own is never told of `non_blocking`: it would ask the device's C++ part for pinned memory.
        """
        to = tensor.device if device is None else device
        is_here = to.type == self.memory.name
        is_plain = layout in (None, torch.strided) and tensor.layout is torch.strided and not pin_memory
        if not is_plain or not (is_here or to.type == "cpu") or self.memory.allocate or self._is_users_copy():
            options: dict[str, Any] = {"dtype": dtype, "layout": layout, "pin_memory": pin_memory}
            return _compat.redispatch_to_cpu(  # type: ignore[no-any-return]
                _TO_COPY, tensor, device=device, memory_format=memory_format, **options
            )
        host = self.memory.lend(tensor)
        copy = host.to(dtype or host.dtype, copy=True, memory_format=memory_format or torch.preserve_format)
        return self.memory.adopt(copy, self._index(to)) if is_here else copy

    def _is_users_copy(self) -> bool:
        return bool(self.user_kernels["aten::_copy_from"] or self.user_kernels["aten::empty_strided"])

    def may_take_over(self, tensor: Tensor, other: Tensor) -> bool:
        """May ``tensor.data = other`` be? `nn.Module.to` asks, and makes new parameters where the answer is no."""
        return tensor.layout is torch.strided and other.layout is torch.strided

    def record_stream(self, tensor: Tensor, stream: torch.Stream) -> None:
        """No stream uses the tensor later than the program does: kernels are over when they return."""


def _contiguous(size: Sequence[int]) -> list[int]:
    strides, step = [1] * len(size), 1
    for dim in range(len(size) - 1, -1, -1):
        strides[dim] = step
        step *= max(size[dim], 1)
    return strides


class PinnedMemory:
    """Pinned CPU memory, in name only: a copy that is remembered, so that data loaders work as for other devices.

    torch asks the hooks of the device for it, and those that Python can register have none.
    """

    def __init__(self) -> None:
        self._pinned: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def table(self) -> dict[str, Any]:
        return {op: getattr(self, method) for op, method in PINNING.items()}

    def pin(self, tensor: Tensor, device: torch.device | None = None) -> Tensor:
        copy = tensor.clone(memory_format=torch.preserve_format)
        storage = copy.untyped_storage()
        key = _compat.storage_key(storage)
        self._pinned[key] = weakref.ref(storage, lambda _: self._pinned.pop(key, None))
        return copy

    def is_pinned(self, tensor: Tensor, device: torch.device | None = None) -> bool:
        return _compat.storage_key(tensor.untyped_storage()) in self._pinned


class NotPinned:
    """What to say where the device was registered with ``pin_memory=False``, and of its own tensors."""

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        self.reason = reason

    def table(self) -> dict[str, Any]:
        return {op: getattr(self, method) for op, method in PINNING.items()}

    def pin(self, tensor: Tensor, device: torch.device | None = None) -> Tensor:
        raise UnsupportedError(f"tensors on {tensor.device} cannot be pinned", op=self.name, fix=self.reason)

    def is_pinned(self, tensor: Tensor, device: torch.device | None = None) -> bool:
        return False
