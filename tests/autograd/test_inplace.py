"""Gradients of in-place ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.autograd.forward_ad
from helpers.compiling import BACKENDS
from helpers.tensors import X, leaf_of
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import hessian, jacfwd, jacrev, jvp, vmap

from customops import Registry, Tag
from customops.errors import AutogradError, DefinitionError, RegistrationError

INPLACE = Tag.inplace


# In-place ops ---------------------------------------------------------------------------------------------------


@pytest.fixture
def exp_(registry: Registry, ns: str) -> Any:
    """A formula from the result."""
    op = registry.custom_op(f"{ns}::exp_", lambda x: x.exp_(), mutates_args={"x"}, tags=INPLACE,
                            schema="(Tensor(a!) x) -> Tensor(a!)")  # fmt: skip

    def save(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    op.register_autograd(lambda ctx, g: g * ctx.saved_tensors[0], setup_context=save)
    op.register_jvp(lambda ctx, t: t * ctx.saved_tensors[0], setup_context=save)
    return op


@pytest.fixture
def mul_(registry: Registry, ns: str) -> Any:
    """A formula that needs the value from before the write."""

    @registry.custom_op(f"{ns}::mul_", mutates_args={"x"}, tags=INPLACE)
    def mul_(x: Tensor, y: Tensor) -> Tensor:
        return x.mul_(y)

    def save(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    def backward(ctx: Any, g: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return g * y, g * x

    def forward_mode(ctx: Any, t: Tensor, u: Tensor) -> Tensor:
        x, y = ctx.saved_tensors
        return t * y + x * u

    mul_.register_autograd(backward, setup_context=save, originals="x")
    mul_.register_jvp(forward_mode, setup_context=save, originals="x")
    return mul_


def program(exp_: Any, mul_: Any) -> Any:
    def f(x: Tensor) -> Tensor:
        y = x * 2
        z = exp_(y)
        return y * z + mul_(x.sin(), x) + mul_(mul_(z * 3, x), z)

    return f


PLAIN = program(torch.Tensor.exp_, torch.Tensor.mul_)


@pytest.mark.compile
@pytest.mark.parity(30)
@pytest.mark.parametrize("backend", BACKENDS)
def test_inplace(exp_: Any, mul_: Any, backend: str) -> None:
    f = program(exp_, mul_)
    compiled = f if backend == "eager" else torch.compile(f, fullgraph=True, backend=backend)
    x, y = leaf_of(X), leaf_of(X)
    result, expected = compiled(x), PLAIN(y)
    torch.testing.assert_close(result, expected)
    result.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_the_result_is_the_argument_and_the_node_its_history(exp_: Any) -> None:
    x = leaf_of(X)
    y = x * 2
    version = y._version
    assert exp_(y) is y
    assert "exp_" in y.grad_fn.name()
    assert y._version > version


@pytest.mark.parametrize(
    "transform",
    [
        jacrev,
        lambda f: jacrev(jacrev(f)),
        jacfwd,
        lambda f: jacfwd(jacrev(f)),
        hessian,
        lambda f: lambda x: jvp(f, (x,), (x.cos(),)),
        lambda f: lambda x: jvp(lambda x: jvp(f, (x,), (x.cos(),))[1], (x,), (x.sin(),)),
        lambda f: vmap(jacrev(f), in_dims=1),
    ],
)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_inplace_transformed(exp_: Any, mul_: Any, transform: Any) -> None:
    x = X[:, None].repeat(1, 2)
    torch.testing.assert_close(transform(program(exp_, mul_))(x), transform(PLAIN)(x))


def test_inplace_by_finite_differences(exp_: Any, mul_: Any) -> None:
    x = leaf_of(X.double())
    assert gradcheck(program(exp_, mul_), x, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(program(exp_, mul_), x, check_fwd_over_rev=True)


def test_a_view_is_mutated(exp_: Any, mul_: Any) -> None:
    def f(exp_: Any, mul_: Any, x: Tensor) -> Tensor:
        y = x * 2
        view = y[:2]
        exp_(view)
        z = y * 1
        mul_(z[1:], x[1:])
        return y * z[0] + z

    x, z = leaf_of(X), leaf_of(X)
    result, expected = f(exp_, mul_, x), f(torch.Tensor.exp_, torch.Tensor.mul_, z)
    result.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close((result, x.grad), (expected, z.grad))


def test_only_another_argument_requires_grad(mul_: Any) -> None:
    x, y = X.clone(), leaf_of(X)
    assert mul_(x, y) is x
    assert x.requires_grad
    x.sum().backward()
    torch.testing.assert_close(y.grad, X)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda x: x, "a leaf Variable that requires grad is being used in an in-place operation"),
        (lambda x: x[:2], "a view of a leaf Variable that requires grad is being used in an in-place operation"),
        (lambda x: (x * 1).unbind()[0], "a view is being modified in-place that autograd cannot follow"),
    ],
)
def test_writes_that_autograd_refuses(exp_: Any, make: Any, words: str) -> None:
    x = leaf_of(X)
    tensor = make(x)
    before = tensor.detach().clone()
    with pytest.raises(RuntimeError):
        tensor.exp_()
    with pytest.raises(AutogradError, match=words) as raised:
        exp_(tensor)
    assert raised.value.argument == "x"
    assert torch.equal(tensor.detach(), before)  # it was not written
    with torch.no_grad():
        exp_(tensor)
    torch.testing.assert_close(tensor.detach(), before.exp())


def test_a_saved_tensor_that_is_mutated_later(mul_: Any) -> None:
    x, y = leaf_of(X) * 1, leaf_of(X) * 1
    mul_(x, y)
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        x.sum().backward()


# From torch operations ------------------------------------------------------------------------------------------


@pytest.mark.compile
@pytest.mark.parametrize("backend", BACKENDS)
def test_inplace_from_torch_operations(registry: Registry, ns: str, backend: str) -> None:
    @registry.custom_op(f"{ns}::mul_", mutates_args={"x"}, tags=INPLACE)
    def mul_(x: Tensor, y: Tensor) -> Tensor:
        return x.mul_(y)

    mul_.register_reference(lambda x, y: x * y, gives="gradients")

    def f(x: Tensor) -> Tensor:
        return mul_(x.sin(), x.exp())

    compiled = f if backend == "eager" else torch.compile(f, fullgraph=True, backend=backend)
    x, y = leaf_of(X), leaf_of(X)
    compiled(x).sum().backward()
    (y.sin() * y.exp()).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    if backend == "eager":
        z = leaf_of(X.double())
        assert gradcheck(f, z, check_forward_ad=True)
        assert gradgradcheck(f, z, check_fwd_over_rev=True)


def test_a_buffer_from_torch_operations(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::norm", mutates_args={"out"})
    def norm(out: Tensor, x: Tensor, *, weight: Tensor, eps: float = 1e-6) -> None:
        out.copy_(x * torch.rsqrt(x.square().mean() + eps) * weight)

    norm.register_reference(
        lambda out, x, *, weight, eps: x * torch.rsqrt(x.square().mean() + eps) * weight, gives="gradients"
    )

    def f(x: Tensor, weight: Tensor) -> Tensor:
        out = torch.empty_like(x)
        norm(out, x, weight=weight, eps=1e-3)
        return out.exp()

    x, weight = leaf_of(X.double()), leaf_of(X.double() + 1)
    assert gradcheck(f, (x, weight), check_forward_ad=True)
    assert gradgradcheck(f, (x, weight))


def test_a_counter_and_a_formula_from_torch_operations(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::count", mutates_args={"counter"})
    def count(x: Tensor, counter: Tensor) -> Tensor:
        counter.add_(1)
        return x * x * counter

    count.register_reference(lambda x, counter: (x * x * (counter + 1), counter + 1), gives="gradients")
    x, counter = leaf_of(X), torch.ones(())
    count(x, counter).sum().backward()
    torch.testing.assert_close(x.grad, 4 * X)
    assert counter == 2


# What is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"grads_of": "x"}, RegistrationError, "the op does not write to it"),
        ({"grads_of": ("n",)}, DefinitionError, "names something that is not a tensor"),
        ({"grads_of": "acc", "nondiff_args": "acc"}, RegistrationError, "it is one of nondiff_args"),
        ({"originals": "z"}, DefinitionError, "originals= names something that is not a tensor"),
        ({"originals": "x"}, RegistrationError, "originals= names an argument, but the op does not write to it"),
    ],
)
def test_options_that_do_not_fit(registry: Registry, ns: str, options: Any, error: Any, words: str) -> None:
    op = registry.custom_op(f"{ns}::op", lambda x, acc, n: x * n, mutates_args={"acc"},
                            schema="(Tensor x, Tensor(a!) acc, int n) -> Tensor")  # fmt: skip
    for register in (op.register_autograd, op.register_jvp):
        with pytest.raises(error, match=words) as raised:
            register(lambda ctx, *grads: None, **options)
        assert f"{ns}::op" in str(raised.value)
    with pytest.raises(AutogradError, match="no autograd formula was registered"):  # nothing was registered
        op(leaf_of(X), torch.zeros(3), 2).sum().backward()


def test_the_result_of_an_inplace_op_is_no_new_value(exp_: Any) -> None:
    with pytest.raises(RegistrationError, match="it is returned, so backward gets a gradient for it already"):
        exp_.register_autograd(lambda ctx, g: g, grads_of="x")
