"""test_autocast: under autocast an operator does what its rule says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.numeric_checks import Finds
from torch import Tensor

import customops
from customops.checks import autocast

aten = torch.ops.aten


@pytest.fixture
def op(registry: customops.Registry, ns: str) -> Finds:
    return Finds(autocast.check, registry, ns)


def doubled(x: Tensor) -> Tensor:
    return x * 2


def picky(x: Tensor) -> Tensor:
    if x.dtype is not torch.float32:
        raise ValueError("float32 is needed")
    return x * 2


def with_rule(op: Finds, fn: Any, dtype: torch.dtype) -> Any:
    made = op.define(fn)
    made.register_autocast("cpu", cast_inputs=dtype)
    return made


def test_rules(op: Finds) -> None:
    op.passes(with_rule(op, doubled, torch.bfloat16), torch.randn(3))
    op.passes(with_rule(op, picky, torch.float32), torch.randn(3))
    op.finds(with_rule(op, picky, torch.bfloat16), torch.randn(3), match="fails under autocast")


def test_without_a_rule(op: Finds) -> None:
    op.has_nothing(doubled, torch.randn(3), match="no autocast rule")
    op.has_nothing(with_rule(op, doubled, torch.bfloat16), torch.arange(3), match="one of floating point")


def test_a_kernel_at_the_autocast_key(op: Finds, ns: str) -> None:
    lib = torch.library.Library(ns, "FRAGMENT")
    for name, factor in (("right", 2.0), ("wrong", 2.5)):
        lib.define(f"{name}(Tensor x) -> Tensor")
        lib.impl(name, doubled, "CPU")
        lib.impl(name, lambda x, factor=factor: x.bfloat16() * factor, "AutocastCPU")
    namespace = getattr(torch.ops, ns)
    op.passes(namespace.right.default, torch.randn(3))
    op.finds(namespace.wrong.default, torch.randn(3), match="far from those without")
    lib._destroy()


def test_gradients(op: Finds) -> None:
    made = with_rule(op, doubled, torch.bfloat16)
    made.register_autograd(lambda ctx, grad: grad * 2)
    op.passes(made, torch.randn(3, requires_grad=True))

    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if grad.dtype is not torch.float32:
            raise ValueError("float32 is needed")
        return grad * 2

    other = with_rule(op, doubled, torch.bfloat16)
    other.register_autograd(backward)
    op.finds(other, torch.randn(3, requires_grad=True), match="backward fails under autocast")


def test_operators_of_torch(op: Finds) -> None:
    op.passes(aten.mm.default, torch.randn(3, 4), torch.randn(4, 5))
