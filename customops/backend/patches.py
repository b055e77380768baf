"""Places where torch ends the process, or says nothing helpful, for a device that has no C++ part: closed here.

Each replaces one attribute of torch with a function that asks whether our device is meant, and else does as before.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from customops.backend import _compat
from customops.backend.device_module import DeviceModule
from customops.backend.fallbacks import Fallback
from customops.backend.memory import Memory
from customops.errors import UnsupportedError

#: kDLExtDev of DLPack: what torch exports a PrivateUse1 tensor as.
_DLPACK_EXTENSION = 12


#: What is replaced, as a path below `torch`, by which method of `Patches`.
REPLACED = {
    "UntypedStorage.new": "storage_like",
    "UntypedStorage.__new__": "new_storage",
    "UntypedStorage.resize_": "resize_storage",
    "UntypedStorage.share_memory_": "share_memory",
    "UntypedStorage.is_shared": "is_shared",
    "Tensor.__repr__": "show",
    "Tensor.__dlpack_device__": "dlpack_device",
}

#: What ``torch.accelerator`` calls (`_compat.ACCELERATOR`), by which method: the guard that Python can register knows
#: one device, and no memory.
ACCELERATOR = {
    "getDeviceIndex": "current_device",
    "setDeviceIndex": "exchange_device",
    "exchangeDevice": "exchange_device",
    "maybeExchangeDevice": "exchange_device",
    "synchronizeDevice": "synchronize",
    "isAllocatorInitialized": "is_initialized",
    "emptyCache": "empty_cache",
    "getDeviceStats": "refuse_statistics",
    "getMemoryInfo": "refuse_statistics",
    "resetAccumulatedStats": "refuse_statistics",
    "resetPeakStats": "refuse_statistics",
}

#: The same, where torch has it: from 2.13 and 2.15 on.
NEWER = {"emptyHostCache": "empty_cache", "getDefaultGenerator": "default_generator"}


#: All that has to be there.
NEEDED = (*REPLACED, *(_compat.ACCELERATOR + name for name in ACCELERATOR))


class Patches:
    """The replaced functions, for one device."""

    def __init__(self, memory: Memory, module: DeviceModule, fallback: Fallback) -> None:
        self.memory = memory
        self.module = module
        self.fallback = fallback

    def install(self, undo: contextlib.ExitStack) -> None:
        """Replace all of them, until `undo` is closed."""
        for path, method in REPLACED.items():
            _compat.replace(undo, path, _asking(getattr(self, method), _compat.lookup(path)))
        for name, method in (ACCELERATOR | NEWER).items():
            path = _compat.ACCELERATOR + name
            if name in ACCELERATOR or _compat.lookup(path) is not None:
                _compat.replace(undo, path, getattr(self, method))

    def _is_here(self, device: Any) -> bool:
        return device is not None and torch.device(device).type == self.memory.name

    def new_storage(self, original: Any, cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        """torch has no allocator for the device, and calls it all the same: a segfault (pytorch issue 184032)."""
        if not self._is_here(device):
            if device is not None:
                kwargs["device"] = device
            return original(cls, *args, **kwargs)
        where = torch.device(device)
        if args and not isinstance(args[0], int):
            return torch.tensor(list(args[0]), dtype=torch.uint8, device=where).untyped_storage()
        size = args[0] if args else kwargs.get("size", 0)
        return torch.empty(size, dtype=torch.uint8, device=where).untyped_storage()

    def storage_like(self, original: Any, storage: Any, *args: Any) -> Any:
        if self._is_here(storage.device):
            return torch.UntypedStorage(*args, device=storage.device)
        return original(storage, *args)

    def show(self, original: Any, tensor: Tensor, **options: Any) -> Any:
        """To print is no op of the program's: a debugger may do it where there is to be no fallback."""
        if tensor.device.type != self.memory.name:
            return original(tensor, **options)
        with self.fallback.with_policy("cpu"):
            return original(tensor, **options)

    def resize_storage(self, original: Any, storage: Any, *args: Any) -> Any:
        if self._is_here(storage.device):
            raise UnsupportedError(
                "storage of a device written in Python cannot be resized",
                op="UntypedStorage.resize_",
                got=str(storage.device),
                fix="resize the tensor: x.resize_(...); or take the C++ route (docs/backend.md)",
            )
        return original(storage, *args)

    def share_memory(self, original: Any, storage: Any) -> Any:
        if self._is_here(storage.device):
            raise UnsupportedError(
                "memory of a device written in Python is not shared with other processes",
                op="share_memory_",
                got=f"a tensor on {storage.device}",
                fix="share a tensor of the CPU; one of the device that is sent to a process arrives as a copy",
            )
        return original(storage)

    def is_shared(self, original: Any, storage: Any) -> bool:
        return not self._is_here(storage.device) and original(storage)

    def dlpack_device(self, original: Any, tensor: Tensor) -> Any:
        # torch compares with the literal "privateuse1" (pytorch PR 195815), and fails for any device that has a name.
        if type(tensor) in (Tensor, torch.nn.Parameter) and tensor.device.type == self.memory.name:
            return _DLPACK_EXTENSION, tensor.get_device()
        return original(tensor)

    # torch.accelerator ------------------------------------------------------------------------------------------

    def current_device(self) -> int:
        return self.module.current_device()

    def synchronize(self, index: int) -> None:
        self.module.synchronize(index)

    def is_initialized(self) -> bool:
        return True

    def default_generator(self, index: int) -> torch.Generator:
        return self.module.default_generators[self.module.index_of(index)]

    def exchange_device(self, index: int) -> int:
        before = self.module.current_device()
        if index >= 0:
            self.module.set_device(index)
        return before

    def empty_cache(self) -> None:
        """There is no cache."""

    def refuse_statistics(self, *_: Any) -> Any:
        name = self.memory.name
        raise UnsupportedError(
            "a device written in Python counts its memory, and keeps no other statistics",
            op="torch.accelerator",
            fix=f"torch.{name}.memory_allocated()",
        )


def _asking(function: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement of `original`: `function`, which gets it as its first argument."""

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    return replacement
