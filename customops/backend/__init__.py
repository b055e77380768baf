"""Your own device type, on PrivateUse1: its tensors, its kernels and its device module, from Python."""

from __future__ import annotations

from customops.backend._backend import Backend
from customops.backend.device_memory import Block, DeviceMemory, ProtectedMemory
from customops.backend.errors import BackendError
from customops.backend.kernels import KernelHandle
from customops.backend.registration import (
    generate_methods_for_privateuse1_backend,
    get_backend,
    get_custom_mod_func,
    register_backend,
    rename_privateuse1_backend,
)
from customops.backend.streams import Event, Stream, ThreadStream

__all__ = [
    "Backend",
    "BackendError",
    "Block",
    "DeviceMemory",
    "Event",
    "KernelHandle",
    "ProtectedMemory",
    "Stream",
    "ThreadStream",
    "generate_methods_for_privateuse1_backend",
    "get_backend",
    "get_custom_mod_func",
    "register_backend",
    "rename_privateuse1_backend",
]
