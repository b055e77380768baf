"""The kernels without which there is no device: making, copying and resizing tensors, and views."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from customops.backend import _compat
from customops.backend.memory import Memory
from customops.backend.module import Devices
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


def view_of(name: str) -> Callable[..., Any]:
    """A kernel for an op of `METADATA`."""
    op: Any = _compat.find_op(f"aten::{name}")

    def view(*args: Any, **kwargs: Any) -> Any:
        return _compat.redispatch_to_cpu(op, *args, **kwargs)

    return _compat.outside_dynamo(view)


class Essentials:
    """Kernels over the memory of a device; `table` lists them by op."""

    def __init__(self, memory: Memory, devices: Devices) -> None:
        self.memory = memory
        self.devices = devices

    def table(self) -> dict[str, Any]:
        return {
            "empty.memory_format": self.empty,
            "empty_strided": self.empty_strided,
            "_copy_from": self.copy_from,
            "_copy_from_and_resize": self.copy_from_and_resize,
            "resize_": self.resize_,
            "set_": self.set_to_nothing,
            "_local_scalar_dense": self.local_scalar,
        }

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
        """Kernels for CPU tensors, by op."""
        return {"_pin_memory": self.pin, "is_pinned": self.is_pinned}

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
        return {"_pin_memory": self.pin, "is_pinned": self.is_pinned}

    def pin(self, tensor: Tensor, device: torch.device | None = None) -> Tensor:
        raise UnsupportedError(f"tensors on {tensor.device} cannot be pinned", op=self.name, fix=self.reason)

    def is_pinned(self, tensor: Tensor, device: torch.device | None = None) -> bool:
        return False
