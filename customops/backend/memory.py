"""The memory of a device: ordinary memory of this process, in tensors that say they are elsewhere.

A tensor of the device is a plain tensor over the bytes of a CPU tensor: `_compat.as_device` hands the memory over
without copying, and `_compat.as_cpu` lends it back. torch keeps the owner alive, and a weak reference to the owner says
when the bytes are gone. The kernels without which there is no device are here, too: they make, copy, resize and pin.
"""

from __future__ import annotations

import collections
import contextlib
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from customops import _torch
from customops.backend import _compat
from customops.backend.errors import BackendError
from customops.backend.streams import Current
from customops.errors import UnsupportedError

#: ``allocate(nbytes, index)``: a writable array of that many bytes, as NumPy has them.
Allocate = Callable[[int, int], Any]


class Tally:
    """Bytes of one device since the last reset: allocated, freed, and the most that were alive at a time.

    No lock: CPython does not change threads within one of the statements that count.
    """

    __slots__ = ("allocated", "before", "freed", "peak")

    def __init__(self) -> None:
        self.allocated = self.freed = self.peak = 0
        self.before = 0  #: what was alive at the reset

    @property
    def current(self) -> int:
        return self.before + self.allocated - self.freed


def bytes_of_host() -> tuple[int, int]:
    """The bytes that are free, and all."""
    page = os.sysconf("SC_PAGE_SIZE")
    return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")


