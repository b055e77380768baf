"""The memory of a device: ordinary memory of this process, in tensors that say they are elsewhere.

A tensor of the device is a plain tensor over the bytes of a CPU tensor: `_compat.as_device` hands the memory over
without copying, and `_compat.as_cpu` lends it back. torch keeps the owner alive, and a weak reference to the owner says
when the bytes are gone.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from customops.backend import _compat
from customops.backend.errors import BackendError, WrongDeviceError
from customops.errors import UnsupportedError

#: ``allocate(nbytes, index)``: a writable array of that many bytes, as NumPy has them.
Allocate = Callable[[int, int], Any]


class Memory:
    """Makes tensors of the device, lends them out as CPU tensors, and counts the bytes."""

    def __init__(self, name: str, device_count: int, allocate: Allocate | None = None) -> None:
        self.name = name
        self.device_count = device_count
        self.allocate = allocate
        self._when_dead = self._forget
        self._live: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}  # owner, index, bytes

    # Making -----------------------------------------------------------------------------------------------------

    def empty(self, size: Iterable[int], stride: Iterable[int], dtype: torch.dtype, index: int) -> Tensor:
        """A new tensor of the device."""
        host = torch.empty_strided(size, stride, dtype=dtype, device="cpu")  # type: ignore[arg-type]
        nbytes = host.untyped_storage().nbytes() if self.allocate is not None else 0
        if not nbytes:
            return self.adopt(host, index)
        # The CPU's tensor, of which nothing was touched, has told whether sizes and strides are right.
        flat = self._allocated(nbytes, index)
        return self.adopt(flat.view(dtype).as_strided(host.shape, host.stride()), index, flat)

    def _allocated(self, nbytes: int, index: int) -> Tensor:
        assert self.allocate is not None
        array = self.allocate(nbytes, index)
        try:
            flat = torch.from_numpy(array)
        except TypeError:
            flat = None
        if flat is None or flat.dtype != torch.uint8 or flat.shape != (nbytes,) or not flat.is_contiguous():
            shape, dtype = getattr(array, "shape", None), getattr(array, "dtype", None)
            raise BackendError(
                "allocate returned something else than the memory asked for",
                op=self.name,
                expected=f"a contiguous numpy array of {nbytes} uint8",
                got=f"{type(array).__name__}, shape {shape}, dtype {dtype}" if shape is not None else repr(array),
                fix="return numpy.empty(nbytes, numpy.uint8)",
            )
        return flat

    def adopt(self, host: Tensor, index: int, owner: Tensor | None = None) -> Tensor:
        """The memory of a plain CPU tensor as a tensor of the device; no copy."""
        try:
            tensor = _compat.as_device(host, index)
        except (BufferError, RuntimeError) as error:
            raise self.cannot_hold(host) from error
        if tensor.dtype is not host.dtype:  # DLPack knows no numbers of 4 bits
            raise self.cannot_hold(host)
        reference = weakref.ref(host, self._when_dead)
        nbytes = host.nbytes if owner is None else owner.nbytes
        self._live[id(reference)] = (reference, index, nbytes)  # references compare as what they refer to: not as keys
        return tensor

    def place(self, host: Tensor, index: int) -> Tensor:
        """What an op computed on the CPU, as a tensor of the device: in memory of `allocate`, if there is one."""
        if host.layout is not torch.strided or host.is_quantized or host.is_nested:
            raise self.cannot_hold(host)
        plain = self.plain(host)
        if self.allocate is None:
            return self.adopt(plain, index)
        tensor = self.empty(plain.shape, plain.stride(), plain.dtype, index)
        _compat.as_cpu(tensor).copy_(plain)
        return tensor

    @staticmethod
    def plain(host: Tensor) -> Tensor:
        """A CPU tensor as it lies in memory: not lazily conjugated or negated, and with memory at all."""
        if host.is_conj() or host.is_neg():
            return host.resolve_conj().resolve_neg()
        if _compat.is_zero_tensor(host):  # torch makes zeros without memory for undefined gradients
            return host.clone()
        return host

    def cannot_hold(self, tensor: Tensor) -> UnsupportedError:
        """The error for a tensor that is not just numbers in memory."""
        kind, remedy = str(tensor.dtype), ".view(torch.uint8)"
        if tensor.is_nested:
            kind, remedy = "nested ones", ".to_padded_tensor(0.0) (nn.TransformerEncoder: enable_nested_tensor=False)"
        elif tensor.layout is not torch.strided:
            kind, remedy = f"layout {tensor.layout}", ".to_dense()"
        elif tensor.is_quantized:
            remedy = ".dequantize()"
        return UnsupportedError(
            f"a device written in Python holds strided tensors of plain dtypes: not {kind}",
            got=f"a tensor for {self.name!r}",
            fix=f"keep it on the CPU, or call {remedy} before .to({self.name!r})",
        )

    def over(self, storage: torch.UntypedStorage, index: int) -> Tensor:
        """All bytes of a storage of the device."""
        empty = self.empty((0,), (1,), torch.uint8, index)
        return empty.set_(storage, 0, (storage.nbytes(),), (1,))

    # Lending ----------------------------------------------------------------------------------------------------

    def lend_together(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """CPU tensors that share memory as these do, and tell so: ops refuse to write what they read elsewhere."""
        hosts = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = _compat.storage_key(storage)
            if key not in hosts:
                hosts[key] = _compat.as_cpu(self.over(storage, tensor.get_device())).untyped_storage()
        lent = []
        for tensor in tensors:
            host = torch.empty(0, dtype=tensor.dtype, device="cpu")
            shared = hosts[_compat.storage_key(tensor.untyped_storage())]
            host.set_(shared, tensor.storage_offset(), tensor.size(), tensor.stride())
            lent.append(self.with_bits(host, tensor))
        return lent

    @staticmethod
    def overlap(written: Iterable[Tensor], tensors: Iterable[Tensor]) -> bool:
        """Does one of these lie in the memory of another one, which is written?"""
        by_storage = collections.defaultdict(list)
        for tensor in written:
            by_storage[_compat.storage_key(tensor.untyped_storage())].append(tensor)
        for tensor in tensors:
            for other in by_storage.get(_compat.storage_key(tensor.untyped_storage()), ()):
                if other is not tensor and _bytes_meet(other, tensor):
                    return True
        return False

    def lend(self, tensor: Tensor) -> Tensor:
        """A CPU tensor over the same memory; anything that is on the CPU already stays itself."""
        if tensor.is_cpu:
            return tensor
        host = _compat.as_cpu(tensor)
        return self.with_bits(host, tensor) if tensor.is_conj() or tensor.is_neg() else host

    @staticmethod
    def with_bits(host: Tensor, tensor: Tensor) -> Tensor:
        """The lent tensor, lazily conjugated and negated as the other one is."""
        if tensor.is_conj():
            host = host.conj()
        return _compat.neg_view(host) if tensor.is_neg() else host

    def require_here(self, tensor: object, what: str) -> Tensor:
        """Raise unless it is a tensor with memory on this device."""
        if not isinstance(tensor, Tensor):
            raise WrongDeviceError(f"{what} expects a tensor", op=self.name, got=type(tensor).__name__)
        if tensor.device.type != self.name:
            raise WrongDeviceError(
                f"{what} expects a tensor of this device",
                op=self.name,
                got=f"one on {tensor.device}",
                fix=f"x.to({self.name!r})",
            )
        if _compat.is_abstract(tensor) or _compat.is_functional(tensor):
            raise WrongDeviceError(
                f"{what} expects a tensor with memory", op=self.name, got=f"{type(tensor).__name__}, while tracing"
            )
        return tensor

    # Counting ---------------------------------------------------------------------------------------------------

    def allocated(self, index: int) -> int:
        """Bytes that are alive."""
        return sum(nbytes for _, at, nbytes in list(self._live.values()) if at == index)

    def _forget(self, reference: weakref.ref[Tensor]) -> None:
        self._live.pop(id(reference), None)

    # Indices ----------------------------------------------------------------------------------------------------

    def check_index(self, index: int) -> int:
        if 0 <= index < self.device_count:
            return index
        raise BackendError(
            "there is no such device",
            expected=f"{self.name}:0 to {self.name}:{self.device_count - 1}",
            got=f"{self.name}:{index}",
            fix="register_backend(..., device_count=...)",
        )


def _bytes_meet(a: Tensor, b: Tensor) -> bool:
    """Do the ranges of memory meet that two tensors lie in?"""
    return a.numel() > 0 < b.numel() and a.data_ptr() < _end(b) and b.data_ptr() < _end(a)


def _end(tensor: Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.element_size()
