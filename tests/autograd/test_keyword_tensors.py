"""Gradients of keyword-only tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from helpers.compiling import compiled
from helpers.tensors import X, leaf_of
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, jacfwd, jacrev, vjp, vmap

from customops import Registry, register_autograd
from customops.errors import AutogradError

# Keyword-only tensors -------------------------------------------------------------------------------------------


@pytest.fixture
def affine(registry: Registry, ns: str) -> Any:
    @registry.custom_op(f"{ns}::affine", mutates_args=())
    def affine(
        x: Tensor, power: int = 1, *, weight: Tensor, bias: Tensor | None = None, more: list[Tensor], by: float = 1.0
    ) -> Tensor:
        return affine_in_torch(x, power, weight=weight, bias=bias, more=more, by=by)

    affine.register_fake(lambda x, power, **_: torch.empty_like(x))

    def setup_context(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
        x, ctx.power = inputs
        ctx.by, ctx.has_bias = keyword_only_inputs["by"], keyword_only_inputs["bias"] is not None
        tensors = x, keyword_only_inputs["weight"], *keyword_only_inputs["more"]
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight, *more = ctx.saved_tensors
        needs.append(ctx.needs_input_grad)
        g = g * ctx.by
        g_x = g * weight * ctx.power * x ** (ctx.power - 1)
        return g_x, None, g * x**ctx.power, g if ctx.has_bias else None, [g * 2 * m for m in more]

    def forward_mode(ctx: Any, t: Any, _: Any, t_weight: Any, t_bias: Any, t_more: Any) -> Any:
        x, weight, *more = ctx.saved_tensors
        result = t * weight * ctx.power * x ** (ctx.power - 1) + t_weight * x**ctx.power
        result = result + sum((2 * m * u for m, u in zip(more, t_more, strict=True)), torch.zeros_like(x))
        return (result if t_bias is None else result + t_bias) * ctx.by

    needs: list[Any] = []
    affine.register_autograd(backward, setup_context=setup_context)
    affine.register_jvp(forward_mode, setup_context=setup_context)
    affine.needs = needs
    return affine


def affine_in_torch(
    x: Tensor, power: int = 1, *, weight: Tensor, bias: Tensor | None = None, more: list[Tensor], by: float = 1.0
) -> Tensor:
    result = x**power * weight + sum((m * m for m in more), torch.zeros_like(x))
    return (result if bias is None else result + bias) * by


#: Calls with what is left out, given, or in another order. Four tensors each.
CALLS: list[Callable[..., Any]] = [
    lambda op, x, w, b, m: op(x, weight=w, more=[]),
    lambda op, x, w, b, m: op(x, 2, weight=w, bias=b, more=[m, x]),
    lambda op, x, w, b, m: op(x, by=3.0, more=(m,), weight=w),
    lambda op, x, w, b, m: op(power=3, x=x, bias=b, weight=x, more=[m, m]),
    lambda op, x, w, b, m: op(x.detach(), weight=w, more=[m.detach(), m]),
]


def arguments(dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    return tuple((X + i).to(dtype).requires_grad_() for i in range(4))


@pytest.mark.compile
@pytest.mark.parity(18)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_keyword_only_tensors(affine: Any, call: Any, backend: str) -> None:
    ours, plain = arguments(), arguments()
    result, expected = compiled(lambda *xs: call(affine, *xs), backend)(*ours), call(affine_in_torch, *plain)
    torch.testing.assert_close(result, expected)
    result.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close([x.grad for x in ours], [x.grad for x in plain])


@pytest.mark.parametrize("call", CALLS[:4])  # what is detached is no constant to finite differences
def test_keyword_only_tensors_by_finite_differences(affine: Any, call: Any) -> None:
    def f(*xs: Tensor) -> Any:
        return call(affine, *xs)

    xs = arguments(torch.float64)
    assert gradcheck(f, xs, check_forward_ad=True)
    assert gradgradcheck(f, xs, check_fwd_over_rev=True)


@pytest.mark.compile
def test_keyword_only_tensors_compiled_by_inductor(affine: Any) -> None:
    ours, plain = arguments(), arguments()
    torch.compile(lambda *xs: CALLS[1](affine, *xs).sum(), fullgraph=True)(*ours).backward()
    CALLS[1](affine_in_torch, *plain).sum().backward()
    torch.testing.assert_close([x.grad for x in ours], [x.grad for x in plain])


@pytest.mark.parametrize("call", CALLS[:4])
def test_keyword_only_tensors_transformed(affine: Any, call: Any) -> None:
    xs = tuple(x.detach() for x in arguments())
    for i in range(4):

        def f(op: Any, y: Tensor, i: int = i) -> Any:
            return call(op, *xs[:i], y, *xs[i + 1 :])

        for transform in (jacrev, jacfwd, lambda f: jacrev(jacrev(f)), lambda f: vjp(f, xs[0])[1]):
            with_ours, with_plain = transform(lambda y: f(affine, y)), transform(lambda y: f(affine_in_torch, y))
            torch.testing.assert_close(with_ours(xs[i]), with_plain(xs[i]))


def test_flags_of_keyword_only_tensors(affine: Any) -> None:
    x, w, _, m = arguments()
    affine(x, weight=w.detach(), more=[m, m.detach()]).sum().backward()
    assert affine.needs[-1] == (True, False, False, False, [True, False])


def test_per_sample_gradients_of_keyword_only_tensors(affine: Any) -> None:
    affine.register_vmap("broadcast_all")
    xs, w = torch.randn(4, 3), X

    def loss(op: Any, w: Tensor, x: Tensor) -> Tensor:
        return op(x, 2, weight=w, bias=w, more=[x * w]).sum()

    ours, plain = (
        vmap(grad(lambda w, x, op=op: loss(op, w, x)), in_dims=(None, 0))(w, xs) for op in (affine, affine_in_torch)
    )
    torch.testing.assert_close(ours, plain)


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
