"""test_autograd_registration: what makes an operator differentiable is registered where autograd looks.

An operator is differentiable through a kernel at an autograd key, or as a composite of differentiable operators. A
kernel registered for a device (CPU, CUDA, ...) runs below autograd: an autograd.Function called there, or other
operators, appear to work in eager mode, since nothing stops autograd from recording them, and are lost or recorded
twice once another transform is involved.

Without an autograd kernel torch hands outputs on as the device's kernel made them. So the operator is run with
torch's fallback switched off; an output that requires grad then says that autograd was at work below its own key.
"""

from __future__ import annotations

from typing import Any

import torch

from customops import _torch
from customops.checks._inputs import tensors_in
from customops.checks._outcome import NotExercised
from customops.checks._trial import Trial, resolve
from customops.errors import CheckError


def autograd_registration_check(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
    """Raise CheckError if autograd records calls of `op`, but its formula is registered below autograd.

    Raises:
        NotExercised: no input requires grad, or gradients are disabled.
    """
    check(Trial(resolve(op), tuple(args), kwargs or {}))


def check(trial: Trial) -> None:
    trial.require_data()
    if not any(tensor.requires_grad for tensor in trial.tensors):
        raise NotExercised("no input has requires_grad=True")
    if not torch.is_grad_enabled():
        raise NotExercised("gradients are disabled")
    key = _torch.dispatcher.autograd_key(trial.tensors)
    if key is None:
        raise NotExercised("the inputs were made in inference mode: autograd does not see them")
    if not _is_differentiable_at(trial.name, key):
        _run_below_autograd(trial, key)


def _is_differentiable_at(name: str, key: str) -> bool:
    if _torch.dispatcher.has_kernel(name, key) or _torch.dispatcher.has_kernel(name, "Autograd"):
        return True
    # A composite stops being one where the device has a kernel of its own.
    backend = key.removeprefix("Autograd")
    return _torch.dispatcher.has_kernel(name, "CompositeImplicitAutograd") and not (
        _torch.dispatcher.has_kernel(name, "CompositeExplicitAutograd") or _torch.dispatcher.has_kernel(name, backend)
    )


def _run_below_autograd(trial: Trial, key: str) -> None:
    copy = trial.copy()
    already = {id(tensor) for tensor in copy.tensors if tensor.requires_grad}
    before = _torch.autograd.set_autograd_fallback("nothing")
    try:
        outputs = copy.run()
    finally:
        _torch.autograd.set_autograd_fallback(before)
    for i, tensor in enumerate(tensors_in(outputs)):
        if tensor.requires_grad and id(tensor) not in already:
            raise _misplaced(trial, key, f"output {i} requires grad")
    for name, value in copy.arguments.items():
        if any(tensor.requires_grad and id(tensor) not in already for tensor in tensors_in(value)):
            raise _misplaced(trial, key, f"argument {name} requires grad after the call, and did not before")


def _misplaced(trial: Trial, key: str, got: str) -> CheckError:
    return CheckError(
        "the operator does not have an autograd kernel, and yet autograd recorded it: "
        "its backward is incorrectly registered, below autograd",
        op=trial.name,
        expected=f"a kernel at {key} or Autograd; or only one at CompositeImplicitAutograd",
        got=got,
        fix="call register_autograd; or register the autograd.Function at Autograd and not for a device; "
        "or, if it is made of differentiable operators, register it as CompositeImplicitAutograd",
    )
