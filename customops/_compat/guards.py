"""One look at all tensors of a call and at the state of the thread: is this call like an earlier one?"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from customops._compat.kernel_state import autocast_is_on

_guards: Any = torch._C._dynamo.guards

__tracebackhide__ = True  # pytest leaves the frames out


#: ``look(*tensors)``: is the call of the kind that the look was made of? It wants as many tensors.
Look = Callable[..., bool]


def look_of(tensors: Sequence[Tensor]) -> Look | None:
    """A look for calls like the one with these tensors, which it does not keep; None if it would not know them again.

    It compares the type, dtype, device, number of dimensions and dispatch keys of each tensor, to the keys adding those
    that are active in the thread, and taking away those that are excluded there: so it sees dispatch modes, transforms,
    functionalization, tracing and inference mode. It compares ``requires_grad``, too, but does not look at gradient
    mode. Autocast must be off, for all devices. Sizes and strides may be any.

    It must not be called with a nested tensor: looking for strides of one ends the process.
    """
    if autocast_is_on():
        return None
    if all(tensor.is_cpu for tensor in tensors):
        look = _guard(tensors)
        if torch.accelerator.is_available():
            look = functools.partial(_look_without_autocast, look)
    else:  # the keys of a tensor say whether autocast is on for its device
        on_cpu = torch.empty(0)
        look = functools.partial(_guard([on_cpu, *tensors]), on_cpu)
    return look if look(*tensors) else None


def _guard(tensors: Sequence[Tensor]) -> Look:
    dims = [[None] * tensor.dim() for tensor in tensors]
    look: Look = _guards.TensorGuards(*tensors, dynamic_dims_sizes=dims, dynamic_dims_strides=dims).check
    return look


def _look_without_autocast(look: Look, *tensors: Tensor) -> bool:
    return not autocast_is_on() and look(*tensors)
