"""opcheck as a whole: its results and errors, and operators of many kinds that pass all checks."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.libraries import Ops
from helpers.opchecks import SUCCESS, aten
from helpers.warm import PYTHON
from torch import Tensor

import customops
from customops import Registry, legacy
from customops.checks import CHECKS, DEFAULT_CHECKS, Outcome, opcheck, run_check
from customops.errors import CheckError, OpCheckError


@pytest.fixture
def bad(define: Ops) -> Any:
    """An operator that is right but for its schema."""
    return define("bad(Tensor x) -> Tensor", CompositeExplicitAutograd=lambda x: x[:])


# -- results and errors ------------------------------------------------------------------------


def test_the_table() -> None:
    assert DEFAULT_CHECKS == (
        "test_schema",
        "test_autograd_registration",
        "test_faketensor",
        "test_aot_dispatch_dynamic",
    )
    assert {*DEFAULT_CHECKS, "test_aot_dispatch_static"} <= set(CHECKS)
    assert all(name.startswith("test_") for name in CHECKS)
    # Names of generated tests begin with those of checks.
    assert [(a, b) for a in CHECKS for b in CHECKS if a != b and b.startswith(a)] == []
    assert {name for row in CHECKS.values() for name in row.after} <= set(CHECKS)


@pytest.mark.parity(78)
def test_results_are_in_order(x: torch.Tensor) -> None:
    assert list(opcheck(aten.sin.default, (x,)).items()) == list(SUCCESS.items())


@pytest.mark.parity(78)
@pytest.mark.parametrize("names", ["test_schema", ["test_faketensor", "test_schema"], ("test_schema",), [], "ALL"])
def test_chosen_checks(x: torch.Tensor, names: Any) -> None:
    expected = list(CHECKS) if names == "ALL" else [names] if isinstance(names, str) else list(names)
    assert list(opcheck(aten.sin.default, [x], test_utils=names)) == expected


@pytest.mark.parity(79)
def test_failures_are_raised(bad: Any, x: torch.Tensor) -> None:
    with pytest.raises(OpCheckError, match="is not defined to alias output") as caught:
        opcheck(bad, (x,))
    assert str(caught.value).startswith(f"opcheck(op, ...): test_schema failed with {bad.name()}: Argument x")
    assert isinstance(caught.value.__cause__, CheckError)


@pytest.mark.parity(79)
def test_failures_are_stored(bad: Any, x: torch.Tensor) -> None:
    results = opcheck(bad, (x,), raise_exception=False)
    assert isinstance(results.pop("test_schema"), RuntimeError)
    assert results == {name: "SUCCESS" for name in DEFAULT_CHECKS if name != "test_schema"}


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] * 2


def permuted(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous().t()


# What is wrong, the kernels that make it so, and the phrase that names it
FAULTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "write": (
        "Tensor x",
        {"CompositeExplicitAutograd": lambda x: x.add_(1).clone()},
        "Argument x is not defined as mutable but was mutated",
    ),
    "alias": (
        "Tensor x",
        {"CompositeExplicitAutograd": lambda x: x[:]},
        "Argument x is not defined to alias output but was aliasing",
    ),
    "shape": ("Tensor x", {"CPU": torch.clone, "Meta": lambda x: x.new_empty(7)}, "Shapes .* are not equal"),
    "stride": ("Tensor x", {"CPU": permuted, "Meta": lambda x: x.new_empty(x.shape)}, "Stride mismatch"),
    "no fake": ("Tensor x", {"CPU": torch.clone}, r"NS\.f\.default"),
    "alias annotation": (
        "Tensor(a) x",
        {"CPU": lambda x: x.view_as(x), "Meta": lambda x: x.view_as(x)},
        "We only support functionalizing operators whose outputs do not have alias annotations",
    ),
    "formula below autograd": (
        "Tensor x",
        {"CPU": Double.apply, "Meta": torch.empty_like},
        "does not have an autograd kernel",
    ),
    "formula below autograd, by device": (
        "Tensor x",
        {"CPU": Double.apply, "CUDA": Double.apply, "Meta": torch.empty_like},
        "does not have an autograd kernel",
    ),
}


@pytest.mark.parity(80)
@pytest.mark.parametrize(("argument", "kernels", "phrase"), FAULTS.values(), ids=FAULTS)
def test_faults_are_found(define: Ops, argument: str, kernels: dict[str, Any], phrase: str) -> None:
    returns = "Tensor(a)" if "(a)" in argument else "Tensor"
    op = define(f"f({argument}) -> {returns}", **kernels)
    with pytest.raises(OpCheckError, match=phrase.replace("NS", define.ns)):
        opcheck(op, (torch.rand(3, 2, requires_grad="autograd" in phrase),))


def test_an_op_that_ends_the_program_fails(define: Ops) -> None:
    def leave(x: Tensor) -> Tensor:
        raise SystemExit(3)

    op = define("leave(Tensor x) -> Tensor", CPU=leave)
    with pytest.raises(OpCheckError, match="test_schema failed with") as caught:
        opcheck(op, (torch.ones(2),), test_utils="test_schema")
    assert isinstance(caught.value.__cause__, CheckError)
    assert caught.value.__cause__.op == op.name()
    assert caught.value.__cause__.problem == "the operator raised SystemExit(3)"


@pytest.mark.parity(80)
def test_an_op_of_the_older_api_without_a_formula_is_found(ns: str) -> None:
    legacy.custom_op(f"{ns}::f", "(Tensor x) -> Tensor")
    legacy.impl(f"{ns}::f", func=torch.clone)
    legacy.impl_abstract(f"{ns}::f", func=torch.empty_like)
    op = getattr(torch.ops, ns).f.default
    with pytest.raises(OpCheckError, match="Autograd has not been implemented for operator"):
        opcheck(op, (torch.ones(2, requires_grad=True),))
    assert opcheck(op, (torch.ones(2),)) == SUCCESS
    legacy._destroy(f"{ns}::f")


@pytest.mark.parity(78)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_every_handle_to_an_op_of_ours(registry: Registry, ns: str, requires_grad: bool) -> None:
    op = registry.custom_op(f"{ns}::f", torch.sin, mutates_args=(), schema="(Tensor x) -> Tensor")
    op.register_fake(torch.empty_like)
    op.register_autograd(
        lambda ctx, grad: grad * torch.cos(*ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    for handle in (op, op._opoverload, getattr(torch.ops, ns).f):
        assert customops.opcheck(handle, (torch.rand(3, requires_grad=requires_grad),)) == SUCCESS
        assert customops.opcheck(handle, (), {"x": torch.rand(3)}) == SUCCESS


@pytest.mark.parity(80, 81)
def test_the_comparison_stays_reachable(define: Ops) -> None:
    calls: list[int] = []

    def kernel(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x + 0.1 * len(calls)

    op = define("f(Tensor x) -> Tensor", CompositeImplicitAutograd=kernel)
    with pytest.raises(OpCheckError, match="eager-mode PyTorch vs AOTDispatcher") as caught:
        opcheck(op, (torch.tensor(1.0),))
    context = caught.value.__context__
    assert context is not None
    assert "Absolute difference:" in str(context.__context__)
    assert opcheck(op, (torch.tensor(1.0),), atol=3, rtol=0.01) == SUCCESS


@pytest.mark.parametrize("tolerance", [{"atol": 0.0}, {"rtol": 1e-3}])
def test_tolerances_go_together(x: torch.Tensor, tolerance: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="give both"):
        opcheck(aten.sin.default, (x,), **tolerance)


@pytest.mark.parity(78)
@pytest.mark.parametrize("op", [torch.sin, "aten::sin", None, object()])
def test_what_is_no_operator(op: Any, x: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="OpOverload"):
        opcheck(op, (x,))


def test_packets(define: Ops, x: torch.Tensor) -> None:
    op = define("f(Tensor x) -> Tensor", CompositeImplicitAutograd=torch.sin)
    packet = getattr(torch.ops, define.ns).f
    assert opcheck(packet, (x,)) == SUCCESS
    assert op.overloadpacket is packet
    with pytest.raises(ValueError, match=r"aten.sin has \d overloads") as caught:
        opcheck(aten.sin, (x,))
    assert "default, out" in str(caught.value)
    assert "aten.sin.default" in str(caught.value)


@pytest.mark.parity(78)
def test_unknown_checks(x: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="test_utils to be subset of") as caught:
        opcheck(aten.sin.default, (x,), test_utils=["test_schema", "test_vibes"])
    assert "got:      'test_vibes'" in str(caught.value)


def test_args_are_a_tuple(x: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="args holds the arguments of one call") as caught:
        opcheck(aten.sin.default, x)  # type: ignore[arg-type]
    assert "(x,)" in str(caught.value)


def test_outcomes(bad: Any, x: torch.Tensor) -> None:
    passed = run_check("test_schema", aten.sin.default, (x,))
    assert passed == Outcome("test_schema", "passed", seconds=passed.seconds)
    assert passed.seconds > 0
    failed = run_check("test_schema", bad, (x,), {}, None, None)
    assert failed.status == "failed"
    assert isinstance(failed.error, CheckError)
    skipped = run_check("test_autograd_registration", aten.sin.default, (x,))
    assert (skipped.status, skipped.reason) == ("not exercised", "no input has requires_grad=True")


@pytest.mark.parametrize("name", CHECKS)
def test_abstract_inputs(name: str) -> None:
    x = torch.empty(3, device="meta", requires_grad=True)
    assert opcheck(aten.sin.default, (x,), test_utils=name) == {name: "SUCCESS"}
    assert run_check(name, aten.sin.default, (x,)).status == "not exercised"


def test_inputs_and_random_state_are_left_alone(define: Ops) -> None:
    def kernel(x: torch.Tensor, ys: list[torch.Tensor]) -> torch.Tensor:
        x.zero_()
        ys[0].zero_()
        return torch.rand(3)

    op = define("f(Tensor x, Tensor(a!)[] ys) -> Tensor", CPU=kernel)
    x, y = torch.randn(3), torch.randn(3, requires_grad=True)
    before, state = (x.clone(), y.detach().clone()), torch.get_rng_state()
    opcheck(op, (x, [y]), raise_exception=False, test_utils="ALL")
    assert torch.equal(x, before[0])
    assert torch.equal(y, before[1])
    assert y.grad is None
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.process
@pytest.mark.parity(86)
def test_nothing_but_torch_is_needed() -> None:
    script = """
