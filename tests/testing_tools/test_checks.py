"""The checks and assertions that customops.testing offers one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import customops
from customops import errors, opcheck, testing
from customops.testing import (
    OpCheckError,
    aot_autograd_check,
    assert_raises_regex,
    autograd_registration_check,
    fake_check,
    make_fx_check,
)

NAMES = """
OpCheckError aot_autograd_check autograd_registration_check fake_check make_fx_check generate_opcheck_tests
dontGenerateOpCheckTests is_inside_opcheck_mode DEFAULT_TEST_UTILS DEPRECATED_DEFAULT_TEST_UTILS FailuresDict
OpCheckMode validate_failures_dict_structure generate_repro assert_raises_regex
"""


def test_names() -> None:
    assert set(NAMES.split()) <= set(testing.__all__)
    assert errors.OpCheckError is customops.errors.OpCheckError


@pytest.mark.parity(81)
def test_comparison_error_stays_reachable(ns: str) -> None:
    calls: list[None] = []
    with torch.library._scoped_library(ns, "FRAGMENT") as lib:
        lib.define("f(Tensor x) -> Tensor")
        lib.impl("f", lambda x: (calls.append(None), x + len(calls) / 10)[1], "CPU")
        lib.impl("f", torch.empty_like, "Meta")
        op = getattr(torch.ops, ns).f.default
        with pytest.raises(OpCheckError) as caught:
            opcheck(op, (torch.ones([]),), test_utils="test_aot_dispatch_static")
        assert caught.value.__context__ is not None
        assert "Absolute difference:" in str(caught.value.__context__.__context__)
        opcheck(op, (torch.ones([]),), test_utils="test_aot_dispatch_static", atol=3, rtol=0.01)


# autograd_registration_check, fake_check ------------------------------------------------------------------------


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] * 2


@pytest.mark.parity(83)
@pytest.mark.parametrize("key", ["Autograd", "CompositeImplicitAutograd", "CPU", "CompositeExplicitAutograd"])
def test_autograd_registration(ns: str, key: str) -> None:
    with torch.library._scoped_library(ns, "FRAGMENT") as lib:
        lib.define("f(Tensor x) -> Tensor")
        lib.impl("f", Twice.apply, key)
        op = getattr(torch.ops, ns).f.default
        inputs = (torch.ones(2, requires_grad=True),)
        if key in ("Autograd", "CompositeImplicitAutograd"):
            autograd_registration_check(op, inputs, {})
        else:
            with pytest.raises(AssertionError, match="incorrectly registered"):
                autograd_registration_check(op, inputs, {})


def test_fake_check(ns: str) -> None:
    with torch.library._scoped_library(ns, "FRAGMENT") as lib:
        lib.define("f(Tensor x) -> Tensor")
        lib.impl("f", torch.clone, "CPU")
        lib.impl("f", lambda x: x.new_empty(3), "Meta")
        with pytest.raises(AssertionError, match=r"Shapes .* are not equal"):
            fake_check(getattr(torch.ops, ns).f.default, (torch.ones(2),), {})
    fake_check(torch.ops.aten.sin.default, (torch.ones(2),), {})


# aot_autograd_check ---------------------------------------------------------------------------------------------


@pytest.mark.parity(84)
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("check_gradients", [False, "auto"])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_aot_without_gradients(dynamic: bool, check_gradients: Any, requires_grad: bool) -> None:
    def no_output_requires_grad(x: torch.Tensor) -> torch.Tensor:
        return x.detach().sin()

    x = torch.ones(2, requires_grad=requires_grad)
    aot_autograd_check(no_output_requires_grad, (x,), {}, dynamic, check_gradients=check_gradients)
    aot_autograd_check(torch.sin, (x,), {}, dynamic, check_gradients=check_gradients)


@pytest.mark.parity(84)
def test_aot_with_gradients() -> None:
    aot_autograd_check(torch.sin, (torch.ones(2, requires_grad=True),), {}, True, check_gradients=True)


# assert_raises_regex --------------------------------------------------------------------------------------------


@pytest.mark.parity(85)
@pytest.mark.parametrize("regex", ["middle", r"^the m", r"\w+ text$"])
def test_match(regex: str) -> None:
    with assert_raises_regex(ValueError, regex):
        raise ValueError("the middle of a text")


def test_subclass_matches() -> None:
    with assert_raises_regex((KeyError, RuntimeError), "text"):
        raise NotImplementedError("text")


@pytest.mark.parity(85)
def test_other_type() -> None:
    with pytest.raises(AssertionError, match="instead got KeyError") as caught, assert_raises_regex(ValueError, ""):
        raise KeyError("text")
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parity(85)
def test_nothing_raised() -> None:
    with (
        pytest.raises(AssertionError, match="Expected exception, but none was raised"),
        assert_raises_regex(ValueError, ""),
    ):
        pass


@pytest.mark.parity(85)
def test_mismatch() -> None:
    with pytest.raises(AssertionError, match="to match regex") as caught, assert_raises_regex(ValueError, "other"):
        raise ValueError("text")
    assert isinstance(caught.value.__cause__, ValueError)


def test_interrupt_goes_through() -> None:
    with pytest.raises(KeyboardInterrupt), assert_raises_regex(ValueError, ""):
        raise KeyboardInterrupt


# make_fx_check --------------------------------------------------------------------------------------------------

every_mode: Any = pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])


@every_mode
@pytest.mark.parametrize("randomize_data", [True, False])
def test_traceable(tracing_mode: Any, randomize_data: bool) -> None:
    def function(xs: list[torch.Tensor], *, scale: float, out: torch.Tensor) -> torch.Tensor:
        return out.add_(xs[0] * scale + xs[1].shape[0])

    x, out = torch.ones(3, requires_grad=True), torch.zeros(3)
    make_fx_check(function, ([x, x],), {"scale": 2.0, "out": out}, tracing_mode, randomize_data=randomize_data)
    assert torch.equal(out, torch.zeros(3))


@every_mode
def test_state_outside_of_the_arguments(tracing_mode: Any) -> None:
    calls: list[None] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        calls.append(None)
        return x + len(calls)

    with pytest.raises(AssertionError, match="another result when traced by make_fx") as caught:
        make_fx_check(function, (torch.ones(2),), {}, tracing_mode)
    assert "function" in str(caught.value)


def test_value_baked_in() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x * float(x.detach().numpy()[0])

    make_fx_check(function, (torch.ones(2),), {}, "real")
    with pytest.raises(AssertionError, match="make_fx"):
        make_fx_check(function, (torch.ones(2),), {}, "real", randomize_data=True)


def test_random_values_that_do_not_work() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling() and float(x.detach().numpy()[0]) < 1:
            raise ValueError
        return x

    make_fx_check(function, (torch.ones(2),), {}, "real", randomize_data=True)


@every_mode
def test_sizes(tracing_mode: Any) -> None:
    seen = []

    def function(x: torch.Tensor, size: torch.Size, *, other: torch.Size) -> torch.Tensor:
        seen.append((size, other))
        return x.expand(size) + x.expand(other)

    make_fx_check(function, (torch.ones(1), torch.Size([5])), {"other": torch.Size([5])}, tracing_mode)
    assert (type(seen[0][0][0]) is torch.SymInt) == (tracing_mode == "symbolic")
    assert seen[1] == (torch.Size([5]), torch.Size([5]))


def test_given_comparison() -> None:
    def fail(actual: Any, expected: Any) -> None:
        raise AssertionError("never equal")

    with pytest.raises(AssertionError, match="never equal"):
        make_fx_check(torch.sin, (torch.ones(2),), None, "real", fail)


def test_random_numbers_are_the_same() -> None:
    make_fx_check(torch.rand_like, (torch.ones(8),), {}, "fake")


def test_a_context_that_is_entered_twice() -> None:
    context = assert_raises_regex(ValueError, "text")
    for _ in range(2):
        with context:
            raise ValueError("text")
