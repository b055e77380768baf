"""``torch.<name>``: the module through which torch, and users, ask a device for its count, seeds and dtypes."""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from customops.backend.errors import BackendError
from customops.backend.memory import Memory
from customops.errors import UnsupportedError

Index: TypeAlias = "int | str | torch.device | None"


class DeviceModule(types.ModuleType):
    """The functions of one device type; an instance is ``torch.<name>``.

    There is nothing to wait for and nothing to initialise: kernels run when they are called.
    """

    def __init__(self, memory: Memory, amp_dtypes: Iterable[torch.dtype]) -> None:
        name = memory.name
        super().__init__(f"torch.{name}", f"The device {name!r}, made by customops.backend.register_backend.")
        self._device_name = name
        self._memory = memory
        self._current = memory.current
        self._amp_dtypes = list(amp_dtypes)
        self._initialized = True  # torch.utils.checkpoint asks, before it keeps the random state
        # Inductor asks the module for its code generators, and fails at a KeyError where there are none.
        self.Scheduling = self.PythonWrapperCodegen = self.CppWrapperCodegen = self.WrapperFxCodegen = _NoCodegen()
        #: One CPU generator for each device: torch makes generators of a device's own in C++ alone.
        self.default_generators = tuple(torch.Generator() for _ in range(memory.device_count))
        self.device = type("device", (_device,), {"module": self})
        self.device_of = type("device_of", (_device_of,), {"module": self})

    def __dir__(self) -> list[str]:  # a module lists what is in its dict, and the functions are in its class
        return sorted({*super().__dir__(), *(name for name in vars(DeviceModule) if not name.startswith("_"))})

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

    def memory_allocated(self, device: Index = None) -> int:
        """Bytes of the tensors that are alive on a device."""
        return self._memory.allocated(self.index_of(device))

    def get_device_name(self, device: Index = None) -> str:
        return f"{self._device_name}:{self.index_of(device)}"

    def synchronize(self, device: Index = None) -> None:
        """Kernels are over when they return, so there is nothing to wait for."""
        self.index_of(device)

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


class _NoCodegen:
    """Stands where inductor looks for a code generator: whatever is asked of it raises."""

    def __call__(self, *_: Any, **__: Any) -> Any:
        problem = "inductor has no code for a device written in Python"
        raise UnsupportedError(problem, fix='torch.compile(..., backend="aot_eager")')

    def __getattr__(self, name: str) -> Any:
        return self()


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
