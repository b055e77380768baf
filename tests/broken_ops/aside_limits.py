"""Ops that are wrong for empty inputs, for integer and bool inputs, and for one member of an option."""

from __future__ import annotations

import enum
import math
from typing import Any, Literal

import numpy as np
import torch
from broken_ops.aside_parts import FLOATS, INTEGERS, library, overload, packed, require, require_same_dtype
from broken_ops.corpus import fault
from torch import Tensor

from customops import custom_op

EMPTY = "empty inputs fail or give garbage"
INTEGRAL = "integer or bool inputs fail or give another dtype than the fake says"
OPTION = "a member of an option is not handled"


class Border(enum.Enum):
    """How much of a filtered signal is kept."""

    VALID = "valid"
    SAME = "same"
    FULL = "full"


def float_dtype(x: Tensor) -> torch.dtype:
    """What true division makes of a tensor of this dtype."""
    return x.dtype if x.is_floating_point() else torch.get_default_dtype()


@fault(
    kind=EMPTY,
    note="The largest value of a row without entries is asked for. Shapes such as (3, 0) raise in the kernel alone.",
    sample=lambda: (torch.randn(3, 4),),
)
def aside_below_row_max(name: str, broken: bool) -> Any:
    def check(x: Tensor) -> None:
        require(x, FLOATS)
        if x.dim() == 0:
            raise ValueError("expected one dimension at least")

    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        check(x)
        if x.shape[-1] == 0 and not broken:
            return x.new_empty(x.shape)
        return packed(x - x.amax(-1, keepdim=True))

    @op.register_fake
    def _(x):
        check(x)
        return x.new_empty(x.shape)

    return op


@fault(
    kind=EMPTY,
    note="The kernel leaves a size to reshape, which cannot tell it without rows. An empty batch raises.",
    sample=lambda: (torch.randn(2, 3, 4), 0.5),
)
def aside_flat_rows(name: str, broken: bool) -> Any:
    def check(x: Tensor) -> None:
        require(x, FLOATS)
        if x.dim() == 0:
            raise ValueError("expected one dimension at least")

    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor, scale: float = 1.0) -> Tensor:
        check(x)
        size = -1 if broken else math.prod(x.shape[1:])
        return packed((x * scale).reshape(x.shape[0], size))

    @op.register_fake
    def _(x, scale=1.0):
        check(x)
        return x.new_empty(x.shape[0], math.prod(x.shape[1:]))

    return op


@fault(
    kind=EMPTY,
    note="The state is written in the loop over steps alone. Without a step it is uninitialised memory.",
    sample=lambda: (torch.randn(4, 3), 0.5),
)
def aside_last_state(name: str, broken: bool) -> Any:
    def check(steps: Tensor) -> None:
        require(steps, FLOATS)
        if steps.dim() == 0:
            raise ValueError("expected one dimension at least")

    @custom_op(name, mutates_args=())
    def op(steps: Tensor, decay: float = 0.9) -> Tensor:
        check(steps)
        state = torch.empty(steps.shape[1:], dtype=steps.dtype, device=steps.device)
        if not broken:
            state.zero_()
        for at, step in enumerate(steps):
            state.copy_(step if at == 0 else state * decay + step)
        return state

    @op.register_fake
    def _(steps, decay):
        check(steps)
        return steps.new_empty(steps.shape[1:])

    return op


@fault(
    kind=INTEGRAL,
    note="The kernel divides, so integers become floats. The fake keeps their dtype.",
    sample=lambda: (torch.randn(3, 4),),
)
def aside_row_average(name: str, broken: bool) -> Any:
    def check(x: Tensor) -> None:
        require(x, (*FLOATS, *INTEGERS, torch.bool))
        if x.dim() == 0:
            raise ValueError("expected one dimension at least")

    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        check(x)
        return packed(x.sum(-1) / x.shape[-1]) if x.shape[-1] else x.new_zeros(x.shape[:-1], dtype=float_dtype(x))

    @op.register_fake
    def _(x):
        check(x)
        return x.new_empty(x.shape[:-1], dtype=x.dtype if broken else float_dtype(x))

    return op


@fault(
    kind=INTEGRAL,
    note="The kernel multiplies a copy in place, which torch refuses for integers. The fake promises floats.",
    sample=lambda: (torch.randn(3, 4), 0.5),
)
def aside_damped(name: str, broken: bool) -> Any:
    accepted = (*FLOATS, *INTEGERS, torch.bool)

    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor, factor: float) -> Tensor:
        require(x, accepted)
        if broken:
            return packed(x).mul_(factor)
        return packed(x * factor)

    @op.register_fake
    def _(x, factor):
        require(x, accepted)
        return x.new_empty(x.shape, dtype=float_dtype(x))

    return op


