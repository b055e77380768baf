"""Gradients of keyword-only tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from helpers.tensors import X, leaf_of
from torch import Tensor
from torch.func import grad, vmap

from customops import Registry, register_autograd
from customops.errors import AutogradError

# Keyword-only tensors -------------------------------------------------------------------------------------------


def test_gradients_of_keyword_only_tensors_by_name(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::times", lambda x, *, y: x * y, mutates_args=(),
                            schema="(Tensor x, *, Tensor y) -> Tensor")  # fmt: skip

    def setup_context(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs, keyword_only_inputs["y"])

    op.register_autograd(
        lambda ctx, g: {"y": g * ctx.saved_tensors[0], "x": g * ctx.saved_tensors[1]}, setup_context=setup_context
    )
    x, y = leaf_of(X), leaf_of(X + 1)
    op(x, y=y).sum().backward()
    torch.testing.assert_close((x.grad, y.grad), (X + 1, X))
    op.register_autograd(lambda ctx, g: g, setup_context=setup_context)
    with pytest.raises(AutogradError, match=r"incorrect number of gradients \(expected 2, got 1\)"):
        op(x, y=y).sum().backward()


@pytest.mark.parity(18)
@pytest.mark.parametrize("type_", ["Tensor", "Tensor?", "Tensor[]"])
def test_keyword_only_tensors_of_an_op_of_others(ns: str, type_: str) -> None:
    lib = torch.library.Library(ns, "FRAGMENT")
    lib.define(f"f(Tensor x, *, {type_} y) -> Tensor")
    lib.impl("f", lambda x, *, y: x * (y[0] if isinstance(y, list) else y), "CPU")

    def setup_context(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
        ctx.y = keyword_only_inputs["y"]

    register_autograd(f"{ns}::f", lambda ctx, g: {"x": g * 5}, setup_context=setup_context, lib=lib, nondiff_args="y")
    x, y = leaf_of(X), leaf_of(X)
    getattr(torch.ops, ns).f(x, y=[y] if "[" in type_ else y).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [5, 5, 5]
    lib._destroy()


# Names of keyword-only arguments are the user's -----------------------------------------------------------------

NAMES = ["fn", "function", "op", "rule", "args", "self", "kwargs", "others", "info", "in_dims", "node", "current"]


@pytest.mark.parametrize("name", NAMES)
def test_arguments_of_any_name(registry: Registry, ns: str, name: str) -> None:
    code = f"def f(x: Tensor, *, {name}: Tensor, by: float = 2.0) -> Tensor:\n    return x * {name} * by"
    space: dict[str, Any] = {"Tensor": Tensor}
    exec(code, space)
    op = registry.custom_op(f"{ns}::f", space["f"], mutates_args=())
    op.register_fake(lambda x, **_: torch.empty_like(x))

    def setup_context(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0], keyword_only_inputs[name])
        ctx.by = keyword_only_inputs["by"]

    def backward(ctx: Any, grad: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return grad * y * ctx.by, grad * x * ctx.by

    op.register_autograd(backward, setup_context=setup_context)
    op.register_autocast("cpu", torch.bfloat16)
    op.register_vmap(lambda info, in_dims, x, /, **kwargs: (op(x, **kwargs), 0))
    x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    for by in ({}, {"by": 3.0}):
        op(x, **{name: y}, **by).sum().backward()
        torch.testing.assert_close(x.grad, y.detach() * by.get("by", 2.0))
        torch.testing.assert_close(y.grad, x.detach() * by.get("by", 2.0))
        x.grad = y.grad = None
    with torch.autocast("cpu"):
        assert op(x, **{name: y}).dtype is torch.bfloat16
    batched = vmap(lambda x: op(x, **{name: y.detach()}))(torch.ones(2, 3))
    torch.testing.assert_close(batched, 2 * y.detach().expand(2, 3))
    torch.testing.assert_close(grad(lambda x: op(x, **{name: y.detach()}).sum())(torch.ones(3)), 2 * y.detach())
