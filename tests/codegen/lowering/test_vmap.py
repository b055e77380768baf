"""vmap rules of ops with rich types get, and return, dimensions in the form of the signature."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, List, NamedTuple, Optional, Tuple

import pytest
import torch
from torch import Tensor

from customops import Registry


@dataclass(frozen=True)
class Weights:
    w: Tensor
    factor: float = 1.0


class Out(NamedTuple):
    out: Tensor
    parts: Tuple[Tensor, ...]
    maybe: Optional[Tensor]
    size: int


def fn(x: Tensor, p: Weights, xs: List[List[Tensor]], want: bool = False) -> Out:
    y = x * p.w * p.factor + sum(each for part in xs for each in part)
    return Out(y, (y + 1, y * 2), y * 3 if want else None, len(xs))


@pytest.fixture
def op(registry: Registry, ns: str) -> Any:
    return registry.custom_op(f"{ns}::f", fn)


def in_front(x: Tensor, dim: Optional[int], size: int) -> Tensor:
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


def call(op: Any, want: bool = True) -> Any:
    def f(x: Tensor, w: Tensor, a: Tensor) -> Any:
        result = op(x, Weights(w, 2.0), [[a], []], want)
        assert type(result) is Out
        assert result.size == 2
        return [result.out, *result.parts, *([result.maybe] if want else [])]

    return f


@pytest.mark.parametrize("in_dims", [(0, None, None), (0, 1, None), (None, 0, 0), (1, None, 0)])
@pytest.mark.parametrize("form", ["object", "one number"])
def test_rule(op: Any, in_dims: Any, form: str) -> None:
    seen: List[Any] = []

    @op.register_vmap
    def rule(info: Any, in_dims: Any, x: Tensor, p: Weights, xs: Any, want: bool) -> Any:
        seen.append(in_dims)
        x_dim, p_dims, xs_dims, want_dim = in_dims
        assert type(p_dims) is Weights
        assert want_dim is None
        assert [len(part) for part in xs_dims] == [1, 0]
        p = replace(p, w=in_front(p.w, p_dims.w, info.batch_size))
        a = in_front(xs[0][0], xs_dims[0][0], info.batch_size)
        result = op(in_front(x, x_dim, info.batch_size), p, [[a], []], want)
        return result, (0 if form == "one number" else Out(0, (0, 0), 0 if want else None, None))

    inputs = [torch.randn(3, 3) if dim is not None else torch.randn(3) for dim in in_dims]
    got = torch.vmap(call(op), in_dims=in_dims)(*inputs)
    expected = torch.vmap(call(fn), in_dims=in_dims)(*inputs)
    torch.testing.assert_close(got, expected)
    assert seen[0][1].factor is None


@pytest.mark.parametrize("strategy", ["sequential", "broadcast_all"])
def test_strategies(op: Any, strategy: str) -> None:
    op.register_vmap(strategy)
    inputs = torch.randn(4, 3), torch.randn(4, 3), torch.randn(3)
    got = torch.vmap(call(op), in_dims=(0, 0, None))(*inputs)
    torch.testing.assert_close(got, torch.vmap(call(fn), in_dims=(0, 0, None))(*inputs))


def test_nested_with_gradients(op: Any) -> None:
    op.register_vmap("sequential")
    op.register_reference(fn, gives="gradients")
    x, w, a = torch.randn(2, 3, 4), torch.randn(4), torch.randn(4)

    def loss(f: Any) -> Any:
        return torch.func.grad(lambda w: torch.vmap(torch.vmap(lambda x: call(f)(x, w, a)[1]))(x).sum())(w)

    torch.testing.assert_close(loss(op), loss(fn))
