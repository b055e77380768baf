"""Memory that nobody wrote, filled so that its use shows."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

from customops import _compat


@contextlib.contextmanager
def deterministic(*, fill: bool) -> Iterator[None]:
    """Deterministic algorithms, where there are any; with `fill`, torch fills new memory with NaN, or large numbers."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    filling = settings.fill_uninitialized_memory
    _compat.kernel_state.set_deterministic(True, True)
    settings.fill_uninitialized_memory = fill
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = filling
        _compat.kernel_state.set_deterministic(*before)


@contextlib.contextmanager
def is_filled() -> Iterator[None]:
    """New memory of torch, and of numpy where it is loaded, is filled with NaN, or with large numbers."""
    with deterministic(fill=True), _numpy_filled():
        yield


@contextlib.contextmanager
def _numpy_filled() -> Iterator[None]:
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        yield
        return
    before = {name: getattr(numpy, name) for name in ("empty", "empty_like")}
    try:
        for name, make in before.items():
            setattr(numpy, name, _Filled(numpy, make))
        yield
    finally:
        for name, make in before.items():
            setattr(numpy, name, make)


#: What `marked` fills new memory with; integers get it rounded.
MARK = 77.25

_PYTHON_NAMES = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
)


@contextlib.contextmanager
def marked() -> Iterator[None]:
    """What Python code gets of the functions of torch that return new memory is filled with `MARK`."""
    before = [(owner, name, getattr(owner, name)) for owner, name in _PYTHON_NAMES]
    try:
        for owner, name, make in before:
            setattr(owner, name, _marking(make))
        yield
    finally:
        for owner, name, make in before:
            setattr(owner, name, make)


def _marking(make: Any) -> Any:
    def empty(*args: Any, **kwargs: Any) -> Any:
        tensor = make(*args, **kwargs)
        with torch.no_grad():
            return tensor.fill_(MARK if tensor.is_floating_point() or tensor.is_complex() else int(MARK))

    return empty


class _Filled:
    """`numpy.empty`, or `numpy.empty_like`, that fills."""

    def __init__(self, numpy: Any, make: Any) -> None:
        self.numpy, self.make = numpy, make

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        array = self.make(*args, **kwargs)
        if array.dtype.kind in "fc":
            array.fill(float("nan"))
        elif array.dtype.kind in "iu":
            array.fill(self.numpy.iinfo(array.dtype).max)
        return array
