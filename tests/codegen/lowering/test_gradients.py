"""Formulas of ops whose arguments and results hold tensors: what they are given, and what they may return."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, List, NamedTuple, Optional, Tuple, Union

import pytest
import torch
import torch.utils.checkpoint
from helpers.compiling import BACKENDS, compiled
from torch import Tensor
from torch.autograd import gradcheck

from customops import Registry
from customops._schema.annotations import Keys, Mut
from customops.errors import AutogradError


@dataclass(frozen=True)
class Weights:
    w: Tensor
    factor: float = 1.0
    b: Optional[Tensor] = None


class Out(NamedTuple):
    out: Tensor
    squares: Optional[Tensor]


@dataclass(frozen=True)
class Parts:
    total: Tensor
    pieces: Tuple[Tensor, ...]
    note: str


Pair = Annotated[dict[str, Tensor], Keys("p", "q")]


def leaf(*sizes: int) -> Tensor:
    return torch.randn(*sizes, dtype=torch.double, requires_grad=True)


def affine_fn(x: Tensor, p: Weights, want: bool = False) -> Out:
    y = x * p.w * p.factor
    return Out(y if p.b is None else y + p.b, x * x if want else None)


@pytest.fixture
def affine(registry: Registry, ns: str) -> Any:
    op = registry.custom_op(f"{ns}::affine", affine_fn)
    op.register_fake(lambda x, p, want: Out(torch.empty_like(x), torch.empty_like(x) if want else None))

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        x, p, want = inputs
        assert type(p) is Weights
        assert type(output) is Out
        assert (output.squares is not None) is want
        ctx.save_for_backward(x, p.w)
        ctx.save_for_forward(x, p.w)
        ctx.p, ctx.want = (p.factor, p.b is not None), want

    def backward(ctx: Any, grad: Tensor, grad_squares: Optional[Tensor]) -> Any:
        x, w = ctx.saved_tensors
        factor, has_b = ctx.p
        grad_x = grad * w * factor
        if grad_squares is not None:
            grad_x = grad_x + 2 * x * grad_squares
        return grad_x, {"w": grad * x * factor, "b": grad if has_b else None}, None

    def jvp(ctx: Any, x_tangent: Any, p_tangent: Any, want_tangent: None) -> Out:
        x, w = ctx.saved_tensors
        factor, _ = ctx.p
        assert type(p_tangent) is Weights
        assert p_tangent.factor is None
        tangent = torch.zeros_like(x)
        for term, other in ((x_tangent, w), (p_tangent.w, x)):
            tangent = tangent if term is None else tangent + term * other * factor
        tangent = tangent if p_tangent.b is None else tangent + p_tangent.b
        squares = 2 * x * (torch.zeros_like(x) if x_tangent is None else x_tangent)
        return Out(tangent, squares if ctx.want else None)

    op.register_autograd(backward, setup_context=setup)
    op.register_jvp(jvp, setup_context=setup)
    return op


def present(result: Any) -> Tuple[Tensor, ...]:
    return tuple(x for x in result if x is not None)


@pytest.mark.parametrize("want", [False, True])
def test_fields_and_optional_results(affine: Any, want: bool) -> None:
    def f(x: Tensor, w: Tensor, b: Tensor) -> Any:
        return present(affine(x, Weights(w, 2.0, b), want))

    inputs = leaf(3), leaf(3), leaf(3)
    assert gradcheck(f, inputs, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(f, inputs)


def test_an_absent_tensor(affine: Any) -> None:
    assert gradcheck(lambda x, w: affine(x, Weights(w)).out, (leaf(3), leaf(3)), check_forward_ad=True)


@pytest.mark.compile
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled(affine: Any, backend: str) -> None:
    def f(x: Tensor, p: Weights) -> Tensor:
        result = affine(x, p, True)
        return (result.out * result.squares).sum()

    x, w, b = leaf(3), leaf(3), leaf(3)
    got = torch.autograd.grad(compiled(f, backend)(x, Weights(w, 2.0, b)), (x, w, b))
    expected = torch.autograd.grad(((x * w * 2 + b) * x * x).sum(), (x, w, b))
    torch.testing.assert_close(got, expected)


def test_transforms(affine: Any) -> None:
    x, p = torch.randn(3), Weights(torch.randn(3), 2.0, torch.randn(3))
    by_w = torch.func.grad(lambda w: affine(x, replace(p, w=w)).out.sum())(p.w)
    torch.testing.assert_close(by_w, x * 2)
    rows = torch.func.jacrev(lambda x: affine(x, p).out)(x)
    torch.testing.assert_close(rows, torch.func.jacfwd(lambda x: affine(x, p).out)(x))
    torch.testing.assert_close(rows, torch.diag(p.w * 2))


def test_checkpointed(affine: Any) -> None:
    x, w = leaf(3), leaf(3)
    run = torch.utils.checkpoint.checkpoint(lambda x, w: affine(x, Weights(w, 3.0)).out, x, w, use_reentrant=False)
    got = torch.autograd.grad(run.sum(), (x, w))
    torch.testing.assert_close(got, (w * 3, x * 3))


def test_flags_say_whether_an_object_needs_gradients(registry: Registry, ns: str) -> None:
    op, seen = registry.custom_op(f"{ns}::f", affine_fn), []

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        seen.append(ctx.needs_input_grad)
        ctx.has_b = inputs[1].b is not None

    op.register_autograd(
        lambda ctx, grad, _: seen.append(ctx.needs_input_grad) or (grad, {"b": grad if ctx.has_b else None}, None),
        setup_context=setup,
    )
    op(torch.ones(2, requires_grad=True), Weights(torch.ones(2))).out.sum().backward()
    op(torch.ones(2), Weights(torch.ones(2), 1.0, torch.ones(2, requires_grad=True))).out.sum().backward()
    assert seen == [(True, False, False)] * 2 + [(False, True, False)] * 2


@pytest.mark.parametrize(
    "grad",
    [lambda g: Weights(g, None, g), lambda g: {"w": g, "b": g}, lambda g: {"b": g, "w": g, "factor": None}],
    ids=["object", "dict", "whole dict"],
)
def test_forms_of_the_gradient_of_an_object(registry: Registry, ns: str, grad: Any) -> None:
    op = registry.custom_op(f"{ns}::f", affine_fn)
    op.register_autograd(lambda ctx, g, _: (None, grad(g), None))
    w, b = leaf(2), leaf(2)
    op(torch.ones(2, dtype=torch.double), Weights(w, 1.0, b)).out.sum().backward()
    assert w.grad.tolist() == b.grad.tolist() == [1, 1]


def test_gradients_by_names_of_parameters(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::f", affine_fn)
    op.register_autograd(lambda ctx, g, _: {"p": {"w": g}})
    w = leaf(2)
    op(torch.ones(2, dtype=torch.double), Weights(w)).out.sum().backward()
    assert w.grad.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("returned", "phrase"),
    [
        (lambda g: (g, g, None), "something other than the gradient of p"),
        (lambda g: (g, {"v": g}, None), "a field that p does not have"),
        (lambda g: (g, (g, None), None), "something other than the gradient of p"),
        (lambda g: (g, 7, None), "something other than the gradient of p"),
        (lambda g: (g,), "the wrong number of gradients"),
        (lambda g: (g, {"factor": g}, None), "p_factor"),
    ],
    ids=["tensor", "field", "short", "a number", "number", "float"],
)
def test_wrong_gradients(registry: Registry, ns: str, returned: Any, phrase: str) -> None:
    op = registry.custom_op(f"{ns}::f", affine_fn)
    op.register_autograd(lambda ctx, g, _: returned(g))
    result = op(leaf(2), Weights(leaf(2))).out.sum()
    with pytest.raises(AutogradError, match=phrase) as caught:
        result.backward()
    assert "test_gradients.py" in str(caught.value)


def test_callbacks_that_do_not_fit(affine: Any) -> None:
    with pytest.raises(RuntimeError, match="backward does not fit"):
        affine.register_autograd(lambda ctx, grad: None)
    with pytest.raises(RuntimeError, match="jvp does not fit"):
        affine.register_jvp(lambda ctx, x: None)
    with pytest.raises(RuntimeError, match="setup_context does not fit"):
        affine.register_autograd(lambda ctx, g, s: None, setup_context=lambda ctx, inputs: None)


# Other forms ----------------------------------------------------------------------------------------------------


def derived(registry: Registry, ns: str, fn: Any, **options: Any) -> Any:
    op = registry.custom_op(f"{ns}::{fn.__name__}", fn, **options)
    op.register_fake(fn)
    op.register_reference(fn, gives="gradients")
    return op


def nested(xs: List[List[Tensor]], pair: Pair, scale: Union[float, Tensor], *rest: Tensor) -> Parts:
    total = sum(x for part in xs for x in part) * scale + pair["p"] * pair["q"] ** 2
    return Parts(total + sum(r**3 for r in rest), tuple(x * 2 for x in rest), "ok")


def test_a_function_to_differentiate(registry: Registry, ns: str) -> None:
    op = derived(registry, ns, nested)

    def f(a: Tensor, b: Tensor, c: Tensor, p: Tensor, q: Tensor, scale: Tensor, r: Tensor) -> Any:
        result = op([[a, b], [c]], {"p": p, "q": q}, scale, r, r * 2)
        assert result.note == "ok"
        return (result.total, *result.pieces)

    assert gradcheck(f, [leaf(2) for _ in range(7)], check_forward_ad=True)
    number = torch.autograd.grad(op([[x := leaf(2)], []], {"p": leaf(2), "q": leaf(2)}, 3.0).total.sum(), x)
    torch.testing.assert_close(number[0], torch.full((2,), 3.0, dtype=torch.double))


def test_formulas_by_hand_for_lists_of_lists(registry: Registry, ns: str) -> None:
    def total(xs: List[List[Tensor]], scale: Union[float, Tensor]) -> Tensor:
        return sum((x for part in xs for x in part), torch.zeros(2, dtype=torch.double)) * scale

    op, seen = registry.custom_op(f"{ns}::total", total), []

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        (ctx.lengths, ctx.scale) = [len(part) for part in inputs[0]], inputs[1]
        ctx.save_for_forward(output)

    def backward(ctx: Any, grad: Tensor) -> Any:
        return [[grad * ctx.scale] * length for length in ctx.lengths], None

    def jvp(ctx: Any, tangents: Any, _: Any) -> Tensor:
        seen.append([len(part) for part in tangents])
        return sum(t for part in tangents for t in part if t is not None) * ctx.scale

    op.register_autograd(backward, setup_context=setup)
    op.register_jvp(jvp, setup_context=setup)
    assert gradcheck(lambda a, b, c: op([[a, b], [], [c]], 2.0), [leaf(2) for _ in range(3)], check_forward_ad=True)
    assert [2, 0, 1] in seen


def test_jvp_without_setup_context_knows_the_lengths(registry: Registry, ns: str) -> None:
    def total(xs: List[List[Tensor]]) -> Tensor:
        return torch.stack([x for part in xs for x in part]).sum(0)

    op = registry.custom_op(f"{ns}::total", total)
    op.register_jvp(lambda ctx, tangents: tangents[0][0] + tangents[1][0])
    value, tangent = torch.func.jvp(lambda a, b: op([[a], [b]]), (torch.ones(2),) * 2, (torch.ones(2),) * 2)
    assert value.tolist() == tangent.tolist() == [2, 2]


class Cache(NamedTuple):
    k: Tensor
    v: Tensor


def test_written_fields(registry: Registry, ns: str) -> None:
    def write(cache: Mut[Cache], x: Tensor) -> None:
        cache.k.mul_(x)
        cache.v.add_(x)

    op = registry.custom_op(f"{ns}::write", write)
    assert [argument.name for argument in op.schema.mutated] == ["cache_k", "cache_v"]

    @op.register_reference(gives="gradients")
    def _(cache: Cache, x: Tensor) -> Any:
        return cache.k * x, cache.v + x

    def f(k: Tensor, v: Tensor, x: Tensor) -> Any:
        cache = Cache(k * 1, v * 1)
        op(cache, x)
        return cache

    assert gradcheck(f, [leaf(2) for _ in range(3)])


def test_nondiff_args_by_path(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::f", affine_fn, nondiff_args="p.b")
    op.register_autograd(lambda ctx, g, _: (g, {"w": g}, None))
    assert not op(torch.ones(2), Weights(torch.ones(2), 1.0, torch.ones(2, requires_grad=True))).out.requires_grad
    assert op(torch.ones(2), Weights(torch.ones(2, requires_grad=True))).out.requires_grad
    whole = registry.custom_op(f"{ns}::g", affine_fn, nondiff_args=("p",))
    whole.register_autograd(lambda ctx, g, _: (g, None, None))
    assert not whole(torch.ones(2), Weights(torch.ones(2, requires_grad=True))).out.requires_grad
