"""Formulas in traced and compiled programs, under subclasses and dispatch modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, List, Optional

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from helpers.formulas import X, assert_same_gradients, plain
from helpers.tensors import leaf
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from customops import Registry
from customops.errors import AutogradError

# Tracing --------------------------------------------------------------------------------------------------------------


def training_step(f: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
    def step(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        loss = (f(f(x, weight), weight) - 1).pow(2).sum()
        (gradient,) = torch.autograd.grad(loss, weight)
        return loss.detach(), weight.detach() - 0.1 * gradient

    return step


@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
def test_make_fx_of_a_training_step(product: Any, ns: str, tracing_mode: str) -> None:
    x, weight = torch.rand(3), torch.rand(3, requires_grad=True)
    graph = make_fx(training_step(product), tracing_mode=tracing_mode)(x, weight)
    assert graph.code.count(f"torch.ops.{ns}.product.default") == 2
    torch.testing.assert_close(graph(x, weight), training_step(plain)(x, weight))


@pytest.mark.compile
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "aot_eager_decomp_partition"])
def test_compiled_training(product: Any, backend: str, dynamic: bool) -> None:
    @torch.compile(backend=backend, fullgraph=True, dynamic=dynamic)
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return (product(product(x, weight), weight) - 1).pow(2)

    for n in 3, 4:
        x, weight = torch.rand(n), torch.rand(n)
        assert_same_gradients(forward, lambda x, w: (plain(plain(x, w), w) - 1).pow(2), x, weight)


# Subclasses and modes -------------------------------------------------------------------------------------------------


def test_a_subclass_through_torch_function_alone(product: Any) -> None:
    class Named(Tensor):
        pass

    x = X.as_subclass(Named).clone().requires_grad_()
    y = product(x, x)
    assert isinstance(y, Named)
    y.sum().backward()
    reference = X.clone().requires_grad_()
    plain(reference, reference).sum().backward()
    assert torch.equal(torch.Tensor(x.grad), reference.grad)


@pytest.mark.parametrize("gaps", [(None, "x"), ("x", None), (None, "x", None)])
def test_lists_with_gaps_are_differentiated(registry: Registry, ns: str, gaps: tuple[Any, ...]) -> None:
    def total(xs: List[Optional[Tensor]]) -> Tensor:
        return sum((x * 3 for x in xs if x is not None), torch.zeros(2))

    op = registry.custom_op(f"{ns}::total", total, mutates_args=())
    op.register_autograd(lambda ctx, grad: [grad * 3 if need else None for need in ctx.needs_input_grad[0]])
    x = torch.ones(2, requires_grad=True)
    op([x if gap else None for gap in gaps]).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3.0, 3.0]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_layouts_without_tangents_inside_a_level(registry: Registry, ns: str, layout: torch.layout) -> None:
    op = registry.custom_op(f"{ns}::twice", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor")
    x = torch.eye(2).to_sparse(layout=layout)
    with fwAD.dual_level():
        assert torch.equal(op(x).to_dense(), 2 * torch.eye(2))


def product_by_name(registry: Registry, ns: str, backward: Any) -> Any:
    op = registry.custom_op(
        f"{ns}::product",
        lambda x, y, by: x * y * by,
        mutates_args=(),
        schema="(Tensor x, Tensor y, float by=2.0) -> Tensor",
    )
    op.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:2]))
    return op


@pytest.mark.parametrize("by", [(), (2.0,), (3.0,)])
def test_gradients_by_name(registry: Registry, ns: str, by: tuple[float, ...]) -> None:
    factor = by[0] if by else 2.0
    op = product_by_name(registry, ns, lambda ctx, grad: {"y": grad * ctx.saved_tensors[0] * factor})
    x, y = leaf(1.0, 2.0), leaf(3.0, 4.0)
    assert_same = torch.testing.assert_close
    detached = x.detach()
    assert_same(torch.autograd.grad(op(detached, y, *by).sum(), y), torch.autograd.grad((x * y * factor).sum(), y))
    with pytest.raises(AutogradError, match="None for an argument that needs a gradient") as raised:
        op(x, y, *by).sum().backward()
    assert raised.value.argument == "x"


def test_gradients_by_a_wrong_name(registry: Registry, ns: str) -> None:
    op = product_by_name(registry, ns, lambda ctx, grad: {"x": grad, "z": grad})
    with pytest.raises(AutogradError, match="one name is not that of a differentiable argument") as caught:
        op(leaf(1.0), leaf(2.0)).backward()
    assert (caught.value.argument, caught.value.expected) == ("z", "x, y, by")


@pytest.mark.parametrize(
    "backward", [lambda ctx, grad: (grad, grad, grad), lambda ctx, grad: {"x": grad, "y": grad, "by": grad}]
)
def test_a_gradient_for_a_number(registry: Registry, ns: str, backward: Any) -> None:
    op = product_by_name(registry, ns, backward)
    with pytest.raises(AutogradError, match="does not fit its input") as caught:
        op(leaf(1.0), leaf(2.0), 3.0).backward()
    assert (caught.value.argument, caught.value.expected) == ("by", "None: the argument is a float")


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_of_an_op_itself(registry: Registry, ns: str, mode: Any) -> None:
    """As for the function that the op wraps: torch passes all parameters by position."""

    def scale(x: Tensor, by: float = 2.0, y: Optional[Tensor] = None) -> Tensor:
        return x * by + (0 if y is None else y)

    op = registry.custom_op(f"{ns}::scale", scale, mutates_args=())
    op.register_fake(lambda x, by, y: torch.empty_like(x))
    x = torch.rand(3)
    for args in (x,), (x, 3.0), (x, 3.0, x):
        traced = op if len(args) == 3 else lambda *args: op(*args)
        graph = make_fx(traced, tracing_mode=mode)(*args)
        assert f"{ns}.scale" in graph.code
        torch.testing.assert_close(graph(*args), scale(*args))
