"""generate_opcheck_tests, on classes made for one test; test_suite.py has a whole suite."""

from __future__ import annotations

import importlib.util
import json
import unittest
from pathlib import Path
from typing import Any

import pytest
import torch

from customops.testing import (
    DEFAULT_TEST_UTILS,
    DEPRECATED_DEFAULT_TEST_UTILS,
    FailuresDict,
    GenerationError,
    OpCheckError,
    dontGenerateOpCheckTests,
    generate_opcheck_tests,
    is_inside_opcheck_mode,
)

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _not_accepting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_OPCHECK_ACCEPT", raising=False)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "failures.json"
    FailuresDict(path, {}).save()
    return path


@pytest.fixture
def broken(ns: str) -> Any:
    """An operator that writes its argument, and does not say so."""
    with torch.library._scoped_library(ns, "FRAGMENT") as lib:
        lib.define("f(Tensor x) -> Tensor")
        lib.impl("f", lambda x: x.add_(1).clone(), "CPU")
        yield getattr(torch.ops, ns).f


def case(**tests: Any) -> type:
    """A new test class."""
    return type("Case", (unittest.TestCase,), tests or {"test_sin": calling(aten.sin.default)})


def calling(op: Any) -> Any:
    """A test that calls `op`."""

    def test(self: Any) -> None:
        op(torch.zeros(2))

    return test


def run(testcase: Any, name: str) -> unittest.TestResult:
    result = unittest.TestResult()
    testcase(name).run(result)
    return result


def generated(testcase: type) -> set[str]:
    return {name for name in vars(testcase) if "__" in name.strip("_") and name.startswith("test_")}


# Names ----------------------------------------------------------------------------------------------------------


def test_lists_of_checks() -> None:
    assert DEFAULT_TEST_UTILS == [
        "test_schema",
        "test_autograd_registration",
        "test_faketensor",
        "test_aot_dispatch_dynamic",
    ]
    assert DEPRECATED_DEFAULT_TEST_UTILS == [*DEFAULT_TEST_UTILS, "test_aot_dispatch_static"]


@pytest.mark.parity(88)
def test_default_checks(path: Path) -> None:
    testcase = case()
    generate_opcheck_tests(testcase, ["aten"], path)
    assert generated(testcase) == {f"{check}__test_sin" for check in DEFAULT_TEST_UTILS}


@pytest.mark.parity(88)
@pytest.mark.parametrize("checks", ["test_schema", ["test_schema"], ("test_schema",)])
def test_given_checks(path: Path, checks: Any) -> None:
    testcase = case()
    generate_opcheck_tests(testcase, ["aten"], path, test_utils=checks)
    assert generated(testcase) == {"test_schema__test_sin"}
    assert testcase.test_schema__test_sin.__name__ == "test_schema__test_sin"  # type: ignore[attr-defined]


def test_unknown_check(path: Path) -> None:
    with pytest.raises(GenerationError, match="no such checks"):
        generate_opcheck_tests(case(), ["aten"], path, test_utils=["test_nothing"])


@pytest.mark.parity(88)
def test_opting_out(path: Path) -> None:
    @dontGenerateOpCheckTests("it says so itself")
    def test_out(self: Any) -> None: ...

    testcase = case(test_in=lambda self: None, test_out=test_out)
    generate_opcheck_tests(testcase, ["aten"], path, test_utils=["test_schema"])
    assert generated(testcase) == {"test_schema__test_in"}
    assert testcase.test_out is test_out  # type: ignore[attr-defined]


def test_opting_out_needs_a_reason() -> None:
    with pytest.raises(GenerationError, match="a reason is missing") as caught:
        dontGenerateOpCheckTests(lambda self: None)  # type: ignore[arg-type]
    assert caught.value.fix == 'write @dontGenerateOpCheckTests("why")'


def test_twice_is_an_error(path: Path) -> None:
    testcase = case()
    generate_opcheck_tests(testcase, ["aten"], path)
    with pytest.raises(GenerationError, match="already has a test_schema__test_sin"):
        generate_opcheck_tests(testcase, ["aten"], path)


def test_subclass_gets_tests_of_its_own(path: Path) -> None:
    base = case()
    generate_opcheck_tests(base, ["aten"], path, test_utils=["test_schema"])
    derived = type("Derived", (base,), {"test_cos": calling(aten.cos.default)})
    generate_opcheck_tests(derived, ["aten"], path, test_utils=["test_schema"])
    assert generated(derived) == {"test_schema__test_sin", "test_schema__test_cos"}


# Running --------------------------------------------------------------------------------------------------------


@pytest.mark.parity(89)
def test_finds_a_broken_operator(path: Path, broken: Any, ns: str) -> None:
    testcase = case(test_f=calling(broken))
    generate_opcheck_tests(testcase, [ns], path, test_utils=["test_schema", "test_autograd_registration"])
    assert run(testcase, "test_f").wasSuccessful()
    ((_, message),) = run(testcase, "test_schema__test_f").errors
    assert "Argument x is not defined as mutable but was mutated" in message
    assert 'opcheck(op, args, kwargs, test_utils="test_schema")' in message
    assert run(testcase, "test_autograd_registration__test_f").wasSuccessful()


