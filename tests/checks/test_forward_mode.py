"""test_forward_mode: tangents against finite differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.formulas_under_test import op_of, saved, trial_of

from customops import custom_op
from customops.checks import NotExercised
from customops.checks.gradients import check_forward_mode as check
from customops.errors import CheckError

aten = torch.ops.aten
R = torch.randn


def product(ns: str, jvp: Callable[..., Any], materialize_grads: bool = True) -> Any:
    @custom_op(f"{ns}::product", mutates_args=())
    def op(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * y

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    op.register_autograd(
        lambda ctx, grad: (grad * ctx.saved_tensors[1], grad * ctx.saved_tensors[0]),
        setup_context=setup,
        materialize_grads=materialize_grads,
    )
    op.register_jvp(jvp, setup_context=setup, materialize_grads=materialize_grads)
    return op


def right(ctx: Any, dx: Any, dy: Any) -> Any:
    x, y = ctx.saved_tensors
    return (0 if dx is None else dx * y) + (0 if dy is None else x * dy)


def minus(ctx: Any, dx: Any, dy: Any) -> Any:
    return right(ctx, dx, None if dy is None else -dy)


def first_alone(ctx: Any, dx: Any, dy: Any) -> Any:
    return right(ctx, dx, dy) if dx is not None else torch.zeros_like(dy)


def both(ctx: Any, dx: Any, dy: Any) -> Any:
    x, y = ctx.saved_tensors
    return dx * y + dy * x


def test_a_missing_tangent(ns: str) -> None:
    with pytest.raises(CheckError, match="where x alone has a tangent: the formula fails"):
        check(trial_of(product(ns, both, materialize_grads=False), R(3), R(3)))
    check(trial_of(product(ns, right, materialize_grads=False), R(3), R(3)))


def test_a_formula_that_is_right(ns: str) -> None:
    check(trial_of(product(ns, right), R(3), R(3)))


def test_a_formula_that_is_wrong(ns: str) -> None:
    with pytest.raises(CheckError, match=r"forward mode is wrong(.|\n)*minus \(.*test_forward_mode\.py:\d+"):
        check(trial_of(product(ns, minus), R(3), R(3)))


def test_a_tangent_alone(ns: str) -> None:
    with pytest.raises(CheckError, match="forward mode is wrong where y alone has a tangent"):
        check(trial_of(product(ns, first_alone, materialize_grads=False), R(3), R(3)))


def test_no_formula(ns: str) -> None:
    op = op_of(ns, "(Tensor x) -> Tensor", torch.sin, saved(lambda g, x: g * x.cos()))
    with pytest.raises(NotExercised, match="no formula for forward mode"):
        check(trial_of(op, R(3)))

    @custom_op(f"{ns}::sine", mutates_args=())
    def sine(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    sine.register_autograd(
        lambda ctx, grad: grad * ctx.saved_tensors[0].cos(),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    with pytest.raises(NotExercised, match="refuses forward mode"):
        check(trial_of(sine, R(3)))


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.mul.Tensor, (R(3, 4), R(4))),
        (aten.mul_.Tensor, (R(4), R(4))),
        (aten.relu.default, (torch.tensor([0.0, 1, -1]),)),
        (aten.round.default, (R(4),)),
        (aten.nll_loss.default, (R(3, 4), torch.tensor([0, 1, 2]), torch.rand(4))),
        (aten.native_layer_norm.default, (R(3, 4), [4], R(4), R(4), 1e-5)),
        (aten.max.dim, (R(3, 4), 1)),
        (aten.fft_fft.default, (R(4),)),
        (aten.linalg_svd.default, (R(3, 3),)),
        (aten.native_dropout.default, (R(6), 0.5, True)),
        (aten.unbind.int, (R(2, 3),)),
        (aten.view_as_real.default, (R(3, dtype=torch.complex64),)),
    ],
)
def test_aten(op: Any, args: tuple[Any, ...]) -> None:
    check(trial_of(op, *args))


def test_functions_of_symmetric_matrices() -> None:
    try:
        check(trial_of(aten._linalg_eigh.default, R(3, 3)))
    except NotExercised:
        pass


def test_a_formula_that_writes_to_what_was_saved(ns: str) -> None:
    @custom_op(f"{ns}::tanh", mutates_args=())
    def op(x: torch.Tensor) -> torch.Tensor:
        return x.tanh()

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    op.register_autograd(saved(lambda grad, y: (1 - y * y) * grad), setup_context=setup)
    op.register_jvp(saved(lambda dx, y: y.square_().neg_().add_(1) * dx), setup_context=setup)
    with pytest.raises(CheckError, match="with tangents has other results"):
        check(trial_of(op, R(3)))


def test_a_formula_that_writes_to_its_tangents(ns: str) -> None:
    @custom_op(f"{ns}::triple", mutates_args=())
    def op(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    op.register_jvp(lambda ctx, dx: dx.mul_(3).clone())
    with pytest.raises(CheckError, match="writes to the tangents"):
        check(trial_of(op, R(3)))
