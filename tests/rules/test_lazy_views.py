"""Ops that write to tensors that are conjugated, or negated, when they are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.func import vmap
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from customops import Registry, SameAs
from customops.errors import UnsupportedError

#: Each a view of memory that holds other numbers.
VIEWS: dict[str, Callable[[], Tensor]] = {
    "conjugate": lambda: torch.randn(4, dtype=torch.complex64).conj(),
    "negative": lambda: torch.randn(4, dtype=torch.complex64).conj().imag,
    "part": lambda: torch.randn(4, dtype=torch.complex64).conj().imag[1:],
}
pytestmark = pytest.mark.parametrize("make", VIEWS.values(), ids=VIEWS)


@pytest.mark.parametrize("guard", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_the_write_reaches_the_memory(registry: Registry, ns: str, make: Callable[[], Tensor], guard: type) -> None:
    @registry.custom_op(f"{ns}::axpy_", mutates_args=("x",))
    def axpy_(y: Tensor, x: Tensor, *, twice: Tensor | None = None) -> Tensor:
        assert not any(each.is_conj() or each.is_neg() for each in (x, y))
        x += y
        return x * 2

    with guard():
        x, y = make(), make()
        expected = x.clone() + y
        version = None if x.is_inference() else x._version
        assert_close(axpy_(y, x), expected * 2)
        assert_close(x, expected)
        assert version is None or x._version == version + 1


def test_an_in_place_op_returns_its_argument(registry: Registry, ns: str, make: Callable[[], Tensor]) -> None:
    @registry.custom_op(f"{ns}::add_", mutates_args=("x",))
    def add_(x: Tensor, y: Tensor) -> Annotated[Tensor, SameAs("x")]:
        return x.add_(y)

    x, y = make(), make()
    expected = x.clone() + y
    assert add_(x, y) is x
    assert_close(x, expected)


def test_a_list_that_is_written(registry: Registry, ns: str, make: Callable[[], Tensor]) -> None:
    @registry.custom_op(f"{ns}::double_", mutates_args=("xs",))
    def double_(xs: list[Tensor]) -> None:
        assert not any(x.is_conj() or x.is_neg() for x in xs)
        for x in xs:
            x *= 2

    xs = [make(), torch.ones(2), make()]
    expected = [x.clone() * 2 for x in xs]
    double_(xs)
    assert_close(xs, expected)


def test_the_gradient_of_what_is_written(registry: Registry, ns: str, make: Callable[[], Tensor]) -> None:
    @registry.custom_op(f"{ns}::scale_", mutates_args=("x",))
    def scale_(x: Tensor, by: float) -> None:
        x *= by

    scale_.register_autograd(lambda ctx, grad: (grad * 3, None))
    leaf = torch.randn(4, dtype=torch.complex64, requires_grad=True)
    x = (leaf * 1).conj() if make().is_complex() else (leaf * 1).conj().imag
    scale_(x, 3.0)
    (gradient,) = torch.autograd.grad(x.abs().sum(), leaf)
    y = leaf.detach().requires_grad_()
    (expected,) = torch.autograd.grad(((y.conj() if x.is_complex() else y.conj().imag) * 3).abs().sum(), y)
    assert_close(gradient, expected)


@pytest.mark.compile
def test_compiled(registry: Registry, ns: str, make: Callable[[], Tensor]) -> None:
    """Not by inductor, which takes the memory of such inputs for their values, in what calls no op of ours, too."""

    @registry.custom_op(f"{ns}::add_", mutates_args=("x",))
    def add_(x: Tensor, y: Tensor) -> None:
        x += y

    def f(x: Tensor, y: Tensor) -> Tensor:
        add_(x, y)
        return x * 2

    x, y = make(), make()
    expected = x.clone() + y
    assert_close(torch.compile(f, backend="aot_eager", fullgraph=True, dynamic=True)(x, y), expected * 2)
    assert_close(x, expected)


def test_fakes(registry: Registry, ns: str, make: Callable[[], Tensor]) -> None:
    @registry.custom_op(f"{ns}::add_", mutates_args=("x",))
    def add_(x: Tensor, y: Tensor) -> Annotated[Tensor, SameAs("x")]:
        return x.add_(y)

    mode = FakeTensorMode()
    x, y = mode.from_tensor(make()), mode.from_tensor(make())
    with mode:
        assert add_(x, y) is x


def test_two_views_of_one_memory(registry: Registry, ns: str, make: Callable[[], Tensor]) -> None:
    """Copies of both would lose one of the writes. The parts of one tensor, as of a fused projection, are in order."""

    @registry.custom_op(f"{ns}::add_", mutates_args=("x", "y"))
    def add_(x: Tensor, y: Tensor) -> None:
        x += 1
        y += 1

    x = make()
    before = x.clone()
    with pytest.raises(UnsupportedError, match="another tensor of the call has the same memory"):
        add_(x, x[:])
    assert_close(x, before)
    add_(x[:1], x[1:])
    assert_close(x, before + 1)


def test_transforms(registry: Registry, ns: str, make: Callable[[], Tensor]) -> None:
    @registry.custom_op(f"{ns}::scale_", mutates_args=("x",))
    def scale_(x: Tensor, by: float) -> None:
        assert not any((x.is_conj(), x.is_neg()))
        x *= by

    scale_.register_autograd(lambda ctx, grad: (grad * 3, None))
    scale_.register_vmap("sequential")
    is_complex = make().is_complex()

    def view(z: Tensor) -> Tensor:
        return z.conj() if is_complex else z.conj().imag

    def f(z: Tensor) -> Tensor:
        x = view(z * 1)
        scale_(x, 3.0)
        return x * 2

    z = torch.randn(2, 3, dtype=torch.complex64)
    assert_close(checkpoint(f, z, use_reentrant=False), view(z) * 6)
    if is_complex:  # torch has no batching rule for negative views
        assert_close(vmap(f)(z), view(z) * 6)
    gradient = torch.func.grad(lambda z: f(z).abs().sum())(z)
    assert_close(gradient, torch.func.grad(lambda z: (view(z) * 6).abs().sum())(z))
