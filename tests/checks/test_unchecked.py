"""test_unchecked: check="never" and bypass=True make no difference."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from helpers.numeric_checks import Finds
from torch import Tensor

import customops
from customops import Tag
from customops.checks import unchecked

REFUSED = 'a result that check="always" refuses'


@pytest.fixture
def op(registry: customops.Registry, ns: str) -> Finds:
    return Finds(unchecked.check, registry, ns)


def contiguous(x: Tensor) -> Tensor:
    return x.contiguous()


def copied(x: Tensor) -> Tensor:
    return x.contiguous().clone()


def through_numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(x.numpy()))


@pytest.mark.parametrize("options", [{"check": "never"}, {"check": "never", "bypass": True}], ids=str)
@pytest.mark.parametrize(("fn", "right"), [(contiguous, copied), (through_numpy, copied)])
def test_what_nobody_checks(op: Finds, options: dict[str, Any], fn: Any, right: Any) -> None:
    error = op.finds(op.define(fn, **options), torch.randn(2, 3), match=REFUSED)
    assert "test_unchecked" in str(error.where)
    op.passes(op.define(right, **options), torch.randn(2, 3))


def test_what_is_checked_once(op: Finds) -> None:
    made = op.define(contiguous, check="first")
    made(torch.randn(3, 2).t())
    op.finds(made, torch.randn(2, 3), match=REFUSED)


def test_a_kernel_that_goes_by_its_caller(op: Finds) -> None:
    def of_the_dispatcher(x: Tensor) -> Tensor:
        return x * (3 if sys._getframe(1).f_code.co_name == "__call__" else 2)

    made = op.define(of_the_dispatcher, bypass=True)
    made(torch.randn(3))  # the first call is inspected
    op.finds(made, torch.randn(3), match=r"something else with bypass=True")


def several(x: Tensor, by: float = 2.0, *, n: int = 1) -> tuple[Tensor, int]:
    return x * by, n


def joined(xs: list[Tensor], y: Tensor | None = None) -> Tensor:
    return torch.cat([*xs, *([] if y is None else [y])])


def scaled(x: Tensor, by: float = float("inf")) -> Tensor:
    return x * by


@pytest.mark.parametrize("options", [{"check": "first"}, {"check": "never"}], ids=str)
def test_right_ops(op: Finds, options: dict[str, Any]) -> None:
    x = torch.randn(2, 3)
    op.passes(op.define(several, **options), x)
    op.passes(op.define(joined, **options), [x, x])
    op.passes(op.define(scaled, **options), x)
    op.passes(op.define(scaled, **options, bypass=True), x.t(), 2)


def test_ops_that_write(op: Finds) -> None:
    def double_(x: Tensor) -> Tensor:
        return x.mul_(2)

    def other_(x: Tensor) -> Tensor:
        return x.mul_(2)[:]

    options: dict[str, Any] = {"mutates_args": ("x",), "tags": Tag.inplace, "check": "never"}
    op.passes(op.define(double_, **options), torch.randn(3))
    op.finds(op.define(other_, **options), torch.randn(3), match=REFUSED)


def test_kernels_registered_later(op: Finds) -> None:
    made = op.define(copied, check="never")
    made.register_kernel("cpu", contiguous)
    op.finds(made, torch.randn(3), match=REFUSED)


def test_kernels_at_other_keys(op: Finds, ns: str) -> None:
    made = op.define(copied, check="never")
    op.registry.impl(made._qualname, "AutogradCPU", lambda x: x + 5)
    op.has_nothing(made, torch.randn(3), match="does more")


def test_nothing_is_left_behind(op: Finds) -> None:
    made = op.define(copied, check="never")
    before = dir(getattr(torch.ops, op.ns))
    op.passes(made, torch.randn(3))
    assert dir(getattr(torch.ops, op.ns)) == before


def test_nothing_to_try(op: Finds) -> None:
    op.has_nothing(torch.ops.aten.sin.default, torch.randn(3), match="not made by")
    op.has_nothing(op.define(copied), torch.randn(3), match="neither check= nor bypass=True")
    never: dict[str, Any] = {"check": "never"}
    op.has_nothing(op.define(copied, **never), torch.randn(3, dtype=torch.complex64).conj(), match="plain")
    op.has_nothing(op.define(torch.rand_like, schema="(Tensor x) -> Tensor", **never), torch.randn(3))
