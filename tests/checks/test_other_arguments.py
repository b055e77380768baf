"""Faults that other numbers, absent arguments and broadcast tensors show; and right ops of the same kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.modes import TorchDispatchMode
from torch import Tensor

import customops
from customops import CustomOpDef, Registry
from customops.checks import CHECKS, Trial
from customops.checks.inputs import derive, probe

Define = Callable[..., Any]


@pytest.fixture
def define(registry: Registry, ns: str) -> Define:
    """Defines an op with a fake, and with a backward of the saved inputs."""

    def make(schema: str, kernel: Callable[..., Any], backward: Callable[..., Any] | None = None) -> Any:
        op: CustomOpDef[Any, Any] = registry.custom_op(f"{ns}::f", kernel, mutates_args=(), schema=schema)
        op.register_fake(lambda x, *args, **kwargs: torch.empty_like(x))
        if backward is not None:

            def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
                ctx.given = inputs

            op.register_autograd(lambda ctx, grad: backward(grad, *ctx.given), setup_context=setup_context)
        return op

    return make


def problems(op: Any, *args: Any, check: str = "test_gradients") -> list[str]:
    report = customops.check(op, [args], only=check)
    return [failure.error.problem for failure in report.failures]


X = torch.tensor([0.5, -1.5, 2.0], requires_grad=True)
SCALED = "(Tensor x, float by, float and_by=1.0) -> Tensor"
MAYBE = "(Tensor x, Tensor? weight=None) -> Tensor"


@pytest.mark.parametrize("is_right", [False, True])
def test_each_number_is_changed(define: Define, is_right: bool) -> None:
    def backward(grad: Tensor, x: Tensor, by: float, and_by: float) -> tuple[Tensor, None, None]:
        return grad * by * (and_by if is_right else 1.0), None, None

    op = define(SCALED, lambda x, by, and_by: x * by * and_by, backward)
    assert bool(problems(op, X, 0.5)) is not is_right


@pytest.mark.parametrize("is_right", [False, True])
def test_an_op_that_returns_its_input_for_one_number_alone(define: Define, is_right: bool) -> None:
    op = define(
        "(Tensor x, float? by) -> Tensor",
        lambda x, by: x * (1.0 if by is None else by) if is_right else x * (by or 1.0),
        lambda grad, x, by: (grad * (1.0 if by is None else by), None),
    )
    assert bool(problems(op, X, 2.0)) is not is_right


@pytest.mark.parametrize("is_right", [False, True])
def test_an_op_that_returns_its_input_without_an_argument_alone(define: Define, is_right: bool) -> None:
    def backward(grad: Tensor, x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if weight is None:
            return grad.clone() if is_right else torch.zeros_like(grad), None
        return grad * weight, grad * x

    op = define(MAYBE, lambda x, weight: x.clone() if weight is None else x * weight, backward)
    assert bool(problems(op, X, torch.ones(3))) is not is_right


def test_an_op_that_is_there_for_its_backward(define: Define) -> None:
    op = define("(Tensor x, float by) -> Tensor", lambda x, by: x.clone(), lambda grad, x, by: (-by * grad, None))
    assert problems(op, X, 0.5) == []


@pytest.mark.parametrize("is_right", [False, True])
def test_one_tensor_of_two_that_is_broadcast(define: Define, is_right: bool) -> None:
    def backward(grad: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        by_y = grad * x
        if is_right:
            return grad * y, by_y.sum_to_size(y.shape)
        return grad * y, by_y.sum(-1) if y.dim() < x.dim() else by_y

    def kernel(x: Tensor, y: Tensor) -> Tensor:
        if torch.broadcast_shapes(x.shape, y.shape) != x.shape or not (is_right or y.shape[-1:] == x.shape[-1:]):
            raise ValueError("y has to be broadcast to x")
        return x * y

    op = define("(Tensor x, Tensor y) -> Tensor", kernel, backward)
    assert bool(problems(op, torch.randn(3, 3), torch.randn(3, 3))) is not is_right


@pytest.mark.parametrize(
    ("kernel", "right"),
    [
        (lambda x, by: x if by == 1 else x * by, False),
        (lambda x, by: x[:] if x.numel() == 1 else x * by, False),
        (lambda x, by: x * by, True),
    ],
)
def test_an_alias_for_some_inputs(define: Define, kernel: Any, right: bool) -> None:
    op = define("(Tensor x, float by) -> Tensor", kernel)
    found = customops.check(op, [(torch.randn(3), 2.0)], only="test_schema").failures
    assert [failure.check for failure in found] == ([] if right else ["inputs"])


def test_an_alias_that_torch_sees(ns: str) -> None:
    @torch.library.custom_op(f"{ns}::single", mutates_args=())
    def single(x: Tensor) -> Tensor:
        return x.float()

    single.register_fake(lambda x: torch.empty_like(x, dtype=torch.float32))
    report = customops.check(single, [(torch.randn(3, dtype=torch.float64),)], only="test_schema")
    assert "returns an input itself" in str(report.failures[0])


def test_a_rule_for_a_mode_that_drops_arguments(define: Define) -> None:
    class Through(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    op = define("(Tensor x, *, float by=1.0) -> Tensor", lambda x, *, by: x * by)
    op.register_torch_dispatch(Through, lambda mode, func, types, args, kwargs: func(*args))
    assert "changes no result with these arguments" in problems(op, X.detach(), check="test_modes")[0]
    op.register_torch_dispatch(Through, lambda mode, func, types, args, kwargs: func(*args, **kwargs))
    assert problems(op, X.detach(), check="test_modes") == []
    op.register_torch_dispatch(Through, lambda mode, func, types, args, kwargs: torch.zeros(3))
    assert problems(op, X.detach(), check="test_modes") == []


@pytest.mark.compile
def test_views_are_none_of_the_matter_of_aot_dispatch(define: Define, ns: str) -> None:
    op = define("(Tensor(a) x) -> Tensor(a)", lambda x: x.view(-1))
    report = customops.check(op, [(torch.randn(3),)], only="test_aot_dispatch_dynamic")
    assert not report.failures
    assert [result.status for result in report.results] == ["not exercised"]


def test_numbers_are_changed_in_turn() -> None:
    sample = Trial(torch.ops.aten.addmm.default, (torch.randn(2, 2), torch.randn(2, 2), torch.randn(2, 2)))
    cases = [case for case in derive(sample) if case.kind == "number"]
    assert {case.label[:4] for case in cases[:2]} == {"beta", "alph"}
    chosen = list(CHECKS["test_gradients"].inputs(list(derive(sample)), "normal"))
    assert sum(case.kind == "number" for case in chosen) == 8
    assert sum(case.kind == "broadcast" for case in chosen) == 4


def test_right_ops_of_torch() -> None:
    x, y = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
    aten = torch.ops.aten
    for op, args in [
        (aten.leaky_relu.default, (x, 0.1)),
        (aten.add.Tensor, (x, y)),
        (aten.renorm.default, (x, 2, 0, 1.0)),
    ]:
        assert problems(op, *args) == []


def test_the_first_call_may_be_slow() -> None:
    x = torch.randn(3)
    probed = probe(derive(Trial(torch.ops.aten.sin.default, (x,))), seconds=0.0)
    assert len(probed.accepted) == 2
    assert probed.is_late
