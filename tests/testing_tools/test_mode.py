"""OpCheckMode: what it checks, how it judges, and that a test does not notice it."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.warm import PYTHON
from torch._subclasses import FakeTensorMode

import customops
from customops import _torch
from customops.testing import FailuresDict, OpCheckError, OpCheckMode, is_inside_opcheck_mode

ROOT = Path(__file__).parents[2]
aten = torch.ops.aten
X = torch.ones(2)


class Util:
    """A check that notes its calls, and fails for the operators it is told to."""

    def __init__(self, *failing: str) -> None:
        self.failing = failing
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.calls.append((op.name(), args, kwargs))
        if op.name() in self.failing:
            raise ValueError(f"bad {op.name()}")

    @property
    def checked(self) -> list[str]:
        return [name for name, _, _ in self.calls]


def mode(util: Any, statuses: dict[str, str] | None = None, namespaces: Any = ("aten",), path: Any = "") -> OpCheckMode:
    data = {op: {"T.test_u__test_x": {"comment": "", "status": status}} for op, status in (statuses or {}).items()}
    return OpCheckMode(namespaces, "test_u", util, FailuresDict(path, data), "T.test_u__test_x", "the/file.json")


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_OPCHECK_ACCEPT", "CUSTOMOPS_OPCHECK_ACCEPT", "TORCHDYNAMO_DISABLE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def accepting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_OPCHECK_ACCEPT", "1")


# Inside and outside ---------------------------------------------------------------------------------------------


@pytest.mark.parity(87)
def test_is_inside() -> None:
    assert not is_inside_opcheck_mode()
    with OpCheckMode(["foo"], "bar", lambda x: x, None, "baz", "brr"):  # type: ignore[misc,arg-type]
        assert is_inside_opcheck_mode()
        with mode(Util()):
            assert is_inside_opcheck_mode()
        assert is_inside_opcheck_mode()
    assert not is_inside_opcheck_mode()


@pytest.mark.parity(87)
def test_is_not_inside_after_an_error() -> None:
    with pytest.raises(KeyError), mode(Util()):
        raise KeyError
    with pytest.raises(OpCheckError), mode(Util("aten::sin")):
        aten.sin.default(X)
    assert not is_inside_opcheck_mode()
    assert "TORCHDYNAMO_DISABLE" not in os.environ


@pytest.mark.parity(87)
def test_other_threads_are_not_inside() -> None:
    answers = []
    util = Util()
    with mode(util):
        thread = threading.Thread(target=lambda: answers.extend([is_inside_opcheck_mode(), aten.sin.default(X)]))
        thread.start()
        thread.join()
    assert answers[0] is False
    assert util.calls == []


@pytest.mark.parity(87)
def test_threads_have_modes_of_their_own() -> None:
    utils = [Util() for _ in range(4)]
    barrier = threading.Barrier(4)

    def work(util: Util) -> None:
        for _ in range(20):
            with mode(util):
                barrier.wait()
                aten.sin.default(X)
                assert is_inside_opcheck_mode()
            assert not is_inside_opcheck_mode()

    threads = [threading.Thread(target=work, args=(util,)) for util in utils]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(util.calls) for util in utils] == [20] * 4
    assert "TORCHDYNAMO_DISABLE" not in os.environ


# What is checked ------------------------------------------------------------------------------------------------


@pytest.mark.parity(89)
def test_overloads_and_packets_are_checked() -> None:
    util = Util()
    with mode(util):
        aten.sin.default(X)
        aten.sin_(X.clone())
    assert util.checked == ["aten::sin", "aten::sin_"]


@pytest.mark.parity(89)
def test_objects_of_custom_op_are_checked(registry: customops.Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::f", mutates_args=())
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    util = Util()
    with mode(util, namespaces=[ns]):
        f(X)
        f._opoverload(X)
        getattr(torch.ops, ns).f(X)
    assert util.checked == [f"{ns}::f"] * 3


@pytest.mark.parity(89)
def test_only_operators_of_the_namespaces_are_checked() -> None:
    util = Util()
    with mode(util, namespaces=["atenuated"]):
        aten.sin.default(X)
        aten.add(X, X)  # with several overloads, of another namespace
        torch.sin(X)
    with mode(util, namespaces="aten"):
        torch.sin(X)
    assert util.calls == []


@pytest.mark.parity(89)
def test_packet_of_several_overloads_is_refused() -> None:
    with pytest.raises(ValueError, match="one OpOverload at a time"), mode(Util()):
        aten.add(X, X)


@pytest.mark.parity(90)
def test_abstract_inputs_are_not_checked() -> None:
    util = Util()
    with mode(util):
        aten.sin.default(X.to("meta"))
        with FakeTensorMode(allow_non_fake_inputs=True):
            aten.sin.default(torch.ones(2))
            aten.sin.default(X)
        torch.vmap(aten.sin.default)(X)
    assert util.calls == []


def test_traced_calls_are_not_checked() -> None:
    util = Util()
    with mode(util):
        torch.fx.experimental.proxy_tensor.make_fx(aten.sin.default, tracing_mode="fake")(X)
    assert util.calls == []


@pytest.mark.compile
def test_compile_does_nothing_inside(registry: customops.Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::f", mutates_args=())
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    util = Util()
    with mode(util, namespaces=[ns]):
        torch.compile(lambda x: f(x), fullgraph=True, backend="eager")(X)
    assert util.checked == [f"{ns}::f"]


def test_environment_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    with mode(Util()), mode(Util()):
        assert os.environ["TORCHDYNAMO_DISABLE"] == "1"
    assert os.environ["TORCHDYNAMO_DISABLE"] == "0"


def test_inputs_are_those_before_the_call() -> None:
    util = Util()
    x = torch.zeros(2)
    with mode(util):
        aten.cos_.default(x)
    assert torch.equal(x, torch.ones(2))
    assert torch.equal(util.calls[0][1][0], torch.zeros(2))


def test_checks_do_not_touch_the_tensors_of_the_test() -> None:
    def meddle(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        args[0].zero_()

    x = torch.ones(2)
    with mode(meddle):
        y = aten.view_as.default(x, x)
    assert torch.equal(x, torch.ones(2))
    assert y._base is x


def test_random_numbers_are_not_disturbed() -> None:
    def values(util: Any) -> Any:
        torch.manual_seed(1)
        with mode(util) if util else torch.enable_grad():
            aten.bernoulli.default(X)
            return torch.rand(2)

    check = customops.checks.CHECKS["test_aot_dispatch_static"]
    assert torch.equal(values(None), values(lambda op, a, k: check(customops.checks.Trial(op, a, k))))


# How it is judged -----------------------------------------------------------------------------------------------


@pytest.mark.parity(89)
def test_no_entry_has_to_pass() -> None:
    with mode(Util()):
        aten.sin.default(X)
    with pytest.raises(OpCheckError, match=r"failed in the generated test T\.test_u__test_x") as caught:
        with mode(Util("aten::sin")):
            aten.sin.default(X)
    assert isinstance(caught.value.__cause__, ValueError)
    assert caught.value.op == "aten::sin"
    assert all(text in str(caught.value) for text in ["bad aten::sin", "the/file.json", "PYTORCH_OPCHECK_ACCEPT=1"])


@pytest.mark.parity(89)
def test_xfail_has_to_fail() -> None:
    with mode(Util("aten::sin"), {"aten::sin": "xfail"}):
        aten.sin.default(X)
    with pytest.raises(OpCheckError, match="Unexpected success") as caught, mode(Util(), {"aten::sin": "xfail"}):
        aten.sin.default(X)
    assert caught.value.op == "aten::sin"


def test_xfail_of_an_operator_that_is_not_called() -> None:
    with mode(Util(), {"aten::sin": "xfail"}):
        pass


@pytest.mark.parity(89)
def test_skip_is_not_checked() -> None:
    util = Util("aten::sin")
    with mode(util, {"aten::sin": "skip"}):
        aten.sin.default(X)
    assert util.calls == []


@pytest.mark.parity(89)
def test_judged_at_the_end() -> None:
    util = Util("aten::sin", "aten::cos")

    def run() -> None:
        with mode(util):
            aten.sin.default(X)
            aten.cos.default(X)

    with pytest.raises(OpCheckError, match=r"and for aten::cos\)"):
        run()
    assert util.checked == ["aten::sin", "aten::cos"]


def test_one_failing_call_is_a_failure() -> None:
    def fail_for_zeros(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert args[0].any()

    for values in ([0.0, 1.0, 1.0], [1.0, 1.0, 0.0]):
        with mode(fail_for_zeros, {"aten::sin": "xfail"}):
            for value in values:
                aten.sin.default(torch.full((2,), value))


def test_not_exercised_passes() -> None:
    def nothing(op: Any, args: Any, kwargs: Any) -> None:
        raise customops.checks.NotExercised("nothing to try")

    with mode(nothing):
        aten.sin.default(X)


def test_tensors_without_a_fake_pass() -> None:
    def no_fake(op: Any, args: Any, kwargs: Any) -> None:
        raise customops.errors.CheckError("it fails") from _torch.fakes.NoFakeTensor("no")

    with mode(no_fake):
        aten.sin.default(X)


def test_input_that_cannot_be_copied_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(customops.checks.Trial, "copy", lambda self: 1 / 0)
    with pytest.raises(OpCheckError, match="ZeroDivisionError"), mode(Util()):
        assert torch.equal(aten.sin.default(X), torch.sin(X))


# The outcome of the test ----------------------------------------------------------------------------------------


@pytest.mark.parity(90)
def test_expected_error_of_an_operator() -> None:
    util = Util()
    with mode(util), pytest.raises(RuntimeError, match="cannot be multiplied"):
        aten.mm.default(torch.ones(2, 3), torch.ones(2, 3))
    assert util.calls == []


@pytest.mark.parity(90)
@pytest.mark.parametrize("error", [KeyError("the test's"), pytest.skip.Exception("skipped"), KeyboardInterrupt()])
def test_error_of_the_test_is_the_outcome(error: BaseException) -> None:
    def run() -> None:
        with mode(Util("aten::sin"), {"aten::cos": "xfail"}):
            aten.sin.default(X)
            aten.cos.default(X)
            raise error

    with pytest.raises(type(error)) as caught:
        run()
    assert caught.value is error


@pytest.mark.parity(90)
def test_results_are_the_operator_s() -> None:
    with mode(Util()):
        x = torch.ones(2)
        assert aten.sin_.default(x) is x
        assert aten.mm.default(torch.ones(2, 3, requires_grad=True), torch.ones(3, 2)).requires_grad


# Updating the file ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("accepting")
def test_accepting_adds_and_removes(tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    statuses = {"aten::cos": "xfail", "aten::tan": "xfail", "aten::exp": "skip"}
    with mode(Util("aten::sin", "aten::tan"), statuses, path=path):
        for op in (aten.sin, aten.cos, aten.tan, aten.exp, aten.log):
            op.default(X)
    failures = FailuresDict.load(path)
    assert {op: failures.get_status(op, "T.test_u__test_x") for op in failures.data} == {
        "aten::sin": "xfail",
        "aten::tan": "xfail",
        "aten::exp": "skip",
    }


@pytest.mark.usefixtures("accepting")
def test_accepting_does_not_learn_from_a_test_that_fails(tmp_path: Path) -> None:
    path = tmp_path / "f.json"

    def run() -> None:
        with mode(Util("aten::sin"), path=path):
            aten.sin.default(X)
            raise KeyError

    with pytest.raises(KeyError):
        run()
    assert not path.exists()


# Imports --------------------------------------------------------------------------------------------------------

LIGHT = """
import sys, torch
from customops.checks import CHECKS, Trial
from customops.testing import OpCheckMode
for name, check in CHECKS.items():
    with OpCheckMode(["aten"], name, lambda op, a, k: check(Trial(op, a, k)), None, "T.t", ""):
        torch.ops.aten.sin.default(torch.ones(2, requires_grad=True))
print([name for name in ("pytest", "expecttest", "torch.testing._internal.common_utils") if name in sys.modules])
"""


@pytest.mark.process
@pytest.mark.parity(86)
def test_no_test_dependency_is_imported() -> None:
    run = subprocess.run([PYTHON, "-c", LIGHT], cwd=ROOT, check=True, capture_output=True, text=True)
    assert run.stdout == "[]\n"


@pytest.fixture(autouse=True)
def _no_leftovers() -> Iterator[None]:
    yield
    assert not is_inside_opcheck_mode()
