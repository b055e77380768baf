"""The device module of `toy.cpp`: this file becomes `torch.toy`. `toy.register()` builds, loads and registers it all.

torch calls a device module by names that are written down nowhere in one place; the comments say who asks for what.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Iterable, Iterator
from multiprocessing import reduction
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, UntypedStorage
from torch.multiprocessing import reductions
from torch.utils import backend_registration, cpp_extension

NAME = "toy"
SOURCE = Path(__file__).with_name("toy.cpp")


# -- registration ------------------------------------------------------------------------------


def missing_tools() -> list[str]:
    """What has to be installed before the extension can be built."""
    return [tool for tool in (cpp_extension.get_cxx_compiler(), "ninja") if shutil.which(tool) is None]


def load(directory: str | Path | None = None) -> None:
    """Load what CMake built in a directory, or else build `toy.cpp` there; by default in torch's for extensions."""
    if directory is not None and (library := Path(directory) / "libtoy_device.so").exists():
        torch.ops.load_library(library)
        return
    if missing := missing_tools():
        raise RuntimeError(f"toy.cpp cannot be built without {' and '.join(missing)}: install it, and put it on PATH")
    if directory is not None:
        Path(directory).mkdir(parents=True, exist_ok=True)
    cpp_extension.load(
        name="toy_device",
        sources=[str(SOURCE)],
        extra_cflags=["-O1", "-std=c++20"],  # which torch itself is built with from 2.12 on
        build_directory=directory and str(directory),
        is_python_module=False,  # torch.ops.load_library: the file registers operators, and is no Python module
    )


def register(directory: str | Path | None = None) -> None:
    """Make "toy" a device of this process. There is no way back, and no room for a second device."""
    if getattr(torch, NAME, None) is sys.modules[__name__]:
        return
    if (other := torch.accelerator.current_accelerator(check_available=True)) is not None:
        raise RuntimeError(
            f"torch would take {NAME} for its accelerator, in place of {other.type}, whose autograd then fails: hide "
            'that one first, as CUDA_VISIBLE_DEVICES="" does'
        )
    load(directory)  # first, because this may fail, and a name once given stays
    backend_registration.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, sys.modules[__name__])
    # Tensor.toy(), Tensor.is_toy, Module.toy() and so on.
    backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
    reduction.register(torch.UntypedStorage, _reduce_storage)


# -- devices: `with torch.toy.device(1):`, and torch.load, DataLoader, FSDP -----------------------


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _lazy_init() -> None:
    """Asked for before the first tensor; hardware would be woken up here."""


def _is_in_bad_fork() -> bool:
    return False  # memory of the host survives a fork


def device_count() -> int:
    return torch.ops.toy.device_count()


def current_device() -> int:
    return torch.ops.toy.current_device()


def _index(device: Any) -> int:
    """The number of a device, which may be given as a number, a string or a torch.device; None is the current one."""
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    device = torch.device(device)
    if device.type != NAME:
        raise ValueError(f"expected a {NAME} device, got {device}")
    return current_device() if device.index is None else device.index


def set_device(device: Any) -> None:
    torch.ops.toy.exchange_device(_index(device))


@contextlib.contextmanager
def device(device: Any) -> Iterator[None]:
    """Make a device the current one for a while."""
    before = torch.ops.toy.exchange_device(_index(device))
    try:
        yield
    finally:
        torch.ops.toy.exchange_device(before)


def device_of(tensor: Tensor) -> contextlib.AbstractContextManager[None]:
    return device(tensor.device) if tensor.device.type == NAME else contextlib.nullcontext()


def synchronize(device: Any = None) -> None:
    """Work is done when a call returns."""


# -- random numbers: torch.manual_seed, torch.random.fork_rng, checkpoint -------------------------


def default_generator(device: Any = None) -> Generator:
    return torch.ops.toy.default_generator(_index(device))


def manual_seed(seed: int) -> None:
    default_generator().manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        default_generator(index).manual_seed(seed)


def seed_all() -> None:
    manual_seed_all(default_generator().seed())


def initial_seed() -> int:
    return default_generator().initial_seed()


def get_rng_state(device: Any = None) -> Tensor:
    return default_generator(device).get_state()


def set_rng_state(state: Tensor, device: Any = None) -> None:
    default_generator(device).set_state(state)


def get_rng_state_all() -> list[Tensor]:
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(states: Iterable[Tensor]) -> None:
    for index, state in enumerate(states):
        set_rng_state(state, index)


# -- other processes: queues, workers of a DataLoader --------------------------------------------


def _reduce_storage(storage: UntypedStorage) -> Any:
    """What is sent is a copy: torch would raise, in the thread that feeds a queue, and the other end wait for ever."""
    if storage.device.type != NAME:
        return reductions.reduce_storage(storage)
    return _rebuild_storage, (storage.device.index, storage.cpu())


def _rebuild_storage(index: int, host: UntypedStorage) -> UntypedStorage:
    return host.to(device=torch.device(NAME, index))


# -- autocast -------------------------------------------------------------------------------------


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


# -- what the device counts -----------------------------------------------------------------------


def memory_allocated(device: Any = None) -> int:
    """Bytes of live tensors."""
    return torch.ops.toy.live_bytes(_index(device))


def pinned_memory_allocated() -> int:
    return torch.ops.toy.pinned_bytes()


def fallback_counts() -> dict[str, int]:
    """The operators that ran on the CPU, and how often."""
    return dict(sorted(torch.ops.toy.fallback_counts().items()))


def reset_fallback_counts() -> None:
    torch.ops.toy.reset_fallback_counts()


# -- what its tensors carry -----------------------------------------------------------------------


def add_label(tensor: Tensor, label: str) -> None:
    """Attach a label that goes along with detach, torch.save and torch.load."""
    torch.ops.toy.add_label(tensor, label)


def labels(tensor: Tensor) -> list[str]:
    return torch.ops.toy.labels(tensor)


def storage_resizes(tensor: Tensor) -> int:
    """How often the storage was resized: a field of the device's own StorageImpl."""
    return torch.ops.toy.storage_resizes(tensor)