import json, sys, torch
from customops.checks import opcheck
early = "torch._dynamo" in sys.modules
@torch.library.custom_op("fresh::f", mutates_args=())
def f(x: torch.Tensor) -> torch.Tensor:
    return x.clone()
f.register_fake(torch.empty_like)
results = opcheck(f, (torch.randn(3),), test_utils="ALL")
print(json.dumps([early, list(results.values()), sorted(sys.modules)]))
"""
    root = Path(__file__).parents[2]
    run = subprocess.run([PYTHON, "-W", "error", "-c", script], cwd=root, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    early, results, modules = json.loads(run.stdout)
    assert not early, "dynamo is loaded when the AOT check runs, not before"
    assert results == ["SUCCESS"] * len(CHECKS)
    tests_only = {"expecttest", "hypothesis", "numpy.testing", "pytest", "torch.testing._internal.common_utils"}
    assert not tests_only & set(modules)


# What pytest prints ---------------------------------------------------------------------------------------------

FAILURES = """
import customops
import torch
from torch import Tensor


@customops.custom_op("{ns}::hidden_write", mutates_args=())
def hidden_write(x: Tensor) -> Tensor:
    x.add_(1)
    return x.clone()


@customops.custom_op("{ns}::without_fake", mutates_args=())
def without_fake(x: Tensor) -> Tensor:
    return x.clone()


