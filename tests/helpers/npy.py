"""A device written in Python, and its kernels: for tests in a process of their own (`helpers.isolated`)."""

from __future__ import annotations

import os

import torch
from torch.testing import assert_close

from customops.backend import ProtectedMemory, ThreadStream, register_backend

#: The memory of the device in all tests that do not choose: of the host, "protected", or "asynchronous" as well.
MODE = os.environ.get("CUSTOMOPS_TEST_DEVICE", "host")


def register() -> None:
    {"host": register_host, "protected": register_protected, "asynchronous": register_asynchronous}[MODE]()


def register_host() -> None:
    register_backend("npy", device_count=2)


def register_protected() -> None:
    register_backend("npy", device_count=2, memory=ProtectedMemory())


def register_asynchronous() -> None:
    register_backend("npy", device_count=2, memory=ProtectedMemory(), stream=ThreadStream)


def ones(*shape: int, **options) -> torch.Tensor:
    return torch.ones(*shape, device="npy", **options)


class backend_kernels:
    def __init__(self, backend, functions) -> None:
        self.handles = [backend.kernel(op)(fn) for op, fn in functions.items()]

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()


def equal(device_tensor: torch.Tensor, expected: torch.Tensor) -> None:
    assert device_tensor.device.type == "npy"
    assert device_tensor.dtype == expected.dtype
    assert device_tensor.shape == expected.shape
    assert device_tensor.stride() == expected.stride()
    assert_close(device_tensor.cpu(), expected, rtol=0, atol=0, equal_nan=True)