@pytest.mark.parity(89)
@pytest.mark.parametrize("status", ["xfail", "skip"])
def test_known_failure_passes(path: Path, broken: Any, ns: str, status: str) -> None:
    testcase = case(test_f=calling(broken))
    FailuresDict(path, {f"{ns}::f": {"Case.test_schema__test_f": {"comment": "", "status": status}}}).save()
    generate_opcheck_tests(testcase, [ns], path)
    assert run(testcase, "test_schema__test_f").wasSuccessful()


def test_runs_inside_the_mode_with_set_up(path: Path) -> None:
    seen: list[bool] = []
    testcase = case(setUp=lambda self: seen.append(is_inside_opcheck_mode()), test_x=lambda self: seen.append(inside()))
    inside = is_inside_opcheck_mode
    generate_opcheck_tests(testcase, ["aten"], path)
    assert run(testcase, "test_schema__test_x").wasSuccessful()
    assert run(testcase, "test_x").wasSuccessful()
    assert seen == [False, True, False, False]


@pytest.mark.parity(90)
def test_outcomes_of_unittest_stay(path: Path) -> None:
    @unittest.expectedFailure
    def test_fails(self: Any) -> None:
        raise ValueError

    @unittest.skip("not today")
    def test_skipped(self: Any) -> None: ...

    def test_skips(self: Any) -> None:
        aten.sin.default(torch.ones(2))
        self.skipTest("not now")

    testcase = case(test_fails=test_fails, test_skipped=test_skipped, test_skips=test_skips)
    generate_opcheck_tests(testcase, ["aten"], path)
    assert len(run(testcase, "test_schema__test_fails").expectedFailures) == 1
    assert len(run(testcase, "test_schema__test_skipped").skipped) == 1
    assert len(run(testcase, "test_schema__test_skips").skipped) == 1


def test_asynchronous_tests(path: Path, broken: Any, ns: str) -> None:
    async def test_f(self: Any) -> None:
        broken(torch.zeros(2))

    testcase = type("Case", (unittest.IsolatedAsyncioTestCase,), {"test_f": test_f})
    generate_opcheck_tests(testcase, [ns], path)
    assert run(testcase, "test_f").wasSuccessful()
    assert len(run(testcase, "test_schema__test_f").errors) == 1


