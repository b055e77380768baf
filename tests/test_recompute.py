"""`register_autograd_from`: the gradients of a function in torch operations, for an op that computes the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Optional

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.library import Library

import customops
from customops import Registry
from customops.errors import AutogradError, CallbackError, RegistrationError

pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node"),
    pytest.mark.filterwarnings("ignore:`torch._prims_common.check` is deprecated"),
]


class Program(NamedTuple):
    """A function of two tensors that calls an op, and the same without the op."""

    op: Callable[[Tensor, Tensor], Tensor]
    reference: Callable[[Tensor, Tensor], Tensor]


def through_numpy(fn: Callable[..., Any], *tensors: Tensor) -> Tensor:
    """Compute where autograd cannot follow."""
    return torch.from_numpy(np.asarray(fn(*(tensor.detach().numpy() for tensor in tensors))))


def plain(registry: Registry, ns: str) -> Program:
    def fn(x: Tensor, y: Tensor, by: float = 2.0) -> Tensor:
        return through_numpy(lambda x, y: np.sin(x) * y * by, x, y)

    op = registry.custom_op(f"{ns}::plain", fn, mutates_args=())
    op.register_fake(lambda x, y, by: torch.empty_like(x))
    op.register_vmap("broadcast_all")

    @op.register_autograd_from
    def reference(x: Tensor, y: Tensor, by: float) -> Tensor:
        return x.sin() * y * by

    return Program(op, lambda x, y: reference(x, y, 2.0))


def mixed(registry: Registry, ns: str) -> Program:
    """A list, an optional tensor, a keyword; several outputs, one an integer tensor, one a number."""

    def compute(xs: Any, bias: Any, power: int) -> Any:
        total = sum(x**power for x in xs) + (0 if bias is None else bias)
        return total, [x * total for x in xs], total.argsort(), len(xs)

    def fn(
        xs: list[Tensor], bias: Optional[Tensor] = None, *, power: int = 2
    ) -> tuple[Tensor, list[Tensor], Tensor, int]:
        return compute(xs, bias, power)  # type: ignore[no-any-return]

    op = registry.custom_op(f"{ns}::mixed", fn, mutates_args=())
    op.register_fake(
        lambda xs, bias, *, power: (
            torch.empty_like(xs[0]),
            [torch.empty_like(x) for x in xs],
            torch.empty_like(xs[0], dtype=torch.int64),
            len(xs),
        )
    )
    op.register_vmap("sequential")
    op.register_autograd_from(lambda xs, bias, *, power: compute(xs, bias, power))

    def call(x: Tensor, y: Tensor) -> Tensor:
        total, products, order, n = op([x, y, x], y, power=3)
        alone, *_ = op([x])
        assert order.dtype == torch.int64
        return (total + sum(products) + alone) * n

    def reference(x: Tensor, y: Tensor) -> Tensor:
        total, products, _, n = compute([x, y, x], y, 3)
        return (total + sum(products) + compute([x], None, 2)[0]) * n  # type: ignore[no-any-return]

    return Program(call, reference)


func = torch.func
TRANSFORMS: dict[str, Callable[..., Any]] = {
    "value": lambda f, x, y: f(x, y),
    "grad": lambda f, x, y: func.grad(lambda x, y: f(x, y).sum(), argnums=(0, 1))(x, y),
    "grad of one": lambda f, x, y: func.grad(lambda y: f(x, y).sum())(y),
    "vjp": lambda f, x, y: func.vjp(f, x, y)[1](x),
    "jacrev": lambda f, x, y: func.jacrev(f)(x, y),
    "jacfwd": lambda f, x, y: func.jacfwd(f)(x, y),
    "hessian": lambda f, x, y: func.hessian(lambda x: f(x, y).sum())(x),
    "grad(grad)": lambda f, x, y: func.grad(lambda x: func.grad(lambda x: f(x, y).sum())(x).sum())(x),
    "jvp": lambda f, x, y: func.jvp(f, (x, y), (y, x)),
    "jvp of one": lambda f, x, y: func.jvp(lambda y: f(x, y), (y,), (x,)),
    "vmap(grad)": lambda f, x, y: torch.vmap(func.grad(lambda x, y: f(x, y).sum()))(
        x.expand(2, *x.shape), y.expand(2, *y.shape)
    ),
}


@pytest.mark.parametrize("make", [plain, mixed])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms(registry: Registry, ns: str, make: Any, transform: str) -> None:
    program, run = make(registry, ns), TRANSFORMS[transform]
    x, y = torch.rand(2, 3, dtype=torch.double)
    torch.testing.assert_close(run(program.op, x, y), run(program.reference, x, y))


@pytest.mark.parametrize("make", [plain, mixed])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(registry: Registry, ns: str, make: Any, backend: str) -> None:
    program = make(registry, ns)
    compiled = torch.compile(program.op, fullgraph=True, backend=backend)
    x, y = (torch.rand(3, dtype=torch.double, requires_grad=True) for _ in range(2))
    got = torch.autograd.grad(compiled(x, y).sum(), (x, y))
    wanted = torch.autograd.grad(program.reference(x, y).sum(), (x, y))
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("transform", ["grad", "jvp", "hessian"])
def test_compiled_transforms(registry: Registry, ns: str, transform: str) -> None:
    program, run = plain(registry, ns), TRANSFORMS[transform]
    x, y = torch.rand(2, 3, dtype=torch.double)
    compiled = torch.compile(lambda x, y: run(program.op, x, y), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, y), run(program.reference, x, y))


@pytest.mark.parametrize("make", [plain, mixed])
def test_gradcheck(registry: Registry, ns: str, make: Any) -> None:
    op = make(registry, ns).op
    x, y = (torch.rand(3, dtype=torch.double, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(op, (x, y), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(op, (x, y), check_fwd_over_rev=True)


def test_only_what_is_needed_is_derived(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::f", lambda x, y: x * y, mutates_args=(), schema="(Tensor x, Tensor y) -> Tensor")
    needed = []

    def reference(x: Tensor, y: Tensor) -> Tensor:
        needed.append((x.requires_grad, y.requires_grad))
        return x * y

    customops.register_autograd_from(op, reference)
    x, y = torch.rand(3, requires_grad=True), torch.rand(3)
    (grad,) = torch.autograd.grad(op(x, y).sum(), x)
    assert torch.equal(grad, y)
    assert needed == [(True, False)]


def test_an_op_of_somebody_else(ns: str) -> None:
    library = Library(ns, "FRAGMENT")
    library.define("f(Tensor x) -> Tensor")
    library.impl("f", lambda x: through_numpy(np.exp, x), "CPU")
    op = getattr(torch.ops, ns).f.default
    customops.register_autograd_from(op, torch.exp, lib=library)
    x = torch.rand(3, requires_grad=True)
    (grad,) = torch.autograd.grad(op(x).sum(), x)
    torch.testing.assert_close(grad, x.detach().exp())
    library._destroy()


def test_what_is_refused(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::f", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor")
    with pytest.raises(CallbackError, match="function to differentiate does not fit"):
        op.register_autograd_from(lambda: 0)
    op.register_autograd_from(lambda x: (x * 2).sum())
    x = torch.rand(3, requires_grad=True)
    with pytest.raises(AutogradError, match="does not return what the op does"):
        op(x).sum().backward()
    view = registry.custom_op(f"{ns}::g", lambda x: x[:1], mutates_args=(), schema="(Tensor(a) x) -> Tensor(a)")
    with pytest.raises(RegistrationError, match="non-functional"):
        view.register_autograd_from(lambda x: x[:1])
    assert view._rules.autograd._slots.values == {}
