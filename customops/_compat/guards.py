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
    """A look for calls like the one with these tensors, which it does not keep; None where it would not know them again.

    It compares the type, dtype, device, number of dimensions and dispatch keys of each tensor, to the keys adding those
    that are active in the thread, and taking away those that are excluded there: so it sees dispatch modes, transforms,
    functionalization, tracing and inference mode. No tensor may be recorded by autograd, and autocast must be off, for
    all devices. Sizes and strides may be any.

    It must not be called with a nested tensor: looking for strides of one ends the process.
    """
    if autocast_is_on():
        return None
    examples = [*map(_without_grad, tensors)]
    if all(tensor.is_cpu for tensor in tensors):
        look = _guard(examples)
        if torch.accelerator.is_available():
            look = functools.partial(_look_without_autocast, look)
    else:  # the keys of a tensor say whether autocast is on for its device
        on_cpu = torch.empty(0)
        look = functools.partial(_guard([on_cpu, *examples]), on_cpu)
    return look if look(*tensors) else None


def _guard(examples: Sequence[Tensor]) -> Look:
    dims = [[None] * tensor.dim() for tensor in examples]
    look: Look = _guards.TensorGuards(*examples, dynamic_dims_sizes=dims, dynamic_dims_strides=dims).check
    return look


def _look_without_autocast(look: Look, *tensors: Tensor) -> bool:
    return not autocast_is_on() and look(*tensors)


def _without_grad(tensor: Tensor) -> Tensor:
    """A tensor of the same type and keys, that requires no grad."""
    if not tensor.requires_grad:
        return tensor
    detached = tensor.detach()
    is_parameter = type(tensor) is torch.nn.Parameter
    return torch.nn.Parameter(detached, requires_grad=False) if is_parameter else detached
