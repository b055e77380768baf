"""Right ops that a check took for broken: aten's, as `benchmarks/real_ops.py` found them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import customops
from customops.checks import CHECKS, NotExercised, Trial
from customops.checks.inputs import derive
from customops.checks.inputs.parts import follow
from customops.checks.modes import _Through

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("check", "op", "args"),
    [
        ("test_symbolic_sizes", aten.acos_.default, (torch.rand(21)[1:],)),
        ("test_symbolic_sizes", aten.slice.Tensor, (torch.rand(21)[1:], 0, 1, 4)),
    ],
    ids=["acos_", "slice"],
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


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint8, torch.uint16, torch.int8], ids=str
)
def test_inputs_are_derived_of_all_dtypes(dtype: torch.dtype) -> None:
    x = torch.arange(1, 9).to(dtype)
    cases = list(derive(Trial(aten.index_select.default, (torch.rand(300), 0, x.view(torch.uint8).int()))))
    cases += list(derive(Trial(aten.stack.default, ([x, x.clone()],))))
    assert {"value", "size", "layout"} <= {case.kind for case in cases}


def test_indices_stay_in_their_dtype_where_a_dimension_outgrows_it() -> None:
    index = torch.tensor([3, 7], dtype=torch.uint8)
    for sizes in ({8: 300}, {7: 300}):
        assert follow(index, sizes).dtype is torch.uint8


def test_a_dispatch_mode_passes_higher_order_ops_on() -> None:
    with _Through():
        torch.ops.higher_order.out_dtype(aten.mm.default, torch.int32, *[torch.ones(2, 2, dtype=torch.int8)] * 2)
