"""test_pointwise: ops with the tag compute each element from those at its place."""

from __future__ import annotations

import pytest
import torch
from helpers.numeric_checks import Finds
from torch import Tensor

import customops
from customops.checks import laws

POINTWISE = {"tags": (torch.Tag.pointwise,)}


@pytest.fixture
def op(registry: customops.Registry, ns: str) -> Finds:
    return Finds(laws.check_pointwise, registry, ns)


def scaled_sum(x: Tensor, y: Tensor) -> Tensor:
    return x * 2 + y


def centred(x: Tensor) -> Tensor:
    return x - x.mean()


def by_row(x: Tensor, y: Tensor) -> Tensor:
    return x * y.sum(-1, keepdim=True)


def test_ops_that_are_pointwise(op: Finds) -> None:
    op.passes(op.define(scaled_sum, **POINTWISE), torch.randn(3, 4), torch.randn(4))
    op.passes(op.define(torch.relu, schema="(Tensor x) -> Tensor", **POINTWISE), torch.randn(3, 4).t())


def test_elements_that_are_mixed(op: Finds) -> None:
    found = op.finds(op.define(centred, **POINTWISE), torch.randn(3, 4), match="depends on other elements")
    assert found.argument == "x"
    found = op.finds(op.define(by_row, **POINTWISE), torch.randn(3, 4), torch.randn(3, 4), match="other elements")
    assert found.argument == "y"


def test_not_exercised(op: Finds) -> None:
    op.has_nothing(centred, torch.randn(3), match="not tagged")
    op.has_nothing(op.define(scaled_sum, **POINTWISE), torch.randn(1), torch.randn(1), match="several elements")
