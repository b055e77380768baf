"""Second derivatives: what is lost is said, and what is saved is unpacked once."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwAD
import torch.utils.checkpoint
from helpers.compiling import compiled
from helpers.tensors import X, leaf_of
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, hessian, jacfwd, jacrev, vmap

from customops import Registry
from customops.errors import AutogradError

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
    x = leaf_of(X)

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
        lambda: gradgradcheck(op, leaf_of(X.double())),
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


@pytest.mark.compile
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_first_derivative_does_not_mind(registry: Registry, ns: str, kind: str) -> None:
    op = cube(registry, ns, kind)
    for backend in ("eager", "aot_eager"):
        x = leaf_of(X)
        compiled(lambda x: op(x).sum(), backend)(x).backward()
        torch.testing.assert_close(x.grad, 3 * X**2)
    torch.testing.assert_close(vmap(grad(op))(X), 3 * X**2)
    torch.testing.assert_close(jacrev(op)(X), torch.diag(3 * X**2))
    assert gradcheck(op, leaf_of(X.double()), check_batched_grad=True)


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
    assert gradgradcheck(op, leaf_of(x))
    torch.testing.assert_close(jacrev(jacrev(lambda x: op(x).sum()))(x), torch.diag(6 * x))


def test_a_constant_of_another_dtype_may_be_kept(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::relu", lambda x: x.relu(), mutates_args=(), schema="(Tensor x) -> Tensor")
    op.register_autograd(
        lambda ctx, g: g * ctx.positive,
        setup_context=lambda ctx, inputs, output: setattr(ctx, "positive", inputs[0] > 0),
    )
    assert gradgradcheck(op, leaf_of(X.double()))


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
    x = leaf_of(x)
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


@pytest.mark.compile
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


@pytest.mark.compile
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


@pytest.mark.compile
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


@pytest.mark.compile
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

    x = leaf_of(X)
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
    x = leaf_of(X)
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

    x = leaf_of(torch.tensor([1.0, 2.0]))
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
    x = leaf_of(X)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.numpy(force=True), lambda x: torch.from_numpy(x) * 1):
        y = op(x).sum()
    y.backward(retain_graph=True)
    assert refs[0]() is None
    y.backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 4 * X)
