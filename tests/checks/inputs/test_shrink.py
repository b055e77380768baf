"""A failing input is made simpler as long as it fails; probing finds out what an operator takes."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from customops import Registry
from customops.checks import Trial
from customops.checks._trial import Case
from customops.checks.inputs import derive, probe, shrink

aten = torch.ops.aten


def test_sizes_and_layouts_that_do_not_matter_go() -> None:
    x, y = torch.randn(9, 7).t(), torch.randn(7, 9)

    def fails(trial: Trial) -> bool:
        return bool(trial.args[0].shape[0] > 2)

    small = shrink(Case(Trial(aten.mul.Tensor, (x, y)), "size", "the label"), fails, budget=5)
    assert [tuple(tensor.shape) for tensor in small.trial.args] == [(3, 1), (3, 1)]
    assert all(tensor.is_contiguous() for tensor in small.trial.args)
    assert small.trial.args[0].flatten().tolist() == [1, 2, 3]
    assert (small.kind, small.label) == ("size", "the label, simplified")


def test_lists_get_shorter() -> None:
    case = Case(Trial(aten.cat.default, ([torch.randn(2, 3)] * 2 + [torch.randn(2, 3)],)))
    small = shrink(case, lambda trial: isinstance(trial.args[0], list), budget=5)
    assert [tuple(tensor.shape) for tensor in small.trial.args[0]] == [(1, 1)]


def test_what_cannot_be_simpler_stays() -> None:
    case = Case(Trial(aten.sin.default, (torch.randn(3),)))
    assert shrink(case, lambda trial: False) is case


def test_probing_goes_by_the_kernel(registry: Registry) -> None:
    @registry.custom_op("probe_tests::halve", mutates_args=())
    def halve(x: Tensor) -> Tensor:
        warnings.warn("of the kernel", stacklevel=2)
        if x.dim() == 0:
            raise ValueError("no dimension")
        return x / 2

    @halve.register_fake
    def _(x: Tensor) -> Tensor:
        if x.numel() == 0:
            raise ValueError("no elements")
        return torch.empty_like(x)

    probed = probe(derive(Trial(halve._opoverload, (torch.randn(3),))))
    assert "sizes: 3 to 0" in {case.label for case in probed.accepted}
    assert {rejection.case.label for rejection in probed.rejected} == {"x: one dimension less", "x: 0-dimensional"}
