"""torch.func, and forward mode where there is no rule for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from helpers.formulas import (
    X,
    assert_same_gradients,
    gradients,
    plain,
    product_backward,
    product_setup,
    slow_vmap,
)
from torch import Tensor

from customops.errors import UnsupportedError

# torch.func -----------------------------------------------------------------------------------------------------------


def quintic(f: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    """A scalar function of one tensor in which every derivative of `f` shows."""
    return lambda x: (f(f(x, x + 1), x) * f(x, x)).sum()


#: Those that tests/products/gradients does not try.
TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor]], Any]] = {
    "third order": lambda f: torch.func.jacrev(torch.func.jacrev(torch.func.jacrev(f)))(X),
    "vmap(grad(grad))": lambda f: torch.vmap(torch.func.grad(torch.func.grad(f)))(X),
    "grad under no_grad": lambda f: torch.no_grad()(torch.func.grad(f))(X),
    "grad(grad) under no_grad": lambda f: torch.no_grad()(torch.func.grad(lambda x: torch.func.grad(f)(x).sum()))(X),
    "backward of grad": lambda f: gradients(torch.func.grad(f), X),
    "backward of jacrev": lambda f: gradients(torch.func.jacrev(f), X),
    "functional.hessian": lambda f: torch.autograd.functional.hessian(f, X),
}  # fmt: skip


@pytest.mark.parity(49)
@slow_vmap
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms(product: Any, transform: Callable[..., Any]) -> None:
    torch.testing.assert_close(transform(quintic(product)), transform(quintic(plain)))


def test_setup_context_runs_once_for_each_level(product: Any) -> None:
    needed = []

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        needed.append(ctx.needs_input_grad)
        product_setup(ctx, inputs, output)

    product.register_autograd(product_backward, setup_context=setup_context)
    torch.func.grad(lambda x: product(x, X).sum())(X)
    assert needed == [(True, False)]
    needed.clear()
    torch.func.grad(lambda y: torch.func.grad(lambda x: product(x, y).sum())(X).sum())(X)
    assert sorted(needed) == [(False, True), (True, False)]


# Forward mode: there is no rule for it, which must show ---------------------------------------------------------------


def dual_level(f: Callable[..., Tensor]) -> Any:
    with fwAD.dual_level():
        return fwAD.unpack_dual(f(fwAD.make_dual(X, X), X)).tangent


def dual_level_requires_grad(f: Callable[..., Tensor]) -> Any:
    with fwAD.dual_level():
        return fwAD.unpack_dual(f(fwAD.make_dual(X.clone().requires_grad_(), X), X)).tangent


def dual_level_other_requires_grad(f: Callable[..., Tensor]) -> Any:
    with fwAD.dual_level():
        return fwAD.unpack_dual(f(fwAD.make_dual(X, X), X.clone().requires_grad_())).tangent


def dual_level_no_grad(f: Callable[..., Tensor]) -> Any:
    with fwAD.dual_level(), torch.no_grad():
        return fwAD.unpack_dual(f(fwAD.make_dual(X, X), X)).tangent


FORWARD_MODE: dict[str, Callable[[Callable[..., Tensor]], Any]] = {
    "jvp": lambda f: torch.func.jvp(f, (X, X), (X, X))[1],
    "jvp of the other": lambda f: torch.func.jvp(lambda y: f(X, y), (X,), (X,))[1],
    "jacfwd": lambda f: torch.func.jacfwd(f)(X, X),
    "hessian": lambda f: torch.func.hessian(quintic(f))(X),
    "vmap(jvp)": lambda f: torch.vmap(lambda x: torch.func.jvp(quintic(f), (x,), (x,))[1])(X[:, None]),
    "linearize": lambda f: torch.func.linearize(lambda x: f(x, X), X)[1](X),
    "dual numbers": dual_level,
    "dual that requires grad": dual_level_requires_grad,
    "dual beside a leaf": dual_level_other_requires_grad,
    "dual under no_grad": dual_level_no_grad,
}  # fmt: skip


@pytest.mark.parity(49)
@slow_vmap
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
@pytest.mark.parametrize("transform", FORWARD_MODE.values(), ids=FORWARD_MODE)
def test_forward_mode_raises(product: Any, transform: Callable[..., Any]) -> None:
    tangents = transform(plain)
    assert torch.any(torch.stack([t for t in torch.utils._pytree.tree_leaves(tangents)]) != 0)  # the oracle has some
    with pytest.raises(NotImplementedError, match="forward-mode differentiation") as raised:
        transform(product)
    assert isinstance(raised.value, UnsupportedError)
    assert raised.value.op == product._qualname


def test_forward_mode_raises_for_a_list(combine: Any) -> None:
    with fwAD.dual_level(), pytest.raises(NotImplementedError, match="forward-mode differentiation"):
        combine([X[:2], fwAD.make_dual(X[:2], X[:2])])
    with pytest.raises(NotImplementedError, match="forward-mode differentiation"):
        torch.func.jacfwd(lambda x: combine([x, x]))(X[:2])


@pytest.mark.compile
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", ["jvp", "jvp of the other", "jacfwd", "dual numbers"])
@slow_vmap
def test_forward_mode_raises_under_compile(product: Any, name: str, backend: str) -> None:
    transform = FORWARD_MODE[name]
    with pytest.raises(Exception, match="forward-mode differentiation"):
        torch.compile(lambda: transform(product), backend=backend)()
    torch._dynamo.reset()
    with pytest.raises(Exception, match="forward-mode differentiation"):
        transform(torch.compile(product, backend=backend))


def test_forward_mode_elsewhere_is_left_alone(product: Any) -> None:
    with fwAD.dual_level():
        dual = fwAD.make_dual(X, X)
        constant = product(X, X)
        assert torch.equal(constant, plain(X, X))
        assert fwAD.unpack_dual(constant).tangent is None
        assert torch.equal(fwAD.unpack_dual(dual * constant).tangent, X * constant)
    _, tangent = torch.func.jvp(lambda x: x * product(X, X), (X,), (X,))
    assert torch.equal(tangent, X * plain(X, X))
    # Reverse mode, while a forward-mode level is open.
    with fwAD.dual_level():
        assert_same_gradients(product, plain, X, X)


def test_forward_mode_in_inference_mode_is_that_of_torch(product: Any) -> None:
    with torch.inference_mode():
        assert dual_level(plain) is None  # tangents are not tracked
        assert dual_level(product) is None
