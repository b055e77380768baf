"""test_batches: the elements of a batch have their own results, however many there are."""

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
    return Finds(laws.check_batches, registry, ns)


def doubled(x: Tensor) -> Tensor:
    return x * 2


WRONG = "an element of a batch has another result in a batch of another size"


def in_blocks(x: Tensor) -> Tensor:
    result = torch.zeros_like(x)
    whole = len(x) // 4 * 4
    result[:whole] = x[:whole].softmax(1)
    return result


@pytest.mark.parametrize("rows", [4, 8])
def test_tails(op: Finds, rows: int) -> None:
    error = op.finds(in_blocks, torch.randn(rows, 3), match=WRONG)
    assert error.argument == "x"


def test_a_fixed_number_of_threads(op: Finds) -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        result[:1024] = x[:1024] * y
        return result

    op.finds(f, torch.randn(3, 4), torch.randn(4), match=WRONG)


def test_an_index_that_overflows(op: Finds) -> None:
    def f(x: Tensor) -> Tensor:
        index = torch.arange(len(x)).to(torch.int16).long() % len(x)
        return x[index] * 2

    op.finds(f, torch.randn(4), match=WRONG)


@pytest.mark.parametrize(
    ("overload", "args"),
    [
        (aten.softmax.int, (torch.randn(3, 4), 1)),
        (aten.mm.default, (torch.randn(3, 3), torch.randn(3, 3))),
        (aten.bmm.default, (torch.randn(2, 3, 4), torch.randn(2, 4, 5))),
        (aten.native_layer_norm.default, (torch.randn(3, 4), [4], torch.randn(4), torch.randn(4), 1e-5)),
        (aten.embedding.default, (torch.randn(5, 3), torch.tensor([0, 2, 2]))),
        (aten.linalg_inv.default, (torch.randn(2, 3, 3),)),
        (aten.max.dim, (torch.randint(0, 3, (4, 5)), 1)),
        (aten.relu_.default, (torch.randn(3),)),
        (aten.repeat_interleave.self_int, (torch.randn(4), 2)),
    ],
)
def test_operators_of_torch(op: Finds, overload: Any, args: Any) -> None:
    op.passes(overload, *args)


def test_what_depends_on_the_size(op: Finds) -> None:
    def share(x: Tensor) -> Tensor:
        return x / len(x)

    def first(x: Tensor) -> Tensor:
        return x[:10].clone()

    def total(x: Tensor) -> Tensor:
        return x.sum()

    op.has_nothing(share, torch.randn(4), match="depends on them")
    op.passes(first, torch.randn(4))
    op.has_nothing(total, torch.randn(4))
    op.has_nothing(aten.cumsum.default, torch.randn(4), 0)
    op.has_nothing(aten.std.correction, torch.ones(4), [0])


def test_equal_elements(op: Finds) -> None:
    def normal(x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.std(0) + 1)

    op.has_nothing(normal, torch.ones(4))
