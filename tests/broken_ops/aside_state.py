"""Ops with stale caches, with state that a program does not hold, and with kernels that only checks keep right."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from broken_ops.aside_parts import FLOATS, NUMBERS, packed, require, require_same_dtype
from broken_ops.corpus import fault
from torch import Tensor

from customops import custom_op

STALE = "a cache gives a stale result"
OUTSIDE = "the result depends on what the program does not hold"
UNCHECKED = "only the check of results shows that the kernel is wrong"


@fault(
    kind=STALE,
    note="Prepared weights are kept by address. It shows when weights change in place, or others get the address.",
    sample=lambda: (torch.randn(3, 4), torch.randn(4, 5)),
)
def aside_prepared_weights(name: str, broken: bool) -> Any:
    prepared: dict[int, Tensor] = {}

    def check(x: Tensor, weight: Tensor) -> None:
        require(x, FLOATS)
        require_same_dtype(x, weight)
        if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[0]:
            raise ValueError(f"expected matrices that fit, got {tuple(x.shape)} and {tuple(weight.shape)}")

    def prepare(weight: Tensor) -> Tensor:
        key = weight.data_ptr()
        known = prepared.get(key) if broken else None
        if known is None or known.shape != weight.shape or known.dtype != weight.dtype:
            known = weight.softmax(0)
        if broken:
            prepared[key] = known
        return known

    @custom_op(name, mutates_args=())
    def op(x: Tensor, weight: Tensor) -> Tensor:
        check(x, weight)
        return packed(x @ prepare(weight))

    @op.register_fake
    def _(x, weight):
        check(x, weight)
        return x.new_empty(x.shape[0], weight.shape[1])

    return op


@fault(
    kind=STALE,
    note="The table of weights is kept by its size, whatever the base. Another base with the same size shows it.",
    sample=lambda: (torch.randn(3, 6), 2.0),
)
def aside_geometric_weights(name: str, broken: bool) -> Any:
    tables: dict[tuple[Any, ...], Tensor] = {}

    def check(x: Tensor, base: float) -> None:
        require(x, FLOATS)
        if x.dim() == 0 or not (base > 0 and math.isfinite(base)):
            raise ValueError("expected one dimension at least, and a base that is positive and finite")

    @custom_op(name, mutates_args=())
    def op(x: Tensor, base: float = 2.0) -> Tensor:
        check(x, base)
        n = x.shape[-1]
        key = (n, x.dtype, x.device) if broken else (n, base, x.dtype, x.device)
        if key not in tables:
            tables[key] = base ** -torch.arange(n, dtype=x.dtype, device=x.device)
        return packed(x * tables[key])

    @op.register_fake
    def _(x, base):
        check(x, base)
        return x.new_empty(x.shape)

    return op


@fault(
    kind=STALE,
    note="The scale is kept by address and version. Memory that is used again, or a write in inference mode, shows it.",
    sample=lambda: (torch.randn(64),),
)
def aside_scaled_to_one(name: str, broken: bool) -> Any:
    scales: dict[tuple[Any, ...], Tensor] = {}

    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        require(x, FLOATS)
        if x.numel() == 0:
            return packed(x)
        key = (x.data_ptr(), 0 if x.is_inference() else x._version, x.shape, x.stride(), x.dtype)
        scale = scales.get(key) if broken else None
        if scale is None:
            scale = x.abs().amax().clamp(min=1e-12)
        if broken:
            scales[key] = scale
        return packed(x / scale)

    @op.register_fake
    def _(x):
        require(x, FLOATS)
        return x.new_empty(x.shape)

    return op


@fault(
    kind=OUTSIDE,
    note="Signs are drawn when the op is defined, from a source that no seed governs. Another process has others.",
    sample=lambda: (torch.randn(3, 8),),
)
def aside_random_signs(name: str, broken: bool) -> Any:
    bits = np.random.default_rng(None if broken else 1234).integers(0, 2, 64)
    signs = torch.from_numpy(bits * 2.0 - 1.0)

    def check(x: Tensor) -> None:
        require(x, FLOATS)
        if x.dim() == 0:
            raise ValueError("expected one dimension at least")

    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        check(x)
        at = torch.arange(x.shape[-1], device=x.device) % len(signs)
        return packed(x * signs.to(x)[at])

    @op.register_fake
    def _(x):
        check(x)
        return x.new_empty(x.shape)

    return op


@fault(
    kind=OUTSIDE,
    note="The order of the features is that of a set of strings, which changes from one process to another.",
    sample=lambda: (torch.randn(3, 8),),
)
def aside_row_features(name: str, broken: bool) -> Any:
    names = ["mean", "sum", "amax", "amin", "norm", "prod"]
    order = list(set(names)) if broken else sorted(set(names))

    def check(x: Tensor) -> None:
        require(x, FLOATS)
        if x.dim() != 2 or x.shape[1] == 0:
            raise ValueError("expected rows with an entry each")

    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        check(x)
        return packed(torch.stack([getattr(x, feature)(dim=1) for feature in order], dim=1))

    @op.register_fake
    def _(x):
        check(x)
        return x.new_empty(x.shape[0], len(order))

    return op


@fault(
    kind=OUTSIDE,
    note="The limit of the first call is kept for all later ones. A second limit shows it; a new process forgets it.",
    sample=lambda: (torch.randn(3, 4), 1.0),
)
def aside_limited(name: str, broken: bool) -> Any:
    kept: dict[str, float] = {}

    def check(x: Tensor, limit: float) -> None:
        require(x, FLOATS)
        if not limit > 0:
            raise ValueError(f"expected a positive limit, got {limit}")

    @custom_op(name, mutates_args=())
    def op(x: Tensor, limit: float) -> Tensor:
        check(x, limit)
        limit = kept.setdefault("limit", limit) if broken else limit
        return packed(x.clamp(-limit, limit))

    @op.register_fake
    def _(x, limit):
        check(x, limit)
        return x.new_empty(x.shape)

    def setup_context(ctx, inputs, output):
        x, limit = inputs
        ctx.limit = kept.get("limit", limit)
        ctx.save_for_backward(x)

    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad.masked_fill(x.abs() > ctx.limit, 0), None

    op.register_autograd(backward, setup_context=setup_context)
    return op


@fault(
    kind=UNCHECKED,
    note="The kernel leaves without a result where there is nothing to do. Unchecked, an empty input gives None.",
    sample=lambda: (torch.randn(3, 4),),
)
def aside_nothing_to_launch(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=(), check="never")
    def op(x: Tensor) -> Tensor:
        require(x, FLOATS)
        if x.numel() == 0 and broken:
            return None  # type: ignore[return-value]
        return packed(x.cos())

    @op.register_fake
    def _(x):
        require(x, FLOATS)
        return x.new_empty(x.shape)

    return op


@fault(
    kind=UNCHECKED,
    note="The first call is checked. A later one with factor 1 returns its input, and nobody notices.",
    sample=lambda: (torch.randn(3, 4), 2.0),
)
def aside_times_factor(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=(), check="first")
    def op(x: Tensor, factor: float) -> Tensor:
        require(x, FLOATS)
        if factor == 1.0 and broken and x.is_contiguous():
            return x
        return packed(x * factor)

    @op.register_fake
    def _(x, factor):
        require(x, FLOATS)
        return x.new_empty(x.shape)

    return op


@fault(
    kind=UNCHECKED,
    note="Of a single row the lowest and the highest entries are one tensor. Unchecked, a write to one is in both.",
    sample=lambda: (torch.randn(3, 4),),
)
def aside_column_bounds(name: str, broken: bool) -> Any:
    def check(x: Tensor) -> None:
        require(x, NUMBERS[:9])
        if x.dim() == 0 or x.shape[0] == 0:
            raise ValueError("expected one row at least")

    @custom_op(name, mutates_args=(), check="never", bypass=True)
    def op(x: Tensor) -> tuple[Tensor, Tensor]:
        check(x)
        low = packed(x.amin(0))
        if len(x) == 1 and broken:
            return low, low
        return low, packed(x.amax(0))

    @op.register_fake
    def _(x):
        check(x)
        return x.new_empty(x.shape[1:]), x.new_empty(x.shape[1:])

    return op
