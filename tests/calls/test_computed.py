"""``computed_args=``: arguments that calls leave out."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from helpers.compiling import dynamo
from torch import Tensor
from torch._subclasses import FakeTensorMode

from customops import Registry
from customops.errors import DefinitionError


def tiled_fn(x: Tensor, weight: Tensor, tile: int, workspace: Tensor, bias: float = 0.0) -> Tensor:
    assert workspace.shape == (tile,)
    return x @ weight * tile + bias


COMPUTED = {
    "tile": lambda x: 1 << (len(x) - 1).bit_length(),
    "workspace": lambda x, tile: x.new_zeros(tile),
}


@pytest.fixture
def tiled(registry: Registry, ns: str) -> Any:
    op = registry.custom_op(f"{ns}::tiled", tiled_fn, mutates_args=("workspace",), computed_args=COMPUTED)
    op.register_fake(lambda x, weight, tile, workspace, bias: x.new_empty(len(x), weight.shape[1]))
    return op


def inputs(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3), torch.randn(3, 2)


def test_calls_leave_them_out(tiled: Any) -> None:
    x, weight = inputs(5)
    torch.testing.assert_close(tiled(x, weight), x @ weight * 8)
    torch.testing.assert_close(tiled(x, weight, 1.0), x @ weight * 8 + 1)
    torch.testing.assert_close(tiled(x, weight=weight, bias=1), x @ weight * 8 + 1)
    torch.testing.assert_close(tiled(x, weight, tile=4), x @ weight * 4)  # which the workspace follows
    with FakeTensorMode():
        assert tiled(*inputs(9)).shape == (9, 2)
    assert [str(each) for each in inspect.signature(tiled).parameters.values()][2:] == [
        "bias: 'float' = 0.0",
        "tile: 'int' = <computed>",
        "workspace: 'Tensor' = <computed>",
    ]


def test_the_op_itself_takes_all(tiled: Any, ns: str) -> None:
    x, weight = inputs(5)
    torch.testing.assert_close(getattr(torch.ops, ns).tiled(x, weight, 2, torch.zeros(2)), x @ weight * 2)
    with pytest.raises(RuntimeError, match="tile"):
        getattr(torch.ops, ns).tiled(x, weight)
    with pytest.raises(TypeError, match="weight"):
        tiled(x)


@pytest.mark.compile
def test_compilers_trace_what_computes_them(tiled: Any) -> None:
    """A size that decides is guarded, and no value of a former call is kept."""
    counter = dynamo("testing").CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(tiled, fullgraph=True, backend=counter)
    for n, tile in [(5, 8), (5, 8), (3, 4), (17, 32), (5, 8)]:
        x, weight = inputs(n)
        torch.testing.assert_close(compiled(x, weight), x @ weight * tile)
    assert "new_zeros" in counter.graphs[0].code


@pytest.mark.parametrize("option", ["bypass", "eager"])
def test_without_the_dispatcher(registry: Registry, ns: str, option: str) -> None:
    op = registry.custom_op(f"{ns}::f", tiled_fn, mutates_args=("workspace",), computed_args=COMPUTED, **{option: True})
    x, weight = inputs(5)
    torch.testing.assert_close(op(x, weight), x @ weight * 8)


def test_gradients_reach_what_is_given(registry: Registry, ns: str) -> None:
    """A tensor that is computed of others is part of the program, and so are its gradients."""

    @registry.custom_op(f"{ns}::times", mutates_args=(), computed_args={"scale": lambda x: x.abs().amax()})
    def times(x: Tensor, scale: Tensor) -> Tensor:
        return x * scale

    times.register_autograd(
        lambda ctx, g: (g * ctx.saved_tensors[1], (g * ctx.saved_tensors[0]).sum()),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    x = torch.tensor([1.0, -3.0], requires_grad=True)
    (grad,) = torch.autograd.grad(times(x).sum(), x)
    (expected,) = torch.autograd.grad((x * x.abs().amax()).sum(), x)
    torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ([], "must be a dict of functions"),
        ({"tiles": lambda x: 1}, "names an argument that the op does not have"),
        ({"tile": 3}, "computed_args needs a function for each argument"),
        ({"tile": lambda y: 1}, "has a parameter that is not an argument before it"),
        ({"tile": lambda workspace: 1, "workspace": lambda x: x}, "has a parameter that is not an argument before it"),
        ({"tile": lambda x, /: 1}, "has a parameter that is not an argument before it"),
    ],
)
def test_what_is_refused(registry: Registry, ns: str, given: Any, problem: str) -> None:
    with pytest.raises(DefinitionError, match=problem):
        registry.custom_op(f"{ns}::f", tiled_fn, mutates_args=("workspace",), computed_args=given)
    assert not hasattr(getattr(torch.ops, ns), "f")


def test_a_function_without_a_signature_cannot_compute(registry: Registry, ns: str) -> None:
    with pytest.raises(DefinitionError, match=r"does not know the parameters[\s\S]*lambda x: f\(x\)"):
        registry.custom_op(f"{ns}::f", tiled_fn, mutates_args=(), computed_args={"tile": max})
    assert f"{ns}::f" not in registry
