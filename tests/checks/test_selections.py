"""Which inputs a check runs on: none of which it is known already what comes of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import customops
from customops import Registry
from customops.checking.report import Report


def doubled(x: Tensor, shift: float = 0.0) -> Tensor:
    return x * 2 + shift


DYNAMIC = "test_aot_dispatch_dynamic"
SAMPLES = [(torch.randn(3, 4, requires_grad=True),), (torch.randn(5, requires_grad=True), 1.0)]


def inputs_of(report: Report, check: str) -> list[str]:
    return [each.input for each in report.results if each.check == check]


def by_hand(registry: Registry, name: str) -> Any:
    op = registry.custom_op(name, doubled, mutates_args=())
    op.register_fake(lambda x, shift=0.0: torch.empty_like(x))
    op.register_autograd(lambda ctx, grad: (grad * 2, None))
    return op


def by_reference(registry: Registry, name: str) -> Any:
    return registry.custom_op(
        name,
        lambda x, shift=0.0: doubled(x, shift),
        schema="(Tensor x, float shift=0.0) -> Tensor",
        mutates_args=(),
        reference=doubled,
    )


def test_fakes_of_inputs_that_differ_in_data_alone(registry: Registry, ns: str) -> None:
    report = customops.check(by_hand(registry, f"{ns}::doubled"), SAMPLES)
    assert report.passed, report
    schema, fakes = inputs_of(report, "test_schema"), inputs_of(report, "test_faketensor")
    assert {*fakes} < {*schema}
    assert any("NaN" in each for each in schema)
    assert not any("NaN" in each for each in fakes)
    assert any("transposed" in each for each in fakes)


def test_results_whose_size_depends_on_data(registry: Registry, ns: str) -> None:
    def positive(x: Tensor) -> Tensor:
        return x[x > 0]

    op = registry.custom_op(f"{ns}::positive", positive, mutates_args=(), schema="(Tensor x) -> Tensor")
    op.register_fake(lambda x: x.new_empty(x.numel()))  # right for the sample, and for others of other sizes
    report = customops.check(op, [(torch.rand(6) + 1,)], only="test_faketensor")
    assert "Shapes" in report.failures[0].error.problem


def test_what_is_derived_from_the_reference(registry: Registry, ns: str) -> None:
    hand = customops.check(by_hand(registry, f"{ns}::hand"), SAMPLES)
    derived = customops.check(by_reference(registry, f"{ns}::derived"), SAMPLES)
    assert hand.passed, hand
    assert derived.passed, derived
    assert inputs_of(hand, DYNAMIC) == ["sample 1"]
    assert not inputs_of(hand, "test_aot_dispatch_static")
    assert len(inputs_of(derived, "test_aot_dispatch_static")) == 1
    assert not inputs_of(derived, DYNAMIC)
    assert any(DYNAMIC in each and "thorough" in each for each in derived.left_out)
    assert inputs_of(customops.check(by_reference(registry, f"{ns}::only"), SAMPLES, only=DYNAMIC), DYNAMIC)
    for check in ("test_batches", "test_permutations", "test_symmetries", "test_grad_modes"):
        assert len(inputs_of(hand, check)) > len(inputs_of(derived, check)) == 1
    for check in ("test_faketensor", "test_gradients", "test_forward_mode"):
        assert len(inputs_of(hand, check)) > len(inputs_of(derived, check)) > 1
    tried = ["sample 1", "sample 2, shift left out"]
    assert inputs_of(derived, "test_vmap") == inputs_of(derived, "test_symbolic_sizes") == tried
    assert len(inputs_of(hand, "test_symbolic_sizes")) > len(tried)
    assert {each.status for each in hand.results if each.check == "test_backward"} == {"passed"}
    reasons = {each.reason for each in derived.results if each.check == "test_backward"}
    assert reasons == {"the gradients are those of the reference function, which says what is right"}
