"""test_precision: results are near those of wider dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.numeric_checks import Finds
from torch import Tensor

import customops
from customops.checks import precision

aten = torch.ops.aten


@pytest.fixture
def op(registry: customops.Registry, ns: str) -> Finds:
    return Finds(precision.check, registry, ns)


def doubled(x: Tensor) -> Tensor:
    return x * 2


def slow_sum(x: Tensor) -> Tensor:
    total = torch.zeros((), dtype=x.dtype)
    for value in x.reshape(-1):
        total = total + value
    return total


def test_sums_that_stand_still(op: Finds) -> None:
    op.finds(slow_sum, torch.rand(16).bfloat16(), match="far from that for the same numbers in float64")
    op.passes(slow_sum, torch.rand(16))
    op.passes(aten.sum.default, torch.rand(16).bfloat16())


def test_a_branch_for_a_dtype(op: Finds) -> None:
    def f(x: Tensor) -> Tensor:
        return x * 3 if x.dtype is torch.float64 else x * 2

    op.finds(f, torch.randn(5), match="float32 is far from that")


def test_float64_through_float32(registry: customops.Registry, ns: str) -> None:
    op = Finds(precision.check_resolution, registry, ns)

    def narrowed(x: Tensor) -> Tensor:
        return x.float().cumsum(-1).to(x.dtype)

    def widened(x: Tensor) -> Tensor:
        wide = x if x.dtype is torch.float64 else x.float()
        return wide.cumsum(-1).to(x.dtype, copy=True)

    op.finds(narrowed, torch.randn(5), match="a result for float64 is computed in float32")
    op.passes(widened, torch.randn(5))


def test_integers_that_overflow(op: Finds) -> None:
    def f(x: Tensor) -> Tensor:
        return x.sum(dtype=x.dtype).long()

    x = torch.full((3,), 100, dtype=torch.int8)
    op.finds(f, x, match="narrow integers")
    op.passes(aten.sum.default, x)
    op.has_nothing(aten.mul.Tensor, x, x)


def test_sums_of_large_integers(op: Finds) -> None:
    """The numbers of the sample are small, and nothing that the operator could index is there."""

    def narrow(lengths: Tensor) -> Tensor:
        return lengths.cumsum(0, dtype=lengths.dtype).long()

    def sizes(lengths: Tensor) -> Tensor:
        return torch.arange(int(lengths.sum(dtype=lengths.dtype)))

    def table(lengths: Tensor, x: Tensor) -> Tensor:
        return narrow(lengths)

    lengths = torch.tensor([1, 2, 3], dtype=torch.int32)
    op.finds(narrow, lengths, match="narrow integers")
    op.passes(aten.cumsum.default, lengths, 0)
    op.passes(sizes, lengths)
    op.passes(table, lengths, torch.ones(3))


def steps(x: Tensor) -> Tensor:
    return (x * 10).floor() / 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("f", "shapes"),
    [
        (steps, [(100,)]),
        (aten.exp.default, [(50,)]),
        (aten.softmax.int, [(5, 6), 1]),
        (aten.mm.default, [(3, 4), (4, 5)]),
        (aten.var.correction, [(20,)]),
        (aten.sub.Tensor, [(20,), (20,)]),
        (aten.sign.default, [(20,)]),
    ],
)
def test_right_operators(op: Finds, dtype: torch.dtype, f: Any, shapes: Any) -> None:
    args = [torch.randn(shape).to(dtype) if isinstance(shape, tuple) else shape for shape in shapes]
    if dtype is torch.float64:
        op.has_nothing(f, *args)
    else:
        op.passes(f, *args)


def test_a_dtype_taken_for_another_where_float64_is_refused(op: Finds) -> None:
    def narrow(x: Tensor) -> Tensor:
        if x.dtype is torch.float64:
            raise ValueError("float64 is not supported")
        return (x.view(torch.float16) if x.dtype is torch.bfloat16 else x).tanh().to(x.dtype)

    op.finds(narrow, torch.randn(5).bfloat16(), match="same numbers in float32")
    op.passes(narrow, torch.randn(5).half())


def test_integers_taken_for_others_where_int64_is_refused(op: Finds) -> None:
    def dequantized(q: Tensor) -> Tensor:
        if q.dtype is torch.int64:
            raise ValueError("int64 is not supported")
        return (q.view(torch.int8) if q.dtype is torch.uint8 else q) * 0.5

    op.finds(dequantized, torch.tensor([3, 200], dtype=torch.uint8), match="same numbers in int32")
    op.passes(dequantized, torch.tensor([3, -7], dtype=torch.int8))
