"""Gradients of ops with several mutated arguments, some of them views."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad
from helpers.compiling import BACKENDS
from helpers.covers import every
from helpers.tensors import X, leaf_of
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, hessian, jacfwd, jacrev, vmap
from torch.utils.checkpoint import checkpoint

from customops import Registry
from customops.errors import AutogradError

# Several results, one of which is a view ------------------------------------------------------------------------


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


ANGLES = torch.linspace(0, 1, 2, dtype=torch.double)
QKV = torch.linspace(-1, 1, 24, dtype=torch.double).reshape(3, 2, 4)


def rope(registry: Registry, ns: str) -> tuple[Any, Any]:
    """Rotates q and k, which are views of one tensor."""

    @registry.custom_op(f"{ns}::rope_", mutates_args={"q", "k"})
    def rope_(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
        for x in (q, k):
            x.copy_(rotated(x.clone(), cos, sin))

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[2:])
        ctx.save_for_forward(*inputs[2:])

    def backward(ctx: Any, *grads: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return *(rotated(g, cos, -sin) for g in grads), None, None

    def jvp(ctx: Any, *tangents: Tensor) -> Any:
        return tuple(rotated(t, *ctx.saved_tensors) for t in tangents[:2])

    rope_.register_vmap("sequential")
    rope_.register_autograd(backward, setup_context=setup_context, nondiff_args=("cos", "sin"))
    rope_.register_jvp(jvp, setup_context=setup_context, nondiff_args=("cos", "sin"))

    def ours(qkv: Tensor) -> Tensor:
        qkv = qkv.sin()
        q, k, v = qkv[0], qkv[1], qkv[2]
        rope_(q, k, ANGLES.cos(), ANGLES.sin())
        return (q * k).sin().sum() + (qkv**3).sum() + (k * v).sum()

    def plain(qkv: Tensor) -> Tensor:
        qkv = qkv.sin()
        q, k, v = (*(rotated(x, ANGLES.cos(), ANGLES.sin()) for x in (qkv[0], qkv[1])), qkv[2])
        return (q * k).sin().sum() + (torch.stack([q, k, v]) ** 3).sum() + (k * v).sum()

    return ours, plain


def accumulate_into_a_view(registry: Registry, ns: str) -> tuple[Any, Any]:
    """Returns something, and its formula uses the new value of what it wrote."""

    @registry.custom_op(f"{ns}::grow_", mutates_args={"acc"})
    def grow_(x: Tensor, acc: Tensor) -> Tensor:
        acc.add_(x).exp_()
        return x * x

    grow_.register_fake(lambda x, acc: torch.empty_like(x))

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    def backward(ctx: Any, g: Tensor, g_acc: Tensor) -> Any:
        x, acc = ctx.saved_tensors
        return 2 * g * x + g_acc * acc, g_acc * acc

    def jvp(ctx: Any, t: Tensor, t_acc: Tensor) -> Any:
        x, acc = ctx.saved_tensors
        return 2 * t * x, (t + t_acc) * acc

    grow_.register_vmap("sequential")
    grow_.register_autograd(backward, setup_context=setup_context, grads_of="acc")
    grow_.register_jvp(jvp, setup_context=setup_context, grads_of="acc")

    def ours(x: Tensor) -> Tensor:
        x = x * 1
        base = x.cos()
        return base.sum() + (grow_(x[0], base[1]) * base[0]).sum() + (base**3 * x).sum()

    def plain(x: Tensor) -> Tensor:
        before = x.cos()
        base = torch.stack([before[0], (before[1] + x[0]).exp(), before[2]])
        return before.sum() + (x[0] ** 2 * base[0]).sum() + (base**3 * x).sum()

    return ours, plain


def a_list_of_views(registry: Registry, ns: str) -> tuple[Any, Any]:
    @registry.custom_op(f"{ns}::powers_", mutates_args={"xs"})
    def powers_(xs: list[Tensor], y: Tensor) -> None:
        for x in xs:
            x.mul_(y)

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1], *inputs[0])
        ctx.save_for_forward(inputs[1], *inputs[0])

    def backward(ctx: Any, grads: list[Tensor]) -> Any:
        y, *xs = ctx.saved_tensors
        return [g * y for g in grads], sum((g * x).sum(0) for g, x in zip(grads, xs, strict=True))

    def jvp(ctx: Any, tangents: list[Tensor], t: Tensor) -> Any:
        y, *xs = ctx.saved_tensors
        return [of * y + x * t for of, x in zip(tangents, xs, strict=True)]

    powers_.register_vmap("sequential")
    powers_.register_autograd(backward, setup_context=setup_context, originals="xs")
    powers_.register_jvp(jvp, setup_context=setup_context, originals="xs")

    def ours(x: Tensor) -> Tensor:
        base, y = x.cos(), x[0, 0].exp()
        powers_([base[0], base[2], x.new_ones(2, 4)], y)
        return (base**2 * x).sum()

    def plain(x: Tensor) -> Tensor:
        base, y = x.cos(), x[0, 0].exp()
        return (torch.stack([base[0] * y, base[1], base[2] * y]) ** 2 * x).sum()

    return ours, plain


def first_and_second(f: Any) -> Any:
    x = leaf_of(QKV)
    y = f(x)
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    return y, g, torch.autograd.grad(g.square().sum(), x)[0]


def dual(f: Any) -> Any:
    with torch.autograd.forward_ad.dual_level():
        y = f(torch.autograd.forward_ad.make_dual(QKV, QKV.cos()))
        return torch.autograd.forward_ad.unpack_dual(y).tangent


def gradient(f: Any) -> Any:
    x = leaf_of(QKV)
    return torch.autograd.grad(f(x), x)


def compiled_gradient(backend: str, dynamic: bool | None = None) -> Any:
    return lambda f: gradient(torch.compile(f, fullgraph=True, backend=backend, dynamic=dynamic))


WAYS: dict[str, Any] = {
    "first and second": first_and_second,
    "no grad": lambda f: torch.no_grad()(f)(QKV),
    "checkpoint": lambda f: gradient(lambda x: checkpoint(f, x, use_reentrant=False)),
    "grad": lambda f: grad(f)(QKV),
    "vjp": lambda f: torch.func.vjp(f, QKV)[1](torch.tensor(2.0, dtype=torch.double)),
    "jvp": lambda f: torch.func.jvp(f, (QKV,), (QKV.cos(),)),
    "dual numbers": dual,
    "hessian": lambda f: hessian(f)(QKV),
    "jacrev(jacrev)": lambda f: jacrev(jacrev(f))(QKV),
    "vmap(grad)": lambda f: vmap(grad(f))(torch.stack([QKV, QKV.exp()])),
    "grad(vmap)": lambda f: grad(lambda x: vmap(f)(x).sum())(torch.stack([QKV, QKV.exp()])),
    "aot_eager": compiled_gradient("aot_eager"),
    "dynamic shapes": compiled_gradient("aot_eager", dynamic=True),
    "inductor": compiled_gradient("inductor"),
    "compiled grad": lambda f: torch.compile(grad(f), fullgraph=True, backend="aot_eager")(QKV),
    "compiled jacfwd": lambda f: torch.compile(jacfwd(f), fullgraph=True, backend="aot_eager")(QKV),
}


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(
    ("make", "way"), every(3, itertools.product([rope, accumulate_into_a_view, a_list_of_views], WAYS))
)
def test_several_results_and_views(registry: Registry, ns: str, make: Any, way: str) -> None:
    ours, plain = make(registry, ns)
    torch.testing.assert_close(WAYS[way](ours), WAYS[way](plain))


@pytest.mark.parametrize("make", [rope, accumulate_into_a_view, a_list_of_views])
def test_several_results_and_views_by_finite_differences(registry: Registry, ns: str, make: Any) -> None:
    ours, _ = make(registry, ns)
    assert gradcheck(ours, (leaf_of(QKV),), check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(ours, (leaf_of(QKV),))


def test_a_view_beside_another_result(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::op", lambda x, acc: acc.add_(x) * 2, mutates_args={"acc"},
                            schema="(Tensor x, Tensor(a!) acc) -> Tensor")  # fmt: skip
    op.register_autograd(lambda ctx, g, g_acc: (2 * g + g_acc, 2 * g + g_acc), grads_of="acc")
    base, x = torch.zeros(2, 3), leaf_of(X)
    memory, view = base.data_ptr(), base[0]
    result = op(x, view)
    assert (base.data_ptr(), view.data_ptr()) == (memory, memory)
    assert (base.requires_grad, view.requires_grad, view._base is base) == (True, True, True)
    (result.sum() + 5 * base.sum()).backward()
    torch.testing.assert_close(x.grad, torch.full((3,), 7.0))
    view = torch.zeros(2, 3).mul(leaf_of(X)).unbind()[0]
    with pytest.raises(AutogradError, match="a view is being modified in-place that autograd cannot follow") as raised:
        op(x, view)
    assert raised.value.argument == "acc"


def test_views_that_are_written_without_a_formula(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::op", lambda x, acc: acc.add_(x) * 2, mutates_args={"acc"},
                            schema="(Tensor x, Tensor(a!) acc) -> Tensor")  # fmt: skip
    base = torch.zeros(2, 3)
    op(leaf_of(X), base[0])
    with pytest.raises(AutogradError, match="no autograd formula was registered"):
        base.sum().backward()


@pytest.mark.compile
def test_a_list_of_buffers(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::fan_out", mutates_args={"outs"})
    def fan_out(x: Tensor, outs: list[Tensor]) -> None:
        for i, out in enumerate(outs):
            out.copy_(x * (i + 1))

    def backward(ctx: Any, grads: list[Tensor]) -> Any:
        ctx.seen = ctx.needs_input_grad
        return sum(g * (i + 1) for i, g in enumerate(grads)), [torch.zeros_like(g) for g in grads]

    fan_out.register_autograd(backward)
    for backend in BACKENDS:

        def f(x: Tensor) -> Tensor:
            outs = [torch.empty_like(x) for _ in range(3)]
            fan_out(x, outs)
            return outs[0] * outs[1] + outs[2]

        compiled = f if backend == "eager" else torch.compile(f, fullgraph=True, backend=backend)
        x = leaf_of(X)
        compiled(x).sum().backward()
        torch.testing.assert_close(x.grad, 4 * X + 3)


@pytest.mark.compile
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_keyword_only_buffer(registry: Registry, ns: str, backend: str) -> None:
    @registry.custom_op(f"{ns}::scaled", mutates_args={"out"})
    def scaled(x: Tensor, *, by: float = 2.0, out: Tensor) -> None:
        out.copy_(x * by)

    def setup_context(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
        ctx.by = keyword_only_inputs["by"]

    scaled.register_autograd(lambda ctx, g: {"x": g * ctx.by, "out": torch.zeros_like(g)}, setup_context=setup_context)

    def f(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        scaled(x, by=3.0, out=out)
        return out * out

    compiled = f if backend == "eager" else torch.compile(f, fullgraph=True, backend=backend)
    x = leaf_of(X)
    compiled(x).sum().backward()
    torch.testing.assert_close(x.grad, 18 * X)
