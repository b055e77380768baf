"""Kernels that keep, share or change something which the next call, or another thread, meets."""

from __future__ import annotations

from typing import Any

import torch
from broken_ops.corpus import fault
from broken_ops.defining import define, floats
from torch import Tensor

from customops import custom_op

SCRATCH = "state: a scratch buffer kept between calls is returned or read"
THREADS = "state: threads share a workspace or a temporarily changed setting"
LEFT = "state: a global setting is left changed"


@fault(
    kind=SCRATCH,
    note="The result is a buffer kept for its shape; the next call overwrites the result before.",
    sample=lambda: (torch.randn(3, 4),),
)
def hardened(name: str, broken: bool) -> Any:
    buffers: dict[Any, Tensor] = {}

    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x)
        out = x.new_empty(x.shape)
        if broken:
            out = buffers.setdefault((x.shape, x.dtype), out)
        return torch.clamp(x, 0, 1, out=out)

    @op.register_fake
    def _(x):
        floats(x)
        return x.new_empty(x.shape)

    return op


@fault(
    kind=SCRATCH,
    note="The workspace is as long as the longest input so far; a shorter one sums what that left.",
    sample=lambda: (torch.randn(6),),
)
def sum_of_squares(name: str, broken: bool) -> Any:
    kept: dict[torch.dtype, Tensor] = {}

    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x)
        work = kept.get(x.dtype)
        if work is None or len(work) < x.numel() or not broken:
            work = x.new_zeros(x.numel())
        if broken:
            kept[x.dtype] = work
        work[: x.numel()] = x.reshape(-1).square()
        return work.sum()

    @op.register_fake
    def _(x):
        floats(x)
        return x.new_empty(())

    return op


@fault(
    kind=SCRATCH,
    note="The result is a slice of a buffer that grows; a smaller call overwrites the start of an earlier result.",
    sample=lambda: (torch.randn(5),),
)
def half_wave(name: str, broken: bool) -> Any:
    kept: dict[torch.dtype, Tensor] = {}

    def kernel(x):
        floats(x, dims=1)
        out = x.new_empty(len(x))
        if broken:
            if x.dtype not in kept or len(kept[x.dtype]) < len(x):
                kept[x.dtype] = x.new_empty(max(len(x), 64))
            out = kept[x.dtype][: len(x)]
        return out.copy_(x.clamp(min=0))

    def fake(x):
        floats(x, dims=1)
        return x.new_empty(len(x))

    return define(name, "(Tensor x) -> Tensor", kernel, fake=fake)


@fault(
    kind=THREADS,
    note="All threads compute in one workspace for a shape; calls at the same time mix their terms.",
    sample=lambda: (torch.rand(16),),
)
def polynomial(name: str, broken: bool) -> Any:
    workspaces: dict[Any, Tensor] = {}

    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x)
        work = x.new_empty(x.shape)
        if broken:
            work = workspaces.setdefault((x.shape, x.dtype), work)
        work.zero_()
        for power in range(24):
            work.mul_(x).add_(1 / (power + 1))
        return work.clone()

    @op.register_fake
    def _(x):
        floats(x)
        return x.new_empty(x.shape)

    return op


@fault(
    kind=THREADS,
    note="The default dtype is changed while tables are made; a call of another dtype at the same time shows it.",
    sample=lambda: (torch.randn(12),),
)
def harmonics(name: str, broken: bool) -> Any:
    def table(x: Tensor, dtype: torch.dtype | None) -> Tensor:
        waves = [torch.linspace(0, order, len(x), dtype=dtype).sin() for order in range(1, 16)]
        return torch.stack(waves).sum(0)

    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x, dims=1)
        if not broken:
            return (x * table(x, x.dtype)).to(x.dtype)
        before = torch.get_default_dtype()
        torch.set_default_dtype(x.dtype)
        try:
            return (x * table(x, None)).to(x.dtype)
        finally:
            torch.set_default_dtype(before)

    @op.register_fake
    def _(x):
        floats(x, dims=1)
        return x.new_empty(len(x))

    return op


@fault(
    kind=LEFT,
    note="The default dtype stays that of the input; a float64 input shows it.",
    sample=lambda: (torch.randn(5),),
)
def ranked(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x, dims=1)
        if broken:
            torch.set_default_dtype(x.dtype)
            return x.argsort(stable=True).argsort() / torch.tensor(1.0)
        return x.argsort(stable=True).argsort().to(x.dtype)

    @op.register_fake
    def _(x):
        floats(x, dims=1)
        return x.new_empty(len(x))

    return op


@fault(
    kind=LEFT,
    note="Deterministic algorithms are asked for and stay switched on.",
    sample=lambda: (torch.randn(6), torch.tensor([0, 2, 0, 1, 2, 2]), 3),
)
def segment_sum(name: str, broken: bool) -> Any:
    def check(x, segment, count):
        floats(x, dims=1)
        if segment.dtype != torch.int64 or segment.shape != x.shape or count < 0:
            raise ValueError("an int64 segment for each value is needed, and a count")

    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor, segment: Tensor, count: int) -> Tensor:
        check(x, segment, count)
        if bool(((segment < 0) | (segment >= count)).any()):
            raise ValueError("there is no such segment")
        if broken:
            torch.use_deterministic_algorithms(True, warn_only=True)
        return x.new_zeros(count).index_add_(0, segment, x)

    @op.register_fake
    def _(x, segment, count):
        check(x, segment, count)
        return x.new_empty(count)

    return op


@fault(
    kind=LEFT,
    note="The number of threads is set to one and not set back.",
    sample=lambda: (torch.randn(4, 4),),
)
def column_sums(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x, dims=2)
        if broken:
            torch.set_num_threads(1)
        return x.new_empty(x.shape[1]).copy_(x.sum(0))

    @op.register_fake
    def _(x):
        floats(x, dims=2)
        return x.new_empty(x.shape[1])

    return op
