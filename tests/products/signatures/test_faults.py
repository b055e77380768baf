"""Results and gradients of which a part has no gradient, and values that compilers know only as numbers."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from customops import Registry


@pytest.mark.parametrize("name", ["", "abc"])
def test_gradients_beside_a_returned_string(registry: Registry, ns: str, name: str) -> None:
    def f(x: Tensor, name: str) -> tuple[Tensor, str, Tensor]:
        return x * 2, name, x * 3

    op = registry.custom_op(f"{ns}::f", f)
    op.register_reference(f, gives="gradients")
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    for outputs in ((0,), (2,), (0, 2)):
        assert torch.autograd.gradcheck(lambda x, of=outputs: [op(x, name)[i] for i in of], x, check_forward_ad=True)
    assert op(x, name)[1] == name


def test_gradients_of_lists_of_lists_alone(registry: Registry, ns: str) -> None:
    def f(xs: list[list[Tensor]]) -> Tensor:
        return sum((x for group in xs for x in group), torch.zeros(()))

    op = registry.custom_op(f"{ns}::f", f)
    op.register_autograd(lambda ctx, grad: [[grad], [grad, grad]])
    xs = [torch.ones((), requires_grad=True) for _ in range(3)]
    op([xs[:1], xs[1:]]).backward()
    assert [x.grad for x in xs] == [1, 1, 1]


@pytest.mark.compile
def test_a_literal_of_several_types_is_traced_where_the_int_may_change(registry: Registry, ns: str) -> None:
    def f(x: Tensor, how: Literal["auto", 4, True]) -> Tensor:
        return x * {str: 2, int: 3, bool: 4}[type(how)]

    op = registry.custom_op(f"{ns}::f", f)
    op.register_fake(lambda x, how: torch.empty_like(x))
    compiled: Any = torch.compile(op, fullgraph=True, dynamic=True, backend="aot_eager")
    assert [compiled(torch.ones(()), how).item() for how in (4, "auto", True)] == [3, 2, 4]
