"""test_layouts: values depend on elements, not on where they lie."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.numeric_checks import Finds
from torch import Tensor

import customops
from customops.checks import writes

aten = torch.ops.aten


@pytest.fixture
def op(registry: customops.Registry, ns: str) -> Finds:
    return Finds(writes.check_layouts, registry, ns)


def doubled(x: Tensor) -> Tensor:
    return x * 2


def flat(x: Tensor) -> Tensor:
    return x.as_strided((x.numel(),), (1,), x.storage_offset()).view(x.shape) * 2


LAYOUTS = [
    torch.randn(3, 4).t(),
    torch.randn(3, 8)[:, ::2],
    torch.randn(20)[3:15].view(3, 4)[:, 1:],
    torch.randn(1, 4).expand(3, 4),
]


@pytest.mark.parametrize("x", LAYOUTS)
def test_strides_that_are_ignored(op: Finds, x: Tensor) -> None:
    op.passes(doubled, x)


def test_flat_memory(op: Finds) -> None:
    error = op.finds(flat, torch.randn(3, 4).t(), match="results depend on the layout of an input")
    assert error.argument == "x"
    assert "flat" in str(error.where)


def test_lazy_conjugates_and_negatives(op: Finds) -> None:
    op.passes(doubled, torch.randn(3, dtype=torch.complex64).conj())
    op.passes(doubled, torch.randn(3, dtype=torch.complex64).conj().imag)


def test_contiguous_tensors_have_nothing_to_try(op: Finds) -> None:
    op.has_nothing(doubled, torch.randn(3), match="every tensor is contiguous")


@pytest.mark.parametrize(
    ("overload", "args"),
    [
        (aten.as_strided.default, (torch.randn(4, 3).t(), [2, 2], [1, 2])),
        (aten.argmax.default, (torch.zeros(4, 3).t(), 1)),
        (aten.native_dropout.default, (torch.randn(4, 3).t(), 0.5, True)),
        (aten.empty_like.default, (torch.randn(4, 3).t(),)),
    ],
)
def test_operators_that_may_differ(op: Finds, overload: Any, args: Any) -> None:
    try:
        op.passes(overload, *args)
    except customops.checks.NotExercised:
        pass


def test_numpy(op: Finds) -> None:
    def ordered(x: Tensor) -> Tensor:
        return torch.from_numpy(np.ravel(x.numpy(), order="K").copy()).view(x.shape)

    op.finds(ordered, torch.randn(3, 4).t(), match="depend on the layout")
