"""Right ops that a check took for broken: aten's, as `benchmarks/real_ops.py` found them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import customops
from customops.checks import CHECKS, NotExercised, Trial
from customops.checks.inputs import derive

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("check", "op", "args"),
    [
        ("test_symbolic_sizes", aten.acos_.default, (torch.rand(21)[1:],)),
        ("test_symbolic_sizes", aten.slice.Tensor, (torch.rand(21)[1:], 0, 1, 4)),
    ],
    ids=str,
)
def test_no_finding(check: str, op: Any, args: tuple[Any, ...]) -> None:
    report = customops.check(op, [args], only=check, effort="quick")
    assert not report.failures, str(report)
    assert any(result.status == "passed" for result in report.results)


@pytest.mark.compile
@pytest.mark.parametrize("op", [aten.allclose.default, aten.equal.default], ids=str)
def test_an_op_tagged_as_depending_on_data_is_not_traced(op: Any) -> None:
    with pytest.raises(NotExercised, match="tagged as depending on data"):
        CHECKS["test_aot_dispatch_dynamic"](Trial(op, (torch.ones(3), torch.ones(3))))


def test_inputs_are_derived_of_complex_tensors() -> None:
    assert len(list(derive(Trial(aten.view_as_real.default, (torch.rand(3, 4, dtype=torch.complex64),))))) > 5
