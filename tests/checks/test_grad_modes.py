"""test_grad_modes: gradients do not depend on how they are asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.formulas_under_test import op_of, save_inputs, saved, trial_of

import customops
from customops.checks.grad_modes import check
from customops.errors import CheckError

aten = torch.ops.aten
R = torch.randn
ONE, SCALED = "(Tensor x) -> Tensor", "(Tensor x, float by) -> Tensor"


def find(op: Any, *args: Any) -> str:
    with pytest.raises(CheckError) as caught:
        check(trial_of(op, *args))
    return caught.value.problem


def test_state_between_calls(ns: str) -> None:
    last: dict[str, Any] = {}

    def remember(ctx: Any, inputs: Any, output: Any) -> None:
        last["by"], last["x"] = inputs[1] if len(inputs) > 1 else None, inputs[0].detach().clone()

    of_number = op_of(ns, SCALED, lambda x, by: x * by, lambda ctx, g: (g * last["by"], None), remember)
    assert find(of_number, R(3), 2.0) == "the gradients are other ones while another call was made in between"
    of_tensor = op_of(ns, ONE, torch.sin, lambda ctx, g: g * last["x"].cos(), remember)
    assert find(of_tensor, R(3)) == "the gradients are other ones while another call was made in between"
    right = op_of(ns, SCALED, lambda x, by: x * by, lambda ctx, g: (g * ctx.numbers[0], None))
    check(trial_of(right, R(3), 2.0))


def test_writes_between_forward_and_backward(ns: str) -> None:
    def keep(ctx: Any, inputs: Any, output: Any) -> None:
        (ctx.x,) = inputs

    def keep_output(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.y = output

    def save_data(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0].data)

    for setup in (keep, save_data):
        op = op_of(ns, ONE, torch.sin, lambda ctx, g: g * getattr(ctx, "x", (*ctx.saved_tensors, 0)[0]).cos(), setup)
        assert "where x is written between forward and backward" in find(op, R(3))
    assert "where output 0 is written" in find(op_of(ns, ONE, torch.exp, lambda ctx, g: g * ctx.y, keep_output), R(3))
    check(trial_of(op_of(ns, ONE, torch.sin, saved(lambda g, x: g * x.cos()), save_inputs), R(3)))


def test_recording_switched_on_in_the_kernel(ns: str) -> None:
    def kernel(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if torch.is_grad_enabled() or torch.is_inference_mode_enabled() else x * 3

    op = op_of(ns, ONE, kernel, lambda ctx, g: g * 3)
    assert "under torch.inference_mode()" in find(op, R(3))


def test_selective_checkpointing(ns: str) -> None:
    last: dict[str, torch.Tensor] = {}

    def relu(x: torch.Tensor) -> torch.Tensor:
        last["mask"] = x > 0
        return x.clamp(min=0)

    def take(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(last.pop("mask"))

    problem = find(op_of(ns, ONE, relu, saved(lambda g, mask: g * mask), take), R(3))
    assert problem == "the gradients are other ones under selective checkpointing, CheckpointPolicy.MUST_SAVE"

    def with_mask(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.clamp(min=0), x > 0

    def save_mask(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output[1])

    right = op_of(
        ns, "(Tensor x) -> (Tensor, Tensor)", with_mask, lambda ctx, g, _: g * ctx.saved_tensors[0], save_mask
    )
    check(trial_of(right, R(3)))


def test_selective_checkpointing_of_an_op_that_writes(registry: customops.Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::cube", mutates_args={"calls"})
    def cube(x: torch.Tensor, calls: torch.Tensor) -> torch.Tensor:
        calls.add_(1)
        return x**3

    cube.register_autograd(lambda ctx, g: (3 * ctx.saved_tensors[0].square() * g, None), setup_context=save_inputs)
    check(trial_of(cube, R(3), torch.zeros(1, dtype=torch.int64)))


def test_each_choice_of_inputs(ns: str) -> None:
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        x, y, z = ctx.saved_tensors
        needed = ctx.needs_input_grad
        by_x = g * y * (3 if needed == wrong_for else 1) * z
        return by_x if needed[0] else None, g * x * z if needed[1] else None, g * x * y if needed[2] else None

    schema = "(Tensor x, Tensor y, Tensor z) -> Tensor"
    args = (R(3), R(3), R(3))
    wrong_for: Any = (True, False, True)
    op = op_of(ns, schema, lambda x, y, z: x * y * z, backward)
    assert find(op, *args) == "gradients are other ones where x and z alone require grad"
    wrong_for = None
    check(trial_of(op, *args))


def test_one_buffer_for_all_gradients(ns: str) -> None:
    buffer = torch.empty(3, dtype=torch.float64)
    op = op_of(ns, ONE, lambda x: x * 2, lambda ctx, g: buffer.copy_(g * 2))
    assert "it returns memory that it uses again" in find(op, R(3))
    check(trial_of(op_of(ns, ONE, lambda x: x * 2, lambda ctx, g: g * 2), R(3)))


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.mul.Tensor, (R(3, 4), R(4))),
        (aten.mul_.Tensor, (R(4), R(4))),
        (aten.exp.default, (R(4),)),
        (aten.cat.default, ([R(2), R(3)],)),
        (aten.select.int, (R(3, 4), 0, 1)),
        (aten.native_dropout.default, (R(6), 0.5, True)),
        (aten.native_layer_norm.default, (R(3, 4), [4], R(4), R(4), 1e-5)),
        (aten.native_batch_norm.default, (R(4, 3), R(3), R(3), torch.zeros(3), torch.ones(3), True, 0.1, 1e-5)),
        (aten.view_as_real.default, (R(3, dtype=torch.complex64),)),
        (aten.sort.default, (R(5),)),
        (aten.unbind.int, (R(2, 3),)),
        (aten.index_put_.default, (R(5), [torch.tensor([0, 2])], R(2))),
        (aten.linalg_inv.default, (R(3, 3),)),
        (aten.linalg_svd.default, (R(3, 3),)),
    ],
)
def test_aten(op: Any, args: tuple[Any, ...]) -> None:
    check(trial_of(op, *args))


def test_backward_that_adds_to_grad_by_itself(ns: str) -> None:
    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        (ctx.weight,) = inputs

    def accumulate(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if ctx.weight.grad is None:
            return 2 * grad
        ctx.weight.grad.add_(2 * grad)
        return torch.zeros_like(grad)

    op = op_of(ns, ONE, lambda x: x * 2, accumulate, setup)
    assert "where inputs have a .grad already" in find(op, R(3))