@customops.custom_op("{ns}::other_shape", mutates_args=())
def other_shape(x: Tensor) -> Tensor:
    return x.clone()


@customops.custom_op("{ns}::fails", mutates_args=())
def fails(x: Tensor) -> Tensor:
    raise ValueError("of the kernel")


@customops.custom_op("{ns}::other_type", mutates_args=())
def other_type(x: Tensor) -> Tensor:
    return x.numpy()


@customops.custom_op("{ns}::other_result", mutates_args=(), tags=torch.Tag.needs_fixed_stride_order)
def other_result(x: Tensor) -> Tensor:
    return torch.rand(x.shape)


other_shape.register_fake(lambda x: x.new_empty(7))
other_result.register_fake(torch.empty_like)


def test_hidden_write():
    customops.opcheck(hidden_write, (torch.ones(2),))


def test_without_fake():
    customops.opcheck(without_fake, (torch.ones(2),))


def test_other_shape():
    customops.opcheck(other_shape, (torch.ones(2),))


def test_fails():
    customops.opcheck(fails, (torch.ones(2),))


def test_backward():
    other_shape.register_autograd(lambda ctx, grad: (grad, grad))
    other_shape.register_fake(torch.empty_like)
    customops.opcheck(other_shape, (torch.ones(2, requires_grad=True),))


def test_call():
    fails(torch.ones(2, requires_grad=True))


def test_type():
    other_type(torch.ones(2))
"""


@pytest.mark.process
def test_a_failure_under_pytest_is_short(tmp_path: Path, ns: str) -> None:
    (tmp_path / "test_them.py").write_text(FAILURES.replace("{ns}", ns))
    command = [PYTHON, "-m", "pytest", "test_them.py", "-p", "no:cacheprovider", "--no-header", "-rN"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert run.returncode == 1, f"{run.returncode}\n{run.stdout}{run.stderr}"
    parts = re.split(r"_{5,} (test_\w+) _{5,}\n", run.stdout)
    printed = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert set(printed) == set(re.findall(r"def (test_\w+)", FAILURES))
    for name, text in printed.items():
        assert len(text.splitlines()) < 40, text
        assert f"in {name}" in text or f"def {name}" in text
        assert "customops/checks" not in text
        assert "customops/_op/op.py" not in text
    assert ">       raise ValueError" in printed["test_fails"]  # the line of the kernel
    assert ">       raise ValueError" in printed["test_call"]
