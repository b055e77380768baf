"""Inputs derived from samples: which, and that the operator's own checks decide which of them count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import customops
from customops import Registry
from customops.checks import Trial
from customops.checks._runs import difference
from customops.checks._trial import EFFORTS, Case
from customops.checks.inputs import derive, probe

aten = torch.ops.aten


def accepted(op: Any, *args: Any, effort: Any = "normal", **kwargs: Any) -> list[Case]:
    return probe(derive(Trial(op, args, kwargs), effort=effort)).accepted


def shapes(cases: list[Case]) -> set[tuple[tuple[int, ...], ...]]:
    return {tuple(tuple(tensor.shape) for tensor in case.trial.tensors) for case in cases}


def labels(cases: list[Case]) -> list[str]:
    return [case.label for case in cases]


def test_the_sample_comes_first() -> None:
    x = torch.randn(3, 4)
    first = next(derive(Trial(aten.sin.default, (x,)), number=2))
    assert (first.kind, first.label, first.sample) == ("sample", "", 2)
    assert first.trial.args == (x,)


def test_more_effort_goes_on_where_less_ends() -> None:
    trial = Trial(aten.mm.default, (torch.randn(3, 4), torch.randn(4, 5)))
    quick, normal, thorough = [labels(list(derive(trial, effort=effort))) for effort in EFFORTS]
    assert normal[: len(quick)] == quick
    assert thorough[: len(normal)] == normal


def test_it_is_deterministic() -> None:
    trial = Trial(aten.mul.Tensor, (torch.randn(3, 4), torch.randn(3, 4)))
    one, other = list(derive(trial)), list(derive(trial))
    assert labels(one) == labels(other)
    for first, second in zip(one, other, strict=True):
        assert difference(first.trial.args, second.trial.args, exact=True) is None


def test_the_sample_is_left_alone() -> None:
    x = torch.randn(3, 4)
    before = x.clone()
    probe(derive(Trial(aten.add_.Tensor, (x, torch.randn(3, 4))), effort="thorough"))
    assert torch.equal(x, before)


def test_dimensions_of_one_size_change_together() -> None:
    found = shapes(accepted(aten.mm.default, torch.randn(3, 4), torch.randn(4, 5)))
    assert {((7, 9), (9, 11)), ((0, 4), (4, 5)), ((3, 0), (0, 5)), ((3, 4), (4, 33))} <= found


def test_integers_do_not_grow_with_sizes_to_billions_of_steps() -> None:
    """Three integers of 130 and a tensor of 130 made a pooling of torchvision take minutes."""
    cases = list(derive(Trial(aten.new_zeros.default, (torch.randn(2), [2, 2, 2]))))
    grown = [case.trial.args[1][0] for case in cases if case.label.endswith(", and size")]
    assert 0 < max(grown) <= 100
    assert any(case.trial.args[0].shape == (130,) for case in cases)


def test_what_is_square_in_the_sample_is_soon_tried_as_it_is_not() -> None:
    found = shapes(accepted(aten.t.default, torch.randn(3, 3), effort="quick"))
    assert {((5, 3),), ((3, 5),)} <= found
    found = shapes(accepted(aten.mul.Tensor, torch.randn(4, 4), torch.randn(4), effort="quick"))
    assert {((4, 6), (6,)), ((6, 4), (4,))} <= found  # broadcast: dimensions count from the last


def test_what_is_broadcast_is_tried_among_the_first() -> None:
    found = shapes(accepted(aten.matmul.default, torch.randn(3, 4), torch.randn(4, 5))[:60])
    assert {((3, 4), (2, 4, 5)), ((2, 3, 4), (4, 5))} <= found
    found = shapes(accepted(aten.add.Tensor, torch.randn(3, 4), torch.randn(4))[:60])
    assert ((3, 4), (3, 1)) in found


def test_rows_are_longer_than_usual_blocks_at_once() -> None:
    found = shapes(accepted(aten.sin.default, torch.randn(4, 8), effort="quick"))
    assert any(shape[-1] > 64 for (shape,) in found)


def test_what_an_expanded_tensor_hides_is_not_its_elements() -> None:
    cases = accepted(aten.sin.default, torch.randn(3, 4))
    (case,) = [case for case in cases if case.label.endswith("expanded") and ";" not in case.label]
    (copy,) = case.trial.copy().args
    assert copy.stride() == (0, 1)
    dense = torch.as_strided(copy, (3, 4), (4, 1))
    assert torch.equal(dense[0], copy[0])
    assert bool(dense[1:].isnan().all())


def test_numbers_that_equal_a_size_follow() -> None:
    cases = accepted(aten.expand.default, torch.randn(1, 4), [3, 4])
    assert any(case.trial.args[1] == [3, 9] and case.trial.args[0].shape == (1, 9) for case in cases)


@pytest.mark.parametrize("effort", EFFORTS)
def test_indices_stay_valid(effort: Any) -> None:
    args = (torch.randn(5, 3), torch.tensor([0, 1, 4, 2]))
    for case in derive(Trial(aten.embedding.default, args), effort=effort):
        weight, indices = case.trial.args[:2]
        if case.kind == "size" and weight.dim() == 2 and len(weight) >= 5:
            assert not indices.numel() or 0 <= int(indices.min()) <= int(indices.max()) < len(weight)


def test_layouts_have_the_values_of_the_sample() -> None:
    x = torch.randn(3, 4)
    cases = [case for case in derive(Trial(aten.sin.default, (x,))) if case.kind == "layout"]
    same = [case for case in cases if "expanded" not in case.label and ";" not in case.label]
    assert len(same) >= 5
    for case in same:
        assert torch.equal(case.trial.args[0], x), case.label
    assert {case.trial.args[0].is_neg() for case in same} == {True, False}
    assert {case.trial.args[0].storage_offset() for case in same} == {0, 1}


def test_written_tensors_are_never_expanded() -> None:
    for case in derive(Trial(aten.add_.Tensor, (torch.randn(3, 4), torch.randn(3, 4))), effort="thorough"):
        assert 0 not in case.trial.args[0].stride() or 1 in case.trial.args[0].shape or not case.trial.args[0].numel()


def test_what_requires_grad_goes_on_doing_so() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    for case in derive(Trial(aten.sin.default, (x,)), effort="thorough"):
        y = case.trial.args[0]
        assert y.requires_grad == (y.is_floating_point() or y.is_complex()), case.label
        assert y.is_leaf


def test_dtypes_change_together_and_alone() -> None:
    cases = accepted(aten.mul.Tensor, torch.randn(3), torch.randn(3))
    found = {tuple(tensor.dtype for tensor in case.trial.tensors) for case in cases}
    assert {(torch.float64,) * 2, (torch.bfloat16,) * 2, (torch.float64, torch.float32)} <= found


def test_dims_are_tried_from_both_ends() -> None:
    found = {case.trial.args[1] for case in accepted(aten.cumsum.default, torch.randn(2, 3, 4), 1)}
    assert {0, 1, 2, -1, -3} <= found


def test_lists_get_longer_and_shorter() -> None:
    cases = accepted(aten.cat.default, [torch.randn(2, 3), torch.randn(2, 3)], 0)
    found = {len(case.trial.args[0]) for case in cases}
    assert {1, 2, 3} <= found
    assert any(case.trial.args[0][-1] is case.trial.args[0][-2] for case in cases if len(case.trial.args[0]) > 2)


def test_optional_tensors_are_given_and_taken_away() -> None:
    cases = accepted(aten.native_layer_norm.default, torch.randn(3, 4), [4], torch.randn(4), None, 1e-5)
    found = {(case.trial.args[2] is None, case.trial.args[3] is None) for case in cases}
    assert found == {(False, True), (True, True), (False, False)}


def test_an_operator_without_tensors() -> None:
    assert len(accepted(aten.arange.default, 5)) > 2


def test_probing_ends_in_time() -> None:
    cases = derive(Trial(aten.mul.Tensor, (torch.randn(3, 4), torch.randn(3, 4))))
    assert len(probe(cases, at_most=7).accepted) == 7


def test_lists_of_many_tensors() -> None:
    cases = accepted(aten._foreach_abs.default, [torch.randn(3)])
    assert max(len(case.trial.tensors) for case in cases) >= 40


def test_odd_rows_have_gaps_between_them() -> None:
    tensors = [case.trial.tensors[0] for case in accepted(aten.sin.default, torch.randn(3, 4))]
    assert any(x.dim() == 2 and x.shape[1] % 2 and x.stride(1) == 1 and x.stride(0) > x.shape[1] for x in tensors)


def test_strides_of_dimensions_of_one_element() -> None:
    tensors = [case.trial.tensors[0] for case in accepted(aten.sin.default, torch.randn(3, 4))]
    assert any(1 in x.shape and x.numel() > 1 and x.is_contiguous() and max(x.stride()) > x.numel() for x in tensors)


@pytest.mark.parametrize("padded", [True, False])
def test_minus_one_is_tried_where_it_stands_for_no_index(padded: bool, registry: customops.Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::rows_at", mutates_args=())
    def rows_at(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        found = x[index]
        return found.where((index >= 0)[:, None], 0) if padded else found

    cases = accepted(rows_at._opoverload, torch.randn(4, 3), torch.tensor([0, 3]))
    assert ("padding" in [case.kind for case in cases]) == padded


def test_lists_of_many_tensors_that_may_be_absent() -> None:
    xs, index = torch.randn(4, requires_grad=True), [None, torch.tensor([0, 2])]
    trial = Trial(aten.index.Tensor, (torch.randn(3, 4), index))
    assert any(len(case.trial.args[1]) >= 40 for case in derive(trial))
    cases = list(derive(Trial(aten._foreach_abs.default, ([xs],))))
    assert all(x.is_leaf for case in cases for x in case.trial.tensors)


def in_groups(x: Tensor, weight: Tensor) -> Tensor:
    torch._check(x.shape[-1] % 8 == 0, lambda: "a multiple of 8 is needed")
    torch._check(weight.shape[0] == 2 * x.shape[-1], lambda: "a weight twice as long is needed")
    return torch.cat([x, x], -1) * weight


def scaled(x: Tensor, alpha: float = 1.0, causal: bool = False, block: int = 4) -> Tensor:
    if causal and x.shape[-1] > 2 * block and alpha != 1.0:
        return x * alpha * alpha
    return x * alpha


def labels_accepted(op: Any, *args: Any) -> list[str]:
    outcomes: dict[str, bool] = {}
    cases = derive(Trial(op._opoverload, args), effort="normal", outcomes=outcomes)
    probed = probe(cases, at_most=60, outcomes=outcomes)
    return [case.label for case in probed.accepted if case.is_named]


def test_sizes_that_go_together(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::in_groups", in_groups, mutates_args=())
    op.register_fake(in_groups)
    found = labels_accepted(op, torch.randn(3, 16), torch.randn(32))
    assert {"sizes: 16 to 24, 32 to 48", "sizes: 16 to 40, 32 to 80"} <= {*found}


def test_sizes_that_need_no_care(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::scaled", scaled, mutates_args=())
    op.register_fake(lambda x, *_: torch.empty_like(x))
    assert not [label for label in labels_accepted(op, torch.randn(3, 16)) if label == "sizes: 16 to 24"]