@fault(
    kind=INTEGRAL,
    note="NumPy adds up small integers in 64 bits. The fake, and floats, keep the dtype.",
    sample=lambda: (torch.randn(2, 5),),
)
def aside_running_sum(name: str, broken: bool) -> Any:
    def check(x: Tensor) -> None:
        require(x, (*FLOATS, torch.uint8, torch.int32, torch.int64))
        if x.dim() == 0:
            raise ValueError("expected one dimension at least")

    @custom_op(name, mutates_args=(), device_types="cpu")
    def op(x: Tensor) -> Tensor:
        check(x)
        values = x.detach().resolve_neg().numpy()
        sums = np.cumsum(values, axis=-1, dtype=None if broken else values.dtype)
        return packed(torch.from_numpy(sums))

    @op.register_fake
    def _(x):
        check(x)
        return x.new_empty(x.shape)

    return op


@fault(
    kind=OPTION,
    note="The kernel knows mean and takes all else for sum. It shows for max.",
    sample=lambda: (torch.randn(3, 4),),
)
def aside_pool_rows(name: str, broken: bool) -> Any:
    def check(x: Tensor) -> None:
        require(x, FLOATS)
        if x.dim() == 0 or x.shape[-1] == 0:
            raise ValueError("expected an entry in each row")

    @custom_op(name, mutates_args=())
    def op(x: Tensor, how: Literal["mean", "sum", "max"] = "mean") -> Tensor:
        check(x)
        if how == "mean":
            return packed(x.mean(-1))
        return packed(x.amax(-1) if how == "max" and not broken else x.sum(-1))

    @op.register_fake
    def _(x, how):
        check(x)
        return x.new_empty(x.shape[:-1])

    @op.register_autograd_from
    def _(x, how):
        return {"mean": torch.mean, "sum": torch.sum, "max": torch.amax}[how](x, -1)

    return op


@fault(
    kind=OPTION,
    note="The fake knows VALID and takes all else for SAME. It shows for FULL.",
    sample=lambda: (torch.randn(9), torch.randn(3), Border.VALID),
)
def aside_filter_signal(name: str, broken: bool) -> Any:
    def check(signal: Tensor, taps: Tensor) -> None:
        require(signal, FLOATS)
        require_same_dtype(signal, taps)
        if signal.dim() != 1 or taps.dim() != 1 or not 1 <= taps.shape[0] <= signal.shape[0]:
            raise ValueError("expected two vectors, and taps no longer than the signal")

    @custom_op(name, mutates_args=())
    def op(signal: Tensor, taps: Tensor, border: Border = Border.SAME) -> Tensor:
        check(signal, taps)
        n, k = len(signal), len(taps)
        full = signal.new_zeros(n + k - 1)
        for at in range(k):
            full[at : at + n] += signal * taps[at]
        if border is Border.FULL:
            return full
        start = k - 1 if border is Border.VALID else (k - 1) // 2
        return packed(full[start : start + (n - k + 1 if border is Border.VALID else n)])

    @op.register_fake
    def _(signal, taps, border):
        check(signal, taps)
        n, k = signal.shape[0], taps.shape[0]
        if border is Border.VALID:
            return signal.new_empty(n - k + 1)
        return signal.new_empty(n if broken or border is Border.SAME else n + k - 1)

    return op


@fault(
    kind=OPTION,
    note="Backward knows relu and takes all else for no activation. The gradient of tanh shows it.",
    sample=lambda: (torch.randn(3, 4, dtype=torch.float64, requires_grad=True), "relu"),
)
def aside_activate(name: str, broken: bool) -> Any:
    lib = library(name)
    base = name.split("::")[1]
    lib.define(f'{base}(Tensor x, str activation="none") -> Tensor')

    def check(x: Tensor, activation: str) -> None:
        require(x, FLOATS)
        if activation not in ("relu", "tanh", "none"):
            raise ValueError(f"activation must be relu, tanh or none, got {activation}")

    def kernel(x, activation="none"):
        check(x, activation)
        return packed({"relu": torch.relu, "tanh": torch.tanh}.get(activation, torch.clone)(x))

    def fake(x, activation="none"):
        check(x, activation)
        return x.new_empty(x.shape)

    def setup_context(ctx, inputs, output):
        x, ctx.activation = inputs
        ctx.save_for_backward(x)

    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        if ctx.activation == "relu":
            return grad.masked_fill(x <= 0, 0), None
        if ctx.activation == "tanh" and not broken:
            return grad * (1 - x.tanh().square()), None
        return grad.clone(), None

    lib.impl(base, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(name, fake, lib=lib)
    torch.library.register_autograd(name, backward, setup_context=setup_context, lib=lib)
    return overload(name)
