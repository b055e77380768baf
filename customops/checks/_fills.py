"""Tensors in the middle of larger storages, so that what lies around them can be watched.

A kernel that reads past a tensor, or between its rows where it is a slice, then gives another result when something
else lies there; one that writes there leaves a trace.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from customops import _torch
from customops.checks import _memory
from customops.checks._trial import Trial

_PADDING = 1024  #: bytes before and after the elements; a multiple of the alignment of allocators


class Surrounded:
    """A call with each tensor, or those that `is_put` picks, in a storage of its own, amid bytes of one value.

    Attributes:
        trial: the call.
    """

    def __init__(
        self, trial: Trial, byte: int, is_put: Callable[[str, torch.Tensor], bool] = lambda _name, _tensor: True
    ) -> None:
        self._byte, self._is_put = byte, is_put
        self._bases: list[tuple[str, torch.Tensor, torch.Tensor]] = []  # name, bytes, where elements are
        self.trial = trial.map_tensors(self._put)

    def _put(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not self._is_put(name, tensor):
            return tensor
        width = tensor.element_size()
        start, end = _memory.byte_range(tensor)
        base = torch.full((end - start + 2 * _PADDING,), self._byte, dtype=torch.uint8, device=tensor.device)
        offset = _PADDING // width + tensor.storage_offset() % 16  # as little aligned as it was
        inside = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        inside.set_(base.untyped_storage(), offset, tuple(tensor.shape), tensor.stride())
        taken = torch.zeros(base.shape[0] // width, dtype=torch.bool, device=tensor.device)
        taken[torch.arange(len(taken)).as_strided(tensor.shape, tensor.stride(), offset)] = True
        whole = base[: len(taken) * width].view(len(taken), width)
        elements = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        elements.set_(tensor.untyped_storage(), tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        _memory.bits(inside).copy_(_memory.bits(elements))
        self._bases.append((name, whole, taken))
        return inside

    def written_outside(self) -> tuple[str, int] | None:
        """The name of an argument around which something was written, and how many elements that changed."""
        for name, whole, taken in self._bases:
            count = int((whole[~taken] != self._byte).any(-1).sum())
            if count:
                return name, count
        return None


def can_surround(trial: Trial) -> bool:
    """Have the tensors a storage each, and elements that can be copied one by one?"""
    distinct = trial.distinct
    alone = not any(_memory.share_storage(one, other) for i, one in enumerate(distinct) for other in distinct[:i])
    return (
        bool(distinct) and alone and not any(_memory.overlaps_itself(t) or t.is_conj() or t.is_neg() for t in distinct)
    )


@contextlib.contextmanager
def deterministic(*, fill: bool) -> Iterator[None]:
    """Deterministic algorithms, where there are any; with `fill`, torch fills new memory with NaN, or large numbers."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    filling = settings.fill_uninitialized_memory
    _torch.thread_state.set_deterministic(True, True)
    settings.fill_uninitialized_memory = fill
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = filling
        _torch.thread_state.set_deterministic(*before)


@contextlib.contextmanager
def is_filled() -> Iterator[None]:
    """New memory of torch, and of numpy where it is loaded, is filled with NaN, or with large numbers."""
    numpy: Any = sys.modules.get("numpy")
    names = [(numpy, name) for name in ("empty", "empty_like")] if numpy is not None else []
    with deterministic(fill=True), _replaced(names, functools.partial(_filling, numpy)):
        yield


def _filling(numpy: Any, make: Any) -> Any:
    def empty(*args: Any, **kwargs: Any) -> Any:
        array = make(*args, **kwargs)
        if array.dtype.kind in "fc":
            array.fill(float("nan"))
        elif array.dtype.kind in "iu":
            array.fill(numpy.iinfo(array.dtype).max)
        return array

    return empty


@contextlib.contextmanager
def _replaced(names: Sequence[tuple[Any, str]], wrap: Callable[[Any], Any]) -> Iterator[None]:
    """The functions of these names of modules and classes are wrapped."""
    before = [(owner, name, getattr(owner, name)) for owner, name in names]
    try:
        for owner, name, make in before:
            setattr(owner, name, wrap(make))
        yield
    finally:
        for owner, name, make in before:
            setattr(owner, name, make)


#: What `marked` fills new memory with; integers get it rounded.
MARK = 77.25

_PYTHON_NAMES = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
)


def marked() -> contextlib.AbstractContextManager[None]:
    """What Python code gets of the functions of torch that return new memory is filled with `MARK`."""
    return _replaced(_PYTHON_NAMES, _marking)


def _marking(make: Any) -> Any:
    def empty(*args: Any, **kwargs: Any) -> Any:
        tensor = make(*args, **kwargs)
        with torch.no_grad():
            return tensor.fill_(MARK if tensor.is_floating_point() or tensor.is_complex() else int(MARK))

    return empty
