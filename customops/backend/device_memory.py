"""Memory that is not the host's: hooks of the user allocate it and copy it, and nothing else reads or writes it.

A tensor of the device has the number that `DeviceMemory.allocate` returned in the place of an address. Torch computes
sizes, strides and offsets with it, and never looks there. What runs on the CPU runs on copies (`Loan`).
"""

from __future__ import annotations

import abc
import contextlib
import ctypes
import functools
import mmap
import operator
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from customops import _torch
from customops._places import users_call
from customops.backend import _compat
from customops.backend.errors import BackendError, WorkError
from customops.backend.memory import Memory, bytes_of_host
from customops.backend.streams import Streams, Work
from customops.errors import UnsupportedError

# The hooks ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """Bytes of the device: `nbytes` of them, from `offset` on in what `allocate` returned as `handle`.

    The handle of a tensor whose storage is empty is 0.
    """

    handle: int
    offset: int
    nbytes: int
    index: int  #: of the device


class DeviceMemory(abc.ABC):
    """The memory of a device, for ``register_backend(..., memory=)``: a subclass defines the first four methods.

    ``host`` is a contiguous CPU tensor of uint8, as long as the block. A copy is over when its method returns.
    """

    @abc.abstractmethod
    def allocate(self, nbytes: int, index: int) -> int:
        """New memory, as a number above 0: an address, or whatever the other methods understand."""

    @abc.abstractmethod
    def free(self, handle: int, nbytes: int, index: int) -> None:
        """No tensor uses the memory any longer, and no stream."""

    @abc.abstractmethod
    def copy_to_host(self, source: Block, host: Tensor) -> None:
        """Copy to a contiguous CPU tensor of ``source.nbytes`` uint8: ``host.data_ptr()``, or ``host.numpy()``."""

    @abc.abstractmethod
    def copy_from_host(self, host: Tensor, target: Block) -> None:
        """Copy from a contiguous CPU tensor of ``target.nbytes`` uint8."""

    def copy_on_device(self, source: Block, target: Block) -> None:
        """From one block to another, which do not overlap; of two devices, perhaps."""
        host = torch.empty(source.nbytes, dtype=torch.uint8, device="cpu")
        self.copy_to_host(source, host)
        self.copy_from_host(host, target)

    def access(self, block: Block) -> AbstractContextManager[object]:
        """Context manager in which the host may read and write at the address ``handle``; for memory that it can."""
        problem = "the host cannot read or write this memory"
        fix = "x.cpu() is a copy; a kernel asks backend.handle(x) where a tensor lies"
        raise UnsupportedError(problem, got=f"memory of {type(self).__name__}", fix=fix)

    def info(self, index: int) -> tuple[int, int]:
        """The bytes that are free, and all."""
        problem = f"{type(self).__name__} does not say how much memory a device has"
        raise UnsupportedError(problem, fix="define info(index), which returns (free, total)")

    def empty_cache(self) -> None:  # noqa: B027 (it may be left out)
        """Give back what is kept for later."""


class ProtectedMemory(DeviceMemory):
    """Pages of the host without access, for tests: what reads or writes them past the hooks ends the process (SIGSEGV).

    Only the copies, and kernels by `Backend.host` and `Backend.numpy`, open a block, and close it when they are over.
    """

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mprotect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self._protect: Any = libc.mprotect
        self._pages: dict[int, tuple[mmap.mmap, int]] = {}  #: address -> pages, how often they are open
        self._lock = threading.Lock()

    def allocate(self, nbytes: int, index: int) -> int:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # a fork has its own
        address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        self._pages[address] = pages, 0
        self._allow(address, 0)
        return address

    def free(self, handle: int, nbytes: int, index: int) -> None:
        self._pages.pop(handle)[0].close()

    def copy_to_host(self, source: Block, host: Tensor) -> None:
        with self.access(source):
            ctypes.memmove(host.data_ptr(), source.handle + source.offset, source.nbytes)

    def copy_from_host(self, host: Tensor, target: Block) -> None:
        with self.access(target):
            ctypes.memmove(target.handle + target.offset, host.data_ptr(), target.nbytes)

    def copy_on_device(self, source: Block, target: Block) -> None:
        with self.access(source), self.access(target):
            ctypes.memmove(target.handle + target.offset, source.handle + source.offset, target.nbytes)

    @contextlib.contextmanager
    def access(self, block: Block) -> Iterator[None]:
        self._open(block.handle, 1)
        try:
            yield
        finally:
            self._open(block.handle, -1)

    def info(self, index: int) -> tuple[int, int]:
        return bytes_of_host()

    def _open(self, address: int, step: int) -> None:
        with self._lock:
            pages, before = self._pages[address]
            self._pages[address] = pages, before + step
            if not before or not before + step:
                self._allow(address, mmap.PROT_READ | mmap.PROT_WRITE if not before else 0)

    def _allow(self, address: int, access: int) -> None:
        if self._protect(address, len(self._pages[address][0]), access):
            raise OSError(ctypes.get_errno(), f"mprotect: {os.strerror(ctypes.get_errno())}")


# Tensors in such memory -----------------------------------------------------------------------------------------------

_AS_STRIDED: Any = _compat.kernel_of_the_cpu(_compat.find_op("aten::as_strided"))


class HandleMemory(Memory):
    """Makes tensors in memory behind hooks, and copies them, in the order of the current stream."""

    copies = True

    def __init__(self, device_count: int, hooks: DeviceMemory, streams: Streams) -> None:
        super().__init__(streams.name, device_count, streams.here, hooks.allocate)
        self.hooks = hooks
        self.streams = streams
        self._users: dict[int, set[Any]] = {}  #: handle -> the streams that may use it when its last tensor is gone

    def empty(self, size: Iterable[int], stride: Iterable[int], dtype: torch.dtype, index: int) -> Tensor:
        like = torch.empty_strided(size, stride, dtype=dtype, device="meta")  # type: ignore[arg-type]
        nbytes = like.untyped_storage().nbytes()
        if not nbytes:
            return super().adopt(torch.empty_strided(size, stride, dtype=dtype, device="cpu"), index)  # type: ignore[arg-type]
        handle = self._handle(self.hooks.allocate(nbytes, index))
        # A byte of the CPU, whose tensor lives as long as the memory: its end is the end of the memory.
        owner = torch.empty(1, dtype=dtype, device="cpu").expand(nbytes // like.element_size())
        try:
            flat = _compat.at_handle(owner, handle, index)
        except (BufferError, RuntimeError) as error:  # DLPack knows no such dtype
            self.hooks.free(handle, nbytes, index)
            raise self.cannot_hold(owner) from error
        self._users[handle] = {self.streams.current(index)} if self.streams.asynchronous else set()
        self._track(owner, index, nbytes, handle)
        if flat.dtype is not dtype:
            raise self.cannot_hold(owner)
        return flat if like.ndim == 1 and like.is_contiguous() else _AS_STRIDED(flat, like.shape, like.stride())

    def _handle(self, given: Any) -> int:
        """What `allocate` returned, as an int; NumPy has others."""
        handle = operator.index(given) if hasattr(given, "__index__") and not isinstance(given, bool) else 0
        if not 0 < handle < 2**63 or handle in self._users:
            problem, got = "allocate returned something else than a handle", repr(given)
            expected = "a number above 0 and below 2**63, of memory that is not in use"
            raise BackendError(problem, op=self.name, expected=expected, got=got)
        return handle

    def adopt(self, host: Tensor, index: int, owner: Tensor | None = None) -> Tensor:
        return self.place(host, index)

    def place(self, host: Tensor, index: int) -> Tensor:
        plain = self.plain(host)
        if not plain.is_cpu:
            raise self.cannot_hold(host)
        tensor = self.empty(plain.shape, plain.stride(), plain.dtype, index)
        self._move(plain, tensor)
        return tensor

    def _forget(self, reference: weakref.ref[Tensor]) -> None:
        _, tally, nbytes, handle = self._live.pop(id(reference))
        tally.freed += nbytes
        if not handle:
            return
        index = self._tallies.index(tally)
        pending = [stream for stream in self._users.pop(handle) if not stream.query()]
        if not pending:
            self.hooks.free(handle, nbytes, index)
            return
        for other in pending[1:]:
            pending[0].enqueue(other.record_event().synchronize)
        pending[0].enqueue(functools.partial(self.hooks.free, handle, nbytes, index))

    def record_stream(self, tensor: Tensor, stream: torch.Stream) -> None:
        users = self._users.get(tensor.untyped_storage().data_ptr())
        if users is not None and self.streams.asynchronous:
            users.add(self.streams.find(stream))

    def block(self, tensor: Tensor) -> Block:
        """Where the bytes of a tensor lie, from its first to its last one."""
        first, end = _extent(tensor)
        return Block(tensor.untyped_storage().data_ptr(), first, end - first, tensor.get_device())

    # Copying ----------------------------------------------------------------------------------------------------

    def _move(self, source: Tensor, target: Tensor, *, wait: bool = True) -> None:
        """Copy the bytes of a dense tensor to one that lies in memory as it does. One of them may be on the CPU."""
        if source.numel():
            hook: Callable[..., None] = self.hooks.copy_from_host if source.is_cpu else self.hooks.copy_on_device
            hook = self.hooks.copy_to_host if target.is_cpu else hook
            ends = [_bytes_of(end) if end.is_cpu else self.block(end) for end in (source, target)]
            stream = self.streams.current((source if target.is_cpu else target).get_device())
            work: Work = functools.partial(_copied, hook, *ends)
            work = work if wait else self.named(work, getattr(hook, "__name__", None))
            stream.submit(work, keep=(source, target), wait=wait)

    def copy(self, source: Tensor, target: Tensor, non_blocking: bool = False, *, is_ours: bool = False) -> Tensor:
        """Return `target`, with the values of `source`. To copy without blocking needs pinned memory, or ours."""
        is_dense, is_plain = _is_dense(target), not target.is_conj() and not target.is_neg()
        if source.is_cpu and is_dense and is_plain and not _alike(source, target):
            staged = torch.empty_strided(target.shape, target.stride(), dtype=target.dtype, device="cpu")
            source, is_ours = staged.copy_(source), True
        if is_dense and _alike(source, target):
            host = next((each for each in (source, target) if each.is_cpu), None)
            if host is not None or not self.overlap((target,), (source,)):
                is_later = non_blocking and self.streams.asynchronous
                wait = host is not None and not (is_later and (is_ours or host.is_pinned()))
                self._move(source, target, wait=wait)
                return target
        loan = Loan(self, [tensor for tensor in (source, target) if not tensor.is_cpu])
        to, from_ = loan.hosts.get(id(target), target), loan.hosts.get(id(source), source)
        to.copy_(from_)
        if to is not target:
            loan.give_back([target])
        return target

    def lend(self, tensor: Tensor) -> Tensor:
        """Return a copy, to read."""
        return tensor if tensor.is_cpu else Loan(self, [tensor]).hosts[id(tensor)]

    # Access by the host -----------------------------------------------------------------------------------------

    def share(self, tensor: Tensor) -> Tensor:
        """A CPU tensor over the same memory, until the innermost scope of this thread ends."""
        block = self.block(tensor) if tensor.device.type == self.name else None
        if block is None or not block.handle:
            return _compat.as_cpu(tensor)
        access = self.hooks.access(block)
        if not self.current.scopes:
            problem = "memory of the device is open to the host in kernels alone"
            fix = "within `with backend.access():`; or x.cpu(), which is a copy"
            raise UnsupportedError(problem, op=self.name, fix=fix)
        self.streams.current(block.index).synchronize()
        self.current.scopes[-1].stack.enter_context(access)
        return _compat.as_cpu(tensor)

    @contextlib.contextmanager
    def scope(self, op: str | None = None, caller: types.FrameType | None = None) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            self.current.scopes.append(_Scope(stack, op, caller))
            try:
                yield
            finally:
                self.current.scopes.pop()

    def scoped(self, fn: Callable[..., Any], op: str | None = None) -> Callable[..., Any]:
        @functools.wraps(fn)
        def in_scope(*args: Any, **kwargs: Any) -> Any:
            with self.scope(op, sys._getframe(1)):
                return fn(*args, **kwargs)

        return in_scope

    def named(self, work: Work, op: str | None = None) -> Work:
        """Work whose error, which whoever waits for the stream gets, names the op that it is for, and who called it."""
        if not self.streams.asynchronous:
            return work
        scope = self.current.scopes[-1] if self.current.scopes else _Scope()
        op, place = op or scope.op, users_call(scope.caller)

        def run() -> None:
            try:
                work()
            except WorkError:
                raise
            except Exception as error:
                problem = f"work on a stream raised {type(error).__name__}: {error}"
                raise WorkError(problem, op=op, where=place) from error

        return run

    def info(self, index: int) -> tuple[int, int]:
        found: Any = self.hooks.info(index)
        numbers = [each for each in found if hasattr(each, "__index__")] if isinstance(found, (tuple, list)) else []
        if len(numbers) != 2 or not 0 <= numbers[0] <= numbers[1]:
            problem, fix = "info returned something else than two numbers of bytes", "return free, total"
            raise BackendError(problem, op=self.name, expected="(free, total)", got=repr(found), fix=fix)
        return operator.index(numbers[0]), operator.index(numbers[1])

    def empty_cache(self) -> None:
        self.hooks.empty_cache()


def _copied(hook: Callable[..., object], source: Any, target: Any) -> None:
    """Call a hook that copies. One that returns the bytes has copied nothing."""
    result = hook(source, target)
    if result is not None:
        name = getattr(hook, "__name__", "the hook")
        problem = f"{name} returned something, and is to copy in place"
        fix = "write into the tensor or block that it gets, and return None"
        raise BackendError(problem, op=name, expected="None", got=type(result).__name__, fix=fix)


@dataclass(slots=True)
class _Scope:
    """A call that has access to memory of the device."""

    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    op: str | None = None  #: of a kernel
    caller: types.FrameType | None = None


class Loan:
    """Copies of tensors of the device on the CPU. Those that share memory there do so here, too."""

    def __init__(self, memory: HandleMemory, tensors: Sequence[Tensor]) -> None:
        self.memory = memory
        self.hosts: dict[int, Tensor] = {}  #: by the id of the tensor
        self.shifts: dict[int, int] = {}  #: by the same, by how many elements its storage starts later here
        spans: dict[int, tuple[Tensor, int, int]] = {}  # storage -> a tensor over it, first byte, end
        for tensor in tensors:
            if tensor.device.type != memory.name:
                raise BufferError(f"memory of {tensor.device}")
            key, (first, end) = _torch.memory.storage_id(tensor), _extent(tensor)
            _, low, high = spans.get(key, (tensor, first, end))
            spans[key] = tensor, min(low, first), max(high, end)
        copies = {}
        for key, (tensor, low, high) in spans.items():
            low -= low % 16  # as aligned as there
            # A storage that does not grow, as one that shares memory would not: see `FallbackCall`.
            host = torch.from_dlpack(torch.empty(high - low, dtype=torch.uint8, device="cpu"))  # type: ignore[attr-defined]
            copies[key] = host.untyped_storage(), low
            if high > low:
                there = memory.over(tensor.untyped_storage(), tensor.get_device())[low:high]
                memory._move(there, host)
        for tensor in tensors:
            storage, low = copies[_torch.memory.storage_id(tensor)]
            self.shifts[id(tensor)] = shift = low // tensor.element_size()
            host = torch.empty(0, dtype=tensor.dtype, device="cpu")
            host.set_(storage, tensor.storage_offset() - shift, tensor.size(), tensor.stride())
            self.hosts[id(tensor)] = memory.with_bits(host, tensor)

    def give_back(self, tensors: Iterable[Tensor]) -> None:
        """Copy what was written into these to the device. They lie where they lay when they were lent."""
        for tensor in tensors:
            host = torch.empty(0, dtype=tensor.dtype, device="cpu")
            offset = tensor.storage_offset() - self.shifts[id(tensor)]
            host.set_(self.hosts[id(tensor)].untyped_storage(), offset, tensor.size(), tensor.stride())
            self.memory._move(host, tensor)


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and the one after the last."""
    width = tensor.element_size()
    first = int(tensor.storage_offset()) * width
    if not tensor.numel():
        return first, first
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    end = first + (last + 1) * width
    if end > tensor.untyped_storage().nbytes():
        raise _compat.emptied(tensor)
    return first, end


def _bytes_of(host: Tensor) -> Tensor:
    """The bytes of a CPU tensor, from its first to its last one."""
    first, end = _extent(host)
    flat = torch.empty(0, dtype=torch.uint8, device="cpu")
    return flat.set_(host.untyped_storage(), first, (end - first,), (1,))


def _alike(one: Tensor, other: Tensor) -> bool:
    """Are these the same but for their values?"""
    of_one, of_other = ((each.dtype, each.shape, each.stride(), each.is_conj(), each.is_neg()) for each in (one, other))
    return of_one == of_other


def _is_dense(tensor: Tensor) -> bool:
    """Does each byte from the first to the last one belong to one element?"""
    expected = 1
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if step != expected:
                return False
            expected *= size
    return True
