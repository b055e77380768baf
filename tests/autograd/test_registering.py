"""register_autograd: on what, in which forms, again, and ops that cannot have a formula."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from helpers.formulas import Recorder, times
from helpers.functions import double_fn
from helpers.tensors import leaf, slope
from torch import Tensor
from torch.library import Library

import customops
from customops import Registry, Tag
from customops.errors import CallbackError, RegistrationError

FORMS = ["op", "name", "overload"]


# x * x * y, opaque to autograd; its formula is differentiable, so all orders of derivatives exist ---------------------


# Registering ------------------------------------------------------------------------------------------------------


@pytest.mark.parity(49)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("which", ["double", "foreign"])
def test_function_forms(request: pytest.FixtureRequest, which: str, form: str) -> None:
    # A CustomOpDef, a name or an OpOverload.
    op = request.getfixturevalue(which)
    handle = {"op": op, "name": op._qualname, "overload": op._opoverload}[form]
    assert customops.register_autograd(handle, times(3)) is None
    assert slope(op) == slope(op._opoverload) == 3.0
    customops.register_autograd(
        handle,
        lambda ctx, grad: grad * ctx.factor,
        setup_context=lambda ctx, inputs, output: setattr(ctx, "factor", (output / inputs[0]).item()),
    )
    assert slope(op) == 2.0


@pytest.mark.parametrize("form", FORMS)
def test_function_forms_on_an_op_of_torch_custom_op(ns: str, form: str) -> None:
    theirs = torch.library.custom_op(f"{ns}::theirs", double_fn, mutates_args=())
    theirs.register_autograd(times(5))
    handle = {"op": theirs, "name": f"{ns}::theirs", "overload": theirs._opoverload}[form]
    rules = Library(ns, "FRAGMENT")
    customops.register_autograd(handle, times(3), lib=rules)
    assert slope(theirs) == 3.0
    rules._destroy()
    assert slope(theirs) == 5.0


def test_an_op_from_cpp_gets_a_formula_and_loses_it() -> None:
    foobar = torch.ops.aten._foobar.default  # a test op of torch's, without a formula
    rules = Library("aten", "FRAGMENT")
    customops.register_autograd(foobar, times(3), lib=rules)
    try:
        assert slope(foobar) == 3.0
    finally:
        rules._destroy()
    with pytest.raises(RuntimeError, match="derivative for aten::_foobar is not implemented"):
        slope(foobar)


@pytest.mark.parity(49)
@pytest.mark.parametrize("end", ["destroyed", "collected"])
def test_a_formula_ends_with_its_library(double: Any, foreign: Any, ns: str, end: str) -> None:
    double.register_autograd(times(2))
    rules = Library(ns, "FRAGMENT")
    for op in double, foreign:
        customops.register_autograd(op, times(3), lib=rules)
        assert slope(op) == 3.0
    if end == "destroyed":
        rules._destroy()
    del rules
    gc.collect()
    assert slope(double) == 2.0
    assert not torch._C._dispatch_has_kernel_for_dispatch_key(foreign._qualname, "Autograd")


def test_a_formula_ends_with_its_library_also_under_a_mode(double: Any, ns: str) -> None:
    double.register_autograd(times(2))
    rules = Library(ns, "FRAGMENT")
    double.register_autograd(times(3), lib=rules)
    rules._destroy()
    assert slope(double) == 2.0
    with Recorder():
        assert slope(double) == 2.0


@pytest.mark.parametrize("end", ["destroyed", "collected"])
def test_a_library_may_outlive_the_op(double: Any, ns: str, end: str) -> None:
    rules = Library(ns, "FRAGMENT")
    double.register_autograd(times(3), lib=rules)
    double.unregister()
    if end == "destroyed":
        rules._destroy()
    del rules
    gc.collect()  # an exception in here is a failure of the test


@pytest.mark.parity(49)
def test_the_newest_formula_wins_over_a_scoped_one(double: Any, ns: str) -> None:
    rules = Library(ns, "FRAGMENT")
    double.register_autograd(times(3), lib=rules)
    double.register_autograd(times(4))
    assert slope(double) == 4.0


def test_a_scope_takes_a_formula_back(registry: Registry, double: Any, foreign: Any) -> None:
    double.register_autograd(times(2))
    with registry.scope(), customops.default_registry.scope():
        double.register_autograd(times(3))
        foreign.register_autograd(times(4))
        assert (slope(double), slope(foreign)) == (3.0, 4.0)
    assert slope(double) == 2.0
    assert not torch._C._dispatch_has_kernel_for_dispatch_key(foreign._qualname, "Autograd")
    foreign.register_autograd(times(5))
    assert slope(foreign) == 5.0


def test_registering_after_first_use(double: Any, foreign: Any) -> None:
    for op in double, foreign:
        assert op(torch.ones(1)).item() == 2.0
        op.register_autograd(times(3))
        assert slope(op) == 3.0


def test_registering_again_replaces_at_once(double: Any) -> None:
    double.register_autograd(times(3), setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output))
    assert slope(double) == 3.0
    double.register_autograd(lambda ctx, grad: grad * (4 + len(ctx.saved_tensors)))
    assert slope(double) == slope(double._opoverload) == 4.0


def test_a_graph_keeps_the_formula_it_was_made_with(double: Any) -> None:
    double.register_autograd(
        lambda ctx, grad: grad * ctx.factor, setup_context=lambda ctx, inputs, output: setattr(ctx, "factor", 3)
    )
    x = leaf(1.0)
    y = double(x)
    double.register_autograd(times(7))
    y.backward()
    assert x.grad is not None
    assert x.grad.item() == 3.0
    assert slope(double) == 7.0


def test_callbacks_must_fit(double: Any) -> None:
    with pytest.raises(CallbackError, match="the backward does not fit the operator"):
        double.register_autograd(lambda ctx: None)
    with pytest.raises(CallbackError, match="the setup_context does not fit the operator") as raised:
        double.register_autograd(times(3), setup_context=lambda ctx, inputs: None)
    assert raised.value.op == double._qualname
    with pytest.raises(CallbackError, match="the backward must be callable"):
        double.register_autograd(3)
    x = leaf(1.0)
    with pytest.raises(RuntimeError, match="no autograd formula"):  # nothing was registered
        double(x).backward()


def test_a_class_is_not_a_formula(double: Any) -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2

    for register in (double.register_autograd, double.register_jvp):
        with pytest.raises(CallbackError, match="a formula must be a function, not a class") as caught:
            register(Double)
        assert (caught.value.op, caught.value.got) == (double._qualname, repr(Double)[:77] + "...")
        assert caught.value.fix == "pass its functions: Double.backward, and setup_context=Double.setup_context"


def test_formulas_that_disagree_about_what_is_written(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::accumulate", mutates_args=("acc",))
    def accumulate(x: Tensor, acc: Tensor) -> Tensor:
        acc.add_(x)
        return x * 2

    accumulate.register_autograd(lambda ctx, g, g_acc: (g * 2 + g_acc, g_acc), grads_of="acc")
    accumulate.register_jvp(lambda ctx, x_tangent, acc_tangent: x_tangent * 2)
    with pytest.raises(RegistrationError, match="do not agree on which written arguments are different") as caught:
        accumulate(leaf(1.0), torch.zeros(1))
    error = caught.value
    assert error.op == f"{ns}::accumulate"
    assert error.expected == "grads_of=('acc',), as for backward"
    assert error.got == "grads_of=() for jvp"
    assert error.fix == "register both with the same grads_of= and nondiff_args="


def test_one_gradient_parameter_for_each_return(registry: Registry, ns: str) -> None:
    op = registry.custom_op(
        f"{ns}::op", lambda x: (x * 2, x * 3), mutates_args=(), schema="(Tensor x) -> (Tensor, Tensor)"
    )
    with pytest.raises(CallbackError, match="does not fit"):
        op.register_autograd(lambda ctx, grad: grad)
    op.register_autograd(lambda ctx, *grads: grads[0] * 2 + grads[1] * 3)
    assert slope(lambda x: sum(op(x))) == 5.0


# Ops that cannot have a formula ---------------------------------------------------------------------------------------


def test_an_op_that_does_nothing_cannot_have_a_formula(registry: Registry, ns: str) -> None:
    idle = registry.custom_op(f"{ns}::op", lambda x: None, mutates_args=(), schema="(Tensor x) -> ()")
    with pytest.raises(RuntimeError, match="cannot register autograd on a non-functional operator"):
        idle.register_autograd(lambda ctx: None)
    with pytest.raises(RuntimeError, match="non-functional"):
        customops.register_autograd(f"{ns}::op", lambda ctx: None)


@pytest.mark.parity(37)
def test_an_out_op_cannot_have_a_formula(registry: Registry, ns: str) -> None:
    # By method or function, and on an op of a library that has the tag.
    def out_fn(x: Tensor, *, out: Tensor) -> Tensor:
        return out.copy_(x)

    op = registry.custom_op(f"{ns}::op", lambda x, *, out: out.copy_(x), mutates_args={"out"}, tags=Tag.out,
                            schema="(Tensor x, *, Tensor(a!) out) -> Tensor(a!)")  # fmt: skip
    with pytest.raises(RuntimeError, match="Out variants do not support autograd"):
        op.register_autograd(times(3))
    with pytest.raises(RuntimeError, match="Out variants do not support autograd"):
        customops.register_autograd(op, times(3))
    if not isinstance(Tag.out, torch.Tag):
        return  # no library has it
    library = Library(ns, "FRAGMENT")
    library.define("foreign(Tensor x, *, Tensor(a!) out) -> Tensor(a!)", tags=(Tag.out,))
    with pytest.raises(RuntimeError, match="Out variants do not support autograd"):
        customops.register_autograd(f"{ns}::foreign", times(3), lib=library)
    library._destroy()


def test_an_optional_list_is_not_the_only_tensor(registry: Registry, ns: str) -> None:
    op: Any = registry.custom_op(f"{ns}::f", lambda xs: xs[0] * 2, mutates_args=(), schema="(Tensor[]? xs) -> Tensor")
    with pytest.raises(RegistrationError, match="optional list of tensors") as caught:
        op.register_autograd(lambda ctx, grad: {"xs": [2 * grad]})
    assert caught.value.argument == "xs"
    op.register_autograd(lambda ctx, grad: {}, nondiff_args="xs")