def test_accepting_writes_the_file(path: Path, broken: Any, ns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_OPCHECK_ACCEPT", "1")
    path.unlink()
    testcase = case(test_f=calling(broken))
    generate_opcheck_tests(testcase, [ns], path)
    assert json.loads(path.read_text())["data"] == {}
    assert run(testcase, "test_schema__test_f").wasSuccessful()
    expected = {f"{ns}::f": {"Case.test_schema__test_f": {"comment": "", "status": "xfail"}}}
    assert FailuresDict.load(path).data == expected
    monkeypatch.delenv("PYTORCH_OPCHECK_ACCEPT")
    again = case(test_f=calling(broken))
    generate_opcheck_tests(again, [ns], path)
    assert run(again, "test_schema__test_f").wasSuccessful()


# The failures file ----------------------------------------------------------------------------------------------

MODULE = """
import unittest
from customops.testing import generate_opcheck_tests

class Case(unittest.TestCase):
    def test_x(self): ...

generate_opcheck_tests(Case, ["aten"])
"""


@pytest.mark.parity(88)
@pytest.mark.parametrize("there", [True, False])
def test_default_file_is_beside_the_caller(tmp_path: Path, there: bool) -> None:
    if there:
        FailuresDict(tmp_path / "failures_dict.json", {"aten::sin": {}}).save()
    (tmp_path / "suite.py").write_text(MODULE)
    spec = importlib.util.spec_from_file_location("suite", tmp_path / "suite.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert hasattr(module.Case, "test_schema__test_x")
    assert hasattr(module.Case, "test_pt2_compliant_tag_aten_sin") == there
    assert len(list(tmp_path.glob("*.json"))) == there


def test_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        generate_opcheck_tests(case(), ["aten"], tmp_path / "none.json")


@pytest.mark.parity(92, 93)
def test_file_that_does_not_fit_is_an_error(path: Path) -> None:
    path.write_text(path.read_text() + "\n")
    with pytest.raises(RuntimeError, match="is not formatted"):
        generate_opcheck_tests(case(), ["aten"], path)
    path.unlink()
    FailuresDict(path, {"aten::sin": {"Case.test_schema__test_gone": {"comment": "", "status": "xfail"}}}).save()
    with pytest.raises(RuntimeError, match="does not exist on the TestCase"):
        generate_opcheck_tests(case(), ["aten"], path)


# Tests of tags --------------------------------------------------------------------------------------------------


def tag_test(path: Path, op: str, **entries: str) -> tuple[type, str]:
    data = {f"Case.{name}__test_sin": {"comment": "", "status": status} for name, status in entries.items()}
    FailuresDict(path, {op: data}).save()
    testcase = case()
    generate_opcheck_tests(testcase, ["aten"], path, test_utils=DEPRECATED_DEFAULT_TEST_UTILS)
    return testcase, "test_pt2_compliant_tag_" + op.replace("::", "_").replace(".", "_")


@pytest.mark.parity(91)
def test_tagged_operator_with_a_known_failure(path: Path) -> None:
    ((_, message),) = run(*tag_test(path, "aten::sin", test_schema="xfail")).failures
    assert "Case.test_schema__test_sin" in message


@pytest.mark.parity(91)
@pytest.mark.parametrize(
    "entries", [{}, {"test_schema": "skip"}, {"test_aot_dispatch_static": "xfail"}], ids=["none", "skip", "static"]
)
def test_tagged_operator_without_one(path: Path, entries: dict[str, str]) -> None:
    assert run(*tag_test(path, "aten::sin", **entries)).wasSuccessful()


@pytest.mark.parity(91)
def test_operator_without_the_tag(path: Path, ns: str) -> None:
    with torch.library._scoped_library(ns, "FRAGMENT") as lib:
        lib.define("f(Tensor x) -> Tensor")
        assert run(*tag_test(path, f"{ns}::f", test_schema="xfail")).wasSuccessful()


@pytest.mark.parity(91)
@pytest.mark.parametrize("op", ["aten::add.Tensor", "aten::sin.default"])
def test_overload_is_looked_up(path: Path, op: str) -> None:
    assert len(run(*tag_test(path, op, test_schema="xfail")).failures) == 1


@pytest.mark.parity(91)
@pytest.mark.parametrize("op", ["not_there::f", "aten::not_there", "aten::add.NotThere", "nothing"])
def test_operator_that_is_not_there(path: Path, op: str) -> None:
    ((_, reason),) = run(*tag_test(path, op, test_schema="xfail")).skipped
    assert reason == f"Can't import operator {op}"


@pytest.mark.parity(91)
def test_additional_decorators(path: Path) -> None:
    testcase = case()
    decorators = {"test_schema__test_sin": [unittest.skip("one"), unittest.skip("two")]}
    generate_opcheck_tests(testcase, ["aten"], path, decorators)
    assert [reason for _, reason in run(testcase, "test_schema__test_sin").skipped] == ["two"]
    assert run(testcase, "test_faketensor__test_sin").skipped == []


def test_two_operators_of_one_name(path: Path) -> None:
    FailuresDict(path, {"a::b_c": {}, "a_b::c": {}}).save()
    with pytest.raises(GenerationError, match="test_pt2_compliant_tag_a_b_c"):
        generate_opcheck_tests(case(), ["aten"], path)


# Classes of pytest ----------------------------------------------------------------------------------------------


class TestWithPytest:
    @pytest.fixture
    def tensor(self) -> torch.Tensor:
        return torch.ones(2)

    @pytest.mark.parametrize("op", [aten.sin, aten.cos], ids=["sin", "cos"])
    def test_unary(self, tensor: torch.Tensor, op: Any) -> None:
        assert op.default(tensor).shape == (2,)

    def test_inside(self, request: pytest.FixtureRequest) -> None:
        assert is_inside_opcheck_mode() == ("__" in request.node.name)


generate_opcheck_tests(TestWithPytest, ["aten"])


def test_pytest_class_finds_a_broken_operator(path: Path, broken: Any, ns: str) -> None:
    class Plain:
        def test_f(self, x: torch.Tensor) -> None:
            broken(x)

    generate_opcheck_tests(Plain, [ns], path)
    with pytest.raises(OpCheckError, match="not defined as mutable"):
        Plain().test_schema__test_f(torch.zeros(2))  # type: ignore[attr-defined]


def test_one_case_of_many(path: Path) -> None:
    cases = pytest.mark.parametrize("x", [1, 2], ids=["one", "two"])
    devices = pytest.mark.parametrize("device", ["cpu", "meta"])
    only_one = pytest.Mark("opcheck_only_one", (), {}, _ispytest=True)

    class Plain:
        @cases
        @devices
        def test_f(self, x: int, device: str) -> None: ...

    Plain.test_f.pytestmark.append(only_one)  # type: ignore[attr-defined]
    generate_opcheck_tests(Plain, ["aten"], path)
    marks = Plain.test_schema__test_f.pytestmark  # type: ignore[attr-defined]
    found = {mark.args[0]: (mark.args[1], mark.kwargs) for mark in marks if mark.name == "parametrize"}
    assert found == {"x": ([1], {"ids": ["one"]}), "device": (["cpu", "meta"], {})}
    assert Plain.test_f.pytestmark[1].args == ("x", [1, 2])  # type: ignore[attr-defined]
