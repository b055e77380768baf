"""Tensors of the device on their way to another process: in a queue, from a worker of a data loader, with a dataset.

What is sent is a copy: the memory of the device is that of one process. torch's own way would raise, but in the thread
that feeds a queue, where nobody sees it, and the other end would wait for ever.
"""

from __future__ import annotations

import contextlib
import multiprocessing.reduction
from typing import Any

import torch
import torch.multiprocessing.reductions

from customops.backend.errors import BackendError
from customops.backend.memory import Memory


class _Here:
    """The memory of this process's device."""

    memory: Memory | None = None


def install(memory: Memory, undo: contextlib.ExitStack) -> None:
    """Have storages of the device pickled by `reduce` between processes, until `undo` is closed."""
    _Here.memory = memory
    undo.callback(setattr, _Here, "memory", None)
    multiprocessing.reduction.register(torch.UntypedStorage, reduce)
    undo.callback(
        multiprocessing.reduction.register, torch.UntypedStorage, torch.multiprocessing.reductions.reduce_storage
    )


def reduce(storage: torch.UntypedStorage) -> Any:
    """As torch reduces a storage of the CPU, with the device beside it."""
    memory = _Here.memory
    if memory is None or storage.device.type != memory.name:
        return torch.multiprocessing.reductions.reduce_storage(storage)
    return rebuild, (memory.name, storage.device.index, storage.cpu())


def rebuild(name: str, index: int, host: torch.UntypedStorage) -> torch.UntypedStorage:
    """A storage of the device, from what `reduce` sent.

    Raises:
        BackendError: this process has no such device.
    """
    memory = _Here.memory
    if memory is None or memory.name != name:
        raise BackendError(
            f"a tensor of the device {name!r} was sent to a process that has not made this device",
            fix=f"register_backend({name!r}) at the top of the file, which a spawned process runs too, and not under "
            "if __name__ == '__main__'; or send x.cpu()",
        )
    flat = torch.empty(0, dtype=torch.uint8, device="cpu").set_(host, 0, (host.nbytes(),), (1,))
    return memory.place(flat, memory.check_index(index)).untyped_storage()
