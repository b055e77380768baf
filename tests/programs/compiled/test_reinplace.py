"""Writes that inductor lets happen in place: an op reads the old value where the program says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from customops import Registry

pytestmark = pytest.mark.compile

COPIES: list[bool] = []


def add_to(x: Tensor, y: Tensor) -> None:
    """Element by element from the first to the last: reading what was written shows."""
    COPIES.append(x.untyped_storage().data_ptr() != y.untyped_storage().data_ptr())
    for i in range(len(x)):
        x[i] += y[i]


def shifted(x: Tensor, add: Callable[..., Any]) -> Tensor:
    x = x * 2
    add(x[1:], x[:-1].clone())
    return x


def of_itself(x: Tensor, add: Callable[..., Any]) -> Tensor:
    x = x * 2
    add(x, x.clone().flip(0))
    add(x, x.flip(0).flip(0).clone())
    return x


def of_an_input(x: Tensor, add: Callable[..., Any]) -> Tensor:
    add(x[1:], x[:-1].clone())
    return x * 3


def used_later(x: Tensor, add: Callable[..., Any]) -> Any:
    y = x * 2
    old = y.clone()
    add(y, x)
    other = y.view(-1)
    add(other, old)
    return y, old, other + 1


def twice_the_same(x: Tensor, add: Callable[..., Any]) -> Any:
    one, two = x * 2, x * 2
    add(one, x)
    add(two, one)
    return one, two


def parts_of_one(x: Tensor, add: Callable[..., Any]) -> Tensor:
    both = torch.cat([x, x + 1]).view(2, -1).t().contiguous()
    add(both[:, 0], both[:, 1])
    return both


PROGRAMS = [shifted, of_itself, of_an_input, used_later, twice_the_same, parts_of_one]


@pytest.mark.parametrize("program", PROGRAMS)
def test_old_values_are_read(registry: Registry, ns: str, program: Any) -> None:
    """The graph of the second call has symbols for sizes."""
    add = registry.custom_op(f"{ns}::add_to", add_to, mutates_args=("x",))
    compiled = torch.compile(lambda x: program(x, add), fullgraph=True)
    for n in (4, 6):
        x, y = torch.randn(2, n)
        assert_close(compiled(x.copy_(y)), program(y, add))
        assert_close(x, y)


def test_views_that_do_not_overlap_are_not_copied(registry: Registry, ns: str) -> None:
    add = registry.custom_op(f"{ns}::add_to", add_to, mutates_args=("x",))
    compiled = torch.compile(lambda x: parts_of_one(x, add), fullgraph=True, dynamic=False)
    compiled(torch.randn(4))
    COPIES.clear()
    compiled(torch.randn(4))
    assert COPIES == [False]