class Memory:
    """Makes tensors of the device, lends them out as CPU tensors, and counts the bytes."""

    copies = False  #: is what is lent a copy, which has to be given back?

    def __init__(self, name: str, device_count: int, current: Current, allocate: Allocate | None = None) -> None:
        self.name = name
        self.device_count = device_count
        self.allocate = allocate
        self.current = current
        self._live: dict[int, tuple[weakref.ref[Tensor], Tally, int, int]] = {}  # owner, its device's, bytes, handle
        self._tallies = [Tally() for _ in range(device_count)]
        self._when_dead = self._forget

    # Making -----------------------------------------------------------------------------------------------------

    def empty(self, size: Iterable[int], stride: Iterable[int], dtype: torch.dtype, index: int) -> Tensor:
        """A new tensor of the device."""
        host = torch.empty_strided(size, stride, dtype=dtype, device="cpu")  # type: ignore[arg-type]
        if self.allocate is None or not (nbytes := host.untyped_storage().nbytes()):
            return self.adopt(host, index)
        # The CPU's tensor, of which nothing was touched, has told whether sizes and strides are right.
        array = self.allocate(nbytes, index)
        try:
            flat = torch.from_numpy(array)
        except TypeError:
            flat = None
        if flat is None or flat.dtype != torch.uint8 or flat.shape != (nbytes,) or not flat.is_contiguous():
            shape, kind = getattr(array, "shape", None), getattr(array, "dtype", None)
            problem = "allocate returned something else than the memory asked for"
            expected, fix = f"a contiguous numpy array of {nbytes} uint8", "return numpy.empty(nbytes, numpy.uint8)"
            got = f"{type(array).__name__}, shape {shape}, dtype {kind}" if shape is not None else repr(array)
            raise BackendError(problem, op=self.name, expected=expected, got=got, fix=fix)
        return self.adopt(flat.view(dtype).as_strided(host.shape, host.stride()), index, flat)

    def adopt(self, host: Tensor, index: int, owner: Tensor | None = None) -> Tensor:
        """The memory of a plain CPU tensor as a tensor of the device; no copy."""
        try:
            tensor = _compat.as_device(host, index)
        except (BufferError, RuntimeError) as error:
            raise self.cannot_hold(host) from error
        if tensor.dtype is not host.dtype:  # DLPack knows no numbers of 4 bits
            raise self.cannot_hold(host)
        self._track(host, index, (host if owner is None else owner).nbytes)
        return tensor

    def _track(self, owner: Tensor, index: int, nbytes: int, handle: int = 0) -> None:
        """Count the bytes until the tensor that owns them ends."""
        reference, tally = weakref.ref(owner, self._when_dead), self._tallies[index]
        # References compare as what they refer to: not as keys.
        self._live[id(reference)] = (reference, tally, nbytes, handle)
        tally.allocated += nbytes
        current = tally.before + tally.allocated - tally.freed
        if current > tally.peak:
            tally.peak = current

    def _forget(self, reference: weakref.ref[Tensor]) -> None:
        _, tally, nbytes, _ = self._live.pop(id(reference))
        tally.freed += nbytes

    def place(self, host: Tensor, index: int) -> Tensor:
        """Make a tensor of the device of what an op computed on the CPU: in memory of `allocate`, if there is one."""
        plain = self.plain(host)
        if self.allocate is None:
            return self.adopt(plain, index)
        tensor = self.empty(plain.shape, plain.stride(), plain.dtype, index)
        _compat.as_cpu(tensor).copy_(plain)
        return tensor

    def plain(self, host: Tensor) -> Tensor:
        """Return a CPU tensor as it lies in memory: not lazily conjugated or negated, and with memory at all."""
        if host.layout is not torch.strided or host.is_quantized or host.is_nested:
            raise self.cannot_hold(host)
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
        problem = f"a device written in Python holds strided tensors of plain dtypes: not {kind}"
        fix = f"keep it on the CPU, or call {remedy} before .to({self.name!r})"
        return UnsupportedError(problem, got=f"a tensor for {self.name!r}", fix=fix)

    @staticmethod
    def cannot_pin(op: str) -> UnsupportedError:
        fix = "make the tensor on the CPU and call .pin_memory()"
        return UnsupportedError("memory of this device cannot be pinned", op=op, fix=fix)

    def over(self, storage: torch.UntypedStorage, index: int) -> Tensor:
        """All bytes of a storage of the device."""
        empty = self.empty((0,), (1,), torch.uint8, index)
        return empty.set_(storage, 0, (storage.nbytes(),), (1,))

    def copy(self, source: Tensor, target: Tensor, non_blocking: bool = False, *, is_ours: bool = False) -> Tensor:
        """`target`, with the values of `source`."""
        if not (source.is_cpu or target.is_cpu) and self.overlap((target,), (source,)):
            to, from_ = self.lend_together((target, source))
        else:
            to, from_ = self.lend(target), self.lend(source)
        to.copy_(from_)
        return target

    # Lending ----------------------------------------------------------------------------------------------------

    share = staticmethod(_compat.as_cpu)
    scope: Callable[[], contextlib.AbstractContextManager[None]] = staticmethod(contextlib.nullcontext)

    def scoped(self, fn: Callable[..., Any], op: str | None = None) -> Callable[..., Any]:
        """A function, the kernel of an op perhaps, that has access to the memory of the device."""
        return fn

    named = scoped  #: for a stream's work, which may run later

    def lend_together(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """CPU tensors that share memory as these do, and tell so: ops refuse to write what they read elsewhere."""
        storages: dict[int, torch.UntypedStorage] = {}
        lent = []
        for tensor in tensors:
            key = _torch.memory.storage_id(tensor)
            if key not in storages:
                whole = self.over(tensor.untyped_storage(), tensor.get_device())
                storages[key] = _compat.as_cpu(whole).untyped_storage()
            host = torch.empty(0, dtype=tensor.dtype, device="cpu")
            host.set_(storages[key], tensor.storage_offset(), tensor.size(), tensor.stride())
            lent.append(self.with_bits(host, tensor))
        return lent

    @staticmethod
    def overlap(written: Iterable[Tensor], tensors: Iterable[Tensor]) -> bool:
        """Does one of these lie in the memory of another one, which is written?"""
        by_storage = collections.defaultdict(list)
        for tensor in written:
            by_storage[_torch.memory.storage_id(tensor)].append(tensor)
        return any(
            other is not tensor and _torch.memory.overlap(other, tensor, other.data_ptr(), tensor.data_ptr())
            for tensor in tensors
            for other in by_storage.get(_torch.memory.storage_id(tensor), ())
        )

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

    # Bytes and indices ------------------------------------------------------------------------------------------

    def allocated(self, index: int) -> int:
        return self._tallies[index].current

    def statistics(self, index: int) -> dict[str, Any]:
        """As torch nests them. Nothing is reserved without being allocated."""
        tally = self._tallies[index]
        kinds = {"all": {name: getattr(tally, name) for name in ("allocated", "freed", "peak", "current")}}
        return {"allocated_bytes": kinds, "reserved_bytes": kinds}

    def reset(self, index: int, *, peak_alone: bool) -> None:
        tally = self._tallies[index]
        if peak_alone:
            tally.peak = tally.current
        else:
            tally.before, tally.allocated, tally.freed = tally.current, 0, 0

    def info(self, index: int) -> tuple[int, int]:
        """The bytes that are free, and all."""
        return bytes_of_host()

    def empty_cache(self) -> None:
        """There is no cache."""

    def record_stream(self, tensor: Tensor, stream: torch.Stream) -> None:
        """No stream uses the tensor later than the program does: kernels are over when they return."""

    def check_index(self, index: int) -> int:
        if 0 <= index < self.device_count:
            return index
        expected = f"{self.name}:0 to {self.name}:{self.device_count - 1}"
        fix = "register_backend(..., device_count=...)"
        raise BackendError("there is no such device", expected=expected, got=f"{self.name}:{index}", fix=fix)


# The kernels without which there is no device: making, copying and resizing tensors, and views ----------------------

#: Ops that change sizes, strides or the storage of a tensor and no data: the CPU's kernels do for any memory.
METADATA = (
    "as_strided view view.dtype unfold _reshape_alias "
    "set_.source_Storage set_.source_Storage_storage_offset set_.source_Tensor"
).split()

#: Ops that make, copy and resize tensors: their kernels are the methods of `Essentials` of the same names.
ESSENTIAL = (
    "empty.memory_format empty_strided _copy_from _copy_from_and_resize resize_ set_ _local_scalar_dense _to_copy "
    "_has_compatible_shallow_copy_type record_stream"
).split()
#: Ops of pinned memory: their kernels are the methods of `PinnedMemory`.
PINNING = ("_pin_memory", "is_pinned")
#: All that have to be there.
NEEDED_OPS = (*METADATA, *ESSENTIAL, *PINNING)

_TO_COPY: Any = _compat.find_op("aten::_to_copy")


class Essentials:
    """Kernels over the memory of a device, named after their ops."""

    def __init__(self, memory: Memory, user_kernels: collections.Counter[str]) -> None:
        self.memory = memory
        self.user_kernels = user_kernels  #: how many there are now, by the name of an op without overload

    def _index(self, device: torch.device | None) -> int:
        if device is None or device.index is None:
            return self.memory.current.index
        return self.memory.check_index(device.index)

    def empty(self, size: Sequence[int], *, memory_format: Any = None, **options: Any) -> Tensor:
        strides, step = [1] * len(size), 1
        for dim in range(len(size) - 1, -1, -1):
            strides[dim] = step
            step *= max(size[dim], 1)
        if memory_format not in (None, torch.contiguous_format):
            strides = list(torch.empty(size, device="meta", memory_format=memory_format).stride())
        return self.empty_strided(size, strides, **options)

    def empty_strided(
        self,
        size: Sequence[int],
        stride: Sequence[int],
        *,
        dtype: torch.dtype | None = None,
        layout: torch.layout | None = None,
        device: torch.device | None = None,
        pin_memory: bool | None = None,
    ) -> Tensor:
        name = self.memory.name
        if layout not in (None, torch.strided):
            problem = f"a device written in Python holds strided tensors: not layout {layout}"
            fix = f"keep it on the CPU, or call .to_dense() before .to({name!r})"
            raise UnsupportedError(problem, op=name, fix=fix)
        if pin_memory:
            raise self.memory.cannot_pin(name)
        return self.memory.empty(size, stride, dtype or torch.get_default_dtype(), self._index(device))

    def _copy_from(self, source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
        return self.memory.copy(source, target, non_blocking)

    def _copy_from_and_resize(self, source: Tensor, target: Tensor) -> Tensor:
        return self._copy_from(source, target.resize_(source.shape))

    def resize_(
        self, tensor: Tensor, size: Sequence[int], *, memory_format: torch.memory_format | None = None
    ) -> Tensor:
        layout = memory_format if memory_format is not torch.preserve_format else None
        plain = torch.empty(size, device="meta", memory_format=layout or torch.contiguous_format)
        needed = (int(tensor.storage_offset()) + plain.numel()) * tensor.element_size()
        storage, index = tensor.untyped_storage(), tensor.get_device()
        if plain.numel() and needed > storage.nbytes():
            # Storage does not grow in place from Python: a new one, with the old bytes at its start.
            grown = self.memory.empty((needed,), (1,), torch.uint8, index)
            self.memory.copy(self.memory.over(storage, index), grown[: storage.nbytes()])
            storage = grown.untyped_storage()
        tensor.set_(storage, tensor.storage_offset(), plain.size(), plain.stride())
        return tensor

    def set_(self, tensor: Tensor) -> Tensor:
        nothing = self.memory.empty((0,), (1,), tensor.dtype, tensor.get_device())
        return tensor.set_(nothing)  # type: ignore[no-any-return, call-overload]

    def _local_scalar_dense(self, tensor: Tensor) -> Any:
        return self.memory.lend(tensor).item()

    def _to_copy(self, tensor: Tensor, *, non_blocking: bool = False, **options: Any) -> Tensor:
        """``x.to(...)``: a copy made on the CPU, unless making and copying tensors has kernels of the user.

        torch's own is not told of `non_blocking` for the CPU: it would ask the device's C++ part for pinned memory.
        """
        to = options.get("device") or tensor.device
        is_here = to.type == self.memory.name
        is_plain = (
            (is_here or to.type == "cpu")
            and tensor.layout is torch.strided
            and options.get("layout") in (None, torch.strided)
            and not options.get("pin_memory")
        )
        users = self.user_kernels
        if non_blocking and not is_here and is_plain and self.memory.copies:
            like = {"dtype": options.get("dtype"), "memory_format": options.get("memory_format")}
            host = torch.empty_like(tensor, device="cpu", **like)
            return self.memory.copy(tensor, host, True, is_ours=True)
        if not is_plain or self.memory.allocate or users["aten::_copy_from"] or users["aten::empty_strided"]:
            non_blocking = non_blocking and is_here
            return _TO_COPY.redispatch(_compat.CPU_KEYS, tensor, non_blocking=non_blocking, **options)  # type: ignore[no-any-return]
        host = self.memory.lend(tensor)
        memory_format = options.get("memory_format") or torch.preserve_format
        copy = host.to(options.get("dtype") or host.dtype, copy=True, memory_format=memory_format)
        return self.memory.adopt(copy, self._index(to)) if is_here else copy

    def _has_compatible_shallow_copy_type(self, tensor: Tensor, other: Tensor) -> bool:
        """May ``tensor.data = other`` be? `nn.Module.to` asks, and makes new parameters where the answer is no."""
        return tensor.layout is torch.strided and other.layout is torch.strided

    def record_stream(self, tensor: Tensor, stream: torch.Stream) -> None:
        self.memory.record_stream(tensor, stream)


class PinnedMemory:
    """Pinned CPU memory, in name only: a copy that is remembered, so that data loaders work as for other devices.

    torch asks the hooks of the device for it, and those that Python can register have none.
    """

    def __init__(self, name: str, refusal: str | None) -> None:
        self.name = name
        self.refusal = refusal  #: the fix to name, where nothing is pinned
        self._pinned: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def _pin_memory(self, tensor: Tensor, device: torch.device | None = None) -> Tensor:
        if self.refusal is not None:
            raise UnsupportedError(f"tensors on {tensor.device} cannot be pinned", op=self.name, fix=self.refusal)
        copy = tensor.clone(memory_format=torch.preserve_format)
        key = _torch.memory.storage_id(copy)
        self._pinned[key] = weakref.ref(copy.untyped_storage(), lambda _: self._pinned.pop(key, None))
        return copy

    def is_pinned(self, tensor: Tensor, device: torch.device | None = None) -> bool:
        return self.refusal is None and _torch.memory.storage_id(tensor) in self._pinned
