"""What is not differentiable is said; gradients are checked; second derivatives are not silently wrong."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwAD
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nested._internal.nested_tensor import NestedTensor

from customops import Registry, register_autograd
from customops.errors import AutogradError, DefinitionError, RegistrationError

BACKENDS = ["eager", "aot_eager", "inductor"]
X = torch.tensor([0.3, -1.2, 2.0])


def leaf(x: Tensor) -> Tensor:
    return x.clone().requires_grad_()


def save_inputs(ctx: Any, inputs: Any, output: Any) -> None:
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)


def compiled(f: Any, backend: str) -> Any:
    return f if backend == "eager" else torch.compile(f, fullgraph=True, backend=backend)


# differentiable= ------------------------------------------------------------------------------------------------


@pytest.fixture
def bins(registry: Registry, ns: str) -> Any:
    @registry.custom_op(f"{ns}::bins", mutates_args=(), differentiable=False)
    def bins(x: Tensor, *, step: float = 0.5) -> Tensor:
        return (x / step).floor()

    bins.register_fake(lambda x, *, step: torch.empty_like(x))
    return bins


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_op_that_is_not_differentiable(bins: Any, backend: str) -> None:
    x = leaf(X)
    assert not bins(x).requires_grad
    compiled(lambda x: (bins(x, step=0.25) * x).sum(), backend)(x).backward()
    torch.testing.assert_close(x.grad, (X / 0.25).floor())


def test_an_op_that_is_not_differentiable_transformed(bins: Any) -> None:
    def f(x: Tensor) -> Tensor:
        return (bins(x) * x * x).sum()

    def plain(x: Tensor) -> Tensor:
        return ((x.detach() / 0.5).floor() * x * x).sum()

    for transform in (grad, jacfwd, jacrev, hessian, lambda f: jacrev(jacrev(f)), lambda f: jacfwd(jacfwd(f))):
        torch.testing.assert_close(transform(f)(X), transform(plain)(X))
    with fwAD.dual_level():
        assert fwAD.unpack_dual(bins(fwAD.make_dual(X, X))).tangent is None
    assert jvp(bins, (X,), (X,))[1].tolist() == [0, 0, 0]


def test_no_formula_for_an_op_that_is_not_differentiable(bins: Any, ns: str) -> None:
    for register in (bins.register_autograd, bins.register_jvp, lambda f: register_autograd(f"{ns}::bins", f)):
        with pytest.raises(RegistrationError, match="declared not to be differentiable"):
            register(lambda ctx, g: g)
    with pytest.raises(RegistrationError, match="declared not to be differentiable"):
        bins.register_autograd_from(lambda x, *, step: x)


def test_a_write_by_an_op_that_is_not_differentiable(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::reset", lambda x: (x.zero_(), None)[1], mutates_args={"x"}, differentiable=False,
                            schema="(Tensor(a!) x) -> ()")  # fmt: skip
    parameter = leaf(X)
    op(parameter)  # as an optimizer does
    assert parameter.tolist() == [0, 0, 0]
    y = leaf(X) * 2
    op(y)
    with pytest.raises(AutogradError, match="declared not to be differentiable, but wrote its argument"):
        y.sum().backward()


@pytest.fixture
def sorted_of(registry: Registry, ns: str) -> Any:
    """Of three returns the second is an integer, and the third is declared to have no gradient."""

    @registry.custom_op(f"{ns}::sorted_of", mutates_args=(), differentiable=(True, True, False))
    def sorted_of(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        values, order = x.sort()
        return values, order, x.mean()

    sorted_of.register_fake(lambda x: (torch.empty_like(x), torch.empty_like(x, dtype=torch.int64), x.new_empty(())))

    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.grads.append([g if g is None else g.dtype for g in grads])
        return torch.zeros_like(grads[0]).scatter(0, ctx.saved_tensors[0], grads[0])

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output[1])
        ctx.save_for_forward(output[1])
        ctx.grads = seen

    seen: list[Any] = []
    sorted_of.register_autograd(backward, setup_context=setup_context)
    sorted_of.register_jvp(lambda ctx, t: (t.gather(0, ctx.saved_tensors[0]), None, None), setup_context=setup_context)
    sorted_of.seen = seen
    return sorted_of


@pytest.mark.parametrize("backend", BACKENDS)
def test_flags_of_returns(sorted_of: Any, backend: str) -> None:
    x = leaf(X)
    values, order, mean = sorted_of(x)
    assert (values.requires_grad, order.requires_grad, mean.requires_grad) == (True, False, False)

    def f(x: Tensor) -> Tensor:
        values, _, mean = sorted_of(x)
        return (values * torch.arange(3.0) * mean).sum()

    compiled(f, backend)(x).backward()
    expected = torch.zeros(3).scatter(0, X.argsort(), torch.arange(3.0)) * X.mean()
    torch.testing.assert_close(x.grad, expected)
    assert sorted_of.seen[-1] == [torch.float32, torch.int64, torch.float32]  # zeros for what has none, as in torch


def test_flags_of_returns_transformed(sorted_of: Any) -> None:
    for transform in (jacrev, jacfwd, lambda f: jacrev(jacrev(f)), lambda f: jacfwd(jacrev(f))):
        torch.testing.assert_close(
            transform(lambda x: sorted_of(x)[0] ** 2)(X), transform(lambda x: x.sort()[0] ** 2)(X)
        )


def test_zeros_for_returns_that_were_not_used(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::parts", mutates_args=())
    def parts(x: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        return x * 2, x.long(), [x * 3, x.bool(), x * 4]

    def backward(ctx: Any, g: Any, g_int: Any, gs: Any) -> Any:
        seen.append([None if x is None else x.tolist() for x in (g, g_int, *gs)])
        return sum(x * by for x, by in ((g, 2), (gs[0], 3), (gs[2], 4)) if x is not None)

    seen: list[Any] = []
    x = torch.tensor([1.0, 2.0])
    parts.register_autograd(backward)
    parts(leaf(x))[2][0].sum().backward()
    assert seen == [[[0, 0], [0, 0], [1, 1], [False, False], [0, 0]]]
    parts.register_autograd(backward, materialize_grads=False)
    parts(leaf(x))[2][0].sum().backward()
    assert seen[1] == [None, None, [1, 1], None, None]
    parts.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.set_materialize_grads(False))
    parts(leaf(x))[0].sum().backward()
    assert seen[2] == [[1, 1], None, None, None, None]
    parts.register_autograd(lambda ctx, g, _, gs: g * 2 + gs[0] * 3 + gs[2] * 4)
    assert torch.equal(jacrev(lambda x: parts(x)[2][2])(x), 4 * torch.eye(2))


@pytest.mark.parametrize("flags", [(True,), "yes", (True, False, False), (1, 0), None])
def test_flags_that_do_not_fit(registry: Registry, ns: str, flags: Any) -> None:
    def two(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 1, x * 2

    with pytest.raises(
        DefinitionError, match="differentiable= is True, False, or one of them for each return"
    ) as error:
        registry.custom_op(f"{ns}::two", two, mutates_args=(), differentiable=flags)
    assert f"{ns}::two" in str(error.value)
    assert len(registry) == 0


# nondiff_args= --------------------------------------------------------------------------------------------------


@pytest.fixture(params=["op", "formula"])
def masked(registry: Registry, ns: str, request: Any) -> Any:
    options = {"nondiff_args": ("mask", "others")}
    of_op, of_formula = (options, {}) if request.param == "op" else ({}, options)

    @registry.custom_op(f"{ns}::masked", mutates_args=(), **of_op)  # type: ignore[arg-type]
    def masked(x: Tensor, mask: Tensor, others: list[Tensor], by: float = 2.0) -> Tensor:
        return x * mask * by

    masked.register_fake(lambda x, mask, others, by: torch.empty_like(x))

    def backward(ctx: Any, g: Tensor) -> Any:
        needs.append(ctx.needs_input_grad)
        return g * ctx.saved_tensors[1] * 2.0, None, None

    needs: list[Any] = []
    masked.register_autograd(backward, setup_context=save_inputs, **of_formula)
    masked.register_jvp(lambda ctx, t, *_: t * ctx.saved_tensors[1] * 2.0, setup_context=save_inputs, **of_formula)
    masked.needs = needs
    return masked


@pytest.mark.parametrize("backend", BACKENDS)
def test_arguments_without_a_gradient(masked: Any, backend: str) -> None:
    x, mask, other = leaf(X), leaf(X + 1), leaf(X)
    compiled(masked, backend)(x, mask, [other]).sum().backward()
    torch.testing.assert_close(x.grad, 2 * (X + 1))
    assert (mask.grad, other.grad) == (None, None)
    assert masked.needs[-1] == (True, False, [False])
    assert not masked(X, mask, [other]).requires_grad


def test_arguments_without_a_gradient_transformed(masked: Any) -> None:
    def f(x: Tensor) -> Tensor:
        return masked(x, x + 1, [x])

    for transform in (jacrev, jacfwd, lambda f: lambda x: jvp(f, (x,), (x,))[1]):
        torch.testing.assert_close(transform(f)(X), transform(lambda x: 2 * x * (x.detach() + 1))(X))
    assert jvp(lambda m: masked(X, m, []), (X,), (X,))[1].tolist() == [0, 0, 0]


@pytest.mark.parametrize("wrong", ["z", ("x", "by"), ("by",)])
def test_nondiff_args_that_are_no_tensors(registry: Registry, ns: str, wrong: Any) -> None:
    def scale(x: Tensor, by: float = 2.0) -> Tensor:
        return x * by

    with pytest.raises(DefinitionError, match="nondiff_args= names an argument that is no tensor of the op") as error:
        registry.custom_op(f"{ns}::scale", scale, mutates_args=(), nondiff_args=wrong)
    assert error.value.expected == "some of x"
    op = registry.custom_op(f"{ns}::scale", scale, mutates_args=())
    with pytest.raises(DefinitionError, match="nondiff_args= names"):
        op.register_autograd(lambda ctx, g: g, nondiff_args=wrong)


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
    x, y = leaf(X), leaf(X + 1)
    op(x, y=y).sum().backward()
    torch.testing.assert_close((x.grad, y.grad), (X + 1, X))
    op.register_autograd(lambda ctx, g: g, setup_context=setup_context)
    with pytest.raises(AutogradError, match=r"incorrect number of gradients \(expected 2, got 1\)"):
        op(x, y=y).sum().backward()


@pytest.mark.parametrize("type_", ["Tensor", "Tensor?", "Tensor[]"])
def test_keyword_only_tensors_of_an_op_of_others(ns: str, type_: str) -> None:
    lib = torch.library.Library(ns, "FRAGMENT")
    lib.define(f"f(Tensor x, *, {type_} y) -> Tensor")
    lib.impl("f", lambda x, *, y: x * (y[0] if isinstance(y, list) else y), "CPU")

    def setup_context(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
        ctx.y = keyword_only_inputs["y"]

    register_autograd(f"{ns}::f", lambda ctx, g: {"x": g * 5}, setup_context=setup_context, lib=lib, nondiff_args="y")
    x, y = leaf(X), leaf(X)
    getattr(torch.ops, ns).f(x, y=[y] if "[" in type_ else y).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [5, 5, 5]
    lib._destroy()


# What backward returned -----------------------------------------------------------------------------------------


def add_bias(registry: Registry, ns: str, backward: Any, **options: Any) -> Any:
    op = registry.custom_op(f"{ns}::add_bias", lambda x, bias: x + bias, mutates_args=(),
                            schema="(Tensor x, Tensor bias) -> Tensor", **options)  # fmt: skip
    op.register_autograd(backward)
    return op


WRONG: list[tuple[Any, str, str, str]] = [
    (lambda g: (g, g.sum()), "bias", "shape [3]", "gradient.expand([3])"),
    (lambda g: (g, g.sum(1)), "bias", "shape [3]", "shape [2]"),
    (lambda g: (g, g.sum(0).to("meta")), "bias", "cpu", "at:"),
    (lambda g: (g.t(), g.sum(0)), "x", "shape [2, 3]", "shape [3, 2]"),
    (lambda g: (g, [g]), "bias", "a Tensor or None", "list of 1"),
    (lambda g: (g, None), "bias", "its gradient; zeros, if it is zero", 'nondiff_args=("bias",)'),
]


@pytest.mark.parametrize(("wrong", "argument", "expected", "words"), WRONG)
def test_gradients_that_do_not_fit(
    registry: Registry, ns: str, wrong: Any, argument: str, expected: str, words: str
) -> None:
    op = add_bias(registry, ns, lambda ctx, g: wrong(g))
    for differentiate in (
        lambda: op(leaf(torch.ones(2, 3)), leaf(torch.ones(3))).sum().backward(),
        lambda: grad(lambda x, b: op(x, b).sum(), (0, 1))(torch.ones(2, 3), torch.ones(3)),
    ):
        with pytest.raises(AutogradError) as raised:
            differentiate()
        assert (raised.value.op, raised.value.argument) == (f"{ns}::add_bias", argument)
        assert expected in str(raised.value.expected)
        assert words in str(raised.value)
        assert "test_gradient_options.py" in str(raised.value.where)


def test_a_gradient_of_another_dtype_under_autocast(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::double", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor")
    op.register_autograd(lambda ctx, g: (g.view(1, -1) @ torch.eye(3) * 2).view(-1))  # a bfloat16 product
    x = leaf(X)
    with torch.autocast("cpu", torch.bfloat16):
        op(x).sum().backward()
    assert x.grad is not None
    assert (x.grad.dtype, x.grad.tolist()) == (torch.float32, [2, 2, 2])


AUTOGRAD_TAKES: dict[str, Any] = {
    "not summed": lambda g: (g, g),
    "not summed, more dimensions": lambda g: (g.expand(4, 2, 3) / 4, g.expand(4, 2, 3) / 4),
    "double": lambda g: (g.double(), g.double()),
    "half": lambda g: (g.half(), g.sum(0).half()),
    "integers": lambda g: (g.long(), g.sum(0).long()),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["one by one", "a list"])
@pytest.mark.parametrize("returned", AUTOGRAD_TAKES)
def test_gradients_that_autograd_takes(registry: Registry, ns: str, returned: str, kind: str, backend: str) -> None:
    make = AUTOGRAD_TAKES[returned]

    class Reference(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
            return x + bias

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:  # type: ignore[override]
            return make(g)

    if kind == "a list":
        of_list = registry.custom_op(f"{ns}::add", lambda xs: xs[0] + xs[1], mutates_args=(),
                                     schema="(Tensor[] xs) -> Tensor")  # fmt: skip
        of_list.register_autograd(lambda ctx, g: list(make(g)))
        of_list.register_fake(lambda xs: torch.empty_like(xs[0]))
        op: Any = lambda x, bias: of_list([x, bias])  # noqa: E731
    else:
        op = add_bias(registry, ns, lambda ctx, g: make(g))
        op.register_fake(lambda x, bias: torch.empty_like(x))
    results = []
    for f in (compiled(lambda x, bias: op(x, bias) * 2, backend), lambda x, bias: Reference.apply(x, bias) * 2):
        x, bias = leaf(torch.ones(2, 3)), leaf(torch.ones(3))
        f(x, bias).sum().backward()
        results.append((x.grad, bias.grad))
    torch.testing.assert_close(*results, rtol=0, atol=0)
    expected = torch.autograd.grad((x + bias).mul(2).sum(), (x, bias))
    torch.testing.assert_close(results[0], expected)
    if backend == "eager":
        found = torch.func.grad(lambda x, bias: (op(x, bias) * 2).sum(), (0, 1))(torch.ones(2, 3), torch.ones(3))
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])  # inductor warns of complex numbers
def test_a_complex_gradient_of_a_real_tensor(registry: Registry, ns: str, backend: str) -> None:
    op = registry.custom_op(f"{ns}::turn", lambda z, r: z * r, mutates_args=(),
                            schema="(Tensor z, Tensor r) -> Tensor")  # fmt: skip
    op.register_fake(lambda z, r: torch.empty_like(z))
    op.register_autograd(
        lambda ctx, g: (g * ctx.saved_tensors[1], g * ctx.saved_tensors[0].conj()),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    z, r = torch.randn(2, 3, dtype=torch.complex64).requires_grad_(), leaf(X)
    weight = torch.randn(2, 3, dtype=torch.complex64)
    f = compiled(lambda z, r: (op(z, r) * weight).abs().sum(), backend)
    found = torch.autograd.grad(f(z, r), (z, r))
    torch.testing.assert_close(found, torch.autograd.grad((z * r * weight).abs().sum(), (z, r)))


def test_gradients_that_are_not_summed_have_gradients(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::mul", lambda x, y: x * y, mutates_args=(),
                            schema="(Tensor x, Tensor y) -> Tensor")  # fmt: skip
    op.register_autograd(
        lambda ctx, g: tuple(op(g, x) for x in reversed(ctx.saved_tensors)),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    x, y = torch.rand(2, 1, dtype=torch.double).requires_grad_(), torch.rand(3, dtype=torch.double).requires_grad_()
    assert torch.autograd.gradcheck(op, (x, y))
    assert torch.autograd.gradgradcheck(op, (x, y))
    ours, theirs = (
        grad(lambda x, f=f: grad(lambda x: f(x, y.detach()).square().sum())(x).sum())(x.detach())
        for f in (op, torch.mul)
    )
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_a_view_that_is_written_are_summed(registry: Registry, ns: str, backend: str) -> None:
    op = registry.custom_op(f"{ns}::add_", lambda x, y: x.add_(y), mutates_args={"x"}, tags=torch.Tag.inplace,
                            schema="(Tensor(a!) x, Tensor y) -> Tensor(a!)")  # fmt: skip
    op.register_autograd(lambda ctx, g: (g.double().expand(2, 3) / 2, g.expand(2, 3).double()))

    def f(x: Tensor, y: Tensor) -> Tensor:
        x = x * 2
        op(x[0], y)
        return (x * x).sum()

    def reference(x: Tensor, y: Tensor) -> Tensor:
        x = x * 2
        x[0].add_(y * 2)
        return (x * x).sum()

    x, y = torch.rand(2, 3), torch.zeros(3)
    found, expected = (
        torch.autograd.grad(g(*xs), xs) for g in (compiled(f, backend), reference) for xs in [(leaf(x), leaf(y))]
    )
    torch.testing.assert_close(found, expected)


def test_when_gradients_are_compared(registry: Registry, ns: str) -> None:
    x, bias = leaf(torch.ones(2, 3)), leaf(torch.ones(3))
    wrong = lambda g: (g, g.sum(1))  # noqa: E731
    with pytest.raises(RuntimeError, match="invalid gradient at index") as raised:  # torch's own
        add_bias(registry, ns, lambda ctx, g: wrong(g), check="never")(x, bias).sum().backward()
    assert not isinstance(raised.value, AutogradError)

    results = [lambda g: (g, g), lambda g: (g, g.sum(0)), wrong]
    once = add_bias(registry, ns, lambda ctx, g: results.pop(0)(g), check="first")
    once(x, bias).sum().backward()  # summed, so the next one is compared
    once(x, bias).sum().backward()
    with pytest.raises(RuntimeError, match="invalid gradient at index"):
        once(x, bias).sum().backward()
    once = add_bias(registry, ns, lambda ctx, g: wrong(g), check="first")
    with pytest.raises(AutogradError):
        once(x, bias).sum().backward()


@pytest.mark.parametrize("backend", BACKENDS)
def test_zeros_for_integers_take_no_memory(registry: Registry, ns: str, backend: str) -> None:
    @registry.custom_op(f"{ns}::order", mutates_args=(), differentiable=(True, True, False))
    def order(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x * 2, x.argsort(), x + 1

    order.register_fake(lambda x: (torch.empty_like(x), torch.empty_like(x, dtype=torch.int64), torch.empty_like(x)))
    seen: list[Any] = []

    def backward(ctx: Any, g: Tensor, *zeros: Tensor) -> Tensor:
        seen.extend((z.dtype, z.shape, z.stride()) for z in zeros)
        return g * 2 + sum(zeros)

    order.register_autograd(backward)
    x = leaf(X)
    compiled(lambda x: order(x)[0].sum(), backend)(x).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2, 2]
    assert seen[-2:] == [(torch.int64, (3,), (0,)), (torch.float32, (3,), (0,))]


def test_none_where_the_gradient_was_none_too(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::both", mutates_args=())
    def both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, y * 3

    both.register_autograd(
        lambda ctx, g, h: (None if g is None else g * 2, None if h is None else h * 3), materialize_grads=False
    )
    x, y = leaf(X), leaf(X)
    both(x, y)[0].sum().backward()
    assert x.grad is not None
    assert (x.grad.tolist(), y.grad) == ([2, 2, 2], None)


@pytest.mark.parametrize("is_summed", [True, False])
def test_gradients_with_symbolic_shapes(registry: Registry, ns: str, is_summed: bool) -> None:
    op = add_bias(registry, ns, lambda ctx, g: (g, g.sum(0) if is_summed else g))
    op.register_fake(lambda x, bias: x.new_empty(x.shape))
    f = torch.compile(lambda x, b: op(x, b).sum(), fullgraph=True, backend="aot_eager", dynamic=True)
    for size in (2, 3, 5):
        x, bias = leaf(torch.ones(size, size + 1)), leaf(torch.ones(size + 1))
        f(x, bias).backward()
        assert bias.grad is not None
        assert bias.grad.tolist() == [size] * (size + 1)


def test_gradients_with_symbolic_shapes_for_a_fixed_one(registry: Registry, ns: str) -> None:
    op = add_bias(registry, ns, lambda ctx, g: (g, g))
    op.register_fake(lambda x, bias: x.new_empty(x.shape))
    frames = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    f = torch.compile(lambda x, b: op(x, b).sum(), fullgraph=True, backend=frames)
    bias = leaf(torch.ones(3))
    for size in (3, 4, 5, 6):  # as long as the bias at first: that is no reason for another graph
        bias.grad, x = None, torch.ones(size, 3, requires_grad=True)
        torch._dynamo.mark_dynamic(x, 0)
        f(x, bias).backward()
        assert bias.grad is not None
        assert bias.grad.tolist() == [size] * 3
    assert frames.frame_count == 1


def test_gradients_of_nested_tensors(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::double", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor")
    op.register_autograd(lambda ctx, g: g * 2)
    op.register_torch_dispatch(NestedTensor, lambda cls, func, types, args, kwargs: args[0] * 2)
    x = torch.nested.nested_tensor([X, X[:2]], layout=torch.jagged, requires_grad=True)
    op(x).values().sum().backward()
    assert x.grad is not None
    assert [part.tolist() for part in x.grad.unbind()] == [[2, 2, 2], [2, 2]]


# Second derivatives ---------------------------------------------------------------------------------------------


def keep(kind: str) -> Any:
    """A setup_context that keeps the cube of x where nobody can follow it."""

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        (x,) = inputs
        square = x.detach() ** 2
        if kind == "saved":
            ctx.save_for_backward(square)
        elif kind == "attribute":
            ctx.square = square
        elif kind == "list":
            ctx.square = [square]
        else:
            ctx.square = {"square": (1, square)}

    return setup_context


def kept(ctx: Any, kind: str) -> Tensor:
    if kind == "saved":
        return ctx.saved_tensors[0]
    return {"attribute": lambda v: v, "list": lambda v: v[0], "dict": lambda v: v["square"][1]}[kind](ctx.square)


KINDS = ["saved", "attribute", "list", "dict"]


def cube(registry: Registry, ns: str, kind: str) -> Any:
    op = registry.custom_op(f"{ns}::cube", lambda x: x**3, mutates_args=(), schema="(Tensor x) -> Tensor")
    op.register_autograd(lambda ctx, g: g * 3 * kept(ctx, kind), setup_context=keep(kind))
    op.register_fake(torch.empty_like)
    return op


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_second_derivative_through_what_was_not_recorded(registry: Registry, ns: str, kind: str) -> None:
    op = cube(registry, ns, kind)
    x = leaf(X)

    def first() -> Tensor:
        (gradient,) = torch.autograd.grad(op(x).sum(), x, create_graph=True)
        return gradient

    torch.testing.assert_close(first().detach(), 3 * X**2)
    what = "saved tensor 0" if kind == "saved" else r"ctx\.square"
    for second in (
        lambda: torch.autograd.grad(first().sum(), x),
        lambda: first().sum().backward(),
        lambda: grad(grad(op))(X[0]),
        lambda: jacrev(jacrev(op))(X),
        lambda: vmap(grad(grad(op)))(X),
        lambda: gradgradcheck(op, leaf(X.double())),
    ):
        with pytest.raises(AutogradError, match=f"a second derivative would be wrong: the formula uses {what}"):
            second()


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_derivative_in_forward_mode_through_what_was_not_recorded(
    registry: Registry, ns: str, kind: str
) -> None:
    op = cube(registry, ns, kind)

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        keep(kind)(ctx, inputs, output)
        if kind == "saved":
            ctx.save_for_forward(inputs[0].detach() ** 2)

    op.register_jvp(lambda ctx, t: t * 3 * kept(ctx, kind), setup_context=setup_context)
    op.register_autograd(lambda ctx, g: g * 3 * kept(ctx, kind), setup_context=setup_context)
    x = X[0]
    torch.testing.assert_close(jacfwd(op)(x), 3 * x**2)
    with fwAD.dual_level():
        torch.testing.assert_close(fwAD.unpack_dual(op(fwAD.make_dual(x, x))).tangent, 3 * x**3)

    def forward_over_reverse() -> Any:
        leaf = x.clone().requires_grad_()
        with fwAD.dual_level():
            return torch.autograd.grad(op(fwAD.make_dual(leaf, torch.ones(()))), leaf)

    for second in (
        lambda: jacfwd(jacfwd(op))(x),
        lambda: hessian(op)(x),
        lambda: jacrev(jacfwd(op))(x),
        forward_over_reverse,
    ):
        with pytest.raises(AutogradError, match="a second derivative would be wrong"):
            second()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_first_derivative_does_not_mind(registry: Registry, ns: str, kind: str) -> None:
    op = cube(registry, ns, kind)
    for backend in ("eager", "aot_eager"):
        x = leaf(X)
        compiled(lambda x: op(x).sum(), backend)(x).backward()
        torch.testing.assert_close(x.grad, 3 * X**2)
    torch.testing.assert_close(vmap(grad(op))(X), 3 * X**2)
    torch.testing.assert_close(jacrev(op)(X), torch.diag(3 * X**2))
    assert gradcheck(op, leaf(X.double()), check_batched_grad=True)


@pytest.mark.parametrize(
    ("setup_context", "square"),
    [
        (lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]), lambda ctx: ctx.saved_tensors[0] ** 2),
        (lambda ctx, inputs, output: setattr(ctx, "x", inputs[0]), lambda ctx: ctx.x**2),
        (lambda ctx, inputs, output: ctx.save_for_backward(output), lambda ctx: ctx.saved_tensors[0] ** (2 / 3)),
        (lambda ctx, inputs, output: setattr(ctx, "kept", [3, inputs]), lambda ctx: ctx.kept[1][0] ** 2),
    ],
)
def test_what_has_a_history_may_be_kept(registry: Registry, ns: str, setup_context: Any, square: Any) -> None:
    op = registry.custom_op(f"{ns}::cube", lambda x: x**3, mutates_args=(), schema="(Tensor x) -> Tensor")
    op.register_autograd(lambda ctx, g: g * 3 * square(ctx), setup_context=setup_context)
    x = torch.rand(3, dtype=torch.float64) + 0.5
    assert gradgradcheck(op, leaf(x))
    torch.testing.assert_close(jacrev(jacrev(lambda x: op(x).sum()))(x), torch.diag(6 * x))


def test_a_constant_of_another_dtype_may_be_kept(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::relu", lambda x: x.relu(), mutates_args=(), schema="(Tensor x) -> Tensor")
    op.register_autograd(
        lambda ctx, g: g * ctx.positive,
        setup_context=lambda ctx, inputs, output: setattr(ctx, "positive", inputs[0] > 0),
    )
    assert gradgradcheck(op, leaf(X.double()))


def test_what_setup_context_computes_is_recorded_at_the_levels_further_out(registry: Registry, ns: str) -> None:
    """Inside transforms there is a level for each derivative, and the inner one is no constant to the outer one."""
    op = registry.custom_op(f"{ns}::exp", lambda x: x.exp(), mutates_args=(), schema="(Tensor x) -> Tensor")

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0].exp())
        ctx.save_for_forward(inputs[0].exp())

    op.register_autograd(lambda ctx, g: g * ctx.saved_tensors[0], setup_context=setup_context)
    op.register_jvp(lambda ctx, t: t * ctx.saved_tensors[0], setup_context=setup_context)
    for transform in (
        lambda f: grad(grad(f)),
        lambda f: grad(grad(grad(f))),
        lambda f: jacfwd(jacfwd(f)),
        lambda f: jacfwd(jacrev(f)),
        lambda f: jacrev(jacfwd(f)),
    ):
        torch.testing.assert_close(transform(op)(X[0]), X[0].exp())


def test_a_kept_tensor_does_not_keep_the_inputs_alive(registry: Registry, ns: str) -> None:
    op = cube(registry, ns, "attribute")
    x = torch.ones(3).requires_grad_() * 2
    alive = weakref.ref(x)
    y = op(x)
    del x
    assert alive() is None
    y.sum().backward()


def normalize(registry: Registry, ns: str, **options: Any) -> Any:
    """A layer norm whose second return is not differentiable, and is saved."""
    op = registry.custom_op(
        f"{ns}::normalize",
        lambda x: norm_in_torch(x),
        mutates_args=(),
        schema="(Tensor x) -> (Tensor, Tensor)",
        **options,
    )
    op.register_fake(lambda x: (torch.empty_like(x), x.new_empty(*x.shape[:-1], 1)))
    op.register_vmap("expand_dims")
    return op


def norm_in_torch(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.var(-1, correction=0, keepdim=True).rsqrt()
    return (x - x.mean(-1, keepdim=True)) * scale, scale


def norm_backward(g: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    return scale * (g - g.mean(-1, keepdim=True) - y * (g * y).mean(-1, keepdim=True))


def save_outputs(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*output)


def save_outputs_and_mark(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*output)
    ctx.mark_non_differentiable(output[1])


def keep_outputs(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(output[0])
    ctx.scale = output[1]


def backward_of_norm(ctx: Any, g: Tensor, _: Any) -> Tensor:
    scale = ctx.scale if hasattr(ctx, "scale") else ctx.saved_tensors[1]
    return norm_backward(g, ctx.saved_tensors[0], scale)


NORMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "declared": (save_outputs, {"differentiable": (True, False)}),
    "marked": (save_outputs_and_mark, {}),
    "kept": (keep_outputs, {"differentiable": (True, False)}),
}


def curvature(f: Any, x: Tensor) -> Tensor:
    """A second derivative, in eager mode."""
    x = leaf(x)
    (slope,) = torch.autograd.grad((f(x) * torch.arange(1.0, 4)).sum(), x, create_graph=True)
    return torch.autograd.grad(slope.square().sum(), x)[0]


def change_of_slope(f: Any, x: Tensor) -> Any:
    """The same, forward over reverse."""
    with fwAD.dual_level():
        x = fwAD.make_dual(x.clone().requires_grad_(), torch.ones_like(x))
        return fwAD.unpack_dual(torch.autograd.grad(f(x)[..., 1].sum(), x)[0]).tangent


SECOND_DERIVATIVES: dict[str, Any] = {
    "eager": curvature,
    "dual numbers": change_of_slope,
    "grad(grad)": lambda f, x: grad(lambda x: grad(lambda x: f(x)[..., 1].sum())(x).square().sum())(x),
    "jacfwd(jacrev)": lambda f, x: jacfwd(lambda x: jacrev(lambda x: f(x)[..., 1].sum())(x))(x),
    "vmap(grad(grad))": lambda f, x: vmap(grad(lambda x: grad(lambda x: f(x)[1])(x).square().sum()))(x),
    "compiled": lambda f, x: torch.compile(
        lambda x: grad(lambda x: grad(lambda x: f(x)[..., 1].sum())(x).square().sum())(x),
        fullgraph=True,
        backend="aot_eager",
    )(x),
}
ROWS = torch.tensor([[1.0, 2.0, 4.0], [1.0, 0.0, 0.5]])


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("transform", SECOND_DERIVATIVES)
def test_a_second_derivative_by_a_return_without_one(registry: Registry, ns: str, kind: str, transform: str) -> None:
    setup_context, options = NORMS[kind]
    op = normalize(registry, ns, **options)
    op.register_autograd(backward_of_norm, setup_context=setup_context)
    op.register_jvp(
        lambda ctx, t: (norm_backward(t, *norm_in_torch(*ctx.saved_tensors)), None),
        setup_context=lambda ctx, inputs, output: ctx.save_for_forward(*inputs),
    )
    slopes = [grad(lambda x, f=f: f(x)[0][..., 1].sum())(ROWS) for f in (op, norm_in_torch)]
    torch.testing.assert_close(*slopes)
    with pytest.raises(Exception, match="a second derivative would be wrong") as raised:
        SECOND_DERIVATIVES[transform](lambda x: op(x)[0], ROWS)
    assert transform == "compiled" or isinstance(raised.value, AutogradError)


@pytest.mark.parametrize("transform", ["eager", "grad(grad)", "vmap(grad(grad))", "compiled"])
def test_a_return_without_a_gradient_may_be_a_constant(registry: Registry, ns: str, transform: str) -> None:
    @registry.custom_op(f"{ns}::positive", mutates_args=(), differentiable=(True, False))
    def positive(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * x * (x > 1), (x > 1).to(x.dtype)

    positive.register_fake(lambda x: (torch.empty_like(x), torch.empty_like(x)))
    positive.register_vmap("expand_dims")

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0], output[1])
        ctx.save_for_forward(inputs[0])

    def backward(ctx: Any, g: Tensor, _: Any) -> Tensor:
        x, mask = ctx.saved_tensors
        return 2 * g * x * mask.detach()

    positive.register_autograd(backward, setup_context=setup_context)
    positive.register_jvp(lambda ctx, t: (2 * t * ctx.saved_tensors[0] * (ctx.saved_tensors[0] > 1), None))
    found, expected = (
        SECOND_DERIVATIVES[transform](f, ROWS) for f in (lambda x: positive(x)[0], lambda x: x * x * (x > 1))
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("transform", SECOND_DERIVATIVES)
@pytest.mark.parametrize("by_keyword", [False, True])
def test_a_second_derivative_by_a_buffer_that_was_written(
    registry: Registry, ns: str, by_keyword: bool, transform: str
) -> None:
    star = "*, " if by_keyword else ""

    def kernel(x: Tensor, buffer: Tensor) -> Tensor:
        buffer.copy_(2 * x)
        return x * x

    op = registry.custom_op(f"{ns}::square", kernel, mutates_args={"buffer"},
                            schema=f"(Tensor x, {star}Tensor(a!) buffer) -> Tensor")  # fmt: skip
    op.register_fake(lambda x, buffer: torch.empty_like(x))
    op.register_vmap("expand_dims")

    def save(ctx: Any, inputs: Any, output: Any, keyword_only_inputs: Any = None) -> None:
        ctx.save_for_backward(keyword_only_inputs["buffer"] if by_keyword else inputs[1])
        ctx.save_for_forward(inputs[0])

    def with_keywords(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
        save(ctx, inputs, output, keyword_only_inputs)

    setup_context = with_keywords if by_keyword else save
    op.register_autograd(
        lambda ctx, g: {"x": g * ctx.saved_tensors[0]}, setup_context=setup_context, nondiff_args="buffer"
    )
    op.register_jvp(lambda ctx, t, *_: 2 * t * ctx.saved_tensors[0], setup_context=setup_context, nondiff_args="buffer")

    def f(x: Tensor) -> Tensor:
        buffer = torch.zeros_like(x)
        return op(x, buffer=buffer) if by_keyword else op(x, buffer)

    torch.testing.assert_close(grad(lambda x: f(x).sum())(X), 2 * X)
    with pytest.raises(Exception, match="a second derivative would be wrong") as raised:
        SECOND_DERIVATIVES[transform](f, ROWS)
    assert transform == "compiled" or isinstance(raised.value, AutogradError)


@pytest.mark.parametrize("transform", SECOND_DERIVATIVES)
@pytest.mark.parametrize("kind", ["one tensor", "a list"])
def test_once_differentiable(registry: Registry, ns: str, kind: str, transform: str) -> None:
    schema = "(Tensor x) -> Tensor" if kind == "one tensor" else "(Tensor[] x) -> Tensor"
    kernel = (lambda x: x.sin()) if kind == "one tensor" else (lambda x: x[0].sin())
    op = registry.custom_op(f"{ns}::sin", kernel, mutates_args=(), schema=schema)
    op.register_fake(lambda x: torch.empty_like(x if isinstance(x, Tensor) else x[0]))
    op.register_vmap("expand_dims")
    recorded: list[bool] = []

    def save(ctx: Any, inputs: Any, output: Any) -> None:
        (x,) = inputs
        ctx.save_for_backward(*([x] if kind == "one tensor" else x))
        ctx.save_for_forward(*([x] if kind == "one tensor" else x))

    def backward(ctx: Any, g: Tensor) -> Any:
        gradient = g * ctx.saved_tensors[0].cos()
        recorded.append(torch.is_grad_enabled())
        return gradient if kind == "one tensor" else [gradient]

    op.register_autograd(backward, setup_context=save, once_differentiable=True)
    op.register_jvp(
        lambda ctx, t: (t if kind == "one tensor" else t[0]) * ctx.saved_tensors[0].cos(), setup_context=save
    )

    def f(x: Tensor) -> Tensor:
        return op(x) if kind == "one tensor" else op([x])  # type: ignore[no-any-return]

    x = leaf(X)
    (slope,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
    torch.testing.assert_close(slope, X.cos())
    torch.testing.assert_close(grad(lambda x: f(x).sum())(X), X.cos())
    torch.testing.assert_close(vmap(grad(lambda x: f(x).sum()))(ROWS), ROWS.cos())
    assert True not in recorded
    with pytest.raises(Exception, match="once_differentiable=True") as raised:
        SECOND_DERIVATIVES[transform](f, ROWS)
    assert transform == "compiled" or isinstance(raised.value, AutogradError)


def test_once_differentiable_by_the_gradient_that_came_in(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::double", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor")
    op.register_autograd(lambda ctx, g: g * 2, once_differentiable=True)
    x = leaf(X)
    (slope,) = torch.autograd.grad(op(x).square().sum(), x, create_graph=True)
    assert torch.equal(slope, 8 * X)
    with pytest.raises(AutogradError, match="once_differentiable=True"):
        slope.sum().backward()


# What is saved is unpacked once ---------------------------------------------------------------------------------


@pytest.mark.parametrize("is_list", [False, True])
@pytest.mark.parametrize("create_graph", [False, True])
def test_saved_tensors_read_twice(registry: Registry, ns: str, is_list: bool, create_graph: bool) -> None:
    schema = "(Tensor[] x) -> Tensor" if is_list else "(Tensor x) -> Tensor"
    op = registry.custom_op(f"{ns}::square", lambda x: (x[0] if is_list else x) ** 2, mutates_args=(), schema=schema)

    def save(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0][0] if is_list else inputs[0], output.sqrt())  # x twice

    def backward(ctx: Any, g: Tensor) -> Any:
        gradient = g * (ctx.saved_tensors[0] + ctx.saved_tensors[1])
        return [gradient] if is_list else gradient

    op.register_autograd(backward, setup_context=save)

    def f(x: Tensor) -> Tensor:
        x = x * 1
        return op([x] if is_list else x)  # type: ignore[no-any-return]

    x = leaf(torch.tensor([1.0, 2.0]))
    y = torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=create_graph)
    torch.testing.assert_close(slope, 2 * x)

    unpacked: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: (unpacked.append(1), x)[1]):
        y = f(x)
    for calls in (1, 2):  # each backward unpacks anew
        torch.autograd.grad(y.sum(), x, retain_graph=True, create_graph=create_graph)
        assert len(unpacked) == 2 * calls


def test_saved_tensors_are_not_kept(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::square", lambda x: x**2, mutates_args=(), schema="(Tensor x) -> Tensor")
    refs: list[Any] = []

    def backward(ctx: Any, g: Tensor) -> Tensor:
        refs.append(weakref.ref(ctx.saved_tensors[0]))
        return 2 * g * ctx.saved_tensors[0]

    op.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]))
    x = leaf(X)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.numpy(force=True), lambda x: torch.from_numpy(x) * 1):
        y = op(x).sum()
    y.backward(retain_graph=True)
    assert refs[0]() is None
    y.backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 4 * X)
