"""A test case like those that projects have, with generated tests; pytest runs them, and so does `unittest` below."""

from __future__ import annotations

import json
import tempfile
import unittest
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from customops.testing import (
    DEPRECATED_DEFAULT_TEST_UTILS,
    FailuresDict,
    dontGenerateOpCheckTests,
    generate_opcheck_tests,
    is_inside_opcheck_mode,
)

NS = "testing_suite"
LIB = torch.library.Library(NS, "FRAGMENT")


class DelayedError(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise NotImplementedError


LIB.define("delayed_error(Tensor x, Tensor y) -> Tensor")
LIB.impl("delayed_error", DelayedError.apply, "Autograd")
LIB.impl("delayed_error", lambda x, y: x.clone(), "CompositeExplicitAutograd")
LIB.define("incorrect_schema(Tensor x) -> Tensor")
LIB.impl("incorrect_schema", lambda x: x.view(-1), "CompositeExplicitAutograd")
LIB.define("no_abstract(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
LIB.impl("no_abstract", lambda x: x.clone(), "CPU")
OPS: Any = getattr(torch.ops, NS)


# The dict of the suite
KNOWN = {
    "aten::nonzero": {"test_aot_dispatch_static__test_nonzero": "xfail"},
    f"{NS}::delayed_error": {
        "test_aot_dispatch_dynamic__test_delayed_error": "xfail",
        "test_aot_dispatch_static__test_delayed_error": "xfail",
    },
    f"{NS}::incorrect_schema": {"test_schema__test_incorrect_schema": "xfail"},
    f"{NS}::no_abstract": {
        "test_aot_dispatch_dynamic__test_no_abstract": "xfail",
        "test_aot_dispatch_static__test_no_abstract": "skip",
        "test_faketensor__test_no_abstract": "xfail",
    },
    f"{NS}::not_there": {},
}
DATA = {
    op: {f"MiniOpTest.{name}": {"comment": "", "status": status} for name, status in tests.items()}
    for op, tests in KNOWN.items()
}


# The bodies
class MiniOpTest(unittest.TestCase):
    def test_mm(self) -> None:
        x = torch.randn(2, 3, requires_grad=True)
        y = torch.randn(3, 5)
        assert torch.ops.aten.mm.default(x, y).shape == (2, 5)
        assert torch.ops.aten.mm.default(mat2=y, self=x).shape == (2, 5)

    def test_mm_meta(self) -> None:
        x, y = torch.randn(2, 3, requires_grad=True, device="meta"), torch.randn(3, 5, device="meta")
        assert torch.ops.aten.mm.default(x, y).is_meta

    def test_mm_fake(self) -> None:
        with FakeTensorMode():
            x, y = torch.randn(2, 3, requires_grad=True, device="cpu"), torch.randn(3, 5, device="cpu")
            assert torch.ops.aten.mm.default(x, y).shape == (2, 5)

    def test_mm_errors(self) -> None:
        x, y = torch.randn(2, 3, requires_grad=True), torch.randn(4, 5)
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            torch.ops.aten.mm.default(x, y)

    def test_nonzero(self) -> None:
        assert torch.ops.aten.nonzero.default(torch.tensor([0, 1, 2])).shape == (2, 1)

    def test_inplace(self) -> None:
        x = torch.randn(3)
        expected = x.sin()
        assert torch.ops.aten.sin_(x) is x
        assert torch.equal(x, expected)

    def test_incorrect_schema(self) -> None:
        x = torch.randn([2, 2])
        assert OPS.incorrect_schema(x).data_ptr() == x.data_ptr()

    def test_no_abstract(self) -> None:
        x = torch.randn([2, 2], requires_grad=False)
        assert torch.equal(OPS.no_abstract(x), x)

    def test_delayed_error(self) -> None:
        x = torch.randn([2, 2], requires_grad=True)
        result = OPS.delayed_error(x, torch.zeros(2, 2))
        with pytest.raises(NotImplementedError):
            result.sum().backward()

    def test_delayed_error_no_requires_grad(self) -> None:
        assert not OPS.delayed_error(torch.randn([2, 2]), torch.zeros(2, 2)).requires_grad

    @dontGenerateOpCheckTests("it says so itself")
    def test_opted_out(self) -> None:
        assert not is_inside_opcheck_mode()


ORIGINAL = [name for name in vars(MiniOpTest) if name.startswith("test_")]


with tempfile.TemporaryDirectory() as directory:
    failures = FailuresDict(Path(directory) / "failures.json", DATA)
    failures.save()
    generate_opcheck_tests(
        MiniOpTest,
        ["aten", NS],
        failures.path,
        {f"test_pt2_compliant_tag_{NS}_no_abstract": [unittest.expectedFailure]},
        DEPRECATED_DEFAULT_TEST_UTILS,
    )


CHECKED = [
    f"{check}__{name}" for check in DEPRECATED_DEFAULT_TEST_UTILS for name in ORIGINAL if name != "test_opted_out"
]
TAGS = [f"test_pt2_compliant_tag_{op.replace('::', '_')}" for op in DATA]


@pytest.fixture(scope="module")
def result() -> unittest.TestResult:
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(MiniOpTest).run(result)
    return result


@pytest.mark.parity(88)
def test_a_test_for_each_test_and_check() -> None:
    names = {name for name in vars(MiniOpTest) if name.startswith("test_")}
    assert names == {*ORIGINAL, *CHECKED, *TAGS}
    assert (len(CHECKED), len(TAGS)) == (50, 5)


@pytest.mark.parity(88)
def test_opting_out_keeps_the_original() -> None:
    assert hasattr(MiniOpTest, "test_opted_out")
    assert not hasattr(MiniOpTest, "test_schema__test_opted_out")


@pytest.mark.slow
@pytest.mark.parity(89, 90)
def test_unittest_runs_them_all(result: unittest.TestResult) -> None:
    assert [*result.failures, *result.errors, *result.unexpectedSuccesses] == []
    assert result.testsRun == len(ORIGINAL) + len(CHECKED) + len(TAGS)


@pytest.mark.parity(91)
def test_decorators_apply_by_name(result: unittest.TestResult) -> None:
    assert [test.id().rpartition(".")[2] for test, _ in result.expectedFailures] == [
        f"test_pt2_compliant_tag_{NS}_no_abstract"
    ]


@pytest.mark.parity(91)
def test_unknown_operator_skips_its_tag_test(result: unittest.TestResult) -> None:
    assert [reason for _, reason in result.skipped] == [f"Can't import operator {NS}::not_there"]


@pytest.mark.parity(89)
@pytest.mark.parametrize("op", [op for op in KNOWN if KNOWN[op]])
def test_without_its_entry_a_known_failure_fails(op: str, tmp_path: Path) -> None:
    bodies = {name: value for name, value in vars(MiniOpTest).items() if name in ORIGINAL}
    case = type("MiniOpTest", (unittest.TestCase,), bodies)
    path = tmp_path / "f.json"
    FailuresDict(path, {name: entries for name, entries in DATA.items() if name != op}).save()
    generate_opcheck_tests(case, ["aten", NS], path, None, DEPRECATED_DEFAULT_TEST_UTILS)
    outcome = unittest.TestResult()
    for name in KNOWN[op]:
        case(name).run(outcome)
    assert len(outcome.errors) == len(KNOWN[op]), json.dumps(outcome.errors, default=str)
