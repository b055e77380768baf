"""test_gradients: formulas against finite differences, and gradients with each other."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.formulas_under_test import op_of, saved, trial_of

from customops import custom_op
from customops._places import where
from customops.checks import NotExercised
from customops.checks.gradients import check_gradients as check
from customops.errors import CheckError

aten = torch.ops.aten
R = torch.randn
ONE, TWO = "(Tensor x) -> Tensor", "(Tensor x, Tensor y) -> Tensor"


def find(op: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(CheckError) as caught:
        check(trial_of(op, *args, **kwargs))
    return caught.value.problem


def passes(op: Any, *args: Any, **kwargs: Any) -> None:
    check(trial_of(op, *args, **kwargs))


WRONG = "the gradient of x is not the derivative of what the operator computes"
NONE = "backward gives y no gradient, though the result depends on it"
OF_OUTPUT = "backward gives x no gradient for output 1, though the result depends on it"
LAYOUT = "backward is wrong where the gradient it is given is not contiguous"
WRITES = "backward writes to the gradient that it is given"
Kernel = Callable[..., Any]


@pytest.mark.parametrize(
    ("schema", "kernel", "wrong", "right", "problem"),
    [
        (ONE, torch.sin, lambda g, x: -g * x.cos(), lambda g, x: g * x.cos(), WRONG),
        (ONE, torch.exp, lambda g, x: g * x, lambda g, x: g * x.exp(), WRONG),
        (TWO, lambda x, y: x * y, lambda g, x, y: (g * y, None), lambda g, x, y: (g * y, g * x), NONE),
        (TWO, lambda x, y: x * y, lambda g, x, y: (g * y, x * 0), lambda g, x, y: (g * y, g * x), NONE),
        (ONE, lambda x: x * 3, lambda g, x: g.as_strided(x.shape, (4, 1)) * 3, lambda g, x: g * 3, LAYOUT),
        (ONE, lambda x: x * 3, lambda g, x: (g.view(-1) * 3).view(x.shape), lambda g, x: g * 3, LAYOUT),
        (ONE, lambda x: x * 3, lambda g, x: g.mul_(3), lambda g, x: g * 3, WRITES),
    ],
)
def test_formulas(ns: str, schema: str, kernel: Kernel, wrong: Kernel, right: Kernel, problem: str) -> None:
    args = (R(3, 4),) if schema is ONE else (R(3, 4), R(3, 4))
    assert find(op_of(ns, schema, kernel, saved(wrong)), *args) == problem
    passes(op_of(ns, schema, kernel, saved(right)), *args)


def test_elements_that_took_each_others_places(ns: str) -> None:
    op = op_of(ns, ONE, lambda x: x * 2, saved(lambda g, x: 2 * g.flip(0)))
    with pytest.raises(CheckError) as caught:
        check(trial_of(op, torch.tensor([1.0, -3.0])))
    assert caught.value.expected.partition(" ")[0] != caught.value.got.partition(" ")[0]


def test_what_is_reported(ns: str) -> None:
    op = op_of(ns, ONE, lambda x: x * x, saved(lambda g, x: g * torch.where(x > 0, 2 * x, x)))
    with pytest.raises(CheckError) as caught:
        check(trial_of(op, torch.tensor([1.0, -3.0])))
    assert caught.value.argument == "x"
    assert "-6 (finite differences, element (1,), for output 0)" in str(caught.value)
    assert "-3 (backward)" in str(caught.value)


def test_the_numbers_for_one_element_are_those_of_the_formula(ns: str) -> None:
    with pytest.raises(CheckError) as caught:
        check(trial_of(op_of(ns, ONE, torch.sin, saved(lambda g, x: g * x.sin())), torch.tensor([1.0])))
    assert float((caught.value.expected or "").split()[0]) == pytest.approx(math.cos(1), rel=1e-4)
    assert float((caught.value.got or "").split()[0]) == pytest.approx(math.sin(1), rel=1e-4)


def test_a_function_that_gradients_are_derived_from_is_named(ns: str) -> None:
    @custom_op(f"{ns}::sine", mutates_args=())
    def sine(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    sine.register_fake(torch.empty_like)

    @sine.register_reference(gives="gradients")
    def plain(x: torch.Tensor) -> torch.Tensor:
        return x.cos()

    with pytest.raises(CheckError) as caught:
        check(trial_of(sine, torch.tensor([1.0, 2.0])))
    assert caught.value.where == where(plain)
    assert "plain" in (caught.value.fix or "")


def test_where_a_formula_of_customops_stands(ns: str) -> None:
    @custom_op(f"{ns}::cube", mutates_args=())
    def cube(x: torch.Tensor) -> torch.Tensor:
        return x * x * x

    cube.register_autograd(lambda ctx, grad: grad, setup_context=lambda ctx, inputs, output: None)
    with pytest.raises(CheckError, match=r"test_gradients\.py:\d+"):
        check(trial_of(cube, R(3)))


def test_each_input_alone(ns: str) -> None:
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, y = ctx.saved_tensors
        return grad * y, grad * x if ctx.needs_input_grad[0] else None

    assert "where y alone requires grad" in find(op_of(ns, TWO, lambda x, y: x * y, backward), R(3), R(3))


@pytest.mark.parametrize("wrong", [lambda g: g.abs().max() * (g / g.abs().max()), lambda g: g + (g.sum() == 0)])
def test_a_gradient_of_zeros(ns: str, wrong: Kernel) -> None:
    op = op_of(ns, ONE, lambda x: x * 3, lambda ctx, g: wrong(g) * 3)
    assert find(op, R(3, 4)) == "backward makes something else than zeros of a gradient of zeros"
    passes(op_of(ns, ONE, lambda x: x * 3, lambda ctx, g: g * 3), R(3, 4))
    penalty = op_of(ns, ONE, torch.clone, saved(lambda g, x: g + 0.1 * x.sign()))
    with pytest.raises(NotExercised, match="as it is"):
        passes(penalty, R(3))


def test_each_output_alone(ns: str) -> None:
    schema = "(Tensor x) -> (Tensor, Tensor)"

    def kernel(x: torch.Tensor) -> Any:
        return x.sin(), x.exp()

    wrong = op_of(ns, schema, kernel, saved(lambda a, b, x: a * x.cos() + b * x.exp() * a.bool()))
    assert find(wrong, R(3)) == "backward is wrong where only some of the outputs are used"
    ignores = op_of(ns, schema, kernel, saved(lambda a, b, x: a * x.cos()))
    assert find(ignores, R(3)) == OF_OUTPUT
    with pytest.raises(CheckError) as caught:
        check(trial_of(ignores, R(3)))
    assert "ctx.mark_non_differentiable(output[1])" in str(caught.value.fix)
    assert "nondiff_args" not in str(caught.value.fix)  # which would stop the other gradient as well
    passes(op_of(ns, schema, kernel, saved(lambda a, b, x: a * x.cos() + b * x.exp())), R(3))


def test_backward_twice(ns: str) -> None:
    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.scale = inputs[0].cos()

    op = op_of(ns, ONE, torch.sin, lambda ctx, g: ctx.scale.mul_(g).clone(), setup)
    assert find(op, R(3)) == "a second backward through the same graph gives other gradients"


def test_backward_writes_to_a_result(ns: str) -> None:
    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output)

    op = op_of(ns, ONE, torch.exp, lambda ctx, g: ctx.saved_tensors[0].mul_(g), setup)
    assert find(op, R(3)) == "backward writes to a result of the operator"


def test_lazily_conjugated_gradients(ns: str) -> None:
    def wrong(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch.view_as_complex(torch.view_as_real(grad) * 2)

    x = R(3, dtype=torch.complex64)
    assert "lazily conjugated" in find(op_of(ns, ONE, lambda x: x * 2, wrong), x)
    passes(op_of(ns, ONE, lambda x: x * 2, lambda ctx, grad: grad * 2), x)
    assert find(op_of(ns, ONE, lambda x: x * x, saved(lambda g, x: 2 * g * x)), x) == WRONG
    passes(op_of(ns, ONE, lambda x: x * x, saved(lambda g, x: 2 * g * x.conj())), x)


def test_backward_that_fails(ns: str) -> None:
    sums = op_of(ns, TWO, lambda x, y: x + y, saved(lambda g, x, y: (g, g.sum(-1))))
    assert find(sums, R(3, 4), R(4)) == "the operator fails where its inputs require grad"

    def refuses(ctx: Any, grad: torch.Tensor) -> Any:
        raise ValueError("gradients are for matrices")

    with pytest.raises(NotExercised, match="gradients are for matrices"):
        passes(op_of(ns, ONE, torch.sin, refuses), R(3))


def test_ties(ns: str) -> None:
    def share(part: float) -> Any:
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            x, y = ctx.saved_tensors
            return grad * ((x > y) + part * (x == y)), grad * ((y > x) + part * (x == y))

        return op_of(ns, TWO, torch.maximum, backward)

    assert "do not add up" in find(share(1.0), torch.ones(3), torch.ones(3))
    passes(share(0.5), torch.ones(3), torch.ones(3))
    passes(share(1.0), R(3), R(3))


def test_random_ops(ns: str) -> None:
    schema = "(Tensor x) -> (Tensor, Tensor)"

    def kernel(x: torch.Tensor) -> Any:
        mask = (torch.rand_like(x) > 0.5).to(x.dtype)
        return x * mask, mask

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output[1])
        ctx.mark_non_differentiable(output[1])

    wrong = op_of(ns, schema, kernel, lambda ctx, g, _: g * (torch.rand_like(g) > 0.5), setup)
    assert find(wrong, R(20)) == WRONG
    passes(op_of(ns, schema, kernel, lambda ctx, g, _: g * ctx.saved_tensors[0], setup), R(20))
    with pytest.raises(NotExercised, match="samples have no gradient"):
        passes(aten.normal.Tensor_Tensor, R(5), torch.rand(5))


def test_not_every_gradient_is_asked_for(ns: str) -> None:
    op = op_of(ns, TWO, lambda x, y: x * y, saved(lambda g, x, y: (g * y, None)))
    with pytest.raises(NotExercised, match="does not ask for one"):
        passes(op, R(3, requires_grad=True), R(3))
    assert find(op, R(3, requires_grad=True), R(3, requires_grad=True)) == NONE


def test_declared_without_gradient(ns: str) -> None:
    @custom_op(f"{ns}::weigh", mutates_args=(), nondiff_args="y")
    def weigh(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * y

    weigh.register_autograd(
        lambda ctx, grad: (grad * ctx.saved_tensors[0], None),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
    )
    passes(weigh, R(3), R(3))


@pytest.mark.parametrize(
    ("kernel", "backward", "reason"),
    [
        (torch.round, lambda g, x: g, "a step function"),
        (lambda x: (x > 0).to(x.dtype), lambda g, x: g * x.sigmoid(), "a step function"),
        (torch.clone, lambda g, x: -g, "as it is"),
        (lambda x: torch.rand_like(x) if x.sum() != 0 else x, None, "no gradient formula|refuses"),
    ],
)
def test_gradients_that_are_chosen(ns: str, kernel: Kernel, backward: Kernel | None, reason: str) -> None:
    with pytest.raises(NotExercised, match=reason):
        passes(op_of(ns, ONE, kernel, backward and saved(backward)), R(5))


def test_only_one_precision(ns: str) -> None:
    def kernel(x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.float32:
            raise TypeError("float32 is needed")
        return x.sin()

    x = torch.linspace(-2, 2, 7)
    passes(op_of(ns, ONE, kernel, saved(lambda g, x: g * x.cos())), x)
    assert find(op_of(ns, ONE, kernel, saved(lambda g, x: g * x)), x) == WRONG


def test_single_precision_inside(ns: str) -> None:
    op = op_of(ns, ONE, lambda x: x.float().sin().to(x.dtype, copy=True), saved(lambda g, x: g * x.cos()))
    passes(op, R(5))


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.mul.Tensor, (R(3, 4), R(4))),
        (aten.mul_.Tensor, (R(4), R(4))),
        (aten._softmax.default, (R(3, 4), 1, False)),
        (aten.sort.default, (R(5),)),
        (aten.max.dim, (torch.ones(3, 4), 1)),
        (aten.amax.default, (torch.ones(4),)),
        (aten.native_dropout.default, (R(6), 0.5, True)),
        (aten.index_put_.default, (R(5), [torch.tensor([0, 2])], R(2))),
        (aten.select.int, (R(3, 4), 0, 1)),
        (aten.native_layer_norm.default, (R(3, 4), [4], R(4), R(4), 1e-5)),
        (aten.native_batch_norm.default, (R(4, 3), R(3), R(3), torch.zeros(3), torch.ones(3), True, 0.1, 1e-5)),
        (aten.nll_loss.default, (R(3, 4), torch.tensor([0, 1, 2]), torch.rand(4))),
        (aten.linalg_inv.default, (R(3, 3),)),
        (aten.linalg_svd.default, (R(3, 3),)),
        (aten.fft_fft.default, (R(4),)),
        (aten.abs.default, (R(3, dtype=torch.complex64),)),
        (aten.relu.default, (torch.tensor([0.0, 1, -1, 0]),)),
        (aten.cumprod.default, (torch.tensor([1.0, 0, 2]), 0)),
        (aten.sqrt.default, (torch.zeros(3),)),
        (aten.unbind.int, (R(2, 3),)),
        (aten.cat.default, ([R(2), R(3)],)),
        (aten.mul.Tensor, (R(3, dtype=torch.bfloat16), R(3, dtype=torch.bfloat16))),
        (aten.exp.default, (R(0, 3),)),
        (aten._to_copy.default, (R(3),)),
    ],
)
def test_aten(op: Any, args: tuple[Any, ...]) -> None:
    passes(op, *args)


@pytest.mark.parametrize(
    ("op", "args", "reason"),
    [
        (aten._linalg_eigh.default, (R(3, 3),), "symmetric"),
        (aten.nonzero.default, (R(3),), "no floating-point output"),
        (aten.bitwise_not.default, (torch.ones(3, dtype=torch.int64),), "no floating-point input"),
        (aten.detach.default, (R(3),), "no output requires grad"),
        (
            aten.fake_quantize_per_tensor_affine.default,
            (torch.tensor([0.31, -0.52, 1.13]), 0.1, 0, -128, 127),
            "step function",
        ),
        (aten.sin.default, (torch.empty(3, device="meta"),), "no data"),
    ],
)
def test_aten_that_gives_nothing_to_try(op: Any, args: tuple[Any, ...], reason: str) -> None:
    with pytest.raises(NotExercised, match=reason):
        passes(op, *args)


def test_inputs_are_left_alone() -> None:
    x = R(3, requires_grad=True)
    before, state = x.detach().clone(), torch.get_rng_state()
    with torch.no_grad():
        passes(aten.relu_.default, x)
    assert torch.equal(x, before)
    assert x.grad is None
    assert torch.equal(torch.get_rng_state(), state)
