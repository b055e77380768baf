"""`register_jvp`: ways into forward mode, against the same function written with torch operations."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor
from torch.library import Library

import customops
from customops import Registry
from customops.errors import AutogradError, CallbackError, RegistrationError, UnsupportedError

#: torch warns when it batches an op by a loop, and of what it does itself.
pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node"),
    pytest.mark.filterwarnings("ignore:`torch._prims_common.check` is deprecated"),
]


class Program(NamedTuple):
    """An op with formulas for both modes, and what it computes."""

    op: Any
    reference: Callable[..., Any]


def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.save_for_forward(*inputs[:2])
    ctx.by = inputs[2]


def product(registry: Registry, ns: str) -> Program:
    """Two inputs, a default."""

    def fn(x: Tensor, y: Tensor, by: float = 2.0) -> Tensor:
        return torch.from_numpy(x.numpy() * by) * y.sin()

    def backward(ctx: Any, grad: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return grad * y.sin() * ctx.by, grad * x * y.cos() * ctx.by, None

    def jvp(ctx: Any, x_tangent: Tensor, y_tangent: Tensor, _: None) -> Tensor:
        x, y = ctx.saved_tensors
        return (x_tangent * y.sin() + x * y.cos() * y_tangent) * ctx.by

    op = registry.custom_op(f"{ns}::product", fn, mutates_args=())
    op.register_fake(lambda x, y, by: torch.empty_like(x))
    op.register_autograd(backward, setup_context=save)
    op.register_jvp(jvp, setup_context=save)
    op.register_vmap("broadcast_all")
    return Program(op, lambda x, y: x * y.sin() * 2)


jvp, jacfwd, hessian = torch.func.jvp, torch.func.jacfwd, torch.func.hessian


def dual(f: Callable[..., Tensor], x: Tensor, y: Tensor, t: Tensor) -> Any:
    with fwAD.dual_level():
        return fwAD.unpack_dual(f(fwAD.make_dual(x, t), y)).tangent


#: Those that tests/products/gradients does not try.
TRANSFORMS: dict[str, Callable[..., Any]] = {
    "jvp(jvp)": lambda f, x, y, t: jvp(lambda x: jvp(f, (x, y), (t, t))[1], (x,), (t,)),
    "jvp(jvp(jvp))": lambda f, x, y, t: jvp(
        lambda x: jvp(lambda x: jvp(lambda x: f(x, y), (x,), (t,))[1], (x,), (t,))[1], (x,), (t,)
    ),
    "jacfwd(jacfwd)": lambda f, x, y, t: jacfwd(jacfwd(f))(x, y),
    "grad(jvp)": lambda f, x, y, t: torch.func.grad(lambda x: jvp(lambda x: f(x, y), (x,), (t,))[1].sum())(x),
    "jvp(vmap)": lambda f, x, y, t: jvp(torch.vmap(f), (x, y), (t, t)),
}


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    x, y, t = torch.rand(3, 3, dtype=torch.double) + 0.5
    return x, y, t


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms(registry: Registry, ns: str, transform: str) -> None:
    program = product(registry, ns)
    run = TRANSFORMS[transform]
    args = inputs()
    torch.testing.assert_close(run(program.op, *args), run(program.reference, *args))


@pytest.mark.compile
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(registry: Registry, ns: str, backend: str) -> None:
    program = product(registry, ns)

    def run(f: Callable[..., Tensor], x: Tensor, y: Tensor, t: Tensor) -> Any:
        return jvp(f, (x, y), (t, 2 * t)), hessian(lambda x: f(x, y).sum())(x)

    compiled = torch.compile(functools.partial(run, program.op), fullgraph=True, backend=backend)
    args = inputs()
    torch.testing.assert_close(compiled(*args), run(program.reference, *args))


def test_nothing_to_do_without_tangents(registry: Registry, ns: str) -> None:
    calls = []
    op = product(registry, ns).op
    op.register_jvp(lambda ctx, *tangents: calls.append(tangents), setup_context=save)
    x, y, _ = inputs()
    with fwAD.dual_level():
        op(x, y)
        op(x.requires_grad_(), y).sum().backward()
    assert not calls


@pytest.mark.compile
def test_a_compiled_level_does_not_go_unseen(registry: Registry, ns: str) -> None:
    """A graph opens its level where Python does not hear of it; what was called directly before must look."""
    program = product(registry, ns)
    x, y, t = inputs()
    program.op(x, y)
    compiled = torch.compile(lambda *args: dual(program.op, *args), fullgraph=True, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(x, y, t), dual(program.reference, x, y, t))


# Registering ----------------------------------------------------------------------------------------------------


def square(registry: Registry, ns: str) -> Any:
    return registry.custom_op(f"{ns}::square", lambda x: x * x, mutates_args=(), schema="(Tensor x) -> Tensor")


def slope(op: Any) -> float:
    return float(jvp(op, (torch.tensor(3.0),), (torch.tensor(1.0),))[1].item())


def remember(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.x = inputs[0]


def test_forward_mode_alone(registry: Registry, ns: str) -> None:
    op = square(registry, ns)
    op.register_jvp(lambda ctx, tangent: 2 * ctx.x * tangent, setup_context=remember)
    assert slope(op) == 6
    with pytest.raises(AutogradError, match="no autograd formula"):
        op(torch.ones(1, requires_grad=True)).backward()


def test_registering_again_and_taking_back(registry: Registry, ns: str) -> None:
    op = square(registry, ns)
    with pytest.raises(UnsupportedError, match=r"op\.register_jvp"):
        slope(op)
    op.register_jvp(lambda ctx, tangent: tangent)
    with registry.scope():
        op.register_jvp(lambda ctx, tangent: 2 * tangent)
        assert slope(op) == 2
    assert slope(op) == 1
    library = Library(ns, "FRAGMENT")
    customops.register_jvp(op._opoverload, lambda ctx, tangent: 3 * tangent, lib=library)
    assert slope(op) == 3
    library._destroy()
    assert slope(op) == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda ctx, t: (t, t), "1 tangents"),
        (lambda ctx, t: t.unsqueeze(0), "shape [1]"),
        (lambda ctx, t: t * 1j, "torch.complex"),
        (lambda ctx, t: 1.0, "a Tensor; zeros, if it is zero"),
        (lambda ctx, t: None, "got:      None"),
    ],
)
def test_tangents_that_do_not_fit(registry: Registry, ns: str, wrong: Any, message: str) -> None:
    op = square(registry, ns)
    op.register_jvp(wrong)
    with pytest.raises(AutogradError, match="jvp returned tangents that do not fit the returns") as caught:
        slope(op)
    assert message in str(caught.value)
    assert f"{ns}::square" in str(caught.value)


def test_a_tangent_of_another_dtype(registry: Registry, ns: str) -> None:
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * x

        @staticmethod
        def jvp(ctx: Any, tangent: Tensor) -> Tensor:  # type: ignore[override]
            return tangent.double()

    op = square(registry, ns)
    op.register_jvp(lambda ctx, tangent: tangent.double())
    results = []
    for f in (op, Function.apply):
        with fwAD.dual_level():
            results.append(fwAD.unpack_dual(f(fwAD.make_dual(torch.ones(2), torch.ones(2)))).tangent)
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda registry, ns: several_list(registry, ns, lambda ctx, *t: ([t[0]],)), "a list of 2 tangents"),
        (lambda registry, ns: several_list(registry, ns, lambda ctx, *t: ([t[0], 1],)), "the return[1]"),
    ],
)
def test_lists_of_tangents_that_do_not_fit(registry: Registry, ns: str, wrong: Any, message: str) -> None:
    with pytest.raises(AutogradError) as caught:
        jvp(lambda x: wrong(registry, ns)(x)[0], (torch.ones(1),), (torch.ones(1),))
    assert message in str(caught.value)


def test_a_tangent_for_an_integer_result(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::top", lambda x: (x * 2, x.argmax()), schema="(Tensor x) -> (Tensor, Tensor)")
    op.register_jvp(lambda ctx, tangent: (tangent * 2, tangent))
    with pytest.raises(AutogradError, match="jvp returned tangents that do not fit the returns") as caught:
        jvp(lambda x: op(x)[0], (torch.ones(2),), (torch.ones(2),))
    error = caught.value
    assert (error.op, error.argument, error.got) == (f"{ns}::top", "return 1", "Tensor")
    assert error.expected == "None: it is not differentiable"


def several_list(registry: Registry, ns: str, jvp: Any) -> Any:
    op = registry.custom_op(f"{ns}::two", lambda x: [x + 1, x + 2], mutates_args=(), schema="(Tensor x) -> Tensor[]")
    op.register_jvp(jvp)
    return op


def test_what_is_refused(registry: Registry, ns: str) -> None:
    op = square(registry, ns)
    with pytest.raises(CallbackError, match="the jvp does not fit the operator"):
        op.register_jvp(lambda ctx: None)
    with pytest.raises(CallbackError, match="setup_context"):
        op.register_jvp(lambda ctx, tangent: tangent, setup_context=lambda ctx: None)

    for schema, fn in (
        ("(Tensor x) -> ()", lambda x: None),
        ("(Tensor(a) x) -> Tensor(a)", lambda x: x[:1]),
    ):
        wrong = registry.custom_op(f"{ns}::wrong", fn, mutates_args=(), schema=schema)
        with pytest.raises(RegistrationError, match="non-functional"):
            wrong.register_jvp(lambda ctx, tangent: tangent)


def test_a_jvp_alone_for_an_op_of_a_schema(registry: Registry, ns: str) -> None:
    """Of which customops knows nothing but its rules: the tangent was 0."""
    registry.define(f"{ns}::sine", "(Tensor x) -> Tensor")
    op = getattr(torch.ops, ns).sine.default
    registry.impl(f"{ns}::sine", "CPU", lambda x: torch.from_numpy(np.sin(x.numpy())))
    customops.register_jvp(
        op,
        lambda ctx, tangent: ctx.saved_tensors[0].cos() * tangent,
        setup_context=lambda ctx, inputs, output: ctx.save_for_forward(*inputs),
    )
    x, tangent = torch.randn(4), torch.randn(4)
    with fwAD.dual_level():
        made = fwAD.unpack_dual(op(fwAD.make_dual(x, tangent)))
    torch.testing.assert_close(made.tangent, x.cos() * tangent)
