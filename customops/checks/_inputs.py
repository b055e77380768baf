"""What every run of an operator starts from: its own copies of the inputs, and the same random seed.

The user's tensors are never handed to the operator. A copy keeps what a kernel can see of a tensor: sizes, strides,
alignment, memory shared with another input, whether it requires grad and whether it is a leaf.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import warnings
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

import torch

from customops import _torch
from customops.checks._memory import byte_range, is_addressable

_T = TypeVar("_T")

#: Copies start at a multiple of this many bytes from the original's storage, as CUDA's allocator aligns.
_ALIGNMENT = 512
_SEED = 0

_lock = threading.RLock()


def alone() -> contextlib.AbstractContextManager[Any]:
    """One thread at a time: checks change settings and generators of the whole program, and put them back."""
    return _lock


_is_fork = False


def has_threads() -> bool:
    """May torch compute in several threads? In a fork of a process that did, it would wait for those for ever."""
    return not _is_fork


def _after_fork() -> None:
    global _lock, _is_fork
    _lock = threading.RLock()  # it may be held by a thread that this process does not have
    _is_fork = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors in nested lists, tuples and dicts."""
    return [leaf for leaf in _torch.trees.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def copy_tensors(tree: _T, *, leaves: bool = False, bare: bool = False, unseen: bool = False) -> _T:
    """Copy the tensors in nested lists, tuples and dicts; all become leaves of autograd if `leaves`.

    Between their elements, the copies have what is in the original memory, or zeros if `bare`. Copies on the CPU are at
    addresses that no tensor had before if `unseen`.
    """
    originals = {id(tensor): tensor for tensor in tensors_in(tree)}
    if not (bare or unseen) and _are_simple(originals.values(), leaves=leaves):
        with torch.no_grad():
            copies = {key: x.clone().requires_grad_(x.requires_grad) for key, x in originals.items()}
    else:
        groups: dict[int, list[torch.Tensor]] = {}
        for tensor in filter(is_plain, originals.values()):
            groups.setdefault(_torch.memory.storage_id(tensor), []).append(tensor)
        blocks = {storage: _Block(group, bare=bare, unseen=unseen) for storage, group in groups.items()}
        copies = {key: _copy(tensor, blocks, leaf=leaves or tensor.is_leaf) for key, tensor in originals.items()}
    copied: _T = _torch.trees.tree_map(lambda value: copies.get(id(value), value), tree)
    return copied


def _are_simple(tensors: Collection[torch.Tensor], *, leaves: bool) -> bool:
    """Is a clone of each all that there is to copy? So it is of contiguous ones that have a storage to themselves."""
    if not all(map(is_plain, tensors)) or len({*map(_torch.memory.storage_id, tensors)}) != len(tensors):
        return False
    for tensor in tensors:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not (leaves or tensor.is_leaf):
            return False
        if not is_ordinary(tensor) or tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
            return False
        if torch.cuda.is_available() and tensor.is_pinned():
            return False
    return True


class _Block:
    """A copy of the bytes that some tensors use of the storage they share, or would use without strides of 0."""

    def __init__(self, tensors: list[torch.Tensor], *, bare: bool, unseen: bool) -> None:
        starts, ends = [], []
        for tensor in tensors:
            start, end = byte_range(tensor)
            dense = start + tensor.numel() * tensor.element_size()
            starts.append(start)
            ends.append(max(end, min(dense, tensor.untyped_storage().nbytes())))
        self.start = min(starts) // _ALIGNMENT * _ALIGNMENT
        size = max(ends) - self.start
        with torch.no_grad():
            original = torch.empty(0, dtype=torch.uint8, device=tensors[0].device)
            copy = original.set_(tensors[0].untyped_storage(), self.start, (size,), (1,))
            copy = _unseen(size).copy_(copy) if unseen and copy.device.type == "cpu" and size else copy.clone()
            # Kernels that read host memory from a device insist on it. (Without CUDA the question can fail.)
            if torch.cuda.is_available() and tensors[0].is_pinned():
                copy = copy.pin_memory()
            self.storage = copy.untyped_storage()
            if bare:
                copy.zero_()
                for tensor in tensors:
                    without_repeats(self.copy_of(tensor)).copy_(without_repeats(tensor))

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        offset = tensor.storage_offset() - self.start // tensor.element_size()
        copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        copy.set_(self.storage, offset, tuple(tensor.shape), tensor.stride())
        return copy.conj() if tensor.is_conj() else copy


_REGION = 16 * 1024 * 1024  # a page costs memory from the first write to it
_region, _used = mmap.mmap(-1, 1), 1  # checks take turns: see `alone`


def _unseen(size: int) -> torch.Tensor:
    """Memory at new addresses. (At those of freed memory, a cache by address takes a tensor for an earlier one.)"""
    global _region, _used
    if _used + size > len(_region):
        _region, _used = mmap.mmap(-1, max(size, _REGION)), 0
    start, _used = _used, _used + -(-size // _ALIGNMENT) * _ALIGNMENT
    return torch.frombuffer(_region, dtype=torch.uint8, offset=start, count=size)


def without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """Without the dimensions that repeat elements, in which torch refuses to write."""
    for dim, stride in enumerate(tensor.stride()):
        tensor = tensor.narrow(dim, 0, 1) if stride == 0 and tensor.shape[dim] else tensor
    return tensor


class _Computed(torch.autograd.Function):
    """Makes a tensor that is no leaf: in-place operators refuse leaves that require grad."""

    @staticmethod
    def forward(_ctx: Any, _anchor: torch.Tensor, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        return make()

    @staticmethod
    def backward(_ctx: Any, *_grads: torch.Tensor) -> tuple[None, None]:
        return None, None


def is_plain(tensor: torch.Tensor) -> bool:
    """Is there nothing more to the tensor, for a kernel, than the elements in its storage?"""
    is_wrapper = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return not (is_wrapper or tensor.is_quantized or tensor.is_neg()) and is_addressable(tensor)


def is_ordinary(tensor: torch.Tensor) -> bool:
    """Is a strided tensor contiguous, at the start of its storage, and no lazy view?"""
    return tensor.is_contiguous() and tensor.storage_offset() == 0 and not (tensor.is_conj() or tensor.is_neg())


def as_ordinary(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def _copy(tensor: torch.Tensor, blocks: dict[int, _Block], *, leaf: bool) -> torch.Tensor:
    def make() -> torch.Tensor:
        if is_plain(tensor):
            return blocks[_torch.memory.storage_id(tensor)].copy_of(tensor)
        try:
            return tensor.detach().clone()
        except NotImplementedError:
            # A backend that can compute but not copy: better to try the operator on the original than not at all.
            return tensor

    if leaf or not tensor.requires_grad:
        with torch.no_grad():
            return make().requires_grad_(tensor.requires_grad)
    with torch.enable_grad():
        anchor = torch.zeros((), requires_grad=True)
        computed: torch.Tensor = _Computed.apply(anchor, make)  # type: ignore[no-untyped-call]
        return computed


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Leave out warnings: those of calls that were made up say nothing to the user."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def seeded(tree: Any) -> Iterator[None]:
    """Fix the seeds of the CPU and of the devices in `tree`; generators, those in `tree` too, are put back."""
    leaves, devices = _torch.trees.tree_leaves(tree), set()
    saved = [(torch.default_generator, torch.default_generator.get_state())]
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            devices.add(leaf.device)
        elif type(leaf) is torch.device:
            devices.add(leaf)
        elif isinstance(leaf, torch.Generator):
            saved.append((leaf, leaf.get_state()))
    torch.default_generator.manual_seed(_SEED)
    try:
        with contextlib.ExitStack() as stack:
            for device in devices:
                if device.type not in ("cpu", "meta"):
                    _seed(device, stack)
            yield
    finally:
        for generator, state in saved:
            generator.set_state(state)


def _seed(device: torch.device, stack: contextlib.ExitStack) -> None:
    module = torch.get_device_module(device.type)
    if not hasattr(module, "get_rng_state"):
        return  # a device without random numbers
    # MPS has one device, and its functions take no index.
    where = () if device.type == "mps" else (device.index or 0,)
    stack.callback(module.set_rng_state, module.get_rng_state(*where), *where)
    with module.device(*where) if where and hasattr(module, "device") else contextlib.nullcontext():
        module.manual_seed(_SEED)
