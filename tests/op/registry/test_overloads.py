"""Overloads of one name that take the same arguments: torch's JIT takes them for one."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from customops import Registry
from customops.errors import UnregisteredError


def define(registry: Registry, ns: str, by: float, overload: str = "") -> Any:
    return registry.custom_op(f"{ns}::f{overload}", lambda x: x * by, schema="(Tensor x) -> Tensor")


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_removed_in_any_order(registry: Registry, ns: str, order: tuple[int, ...]) -> None:
    x = torch.ones(1)
    for _ in range(2):
        ops = [define(registry, ns, float(i), overload) for i, overload in enumerate(["", ".one", ".two"])]
        assert [op(x).item() for op in ops] == [0, 1, 2]
        for i, at in enumerate(order):
            ops[at].unregister()
            left = [op for op in ops if op not in [ops[gone] for gone in order[: i + 1]]]
            assert [op(x).item() for op in left] == [ops.index(op) for op in left]
            with pytest.raises(UnregisteredError):
                ops[at](x)
        torch.ops.aten.sin.default  # noqa: B018
    with pytest.raises(RuntimeError, match="the operator was removed"):
        getattr(torch.ops, ns).f(x)


def test_replaced_and_cleared(registry: Registry, ns: str) -> None:
    other, x = define(registry, ns, 5.0, ".other"), torch.ones(1)
    for by in (2.0, 3.0, 4.0):
        assert define(registry, ns, by)(x).item() == by
        assert getattr(torch.ops, ns).f.default(x).item() == by
        assert other(x).item() == 5
    registry.clear()
    compiled = torch.compile(lambda x: op(x), backend="eager", fullgraph=True)
    op = define(registry, ns, 7.0)
    op.register_fake(torch.empty_like)
    assert compiled(x).item() == 7


def add(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def test_other_arguments_need_nothing(registry: Registry, ns: str) -> None:
    define(registry, ns, 2.0)
    registry.custom_op(f"{ns}::f.add", add, mutates_args=()).unregister()
    assert getattr(torch.ops, ns).f.overloads() == ["default"]


@pytest.mark.parametrize("order", list(itertools.permutations((0, 1, 2))))
def test_defined_again_after_all_were_removed(registry: Registry, ns: str, order: tuple[int, ...]) -> None:
    x = torch.ones(1)
    for _ in range(3):
        ops = [define(registry, ns, i + 2.0, overload) for i, overload in enumerate(["", ".one", ".two"])]
        for at in order:
            ops[at].unregister()
        again = define(registry, ns, 7.0)
        assert getattr(torch.ops, ns).f(x).item() == again(x).item() == 7
        with pytest.raises(UnregisteredError):
            ops[0](x)
        again.unregister()
        other = registry.custom_op(f"{ns}::f", lambda x, y=2.0: x * y, schema="(Tensor x, float y=2.0) -> Tensor")
        assert getattr(torch.ops, ns).f(x).item() == other(x).item() == 2
        other.unregister()
    assert not torch._C._dispatch_has_kernel(f"{ns}::f")
