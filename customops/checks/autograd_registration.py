"""test_autograd_registration: what makes an operator differentiable is registered where autograd looks.

An operator is differentiable through a kernel at an autograd key, or as a composite of differentiable operators. A
kernel registered for a device (CPU, CUDA, ...) runs below autograd: an autograd.Function called there, or other
operators, appear to work in eager mode, and are lost or recorded twice once another transform is involved. So the
operator is run with torch's fallback for autograd switched off: an output that requires grad then says that autograd
was at work below its own key.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from customops import _torch
from customops.checks._inputs import tensors_in
from customops.checks._outcome import NotExercised, require
from customops.checks._trial import Trial, resolve


def autograd_registration_check(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
    """Raise CheckError if autograd records calls of `op`, but its formula is registered below autograd.

    Raises:
        NotExercised: no input requires grad, or gradients are disabled.
    """
    check(Trial(resolve(op), tuple(args), kwargs or {}))


def check(trial: Trial) -> None:
    trial.require_data()
    require(any(tensor.requires_grad for tensor in trial.tensors), "no input has requires_grad=True")
    require(torch.is_grad_enabled(), "gradients are disabled")
    key = _torch.dispatcher.autograd_key(trial.tensors)
    if key is None:
        raise NotExercised("the inputs were made in inference mode: autograd does not see them")
    has_kernel = functools.partial(_torch.dispatcher.has_kernel, trial.name)
    # A composite stops being one where the device has a kernel of its own.
    of_device = has_kernel("CompositeExplicitAutograd") or has_kernel(key.removeprefix("Autograd"))
    if has_kernel(key) or has_kernel("Autograd") or (has_kernel("CompositeImplicitAutograd") and not of_device):
        return
    copy = trial.copy()
    already = {id(tensor) for tensor in copy.tensors if tensor.requires_grad}
    before = _torch.autograd.set_autograd_fallback("nothing")
    try:
        outputs = copy.run()
    finally:
        _torch.autograd.set_autograd_fallback(before)
    results = [(f"output {i} requires grad", tensor) for i, tensor in enumerate(tensors_in(outputs))]
    for name, value in copy.arguments.items():
        got = f"argument {name} requires grad after the call, and did not before"
        results += [(got, tensor) for tensor in tensors_in(value)]
    for got, tensor in results:
        if tensor.requires_grad and id(tensor) not in already:
            raise trial.finding(
                "the operator does not have an autograd kernel, and yet autograd recorded it: "
                "its backward is incorrectly registered, below autograd",
                expected=f"a kernel at {key} or Autograd; or only one at CompositeImplicitAutograd",
                got=got,
                fix="call register_autograd; or register the autograd.Function at Autograd and not for a device; "
                "or, if it is made of differentiable operators, register it as CompositeImplicitAutograd",
            )
