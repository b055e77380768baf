"""Tensors in the middle of larger storages, so that what lies around them can be watched.

A kernel that reads past a tensor, or between its rows where it is a slice, then gives another result when something
else lies there; one that writes there leaves a trace.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from customops import _torch
from customops.checks import _memory
from customops.checks._trial import Trial

_PADDING = 1024  #: bytes before and after the elements; a multiple of the alignment of allocators


def surrounded(
    trial: Trial, byte: int, is_put: Callable[[str, torch.Tensor], bool] = lambda _name, _tensor: True
) -> tuple[Trial, Callable[[], tuple[str, int] | None]]:
    """A call with each tensor, or those that `is_put` picks, in a storage of its own, amid bytes of one value.

    Returns:
        The call; and a function that says around which argument something was written since, and how many elements that
        changed.
    """
    bases: list[tuple[str, torch.Tensor, torch.Tensor]] = []  # name, bytes, where elements are

    def put(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not is_put(name, tensor):
            return tensor
        width = tensor.element_size()
        start, end = _memory.byte_range(tensor)
        base = torch.full((end - start + 2 * _PADDING,), byte, dtype=torch.uint8, device=tensor.device)
        offset = _PADDING // width + tensor.storage_offset() % 16  # as little aligned as it was
        inside = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        inside.set_(base.untyped_storage(), offset, tuple(tensor.shape), tensor.stride())
        taken = torch.zeros(base.shape[0] // width, dtype=torch.bool, device=tensor.device)
        taken[torch.arange(len(taken)).as_strided(tensor.shape, tensor.stride(), offset)] = True
        _memory.bits(inside).copy_(_memory.bits(tensor))
        bases.append((name, base[: len(taken) * width].view(len(taken), width), taken))
        return inside

    def written_outside() -> tuple[str, int] | None:
        for name, whole, taken in bases:
            count = int((whole[~taken] != byte).any(-1).sum())
            if count:
                return name, count
        return None

    return trial.map_tensors(put), written_outside


def can_surround(trial: Trial) -> bool:
    """Have the tensors a storage each, and elements that can be copied one by one?"""
    shared = any(_memory.share_storage(one, other) for one, other in itertools.combinations(trial.distinct, 2))
    are_lazy = any(_memory.overlaps_itself(t) or t.is_conj() or t.is_neg() for t in trial.distinct)
    return bool(trial.distinct) and not shared and not are_lazy


@contextlib.contextmanager
def deterministic(*, fill: bool) -> Iterator[None]:
    """Deterministic algorithms, where there are any; with `fill`, torch fills new memory with NaN, or large numbers."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    filling = settings.fill_uninitialized_memory
    _torch.dispatcher.set_deterministic(True, True)
    settings.fill_uninitialized_memory = fill
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = filling
        _torch.dispatcher.set_deterministic(*before)


@contextlib.contextmanager
def is_filled() -> Iterator[None]:
    """New memory of torch, and of numpy where it is loaded, is filled with NaN, or with large numbers."""
    numpy: Any = sys.modules.get("numpy")

    def fill(array: Any) -> None:
        if array.dtype.kind in "fc":
            array.fill(float("nan"))
        elif array.dtype.kind in "iu":
            array.fill(numpy.iinfo(array.dtype).max)

    names = [(numpy, name) for name in ("empty", "empty_like")] if numpy is not None else []
    with deterministic(fill=True), _filling(names, fill):
        yield


@contextlib.contextmanager
def _filling(names: Sequence[tuple[Any, str]], fill: Callable[[Any], Any]) -> Iterator[None]:
    """What the functions of these names of modules and classes return is filled."""
    before = [(owner, name, getattr(owner, name)) for owner, name in names]
    try:
        for owner, name, make in before:
            setattr(owner, name, _and_fill(make, fill))
        yield
    finally:
        for owner, name, make in before:
            setattr(owner, name, make)


def _and_fill(make: Callable[..., Any], fill: Callable[[Any], Any]) -> Callable[..., Any]:
    def empty(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        fill(made)
        return made

    return empty


_MARK = 77.25

_PYTHON_NAMES = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
)


def marked() -> contextlib.AbstractContextManager[None]:
    """What Python code gets of the functions of torch that return new memory is filled with `MARK`."""
    return _filling(_PYTHON_NAMES, lambda tensor: tensor.detach().fill_(mark_of(tensor)))


def mark_of(tensor: torch.Tensor) -> float:
    """What `marked` fills new memory of this dtype with."""
    return _MARK if tensor.is_floating_point() or tensor.is_complex() else int(_MARK)
