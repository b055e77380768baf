"""test_second_order: gradients of gradients are right, or an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.formulas_under_test import op_of, saved, trial_of
from helpers.libraries import Ops

from customops import custom_op
from customops.checks import NotExercised
from customops.checks.gradients import check_second_order as check
from customops.errors import CheckError

aten = torch.ops.aten
R = torch.randn
ONE, TWO = "(Tensor x) -> Tensor", "(Tensor x, Tensor y) -> Tensor"


def find(op: Any, *args: Any) -> str:
    with pytest.raises(CheckError) as caught:
        check(trial_of(op, *args))
    return caught.value.problem


def test_a_slope_that_is_not_recorded(ns: str) -> None:
    wrong = op_of(ns, ONE, torch.exp, saved(lambda g, x: g * x.detach().exp()))
    assert find(wrong, R(3)) == "the second derivative is silently zero: of the gradient of x, by x"
    check(trial_of(op_of(ns, ONE, torch.exp, saved(lambda g, x: g * x.exp())), R(3)))


def test_a_gradient_of_the_output_that_is_not_recorded(ns: str) -> None:
    wrong = op_of(ns, ONE, torch.exp, saved(lambda g, x: g.detach() * x.exp()))
    assert "by the gradient of output 0" in find(wrong, R(3))


def test_an_argument_that_is_not_recorded(ns: str) -> None:
    wrong = op_of(ns, TWO, lambda x, y: x * y, saved(lambda g, x, y: (g * y.data, g * x)))
    assert find(wrong, R(3), R(3)) == "the second derivative is silently zero: of the gradient of x, by y"
    check(trial_of(op_of(ns, TWO, lambda x, y: x * y, saved(lambda g, x, y: (g * y, g * x))), R(3), R(3)))


def test_backward_by_an_op_without_a_gradient(ns: str, define: Ops) -> None:
    slope = define("slope(Tensor x, Tensor grad) -> Tensor", lambda x, grad: 2 * x.detach() * grad.detach())
    wrong = op_of(ns, ONE, torch.square, saved(lambda g, x: slope(x, g)))
    assert "silently zero" in find(wrong, R(3))


def test_a_second_formula_that_is_wrong(ns: str) -> None:
    slope = op_of(ns, TWO, lambda x, y: x.cos() * y, saved(lambda g, x, y: (g * y * x.sin(), g * x.cos())))
    wrong = op_of(ns, ONE, torch.sin, saved(lambda g, x: slope(x, g)))
    assert find(wrong, R(3)) == "the second derivative is wrong: of the gradient of x, by x"


def test_errors_are_in_order(ns: str) -> None:
    @custom_op(f"{ns}::square", mutates_args=())
    def square(x: torch.Tensor) -> torch.Tensor:
        return x * x

    square.register_autograd(
        lambda ctx, grad: 2 * grad * ctx.saved_tensors[0],
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
        once_differentiable=True,
    )
    with pytest.raises(NotExercised, match="cannot be differentiated twice"):
        check(trial_of(square, R(3)))


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.mul.Tensor, (R(3, 4), R(4))),
        (aten.relu.default, (R(5),)),
        (aten.linalg_inv.default, (R(3, 3),)),
        (aten.native_layer_norm.default, (R(3, 4), [4], R(4), R(4), 1e-5)),
        (aten.max.dim, (R(3, 4), 1)),
        (aten.mul_.Tensor, (R(4), R(4))),
        (aten.native_dropout.default, (R(6), 0.5, True)),
        (aten.round.default, (R(4),)),
        (aten.unbind.int, (R(2, 3),)),
        (aten.fft_fft.default, (R(4),)),
        (aten.abs.default, (R(3, dtype=torch.complex64),)),
    ],
)
def test_aten(op: Any, args: tuple[Any, ...]) -> None:
    check(trial_of(op, *args))


def test_functions_of_symmetric_matrices() -> None:
    try:
        check(trial_of(aten._linalg_eigh.default, R(3, 3)))
    except NotExercised:
        pass
