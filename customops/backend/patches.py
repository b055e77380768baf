"""Places where torch ends the process, or says nothing helpful, for a device that has no C++ part: closed here.

Each replaces one attribute of torch with a function that asks whether our device is meant, and else does as before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from customops.backend import _compat
from customops.backend.fallback import Fallback
from customops.backend.memory import Memory
from customops.backend.module import DeviceModule
from customops.errors import UnsupportedError

#: kDLExtDev of DLPack: what torch exports a PrivateUse1 tensor as.
_DLPACK_EXTENSION = 12


class Patches:
    """The replaced functions, for one device."""

    def __init__(self, memory: Memory, module: DeviceModule, fallback: Fallback) -> None:
        self.memory = memory
        self.module = module
        self.fallback = fallback

    def install(self) -> None:
        _compat.answer_for_accelerator(self.accelerator())
        self._replace(torch.UntypedStorage, "new", self.storage_like)
        self._replace(torch.Tensor, "__repr__", self.show)
        self._replace(torch.UntypedStorage, "__new__", self.new_storage)
        self._replace(torch.UntypedStorage, "resize_", self.resize_storage)
        self._replace(torch.UntypedStorage, "_share_fd_cpu_", self.share)
        self._replace(torch.UntypedStorage, "_share_filename_cpu_", self.share)
        self._replace(torch.Tensor, "__dlpack_device__", self.dlpack_device)

    @staticmethod
    def _replace(owner: type, attribute: str, function: Callable[..., Any]) -> None:
        original = getattr(owner, attribute)

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        setattr(owner, attribute, replacement)

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

    def share(self, original: Any, storage: Any, *args: Any, **kwargs: Any) -> Any:
        if self._is_here(storage.device):
            raise UnsupportedError(
                "a tensor of this device cannot be sent to another process",
                op=self.memory.name,
                got=f"one on {storage.device}",
                fix="send x.cpu()",
            )
        return original(storage, *args, **kwargs)

    def dlpack_device(self, original: Any, tensor: Tensor) -> Any:
        # torch compares with the literal "privateuse1" (pytorch PR 195815), and fails for any device that has a name.
        if type(tensor) in (Tensor, torch.nn.Parameter) and tensor.device.type == self.memory.name:
            return _DLPACK_EXTENSION, tensor.get_device()
        return original(tensor)

    # torch.accelerator ------------------------------------------------------------------------------------------

    def accelerator(self) -> dict[str, Callable[..., Any]]:
        """What ``torch.accelerator`` calls: the guard that Python can register knows one device and no memory."""
        refused = ("getDeviceStats", "getMemoryInfo", "resetAccumulatedStats", "resetPeakStats")
        return {
            "getDeviceIndex": self.module.current_device,
            "setDeviceIndex": self.exchange_device,
            "exchangeDevice": self.exchange_device,
            "maybeExchangeDevice": self.exchange_device,
            "synchronizeDevice": self.module.synchronize,
            "isAllocatorInitialized": self.module.is_initialized,
            "emptyCache": self.empty_cache,
            "emptyHostCache": self.empty_cache,
            "getDefaultGenerator": self.module.default_generators.__getitem__,
            **dict.fromkeys(refused, self.refuse_statistics),
        }

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
            "memory of a device written in Python is counted, and nothing else is known of it",
            op="torch.accelerator",
            fix=f"torch.{name}.memory_allocated()",
        )
