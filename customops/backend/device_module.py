"""``torch.<name>``: the module through which torch, and users, ask a device for its count, seeds and dtypes."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from customops.backend import _compat
from customops.backend.errors import BackendError
from customops.backend.memory import Memory
from customops.backend.streams import Streams

Index: TypeAlias = "int | str | torch.device | None"


@dataclass(frozen=True)
class DeviceProperties:
    """What ``torch.<name>.get_device_properties`` returns."""

    name: str
    total_memory: int  #: in bytes


class DeviceModule(types.ModuleType):
    """The functions of one device type; an instance is ``torch.<name>``. There is nothing to initialise."""

    def __init__(self, memory: Memory, amp_dtypes: Iterable[torch.dtype], streams: Streams) -> None:
        name = memory.name
        super().__init__(f"torch.{name}", f"The device {name!r}, made by customops.backend.register_backend.")
        self._device_name = name
        self._memory = memory
        self._current = memory.current
        self._streams, self.Stream, self.Event = streams, streams.Stream, streams.Event
        streams.index_of = self.index_of
        self._amp_dtypes = list(amp_dtypes)
        self._initialized = True  # torch.utils.checkpoint asks, before it keeps the random state
        self._is_called: Callable[[str], bool] = lambda op: True  # set once there are kernels
        #: One CPU generator for each device: torch makes generators of a device's own in C++ alone.
        self.default_generators = tuple(torch.Generator() for _ in range(memory.device_count))
        self.device = type("device", (_device,), {"module": self})
        self.device_of = type("device_of", (_device_of,), {"module": self})

    def __dir__(self) -> list[str]:  # a module lists what is in its dict, and the functions are in its class
        return sorted({*super().__dir__(), *(name for name in vars(DeviceModule) if not name.startswith("_"))})

    def __getattr__(self, name: str) -> Any:
        """Inductor asks for its code generators when it first compiles for the device; nothing loads it before."""
        if name not in _compat.CODE_GENERATORS:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return _compat.code_generators(self._device_name, type(self._memory) is Memory, self._is_called)[name]

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _lazy_init(self) -> None:
        """torch calls it before the device is first used."""

    def device_count(self) -> int:
        return self._memory.device_count

    def current_device(self) -> int:
        return self._current.index

    def set_device(self, device: Index) -> None:
        self._current.index = self.index_of(device)

    # Memory, as ``torch.accelerator`` counts it

    def memory_stats(self, device: Index = None) -> dict[str, Any]:
        return torch.accelerator.memory_stats(self.index_of(device))

    def memory_allocated(self, device: Index = None) -> int:
        """Bytes of the tensors that are alive on a device."""
        return self._memory.allocated(self.index_of(device))

    def max_memory_allocated(self, device: Index = None) -> int:
        return torch.accelerator.max_memory_allocated(self.index_of(device))

    memory_reserved, max_memory_reserved = memory_allocated, max_memory_allocated  # there is no cache

    def reset_peak_memory_stats(self, device: Index = None) -> None:
        self._memory.reset(self.index_of(device), peak_alone=True)

    def reset_accumulated_memory_stats(self, device: Index = None) -> None:
        self._memory.reset(self.index_of(device), peak_alone=False)

    def mem_get_info(self, device: Index = None) -> tuple[int, int]:
        """The bytes that are free, and all."""
        return self._memory.info(self.index_of(device))

    def empty_cache(self) -> None:
        self._memory.empty_cache()

    def get_device_properties(self, device: Index = None) -> DeviceProperties:
        return DeviceProperties(self.get_device_name(device), self.mem_get_info(device)[1])

    def get_device_name(self, device: Index = None) -> str:
        return f"{self._device_name}:{self.index_of(device)}"

    # Streams

    def synchronize(self, device: Index = None) -> None:
        """Wait for all work of a device."""
        self._streams.wait(self.index_of(device))

    def current_stream(self, device: Index = None) -> Any:
        return self._streams.current(self.index_of(device))

    def default_stream(self, device: Index = None) -> Any:
        return self._streams.default(self.index_of(device))

    def set_stream(self, stream: torch.Stream | None) -> None:
        if stream is not None:
            self._streams.set(stream)

    def stream(self, stream: torch.Stream | None) -> AbstractContextManager[Any]:
        """Context manager: this is the current stream of the thread, and its device the current device."""
        return nullcontext() if stream is None else self._streams.find(stream)

    def index_of(self, device: Index) -> int:
        """The number of a device: given as that, as ``"name:1"``, as a `torch.device`, or as None, the current one."""
        if device is None:
            return self._current.index
        if isinstance(device, int) and not isinstance(device, bool):
            return self._memory.check_index(device)
        found = torch.device(device)
        if found.type != self._device_name:
            op = f"torch.{self._device_name}"
            raise BackendError("Invalid device", op=op, expected=self._device_name, got=str(found))
        return self._current.index if found.index is None else self._memory.check_index(found.index)

    def _is_in_bad_fork(self) -> bool:
        return False  # the memory is that of the process: a child has its own copy

    def manual_seed(self, seed: int) -> None:
        self.default_generators[self._current.index].manual_seed(int(seed))

    def manual_seed_all(self, seed: int) -> None:
        for generator in self.default_generators:
            generator.manual_seed(int(seed))

    def Generator(self, device: Index = None) -> torch.Generator:
        """A generator for random ops of a device. It is a CPU generator."""
        self.index_of(device)
        return torch.Generator()

    def seed(self) -> int:
        return self.default_generators[self._current.index].seed()

    def initial_seed(self) -> int:
        return self.default_generators[self._current.index].initial_seed()

    def get_rng_state(self, device: Index = None) -> Tensor:
        return self.default_generators[self.index_of(device)].get_state()

    def set_rng_state(self, new_state: Tensor, device: Index = None) -> None:
        self.default_generators[self.index_of(device)].set_state(new_state)

    def get_rng_state_all(self) -> list[Tensor]:
        return [generator.get_state() for generator in self.default_generators]

    def set_rng_state_all(self, new_states: Iterable[Tensor]) -> None:
        for generator, state in zip(self.default_generators, new_states, strict=True):
            generator.set_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return list(self._amp_dtypes)

    def is_bf16_supported(self) -> bool:
        return torch.bfloat16 in self._amp_dtypes


class _device:
    """Context manager: the current device is another one. A negative index, or None, changes nothing."""

    module: DeviceModule

    def __init__(self, device: Index) -> None:
        changes = device is not None and not (isinstance(device, int) and device < 0)
        self.index: int | None = self.module.index_of(device) if changes else None
        self.before: list[int] = []

    def __enter__(self) -> None:
        self.before.append(self.module.current_device())
        if self.index is not None:
            self.module.set_device(self.index)

    def __exit__(self, *_: object) -> None:
        self.module.set_device(self.before.pop())


class _device_of(_device):
    """Context manager: the current device is that of a tensor or storage; one that is elsewhere changes nothing."""

    def __init__(self, value: Any) -> None:
        here = value.device.type == self.module._device_name
        super().__init__(value.device.index if here else None)
