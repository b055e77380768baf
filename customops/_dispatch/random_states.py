"""The states of random number generators: to draw again what a call drew."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from customops import _torch


class RandomStates:
    """The current states of the generators of the CPU, of the devices of a call's tensors, and among its arguments."""

    def __init__(self, values: Iterable[Any]) -> None:
        leaves = _torch.trees.flat_items(values)
        given = [torch.default_generator, *(x for x in leaves if isinstance(x, torch.Generator))]
        self._ways: list[Any] = [(generator.get_state, generator.set_state) for generator in given]
        devices = {x.device for x in leaves if isinstance(x, Tensor) and x.device.type not in ("cpu", "meta")}
        self._ways += [way for device in devices if (way := _way_of_device(device)) is not None]
        self._states = self._current()

    def _current(self) -> list[Tensor]:
        return [get() for get, _ in self._ways]

    def _put(self, states: list[Tensor]) -> None:
        for (_, put), state in zip(self._ways, states, strict=True):
            put(state)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """What runs here draws from these states on. Then the generators are as they were."""
        states = self._current()
        self._put(self._states)
        try:
            yield
        finally:
            self._put(states)

    def have_changed(self) -> bool:
        return [*map(_bytes, self._current())] != [*map(_bytes, self._states)]


def _bytes(state: Tensor) -> bytes:
    """The memory of a state: operations on it would be those of the transform or mode that is active."""
    return ctypes.string_at(state.data_ptr(), state.nbytes)


def _way_of_device(device: torch.device) -> Any:
    """The functions that get and set the state of a device's generator, if it has one that is in use."""
    module = torch.get_device_module(device.type)
    if not hasattr(module, "get_rng_state") or not getattr(module, "is_initialized", lambda: True)():
        return None  # of a fake tensor, for one
    if device.type == "mps":  # there is one device, and no index
        return module.get_rng_state, module.set_rng_state
    return partial(module.get_rng_state, device), lambda state: module.set_rng_state(state, device)


class WatchDraws(_torch.dispatcher.TorchDispatchMode):
    """Raises an error where an operator draws random numbers."""

    supports_higher_order_operators = True

    def __init__(self, error: Exception) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.error = error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            arguments = func._schema.arguments
            given = {argument.name: argument.default_value for argument in arguments}
            given |= dict(zip(given, args, strict=False)) | kwargs
            # Attention has the tag, too, and a probability that is 0 by default.
            chances = [given.get(name) for name in ("p", "dropout", "dropout_p")]
            if not any(isinstance(chance, (int, float)) and chance == 0 for chance in chances):
                raise self.error
        return func(*args, **kwargs)
