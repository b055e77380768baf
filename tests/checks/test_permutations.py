"""test_permutations: where order has no part for one size, it has none for others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.numeric_checks import Finds
from torch import Tensor

import customops
from customops.checks import laws

aten = torch.ops.aten


@pytest.fixture
def op(registry: customops.Registry, ns: str) -> Finds:
    return Finds(laws.check_permutations, registry, ns)


def doubled(x: Tensor) -> Tensor:
    return x * 2


WRONG = "the result depends on the order of elements for some sizes"


def lanes(x: Tensor) -> Tensor:
    whole = x.numel() // 8 * 8
    return x.reshape(-1)[:whole].view(-1, 8).sum(0).sum()


def halves(x: Tensor) -> Tensor:
    while len(x) > 1:
        half = len(x) // 2
        x = x[:half] + x[half : 2 * half]
    return x.sum()


def peaks(x: Tensor) -> Tensor:
    whole = max(x.shape[1] // 4 * 4, 1)
    return x[:, :whole].amax(1)


@pytest.mark.parametrize(("f", "x"), [(lanes, torch.randn(16)), (halves, torch.randn(8)), (peaks, torch.randn(3, 8))])
def test_what_is_left_over(op: Finds, f: Any, x: Tensor) -> None:
    assert op.finds(f, x, match=WRONG).argument == "x"


def by_blocks(x: Tensor) -> Tensor:
    return torch.cat([block / block.abs().max() for block in x.split(32)])


def norm_in_float32(x: Tensor) -> Tensor:
    return x / x.float().norm(dim=-1, keepdim=True)


@pytest.mark.parametrize("seed", range(6))
def test_float64_may_be_summed_in_float32(op: Finds, seed: int) -> None:
    op.passes(norm_in_float32, torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize(
    ("overload", "args"),
    [
        (by_blocks, (torch.randn(6),)),
        (aten.sum.default, (torch.randn(8),)),
        (aten.softmax.int, (torch.randn(3, 4), 1)),
        (aten.amax.default, (torch.randn(3, 4), [1])),
        (aten.mm.default, (torch.randn(3, 3), torch.randn(3, 3))),
        (aten.native_layer_norm.default, (torch.randn(3, 4), [4], torch.randn(4), torch.randn(4), 1e-5)),
        (aten.var.correction, (torch.randn(5), [0])),
        (aten.logsumexp.default, (torch.randn(3, 4).half(), [1])),
    ],
)
def test_right_operators(op: Finds, overload: Any, args: Any) -> None:
    op.passes(overload, *args)


def test_where_order_counts(op: Finds) -> None:
    op.has_nothing(aten.cumsum.default, torch.randn(5), 0)
    op.has_nothing(aten.native_dropout.default, torch.rand(5), 0.5, True)
