"""Gradients of in-place ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.autograd.forward_ad
from helpers.tensors import X, leaf_of
from torch import Tensor

from customops import Registry, Tag
from customops.errors import AutogradError, DefinitionError, RegistrationError

INPLACE = Tag.inplace


# In-place ops ---------------------------------------------------------------------------------------------------


@pytest.fixture
def exp_(registry: Registry, ns: str) -> Any:
    """A formula from the result."""
    op = registry.custom_op(f"{ns}::exp_", lambda x: x.exp_(), mutates_args={"x"}, tags=INPLACE,
                            schema="(Tensor(a!) x) -> Tensor(a!)")  # fmt: skip

    op.register_autograd(
        lambda ctx, g: g * ctx.saved_tensors[0],
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
    )
    return op


@pytest.fixture
def mul_(registry: Registry, ns: str) -> Any:
    """A formula that needs the value from before the write."""

    @registry.custom_op(f"{ns}::mul_", mutates_args={"x"}, tags=INPLACE)
    def mul_(x: Tensor, y: Tensor) -> Tensor:
        return x.mul_(y)

    def save(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    def backward(ctx: Any, g: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return g * y, g * x

    mul_.register_autograd(backward, setup_context=save, originals="x")
    return mul_


def test_the_result_is_the_argument_and_the_node_its_history(exp_: Any) -> None:
    x = leaf_of(X)
    y = x * 2
    version = y._version
    assert exp_(y) is y
    assert "exp_" in y.grad_fn.name()
    assert y._version > version


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
