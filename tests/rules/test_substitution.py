"""What a decomposition or a lowering may do, and what inductor makes of what it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from customops import Registry

pytestmark = pytest.mark.compile

KINDS = ["decomposition", "lowering"]
WEIGHT = torch.ones(4)


@pytest.fixture(params=KINDS)
def define(request: pytest.FixtureRequest, registry: Registry, ns: str) -> Iterator[Callable[..., Any]]:
    """Defines ``x * 2`` with a fake impl, and a decomposition or lowering."""

    def define(fn: Callable[..., Any], kernel: Callable[..., Any] = lambda x: x * 2, returns: str = "Tensor") -> Any:
        op = registry.custom_op(f"{ns}::double", kernel, schema=f"(Tensor x) -> {returns}")
        op.register_fake(
            lambda x: torch.empty_like(x) if returns == "Tensor" else (torch.empty_like(x), torch.empty_like(x))
        )
        (op.register_decomposition if request.param == "decomposition" else op.register_lowering)(fn)
        return op

    yield define
    torch._dynamo.reset()


def compiled(op: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(lambda x: op(x), fullgraph=True)


def in_place(x: Tensor) -> Tensor:
    result = torch.empty_like(x)
    torch.mul(x, 2, out=result)
    result[0] = x[0]
    return result.add_(x)


def test_writes_to_its_own_tensors(define: Any) -> None:
    x = torch.randn(4)
    assert_close(compiled(define(in_place))(x), torch.cat([x[:1] * 2, x[1:] * 3]))


def test_results_that_are_arguments_or_views_are_copied(define: Any) -> None:
    op = define(lambda x: (x, x.view(2, 2).view(4)), lambda x: (x.clone(), x.clone()), "(Tensor, Tensor)")
    x = torch.randn(4)
    one, two = compiled(op)(x)
    assert_close((one, two), (x, x))
    one.zero_()
    assert two.any()
    two.zero_()
    assert x.any()


def by_transforms(x: Tensor) -> Tensor:
    """``x * 2``"""
    gradient = torch.func.grad(lambda z: (z * z).sum())(x)
    of_rows = torch.vmap(lambda row: row * 2.0)(x)
    _, tangent = torch.func.jvp(lambda z: z * z * 3.0, (x,), (torch.ones_like(x),))
    return (gradient + of_rows + tangent) / 5


def test_transforms_work_inside(define: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "1")  # there inductor asserts that it has no decomposition of what it cannot lower
    op = define(by_transforms, kernel=lambda x: torch.full_like(x, torch.nan))
    x = torch.randn(4)
    assert_close(compiled(op)(x), x * 2)


FAULTS = {
    "writes to an argument": lambda x: x.mul_(2),
    "uses a tensor that is not an argument": lambda x: x * 2 * WEIGHT,
    "something else than the fake impl": lambda x: (x * 2).double(),
    "number of results": lambda x: (x, x),
    "calls the op itself, without end": None,
}


@pytest.mark.parametrize("words", FAULTS)
def test_faults(define: Any, words: str) -> None:
    ops: list[Any] = []
    ops.append(define(FAULTS[words] or (lambda x: ops[0](x))))
    x = torch.ones(4)
    with pytest.raises(Exception, match=words) as caught:
        compiled(ops[0])(x)
    assert "test_substitution.py" in str(caught.value)
    assert ops[0]._qualname in str(caught.value)
    assert_close(x, torch.ones(4))


def test_a_tuple_of_one_is_told_from_one_result(define: Any) -> None:
    with pytest.raises(Exception, match="got:      a tuple of 1"):
        compiled(define(lambda x: (x * 2,)))(torch.ones(4))


def test_sizes_are_compared(define: Any) -> None:
    with pytest.raises(Exception, match=r"expected: torch.float32 of shape \(4,\)"):
        compiled(define(lambda x: x.sum()))(torch.ones(4))


def test_a_constant_is_no_foreign_tensor(define: Any) -> None:
    x = torch.randn(3)
    assert_close(compiled(define(lambda x: x * torch.tensor([2.0, 2.0, 2.0])))(x), x * 2)


def test_random_numbers(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::noise", torch.rand_like, schema="(Tensor x) -> Tensor")
    op.register_fake(torch.empty_like)
    op.register_lowering(torch.rand_like)
    with pytest.raises(Exception, match="draws random numbers"):
        compiled(op)(torch.ones(4))


def test_dynamic_sizes(define: Any) -> None:
    f = torch.compile(lambda x: define_once(x) + 1, fullgraph=True, dynamic=True)
    define_once = define(in_place)
    for n in (4, 5):
        x = torch.randn(n)
        assert_close(f(x), torch.cat([x[:1] * 2, x[1:] * 3]) + 1)


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # run_decompositions copies them
@pytest.mark.parametrize("define", ["decomposition"], indirect=True)
def test_export(define: Any, registry: Registry, ns: str) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return op(x)

    op = define(lambda x: x * 2)
    op.register_decomposition(lambda x: x, when="export")
    program = torch.export.export(Model(), (torch.ones(4),)).run_decompositions()
    x = torch.ones(4)
    program.module()(x).zero_()
    assert x.any()
