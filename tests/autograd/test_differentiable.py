"""differentiable= and nondiff_args=: which arguments and results have gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwAD
import torch.utils.checkpoint
from helpers.tensors import X, leaf_of
from torch import Tensor
from torch.func import jacrev, jvp

from customops import Registry, register_autograd
from customops.errors import AutogradError, DefinitionError, RegistrationError


def save_inputs(ctx: Any, inputs: Any, output: Any) -> None:
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)


# differentiable= ------------------------------------------------------------------------------------------------


@pytest.fixture
def bins(registry: Registry, ns: str) -> Any:
    @registry.custom_op(f"{ns}::bins", mutates_args=(), differentiable=False)
    def bins(x: Tensor, *, step: float = 0.5) -> Tensor:
        return (x / step).floor()

    bins.register_fake(lambda x, *, step: torch.empty_like(x))
    return bins


def test_an_op_that_is_not_differentiable(bins: Any) -> None:
    x = leaf_of(X)
    assert not bins(x).requires_grad
    (bins(x, step=0.25) * x).sum().backward()
    torch.testing.assert_close(x.grad, (X / 0.25).floor())
    with fwAD.dual_level():
        assert fwAD.unpack_dual(bins(fwAD.make_dual(X, X))).tangent is None
    assert jvp(bins, (X,), (X,))[1].tolist() == [0, 0, 0]


def test_no_formula_for_an_op_that_is_not_differentiable(bins: Any, ns: str) -> None:
    for register in (bins.register_autograd, bins.register_jvp, lambda f: register_autograd(f"{ns}::bins", f)):
        with pytest.raises(RegistrationError, match="declared not to be differentiable"):
            register(lambda ctx, g: g)
    with pytest.raises(RegistrationError, match="declared not to be differentiable"):
        bins.register_reference(lambda x, *, step: x, gives="gradients")


def test_a_write_by_an_op_that_is_not_differentiable(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::reset", lambda x: (x.zero_(), None)[1], mutates_args={"x"}, differentiable=False,
                            schema="(Tensor(a!) x) -> ()")  # fmt: skip
    parameter = leaf_of(X)
    op(parameter)  # as an optimizer does
    assert parameter.tolist() == [0, 0, 0]
    y = leaf_of(X) * 2
    op(y)
    with pytest.raises(AutogradError, match="declared not to be differentiable, but wrote its argument"):
        y.sum().backward()


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
    parts(leaf_of(x))[2][0].sum().backward()
    assert seen == [[[0, 0], [0, 0], [1, 1], [False, False], [0, 0]]]
    parts.register_autograd(backward, materialize_grads=False)
    parts(leaf_of(x))[2][0].sum().backward()
    assert seen[1] == [None, None, [1, 1], None, None]
    parts.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.set_materialize_grads(False))
    parts(leaf_of(x))[0].sum().backward()
    assert seen[2] == [[1, 1], None, None, None, None]
    parts.register_autograd(lambda ctx, g, _, gs: g * 2 + gs[0] * 3 + gs[2] * 4)
    assert torch.equal(jacrev(lambda x: parts(x)[2][2])(x), 4 * torch.eye(2))


@pytest.mark.parametrize("flags", [(True,), "yes", (True, False, False), (1, 0), None])
def test_flags_that_do_not_fit(registry: Registry, ns: str, flags: Any) -> None:
    def two(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 1, x * 2

    with pytest.raises(
        DefinitionError, match="differentiable= must be True, False, or one flag for each return"
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


def test_arguments_without_a_gradient(masked: Any) -> None:
    x, mask, other = leaf_of(X), leaf_of(X + 1), leaf_of(X)
    masked(x, mask, [other]).sum().backward()
    torch.testing.assert_close(x.grad, 2 * (X + 1))
    assert (mask.grad, other.grad) == (None, None)
    assert masked.needs[-1] == (True, False, [False])
    assert not masked(X, mask, [other]).requires_grad
    assert jvp(lambda m: masked(X, m, []), (X,), (X,))[1].tolist() == [0, 0, 0]


@pytest.mark.parametrize("wrong", ["z", ("x", "by"), ("by",)])
def test_nondiff_args_that_are_no_tensors(registry: Registry, ns: str, wrong: Any) -> None:
    def scale(x: Tensor, by: float = 2.0) -> Tensor:
        return x * by

    with pytest.raises(
        DefinitionError, match="nondiff_args= names something that is not a tensor argument of the op"
    ) as error:
        registry.custom_op(f"{ns}::scale", scale, mutates_args=(), nondiff_args=wrong)
    assert error.value.expected == "some of x"
    op = registry.custom_op(f"{ns}::scale", scale, mutates_args=())
    with pytest.raises(DefinitionError, match="nondiff_args= names"):
        op.register_autograd(lambda ctx, g: g, nondiff_args=wrong)
