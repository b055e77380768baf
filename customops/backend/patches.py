"""Places where torch ends the process, or says nothing helpful, for a device that has no C++ part: closed here.

Each replaces one attribute of torch with a function that asks whether our device is meant, and else does as before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from customops.backend.memory import Memory
from customops.errors import UnsupportedError

#: kDLExtDev of DLPack: what torch exports a PrivateUse1 tensor as.
_DLPACK_EXTENSION = 12


class Patches:
    """The replaced functions, for one device."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    def install(self) -> None:
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
        if type(tensor) is Tensor and tensor.device.type == self.memory.name:
            return _DLPACK_EXTENSION, tensor.get_device()
        return original(tensor)
