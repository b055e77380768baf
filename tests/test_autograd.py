"""Gradients: formulas, transforms, lists, errors; the oracle is autograd of the same function in torch operations."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, List, Optional, Tuple

import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import Library
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import customops
from customops import Registry
from customops.errors import AutogradError, CallbackError, UnsupportedError

FORMS = ["op", "name", "overload"]

#: torch warns when it batches an op by a loop, for want of a batching rule.
slow_vmap = pytest.mark.filterwarnings("ignore:There is a performance drop")


def leaf(*values: float) -> Tensor:
    return torch.tensor(values, requires_grad=True)


def gradients(f: Callable[..., Tensor], *inputs: Tensor) -> list[Any]:
    """Gradients of a weighted sum of what `f` returns; the weights tell elements apart."""
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    y = f(*leaves)
    (y * torch.arange(1, y.numel() + 1, dtype=y.dtype).view(y.shape)).sum().backward()
    return [x.grad for x in leaves]


def assert_same_gradients(f: Callable[..., Tensor], reference: Callable[..., Tensor], *inputs: Tensor) -> None:
    for got, wanted in zip(gradients(f, *inputs), gradients(reference, *inputs), strict=True):
        assert got is wanted is None or torch.allclose(got, wanted)


# x * x * y, opaque to autograd; its formula is differentiable, so all orders of derivatives exist ---------------------


def product_fn(x: Tensor, y: Tensor) -> Tensor:
    return torch.from_numpy(np.asarray(x.numpy(force=True) ** 2 * y.numpy(force=True)))


def plain(x: Tensor, y: Tensor) -> Tensor:
    return x * x * y


def product_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def product_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, y = ctx.saved_tensors
    return grad * 2 * x * y, grad * x * x


@pytest.fixture
def product(registry: Registry, ns: str) -> Any:
    op = registry.custom_op(f"{ns}::product", product_fn, mutates_args=())
    op.register_fake(lambda x, y: torch.empty_like(x))
    op.register_autograd(product_backward, setup_context=product_setup)
    return op


def double_fn(x: Tensor) -> Tensor:
    return x * 2


def times(factor: float) -> Callable[[Any, Tensor], Tensor]:
    """A formula by which it shows."""
    return lambda ctx, grad: grad * factor


def slope(op: Any) -> float:
    x = leaf(1.0)
    op(x).backward()
    assert x.grad is not None
    return x.grad.item()


@pytest.fixture
def double(registry: Registry, ns: str) -> Any:
    return registry.custom_op(f"{ns}::double", double_fn, mutates_args=())


@pytest.fixture
def foreign(ns: str) -> Iterator[Any]:
    """An op of a library, with a CPU kernel alone, as the object to register on."""
    library = Library(ns, "FRAGMENT")
    library.define("foreign(Tensor x) -> Tensor")
    library.impl("foreign", double_fn, "CPU")
    yield customops.adopt(f"{ns}::foreign")
    customops.default_registry.clear()
    library._destroy()


# Registering ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("which", ["double", "foreign"])
def test_function_forms(request: pytest.FixtureRequest, which: str, form: str) -> None:
    # 49: a CustomOpDef, a name or an OpOverload.
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


def test_an_out_op_cannot_have_a_formula(registry: Registry, ns: str) -> None:
    # 37: by method or function, and on an op of a library that has the tag.
    def out_fn(x: Tensor, *, out: Tensor) -> Tensor:
        return out.copy_(x)

    op = registry.custom_op(f"{ns}::op", lambda x, *, out: out.copy_(x), mutates_args={"out"}, tags=torch.Tag.out,
                            schema="(Tensor x, *, Tensor(a!) out) -> Tensor(a!)")  # fmt: skip
    with pytest.raises(RuntimeError, match="Out variants do not support autograd"):
        op.register_autograd(times(3))
    with pytest.raises(RuntimeError, match="Out variants do not support autograd"):
        customops.register_autograd(op, times(3))
    library = Library(ns, "FRAGMENT")
    library.define("foreign(Tensor x, *, Tensor(a!) out) -> Tensor(a!)", tags=(torch.Tag.out,))
    with pytest.raises(RuntimeError, match="Out variants do not support autograd"):
        customops.register_autograd(f"{ns}::foreign", times(3), lib=library)
    library._destroy()


# 50: keyword-only arguments and defaults ------------------------------------------------------------------------------


@pytest.fixture
def scale(registry: Registry, ns: str) -> Any:
    @registry.custom_op(f"{ns}::scale", mutates_args=())
    def scale(
        x: Tensor, by: float = 2.0, dtype: torch.dtype = torch.float32, *, times: int = 1, sizes: List[int] = (3, 4)
    ) -> Tensor:
        return (x * by * times).to(dtype)

    return scale


def test_setup_context_sees_every_argument(scale: Any) -> None:
    seen = []

    def setup_context(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
        seen.append((inputs[1:], keyword_only_inputs))
        ctx.factor = inputs[1] * keyword_only_inputs["times"]

    scale.register_autograd(lambda ctx, grad: (grad * ctx.factor, None, None), setup_context=setup_context)
    assert slope(scale) == 2.0
    assert slope(lambda x: scale(x, 5.0)) == 5.0
    assert slope(lambda x: scale(x, 5.0, times=3)) == 15.0
    assert slope(lambda x: scale(times=3, by=1.5, x=x, sizes=[7])) == 4.5
    defaults = {"times": 1, "sizes": [3, 4]}
    assert seen == [
        ((2.0, torch.float32), defaults),
        ((5.0, torch.float32), defaults),
        ((5.0, torch.float32), defaults | {"times": 3}),
        ((1.5, torch.float32), {"times": 3, "sizes": [7]}),
    ]


def test_setup_context_by_keyword_needs_the_keywords(scale: Any) -> None:
    with pytest.raises(CallbackError, match="setup_context does not fit"):
        scale.register_autograd(times(3), setup_context=lambda ctx, inputs, output: None)


def test_keyword_only_arguments_under_transforms_and_compile(scale: Any) -> None:
    def setup_context(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
        ctx.factor = inputs[1] * keyword_only_inputs["times"]

    scale.register_fake(lambda x, by, dtype, *, times, sizes: torch.empty_like(x, dtype=dtype))
    scale.register_autograd(lambda ctx, grad: (grad * ctx.factor, None, None), setup_context=setup_context)
    x = torch.rand(3)
    assert torch.equal(torch.func.grad(lambda x: scale(x, 1.5, times=4).sum())(x), torch.full((3,), 6.0))
    compiled = torch.compile(lambda x: scale(x, 1.5, times=4) * 2, backend="aot_eager", fullgraph=True)
    assert_same_gradients(compiled, lambda x: x * 12, x)


# 51, 52: when setup_context runs, and ops without a formula -----------------------------------------------------------


def test_setup_context_runs_once_where_there_is_a_gradient_to_compute(double: Any) -> None:
    calls = []
    double.register_autograd(times(2), setup_context=lambda ctx, inputs, output: calls.append(len(inputs)))
    x = leaf(1.0)
    with torch.no_grad():
        assert not double(x).requires_grad
    with torch.inference_mode():
        assert double(x).is_inference()
    double(x.detach())
    double(torch.ones(1))
    assert calls == []
    assert double(x).requires_grad
    assert calls == [1]


def test_setup_context_runs_once_for_a_list(registry: Registry, ns: str) -> None:
    calls = []
    op = registry.custom_op(f"{ns}::op", lambda xs: xs[0] * 2, mutates_args=(), schema="(Tensor?[] xs) -> Tensor")
    op.register_autograd(lambda ctx, grad: [grad, None], setup_context=lambda ctx, inputs, output: calls.append(1))
    op([torch.ones(1), None])
    with torch.no_grad():
        op([leaf(1.0), None])
    assert calls == []
    op([torch.ones(1), leaf(1.0)])
    assert calls == [1]


def test_grad_mode_is_off_in_kernels_and_setup_context(double: Any) -> None:
    modes = []
    double.register_kernel("cpu", lambda x: modes.append(torch.is_grad_enabled()) or x * 2)
    double.register_autograd(times(2), setup_context=lambda ctx, inputs, output: modes.append(torch.is_grad_enabled()))
    double(leaf(1.0))
    assert modes == [False, False]


def test_without_a_formula_only_backward_fails(double: Any) -> None:
    x = leaf(1.0, 2.0)
    y = double(x)
    assert y.tolist() == [2.0, 4.0]
    assert y.requires_grad
    with pytest.raises(RuntimeError, match="no autograd formula") as raised:
        y.sum().backward()
    assert isinstance(raised.value, AutogradError)
    assert raised.value.op == double._qualname
    assert "register_autograd" in str(raised.value.fix)
    assert x.grad is None


def test_without_a_formula_lists_work_too(combine: Any, split: Any) -> None:
    outputs = split(combine([leaf(1.0, 2.0), torch.ones(2)]).expand(2, 2))
    assert [y.requires_grad for y in outputs] == [True, True]
    with pytest.raises(RuntimeError, match="no autograd formula"):
        outputs[0].sum().backward()


# 53, 54, 55: what backward returns ------------------------------------------------------------------------------------


@pytest.fixture
def power(registry: Registry, ns: str) -> Any:
    """``x * a * b`` with defaults, without a formula."""

    @registry.custom_op(f"{ns}::power", mutates_args=())
    def power(x: Tensor, a: float = 2.0, b: int = 3, c: Optional[Tensor] = None) -> Tensor:
        return x * a * b if c is None else x * a * b * c

    return power


@pytest.mark.parametrize("returned", [lambda g: g, lambda g: (g,), lambda g: (g, None, None, None)])
def test_gradients_of_inputs_that_were_left_out(power: Any, returned: Callable[[Tensor], Any]) -> None:
    needed: list[Any] = []

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        needed.append(ctx.needs_input_grad)
        ctx.factor = inputs[1] * inputs[2]

    def backward(ctx: Any, grad: Tensor) -> Any:
        needed.append(ctx.needs_input_grad)
        return returned(grad * ctx.factor)

    power.register_autograd(backward, setup_context=setup_context)
    assert slope(power) == 6.0
    assert needed == [(True,), (True,)]


def test_needs_input_grad_covers_the_inputs_that_were_passed(power: Any) -> None:
    needed: list[Any] = []
    power.register_autograd(
        lambda ctx, grad: (grad, None, None, needed.append(ctx.needs_input_grad) or grad),
        setup_context=lambda ctx, inputs, output: needed.append(ctx.needs_input_grad),
    )
    one = torch.ones(1)
    power(leaf(1.0), 5.0, 4, one).backward()
    power(one, 5.0, 4, leaf(1.0)).backward()
    power(leaf(1.0), 2.0, 3, leaf(1.0)).backward()
    assert needed[::2] == needed[1::2] == [
        (True, False, False, False),
        (False, False, False, True),
        (True, False, False, True),
    ]  # fmt: skip


def test_an_optional_tensor_there_or_not(power: Any) -> None:
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.factor = inputs[1] * inputs[2]
        ctx.save_for_backward(inputs[0], inputs[3])

    def backward(ctx: Any, grad: Tensor) -> Any:
        x, c = ctx.saved_tensors
        if c is None:
            return grad * ctx.factor, None, None, None
        return grad * ctx.factor * c, None, None, grad * ctx.factor * x

    power.register_autograd(backward, setup_context=setup_context)
    x, c = torch.rand(3), torch.rand(3)
    assert_same_gradients(power, lambda x: x * 6, x)
    assert_same_gradients(lambda x: power(x, 5.0, 2, None), lambda x: x * 10, x)
    assert_same_gradients(lambda x, c: power(x, 5.0, 2, c), lambda x, c: x * 10 * c, x, c)
    assert_same_gradients(lambda x, c: power(x, c=c), lambda x, c: x * 6 * c, x, c)


@pytest.mark.parametrize(
    ("call", "returned", "counts"),
    [
        (lambda op, x: op(x, 5.0, 4, torch.ones(1)), lambda g: (), "(expected 4, got 0)"),
        (lambda op, x: op(x, 5.0, 4, torch.ones(1)), lambda g: g, "(expected 4, got 1)"),
        (lambda op, x: op(x, 5.0, 4, torch.ones(1)), lambda g: None, "(expected 4, got 1)"),
        (lambda op, x: op(x), lambda g: (g, None, None), "(expected 1 or 4, got 3)"),
        (lambda op, x: op(x), lambda g: (), "(expected 1 or 4, got 0)"),
        (lambda op, x: op(x, 5.0), lambda g: (g,), "(expected 2 or 4, got 1)"),
        (lambda op, x: op(x, 5.0), lambda g: (g,) * 5, "(expected 2 or 4, got 5)"),
    ],
)
def test_the_number_of_gradients(power: Any, call: Any, returned: Callable[[Tensor], Any], counts: str) -> None:
    power.register_autograd(lambda ctx, grad: returned(grad))
    y = call(power, leaf(1.0))
    with pytest.raises(RuntimeError, match="returned an incorrect number of gradients") as raised:
        y.backward()
    assert counts in str(raised.value)
    assert isinstance(raised.value, AutogradError)
    assert raised.value.op == power._qualname
    assert "x, a, b, c" in str(raised.value.expected)
    assert "test_autograd.py" in str(raised.value.where)


def test_the_number_of_gradients_of_an_op_with_one_input(double: Any) -> None:
    double.register_autograd(lambda ctx, grad: ())
    with pytest.raises(RuntimeError, match=r"incorrect number of gradients \(expected 1, got 0\)"):
        double(leaf(1.0)).backward()


@pytest.mark.parametrize(
    ("returned", "argument", "got", "expected"),
    [
        (lambda g: (1.0, None, None, None), "x", "float", "a Tensor or None"),
        (lambda g: (g, "a", None, None), "a", "str", "None: the argument is a float"),
        (lambda g: (g, None, [g], None), "b", "list of 1", "None: the argument is a SymInt"),
        (lambda g: (g, None, None, (g, g)), "c", "tuple of 2", "a Tensor or None"),
    ],
)
def test_a_gradient_of_the_wrong_type_names_its_argument(
    power: Any, returned: Callable[[Tensor], Any], argument: str, got: str, expected: str
) -> None:
    power.register_autograd(lambda ctx, grad: returned(grad))
    with pytest.raises(AutogradError, match="backward returned a gradient that does not fit its input") as raised:
        power(leaf(1.0), 5.0, 4, leaf(1.0)).backward()
    assert (raised.value.argument, raised.value.got, raised.value.expected) == (argument, got, expected)


def test_an_input_left_at_its_default_has_no_gradient(power: Any) -> None:
    power.register_autograd(lambda ctx, grad: (grad, None, None, grad))
    with pytest.raises(AutogradError, match="left at its default") as raised:
        power(leaf(1.0)).backward()
    assert raised.value.argument == "c"


# Lists of tensors -----------------------------------------------------------------------------------------------------


def weighted_sum(xs: Any, weight: float = 2.0) -> Tensor:
    return sum((x * weight * (i + 1) for i, x in enumerate(xs) if x is not None), torch.zeros(2))  # type: ignore[return-value]


@pytest.fixture
def combine(registry: Registry, ns: str) -> Any:
    @registry.custom_op(f"{ns}::combine", mutates_args=())
    def combine(xs: List[Tensor], weight: float = 2.0) -> Tensor:
        return weighted_sum(xs, weight)

    combine.register_fake(lambda xs, weight: torch.empty(2))
    return combine


def combine_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.factors = [inputs[1] * (i + 1) for i in range(len(inputs[0]))]
    ctx.needed = ctx.needs_input_grad


@pytest.mark.parametrize("trailing", [True, False])
def test_a_list_of_inputs(combine: Any, trailing: bool) -> None:
    # 55: needs_input_grad has a list for the list; the None for what was left out may be there or not.
    needed = []

    def backward(ctx: Any, grad: Tensor) -> Any:
        needed.append((ctx.needed, ctx.needs_input_grad))
        gradients = [grad * factor for factor in ctx.factors]
        return (gradients, None) if trailing else gradients

    combine.register_autograd(backward, setup_context=combine_setup)
    x, y = torch.rand(2), torch.rand(2)
    assert_same_gradients(lambda x, y: combine([x, y]), lambda x, y: weighted_sum([x, y]), x, y)
    assert needed == [(([True, True],), ([True, True],))]
    needed.clear()
    assert_same_gradients(lambda x: combine([x, y]), lambda x: weighted_sum([x, y]), x)
    assert needed == [(([True, False],), ([True, False],))]
    if trailing:
        needed.clear()
        assert_same_gradients(lambda x, y: combine([x, y], 5.0), lambda x, y: weighted_sum([x, y], 5.0), x, y)
        assert needed == [(([True, True], False), ([True, True], False))]


def test_the_same_tensor_twice_in_a_list(combine: Any) -> None:
    combine.register_autograd(lambda ctx, grad: [grad * f for f in ctx.factors], setup_context=combine_setup)
    assert_same_gradients(lambda x: combine([x, x, x]), lambda x: weighted_sum([x, x, x]), torch.rand(2))


@pytest.mark.parametrize("returned", [None, (None, None)])
def test_none_for_a_whole_list(combine: Any, returned: Any) -> None:
    combine.register_autograd(lambda ctx, grad: returned)
    x = leaf(1.0, 2.0)
    with pytest.raises(AutogradError, match="None for an argument that needs a gradient") as raised:
        combine([torch.ones(2), x * 2]).sum().backward()
    assert raised.value.argument == "xs[1]"
    combine.register_autograd(lambda ctx, grad: returned, nondiff_args="xs")
    assert not combine([torch.ones(2), x * 2]).requires_grad


@pytest.mark.parametrize(
    ("returned", "argument", "expected", "got"),
    [
        (lambda g: [g], "xs", "a list of 2 gradients", "list of 1"),
        (lambda g: ([g, g, g], None), "xs", "a list of 2 gradients", "list of 3"),
        (lambda g: g, "xs", "a list of 2 gradients", "Tensor"),
        (lambda g: [g, 1.0], "xs[1]", "a Tensor or None", "float"),
        (lambda g: [[g], g], "xs[0]", "a Tensor or None", "list of 1"),
    ],
)
def test_gradients_that_do_not_fit_a_list(
    combine: Any, returned: Callable[[Tensor], Any], argument: str, expected: str, got: str
) -> None:
    combine.register_autograd(lambda ctx, grad: returned(grad))
    with pytest.raises(AutogradError, match="does not fit its input") as raised:
        combine([leaf(1.0, 2.0), torch.ones(2)]).sum().backward()
    assert (raised.value.argument, raised.value.expected, raised.value.got) == (argument, expected, got)


@pytest.fixture
def optional_sum(registry: Registry, ns: str) -> Any:
    """Two lists and a tensor between; formula included."""

    @registry.custom_op(f"{ns}::optional_sum", mutates_args=())
    def optional_sum(xs: List[Optional[Tensor]], y: Tensor, zs: List[Tensor]) -> Tensor:
        return weighted_sum(xs) * y + weighted_sum(zs, 3.0)

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        xs, y, zs = inputs
        ctx.lengths = len(xs), len(zs)
        ctx.present = [x is not None for x in xs]
        ctx.save_for_backward(weighted_sum(xs), y)
        ctx.needed = ctx.needs_input_grad

    def backward(ctx: Any, grad: Tensor) -> Any:
        total, y = ctx.saved_tensors
        assert ctx.needed == ctx.needs_input_grad
        assert [len(ctx.needed[0]), len(ctx.needed[2])] == list(ctx.lengths)
        xs = [grad * y * 2 * (i + 1) if present else None for i, present in enumerate(ctx.present)]
        return xs, grad * total, [grad * 3 * (i + 1) for i in range(ctx.lengths[1])]

    optional_sum.register_fake(lambda xs, y, zs: torch.empty_like(y))
    optional_sum.register_autograd(backward, setup_context=setup_context)
    return optional_sum


LISTS: list[Callable[..., tuple[Any, Any]]] = [
    lambda a, b: ([a, b], [a]),
    lambda a, b: ([None, a], [b, b]),
    lambda a, b: ([None, None], [a, b]),
    lambda a, b: ([], [a, b]),
    lambda a, b: ([a, None, b], []),
    lambda a, b: ([], []),
    lambda a, b: ([None], []),
]


@pytest.mark.parametrize("lists", LISTS)
def test_empty_lists_and_lists_with_none(optional_sum: Any, lists: Callable[..., tuple[Any, Any]]) -> None:
    def reference(a: Tensor, y: Tensor, b: Tensor) -> Tensor:
        xs, zs = lists(a, b)
        return weighted_sum(xs) * y + weighted_sum(zs, 3.0) + 0 * (a + b)

    def ours(a: Tensor, y: Tensor, b: Tensor) -> Tensor:
        xs, zs = lists(a, b)
        return optional_sum(xs, y, zs) + 0 * (a + b)

    inputs = torch.rand(2), torch.rand(2), torch.rand(2)
    assert torch.allclose(ours(*inputs), reference(*inputs))
    assert_same_gradients(ours, reference, *inputs)
    assert_same_gradients(torch.compile(ours, backend="aot_eager", fullgraph=True), reference, *inputs)
    wanted = torch.func.grad(lambda *inputs: reference(*inputs).sum(), argnums=(0, 1, 2))(*inputs)
    got = torch.func.grad(lambda *inputs: ours(*inputs).sum(), argnums=(0, 1, 2))(*inputs)
    for a, b in zip(got, wanted, strict=True):
        assert torch.allclose(a, b)


@pytest.mark.parametrize("hint", [Optional[List[Tensor]], Optional[List[Optional[Tensor]]]])
@pytest.mark.parametrize("ys", [lambda a, b: None, lambda a, b: [], lambda a, b: [a, b], lambda a, b: (b,)])
def test_optional_lists(registry: Registry, ns: str, hint: Any, ys: Callable[..., Any]) -> None:
    def total(x: Tensor, ys: Any = None) -> Tensor:
        return x * (1 if ys is None else 2) + sum(ys or ())

    total.__annotations__["ys"] = hint

    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * (1 if ctx.n is None else 2), None if ctx.n is None else [grad] * ctx.n

    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.n = None if inputs[1] is None else len(inputs[1])

    op = registry.custom_op(f"{ns}::total", total, mutates_args=())
    op.register_fake(lambda x, ys: torch.empty_like(x))
    op.register_autograd(backward, setup_context=setup_context)
    inputs = torch.rand(2), torch.rand(2), torch.rand(2)

    def reference(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return total(x, ys(a, b)) + 0 * (a + b)

    def ours(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return op(x, ys(a, b)) + 0 * (a + b)

    assert_same_gradients(ours, reference, *inputs)
    assert_same_gradients(torch.compile(ours, fullgraph=True), reference, *inputs)
    assert set(customops.opcheck(op, (leaf(1.0, 2.0), ys(leaf(1.0, 3.0), torch.rand(2)))).values()) == {"SUCCESS"}
    op.register_autocast("cpu", torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert op(inputs[0], ys(*inputs[1:])).dtype == torch.bfloat16


def split_fn(x: Tensor, n: int = 2) -> List[Tensor]:
    return [x[i] * (i + 1) for i in range(n)]


@pytest.fixture
def split(registry: Registry, ns: str) -> Any:
    op = registry.custom_op(f"{ns}::split", split_fn, mutates_args=())
    op.register_fake(lambda x, n: [torch.empty_like(x[i]) for i in range(n)])
    return op


@pytest.mark.parametrize("trailing", [True, False])
def test_a_list_of_outputs(split: Any, trailing: bool) -> None:
    # 55: the gradients come as one list, and the same freedom holds for what backward returns.
    seen: list[Any] = []

    def backward(ctx: Any, grads: Any) -> Any:
        seen.append((type(grads), len(grads), ctx.needs_input_grad))
        rows = [grad * (i + 1) for i, grad in enumerate(grads)]
        gradient = torch.stack(rows + [torch.zeros(3)] * (4 - len(grads)))
        return (gradient, None) if trailing else gradient

    split.register_autograd(backward)
    x = torch.rand(4, 3)
    assert_same_gradients(lambda x: torch.stack(split(x)), lambda x: torch.stack(split_fn(x)), x)
    assert_same_gradients(lambda x: split(x)[1], lambda x: split_fn(x)[1], x)  # one of two is used
    assert seen == [(list, 2, (True,))] * 2
    if trailing:
        assert_same_gradients(lambda x: torch.stack(split(x, 3)), lambda x: torch.stack(split_fn(x, 3)), x)
        assert seen[2:] == [(list, 3, (True, False))]
    assert all(y.requires_grad for y in split(x.clone().requires_grad_()))


def test_an_empty_list_of_outputs(split: Any) -> None:
    split.register_autograd(lambda ctx, grads: None)
    assert split(torch.rand(4, 3, requires_grad=True), 0) == []


def test_lists_beside_other_outputs(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::op", mutates_args=())
    def op(xs: List[Tensor], scale: float) -> Tuple[List[Tensor], Tensor, int, List[Tensor]]:
        return [x * scale for x in xs], xs[0] * 5, len(xs), []

    seen: list[Any] = []

    def backward(ctx: Any, grads: Any, grad: Tensor, number: Any, none: Any) -> Any:
        seen.append((len(grads), number, none))
        first, *rest = [g * ctx.scale for g in grads]
        return [first + grad * 5, *rest], None

    op.register_autograd(backward, setup_context=lambda ctx, inputs, output: setattr(ctx, "scale", inputs[1]))
    x, y = leaf(1.0, 2.0), leaf(3.0, 4.0)
    products, five, number, empty = op([x, y], 3.0)
    assert [p.tolist() for p in products] == [[3.0, 6.0], [9.0, 12.0]]
    assert (number, empty) == (2, [])
    (products[0].sum() + products[1].sum() * 2 + five.sum()).backward()
    assert x.grad is not None and y.grad is not None  # noqa: PT018
    assert (x.grad.tolist(), y.grad.tolist()) == ([8.0, 8.0], [6.0, 6.0])
    assert seen == [(2, None, [])]


# Outputs --------------------------------------------------------------------------------------------------------------


def stats_fn(x: Tensor) -> Tuple[Tensor, int, Tensor, float, bool]:
    return x * 2, x.numel(), x.argsort(), x.sum().item(), bool((x > 0).all())


@pytest.fixture
def stats(registry: Registry, ns: str) -> Any:
    return registry.custom_op(f"{ns}::stats", stats_fn, mutates_args=())


def test_outputs_that_are_no_tensors(stats: Any) -> None:
    seen: list[Any] = []

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.number = output[1]
        seen.append(tuple(map(type, output)))

    def backward(ctx: Any, *grads: Any) -> Any:
        seen.append([None if g is None else g.dtype for g in grads])
        return grads[0] * 2 * ctx.number

    stats.register_autograd(backward, setup_context=setup_context)
    x = leaf(3.0, 1.0)
    doubled, number, order, total, positive = stats(x)
    assert (doubled.tolist(), number, order.tolist(), total, positive) == ([6.0, 2.0], 2, [1, 0], 4.0, True)
    assert [type(v) for v in (number, total, positive)] == [int, float, bool]
    assert doubled.requires_grad
    assert not order.requires_grad
    doubled.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [4.0, 4.0]
    assert seen[0] == (Tensor, int, Tensor, float, bool)
    assert seen[1] == [torch.float32, None, torch.int64, None, None]  # zeros, as in torch


def test_outputs_that_are_no_tensors_under_transforms_and_compile(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::op", mutates_args=())
    def op(x: Tensor) -> Tuple[Tensor, int, Tensor, float, bool]:
        return x**3, x.numel(), x.argsort(), 1.5, True

    op.register_fake(lambda x: (torch.empty_like(x), x.numel(), x.new_empty(x.shape, dtype=torch.int64), 1.5, True))
    op.register_autograd(
        lambda ctx, *grads: grads[0] * 3 * ctx.saved_tensors[0] ** 2,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )

    def ours(x: Tensor) -> Tensor:
        cube, n, order, half, flag = op(x)
        return cube[order] * n * half * flag

    def reference(x: Tensor) -> Tensor:
        return (x**3)[x.argsort()] * x.numel() * 1.5

    x = torch.tensor([3.0, 1.0, 2.0])
    for transform in torch.func.jacrev, lambda f: torch.func.jacrev(torch.func.jacrev(f)):
        torch.testing.assert_close(transform(lambda x: ours(x).sum())(x), transform(lambda x: reference(x).sum())(x))
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True, dynamic=True)
    for inputs in x, torch.tensor([5.0, 4.0]):
        assert_same_gradients(compiled, reference, inputs)


def test_only_numbers_come_out(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::op", mutates_args=())
    def total(x: Tensor) -> float:
        return float(x.sum())

    total.register_autograd(lambda ctx, grad: None)
    value = total(leaf(1.0, 2.0))
    assert (type(value), value) == (float, 3.0)


def test_a_tuple_of_one_stays_one(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::op", mutates_args=())
    def op(x: Tensor) -> Tuple[Tensor]:
        return (x * 2,)

    op.register_autograd(lambda ctx, grad: grad * 2)
    result = op(leaf(1.0))
    assert isinstance(result, tuple)
    assert len(result) == 1
    assert slope(lambda x: op(x)[0]) == 2.0


def test_outputs_without_use_get_zeros(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::op", mutates_args=())
    def op(x: Tensor) -> Tuple[Tensor, Tensor]:
        return x * 2, x.sum() * 3

    seen: list[Any] = []
    op.register_autograd(lambda ctx, g, h: (seen.append((g, h)), g * 2 + h * 3)[1])
    x = leaf(1.0, 2.0)
    op(x)[0].sum().backward()
    op(x)[1].backward()
    assert [(g.tolist(), h.tolist()) for g, h in seen] == [([1.0, 1.0], 0.0), ([0.0, 0.0], 1.0)]
    assert x.grad is not None
    assert x.grad.tolist() == [5.0, 5.0]
    # ... or None, on request, as in autograd.Function.
    seen.clear()
    op.register_autograd(
        lambda ctx, g, h: (seen.append((g, h)), g * 2)[1],
        setup_context=lambda ctx, inputs, output: ctx.set_materialize_grads(False),
    )
    op(x)[0].sum().backward()
    assert seen[0][1] is None


def test_an_output_marked_as_not_differentiable(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::op", mutates_args=())
    def op(x: Tensor) -> Tuple[Tensor, Tensor]:
        return x * 2, x * 3

    op.register_autograd(
        lambda ctx, g, h: g * 2, setup_context=lambda ctx, inputs, output: ctx.mark_non_differentiable(output[1])
    )
    x = leaf(1.0)
    first, second = op(x)
    assert (first.requires_grad, second.requires_grad) == (True, False)
    first.backward()
    assert x.grad is not None
    assert x.grad.item() == 2.0


def test_integer_inputs_have_no_gradient(registry: Registry, ns: str) -> None:
    @registry.custom_op(f"{ns}::take", mutates_args=())
    def take(x: Tensor, index: Tensor) -> Tensor:
        return x[index]

    def backward(ctx: Any, grad: Tensor) -> Any:
        (index,) = ctx.saved_tensors
        assert ctx.needs_input_grad == (True, False)
        return torch.zeros(ctx.n).index_add(0, index, grad), None

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.n = inputs[0].numel()
        ctx.save_for_backward(inputs[1])

    take.register_autograd(backward, setup_context=setup_context)
    assert_same_gradients(take, lambda x, i: x[i], torch.rand(4), torch.tensor([2, 0, 2]))


# The ctx --------------------------------------------------------------------------------------------------------------


def test_metadata_of_the_user_survives(double: Any) -> None:
    # 56
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx._pt_metadata = 3

    double.register_autograd(lambda ctx, grad: grad * ctx._pt_metadata, setup_context=setup_context)
    assert slope(double) == 3.0


def exp_fn(x: Tensor) -> Tensor:
    return torch.from_numpy(np.asarray(np.exp(x.numpy(force=True))))


@pytest.fixture
def exp(registry: Registry, ns: str) -> Any:
    """Saves its output."""
    op = registry.custom_op(f"{ns}::exp", exp_fn, mutates_args=())
    op.register_fake(torch.empty_like)
    op.register_autograd(
        lambda ctx, grad: grad * ctx.saved_tensors[0],
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
    )
    return op


def test_an_output_can_be_saved(exp: Any) -> None:
    x = torch.rand(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(exp, (x,))
    assert torch.autograd.gradgradcheck(exp, (x,))


def test_a_saved_tensor_that_is_written_is_noticed(exp: Any, product: Any) -> None:
    y = exp(leaf(1.0))
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    x, weight = leaf(1.0), torch.ones(1)
    z = product(x, weight)
    weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward()


def test_nothing_keeps_the_graph_alive(product: Any, exp: Any) -> None:
    gc.collect()
    gc.disable()
    try:
        for op in lambda x: product(x, x), exp:
            x = torch.rand(3, requires_grad=True) * 1
            y = op(x)
            references = weakref.ref(x), weakref.ref(y.grad_fn)
            y.sum().backward()
            del x, y
            assert [reference() for reference in references] == [None, None]
    finally:
        gc.enable()


# Modes and engines of eager autograd ----------------------------------------------------------------------------------


def test_values_and_gradients_are_those_of_the_plain_function(product: Any) -> None:
    for x, y in [
        (torch.rand(3), torch.rand(3)),
        (torch.rand(2, 3).t(), torch.rand(3, 2)),
        (torch.rand(0), torch.rand(0)),
        (torch.tensor(2.0), torch.tensor(3.0)),
    ]:
        assert torch.allclose(product(x, y), plain(x, y))
        assert_same_gradients(product, plain, x, y)
        assert_same_gradients(lambda x, y=y: product(x, y), lambda x, y=y: plain(x, y), x)
        assert_same_gradients(lambda y, x=x: product(x, y), lambda y, x=x: plain(x, y), y)


@slow_vmap
def test_gradcheck_of_all_orders(product: Any) -> None:
    inputs = [torch.rand(3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradcheck(product, inputs, check_batched_grad=True, check_undefined_grad=False)
    assert torch.autograd.gradgradcheck(product, inputs, check_batched_grad=True, check_undefined_grad=False)


def test_gradcheck_of_complex_inputs(registry: Registry, ns: str) -> None:
    square = registry.custom_op(f"{ns}::square", lambda z: z * z, mutates_args=(), schema="(Tensor z) -> Tensor")
    square.register_autograd(
        lambda ctx, grad: grad * 2 * ctx.saved_tensors[0].conj(),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
    )
    z = torch.rand(3, dtype=torch.complex128, requires_grad=True)
    assert torch.autograd.gradcheck(square, (z,))
    assert torch.autograd.gradgradcheck(square, (z,))


def test_lazily_conjugated_inputs(registry: Registry, ns: str) -> None:
    square = registry.custom_op(f"{ns}::square", lambda z: z * z, mutates_args=(), schema="(Tensor z) -> Tensor")
    square.register_autograd(
        lambda ctx, grad: grad * 2 * ctx.saved_tensors[0].conj(),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
    )
    z = torch.rand(3, dtype=torch.complex64)
    for view in lambda z: z.conj(), lambda z: z.conj().imag:
        got, wanted = (torch.view_as_real(z).clone().requires_grad_() for _ in range(2))
        square(view(torch.view_as_complex(got))).abs().sum().backward()
        (view(torch.view_as_complex(wanted)) ** 2).abs().sum().backward()
        assert got.grad is not None
        assert torch.allclose(got.grad, wanted.grad)


def test_no_grad_and_inference_mode(product: Any) -> None:
    x, y = leaf(1.0, 2.0), leaf(3.0, 4.0)
    with torch.no_grad():
        z = product(x, y)
        assert not z.requires_grad
        with torch.enable_grad():
            assert product(x, y).requires_grad
    with torch.inference_mode():
        z = product(x, y)
        assert z.is_inference()
        assert not z.requires_grad
        assert z.tolist() == [3.0, 16.0]
    with torch.set_grad_enabled(False):
        assert not product(x, y).requires_grad


def test_backward_twice(product: Any) -> None:
    x, y = leaf(1.0, 2.0), leaf(3.0, 4.0)
    z = product(x, y).sum()
    z.backward(retain_graph=True)
    z.backward()
    for got, wanted in zip([x.grad, y.grad], gradients(lambda x, y: 2 * plain(x, y).sum(), x, y), strict=True):
        assert torch.equal(got, wanted)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        z.backward()


def test_create_graph(product: Any) -> None:
    x, y = torch.rand(3, requires_grad=True), torch.rand(3, requires_grad=True)

    def mixed(f: Callable[..., Tensor]) -> list[Tensor]:
        """All second derivatives of a function of `f` which has more than a constant Hessian."""
        first = torch.autograd.grad((f(f(x, y), y) ** 2).sum(), (x, y), create_graph=True)
        return [d for g in first for d in torch.autograd.grad((g**2).sum(), (x, y), retain_graph=True)]

    for got, wanted in zip(mixed(product), mixed(plain), strict=True):
        assert torch.allclose(got, wanted)


def test_once_differentiable(double: Any) -> None:
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.from_numpy(grad.numpy() * 2)

    double.register_autograd(backward)
    x = torch.ones(2, requires_grad=True)
    (gradient,) = torch.autograd.grad((double(x) ** 2).sum(), x, create_graph=True)
    assert gradient.tolist() == [8.0, 8.0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_hooks(product: Any) -> None:
    events: list[str] = []
    x, y = leaf(1.0), leaf(2.0)
    x.register_hook(lambda g: (events.append("x"), g * 10)[1])
    z = product(x, y)
    z.register_hook(lambda g: (events.append("z"), g * 2)[1])
    z.grad_fn.register_prehook(lambda grads: events.append("before"))
    z.grad_fn.register_hook(lambda ins, outs: events.append(f"after {len([g for g in ins if g is not None])}"))
    x.register_post_accumulate_grad_hook(lambda t: events.append(f"accumulated {t.grad.item()}"))
    z.backward()
    assert events[:2] in (["z", "before"], ["before", "z"])
    assert events[2:] == ["after 2", "x", "accumulated 80.0"]
    assert y.grad is not None
    assert y.grad.item() == 2.0


def test_saved_tensor_hooks(product: Any, exp: Any) -> None:
    packed: list[tuple[int, ...]] = []

    def pack(t: Tensor) -> Any:
        packed.append(tuple(t.shape))
        return t.numpy(force=True)

    x, y = torch.rand(3), torch.rand(3)
    with torch.autograd.graph.saved_tensors_hooks(pack, torch.from_numpy):
        assert_same_gradients(lambda x, y: product(exp(x), y), lambda x, y: plain(x.exp(), y), x, y)
        assert packed[:3] == [(3,)] * 3
    with torch.autograd.graph.save_on_cpu():
        assert_same_gradients(product, plain, x, y)
    with torch.autograd.graph.disable_saved_tensors_hooks("not now"):
        assert_same_gradients(product, plain, x, y)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(product: Any, exp: Any, reentrant: bool) -> None:
    calls = []
    exp.register_kernel("cpu", lambda x: calls.append(1) or exp_fn(x))

    def block(f: Any, g: Any) -> Callable[..., Tensor]:
        return lambda x, y: f(g(f(x, y)), y)

    ours = block(product, exp)
    assert_same_gradients(
        lambda x, y: checkpoint(ours, x, y, use_reentrant=reentrant),
        block(plain, torch.exp),
        torch.rand(3),
        torch.rand(3),
    )
    assert len(calls) == 2  # once more in backward


def test_threads(product: Any, exp: Any, combine: Any) -> None:
    combine.register_autograd(lambda ctx, grad: [grad * f for f in ctx.factors], setup_context=combine_setup)
    barrier = threading.Barrier(4)
    failures: list[BaseException] = []

    def ours(x: Tensor, y: Tensor) -> Tensor:
        return product(exp(x), combine([x, y]))

    def reference(x: Tensor, y: Tensor) -> Tensor:
        return plain(x.exp(), weighted_sum([x, y]))

    def work(seed: int) -> None:
        try:
            generator = torch.Generator().manual_seed(seed)
            barrier.wait()
            for _ in range(30):
                x, y = torch.rand(2, 2, generator=generator)
                assert_same_gradients(ours, reference, x, y)
                with torch.no_grad():
                    assert not ours(x.clone().requires_grad_(), y).requires_grad
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_formulas_that_call_ops(registry: Registry, ns: str) -> None:
    """sin and cos in numpy, each the derivative of the other."""
    sin = registry.custom_op(f"{ns}::sin", lambda x: torch.from_numpy(np.sin(x.numpy(force=True))),
                             mutates_args=(), schema="(Tensor x) -> Tensor")  # fmt: skip
    cos = registry.custom_op(f"{ns}::cos", lambda x: torch.from_numpy(np.cos(x.numpy(force=True))),
                             mutates_args=(), schema="(Tensor x) -> Tensor")  # fmt: skip
    for op, derivative in (sin, cos), (cos, lambda x: -sin(x)):
        op.register_autograd(
            lambda ctx, grad, derivative=derivative: grad * derivative(*ctx.saved_tensors),
            setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
        )
        op.register_fake(torch.empty_like)
    x = torch.rand(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(sin, (x,))
    assert torch.autograd.gradgradcheck(sin, (x,))

    def nth(f: Callable[[Tensor], Tensor], order: int) -> Callable[[Tensor], Tensor]:
        for _ in range(order):
            f = torch.func.grad(lambda x, f=f: f(x).sum())
        return f

    x = x.detach()
    for order in range(1, 5):
        assert torch.allclose(nth(lambda x: sin(x) ** 3, order)(x), nth(lambda x: torch.sin(x) ** 3, order)(x))
    compiled = torch.compile(lambda x: sin(x) ** 3, backend="aot_eager", fullgraph=True)
    assert_same_gradients(compiled, lambda x: torch.sin(x) ** 3, x)


def test_ops_inside_kernels(registry: Registry, ns: str, exp: Any) -> None:
    """A kernel that calls another op: that one's formula does not count, the outer one's does."""

    @registry.custom_op(f"{ns}::outer", mutates_args=())
    def outer(x: Tensor) -> Tensor:
        return exp(x) * 2

    outer.register_autograd(
        lambda ctx, grad: grad * ctx.saved_tensors[0],
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
    )
    assert_same_gradients(outer, lambda x: torch.exp(x) * 2, torch.rand(3))


# torch.func -----------------------------------------------------------------------------------------------------------


def quintic(f: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    """A scalar function of one tensor in which every derivative of `f` shows."""
    return lambda x: (f(f(x, x + 1), x) * f(x, x)).sum()


X = torch.tensor([0.5, 1.0, 1.5])

TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor]], Any]] = {
    "grad": lambda f: torch.func.grad(f)(X),
    "grad_and_value": lambda f: torch.func.grad_and_value(f)(X),
    "vjp": lambda f: torch.func.vjp(f, X)[1](torch.tensor(2.0)),
    "jacrev": lambda f: torch.func.jacrev(f)(X),
    "vmap(grad)": lambda f: torch.vmap(torch.func.grad(f))(X[:, None]),
    "grad(vmap)": lambda f: torch.func.grad(lambda x: torch.vmap(f)(x[:, None]).sum())(X),
    "grad(grad)": lambda f: torch.func.grad(lambda x: torch.func.grad(f)(x).sum())(X),
    "grad of squared grad": lambda f: torch.func.grad(lambda x: (torch.func.grad(f)(x) ** 2).sum())(X),
    "jacrev(jacrev)": lambda f: torch.func.jacrev(torch.func.jacrev(f))(X),
    "jacrev(grad)": lambda f: torch.func.jacrev(torch.func.grad(f))(X),
    "third order": lambda f: torch.func.jacrev(torch.func.jacrev(torch.func.jacrev(f)))(X),
    "vmap(grad(grad))": lambda f: torch.vmap(torch.func.grad(torch.func.grad(f)))(X),
    "grad under no_grad": lambda f: torch.no_grad()(torch.func.grad(f))(X),
    "grad(grad) under no_grad": lambda f: torch.no_grad()(torch.func.grad(lambda x: torch.func.grad(f)(x).sum()))(X),
    "backward of grad": lambda f: gradients(torch.func.grad(f), X),
    "backward of jacrev": lambda f: gradients(torch.func.jacrev(f), X),
    "functional.hessian": lambda f: torch.autograd.functional.hessian(f, X),
    "functional.jacobian": lambda f: torch.autograd.functional.jacobian(f, X),
    "functional_call": lambda f: torch.func.grad(lambda p: torch.func.functional_call(Scaled(f), p, X))({"scale": X}),
}  # fmt: skip


class Scaled(torch.nn.Module):
    def __init__(self, f: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(3))
        self.f = f

    def forward(self, x: Tensor) -> Tensor:
        return self.f(x * self.scale)


@slow_vmap
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms(product: Any, transform: Callable[..., Any]) -> None:
    torch.testing.assert_close(transform(quintic(product)), transform(quintic(plain)))


@slow_vmap
def test_transforms_of_an_op_that_saves_its_output(exp: Any) -> None:
    for name in "grad", "jacrev(jacrev)", "third order", "vmap(grad(grad))":
        transform = TRANSFORMS[name]
        torch.testing.assert_close(transform(lambda x: (exp(x) ** 2).sum()), transform(lambda x: (x.exp() ** 2).sum()))


@slow_vmap
def test_transforms_of_lists(combine: Any, split: Any) -> None:
    combine.register_autograd(lambda ctx, grad: [grad * f for f in ctx.factors], setup_context=combine_setup)
    split.register_autograd(lambda ctx, grads: torch.stack([g * (i + 1) for i, g in enumerate(grads)]))

    def ours(x: Tensor) -> Tensor:
        return (combine(split(x * x)) ** 2).sum()

    def reference(x: Tensor) -> Tensor:
        return (weighted_sum(split_fn(x * x)) ** 2).sum()

    x = torch.rand(2, 2)
    for transform in torch.func.grad, torch.func.jacrev, lambda f: torch.func.jacrev(torch.func.jacrev(f)):
        torch.testing.assert_close(transform(ours)(x), transform(reference)(x))


def test_no_grad_inside_a_transform(product: Any) -> None:
    def detached(f: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
        def inner(x: Tensor) -> Tensor:
            with torch.no_grad():
                constant = f(x, x)
            return (f(x, x) * constant).sum()

        return inner

    for transform in torch.func.grad, torch.func.jacrev, lambda f: torch.func.jacrev(torch.func.jacrev(f)):
        torch.testing.assert_close(transform(detached(product))(X), transform(detached(plain))(X))


def test_setup_context_runs_once_for_each_level(product: Any) -> None:
    needed = []

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        needed.append(ctx.needs_input_grad)
        product_setup(ctx, inputs, output)

    product.register_autograd(product_backward, setup_context=setup_context)
    torch.func.grad(lambda x: product(x, X).sum())(X)
    assert needed == [(True, False)]
    needed.clear()
    torch.func.grad(lambda y: torch.func.grad(lambda x: product(x, y).sum())(X).sum())(X)
    assert sorted(needed) == [(False, True), (True, False)]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_transforms(product: Any, backend: str) -> None:
    f, reference = quintic(product), quintic(plain)
    for transform in torch.func.grad, lambda f: torch.func.grad(lambda x: (torch.func.grad(f)(x) ** 2).sum()):
        compiled = torch.compile(lambda x, t=transform: t(f)(x), backend=backend, fullgraph=True)
        torch.testing.assert_close(compiled(X), transform(reference)(X))


# Forward mode: there is no rule for it, which must show ---------------------------------------------------------------


def dual_level(f: Callable[..., Tensor]) -> Any:
    with fwAD.dual_level():
        return fwAD.unpack_dual(f(fwAD.make_dual(X, X), X)).tangent


def dual_level_second_argument(f: Callable[..., Tensor]) -> Any:
    with fwAD.dual_level():
        return fwAD.unpack_dual(f(X, fwAD.make_dual(X, X))).tangent


def dual_level_requires_grad(f: Callable[..., Tensor]) -> Any:
    with fwAD.dual_level():
        return fwAD.unpack_dual(f(fwAD.make_dual(X.clone().requires_grad_(), X), X)).tangent


def dual_level_other_requires_grad(f: Callable[..., Tensor]) -> Any:
    with fwAD.dual_level():
        return fwAD.unpack_dual(f(fwAD.make_dual(X, X), X.clone().requires_grad_())).tangent


def dual_level_no_grad(f: Callable[..., Tensor]) -> Any:
    with fwAD.dual_level(), torch.no_grad():
        return fwAD.unpack_dual(f(fwAD.make_dual(X, X), X)).tangent


FORWARD_MODE: dict[str, Callable[[Callable[..., Tensor]], Any]] = {
    "jvp": lambda f: torch.func.jvp(f, (X, X), (X, X))[1],
    "jvp of one": lambda f: torch.func.jvp(lambda x: f(x, X), (X,), (X,))[1],
    "jvp of the other": lambda f: torch.func.jvp(lambda y: f(X, y), (X,), (X,))[1],
    "jacfwd": lambda f: torch.func.jacfwd(f)(X, X),
    "hessian": lambda f: torch.func.hessian(quintic(f))(X),
    "jacfwd(grad)": lambda f: torch.func.jacfwd(torch.func.grad(quintic(f)))(X),
    "jvp(grad)": lambda f: torch.func.jvp(torch.func.grad(quintic(f)), (X,), (X,))[1],
    "grad(jvp)": lambda f: torch.func.grad(lambda x: torch.func.jvp(quintic(f), (x,), (X,))[1])(X),
    "jvp(jvp)": lambda f: torch.func.jvp(lambda x: torch.func.jvp(quintic(f), (x,), (X,))[1], (X,), (X,))[1],
    "jvp(vmap)": lambda f: torch.func.jvp(torch.vmap(f), (X, X), (X, X))[1],
    "vmap(jvp)": lambda f: torch.vmap(lambda x: torch.func.jvp(quintic(f), (x,), (x,))[1])(X[:, None]),
    "linearize": lambda f: torch.func.linearize(lambda x: f(x, X), X)[1](X),
    "dual numbers": dual_level,
    "dual second argument": dual_level_second_argument,
    "dual that requires grad": dual_level_requires_grad,
    "dual beside a leaf": dual_level_other_requires_grad,
    "dual under no_grad": dual_level_no_grad,
}  # fmt: skip


@slow_vmap
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
@pytest.mark.parametrize("transform", FORWARD_MODE.values(), ids=FORWARD_MODE)
def test_forward_mode_raises(product: Any, transform: Callable[..., Any]) -> None:
    tangents = transform(plain)
    assert torch.any(torch.stack([t for t in torch.utils._pytree.tree_leaves(tangents)]) != 0)  # the oracle has some
    with pytest.raises(NotImplementedError, match="forward-mode differentiation") as raised:
        transform(product)
    assert isinstance(raised.value, UnsupportedError)
    assert raised.value.op == product._qualname


def test_forward_mode_raises_without_a_formula_too(double: Any) -> None:
    with pytest.raises(NotImplementedError, match="forward-mode differentiation"):
        torch.func.jvp(double, (X,), (X,))


def test_forward_mode_raises_for_a_list(combine: Any) -> None:
    with fwAD.dual_level(), pytest.raises(NotImplementedError, match="forward-mode differentiation"):
        combine([X[:2], fwAD.make_dual(X[:2], X[:2])])
    with pytest.raises(NotImplementedError, match="forward-mode differentiation"):
        torch.func.jacfwd(lambda x: combine([x, x]))(X[:2])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", ["jvp", "jvp of the other", "jacfwd", "dual numbers"])
@slow_vmap
def test_forward_mode_raises_under_compile(product: Any, name: str, backend: str) -> None:
    transform = FORWARD_MODE[name]
    with pytest.raises(Exception, match="forward-mode differentiation"):
        torch.compile(lambda: transform(product), backend=backend)()
    torch._dynamo.reset()
    with pytest.raises(Exception, match="forward-mode differentiation"):
        transform(torch.compile(product, backend=backend))


def test_forward_mode_elsewhere_is_left_alone(product: Any) -> None:
    with fwAD.dual_level():
        dual = fwAD.make_dual(X, X)
        constant = product(X, X)
        assert torch.equal(constant, plain(X, X))
        assert fwAD.unpack_dual(constant).tangent is None
        assert torch.equal(fwAD.unpack_dual(dual * constant).tangent, X * constant)
    _, tangent = torch.func.jvp(lambda x: x * product(X, X), (X,), (X,))
    assert torch.equal(tangent, X * plain(X, X))
    # Reverse mode, while a forward-mode level is open.
    with fwAD.dual_level():
        assert_same_gradients(product, plain, X, X)


def test_forward_mode_in_inference_mode_is_that_of_torch(product: Any) -> None:
    with torch.inference_mode():
        assert dual_level(plain) is None  # tangents are not tracked
        assert dual_level(product) is None


# Tracing --------------------------------------------------------------------------------------------------------------


def training_step(f: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], tuple[Tensor, ...]]:
    def step(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        loss = (f(f(x, weight), weight) - 1).pow(2).sum()
        (gradient,) = torch.autograd.grad(loss, weight)
        return loss.detach(), weight.detach() - 0.1 * gradient

    return step


@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
def test_make_fx_of_a_training_step(product: Any, ns: str, tracing_mode: str) -> None:
    x, weight = torch.rand(3), torch.rand(3, requires_grad=True)
    graph = make_fx(training_step(product), tracing_mode=tracing_mode)(x, weight)
    assert graph.code.count(f"torch.ops.{ns}.product.default") == 2
    torch.testing.assert_close(graph(x, weight), training_step(plain)(x, weight))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "aot_eager_decomp_partition"])
def test_compiled_training(product: Any, backend: str, dynamic: bool) -> None:
    @torch.compile(backend=backend, fullgraph=True, dynamic=dynamic)
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return (product(product(x, weight), weight) - 1).pow(2)

    for n in 3, 4:
        x, weight = torch.rand(n), torch.rand(n)
        assert_same_gradients(forward, lambda x, w: (plain(plain(x, w), w) - 1).pow(2), x, weight)


def test_inductor(product: Any, ns: str) -> None:
    class Model(torch.nn.Module):
        def __init__(self, f: Callable[..., Tensor]) -> None:
            super().__init__()
            self.f = f
            self.linear = torch.nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.f(torch.relu(self.linear(x)), x).sin()

    ours, reference = Model(product), Model(plain)
    reference.load_state_dict(ours.state_dict())
    compiled = torch.compile(ours, fullgraph=True)
    x = torch.rand(5, 3)
    for model in compiled, reference:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).pow(2).sum().backward()
            optimizer.step()
    for got, wanted in zip(ours.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(got, wanted, atol=1e-6)


def test_export_keeps_the_op_and_its_gradient(product: Any, ns: str) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.rand(3))

        def forward(self, x: Tensor) -> Tensor:
            return product(x, self.weight) * 2

    model = Model()
    x = torch.rand(3)
    program = torch.export.export(model, (x,))
    assert next(n.target for n in program.graph.nodes if n.op == "call_function") is product._opoverload
    exported = program.module()
    assert torch.allclose(exported(x), plain(x, model.weight) * 2)
    exported(x).sum().backward()
    (gradient,) = [p.grad for p in exported.parameters()]
    assert torch.allclose(gradient, 2 * x * x)


def test_registering_again_reaches_compiled_functions_after_a_reset(product: Any) -> None:
    compiled = torch.compile(lambda x: product(x, x), backend="aot_eager", fullgraph=True)
    assert_same_gradients(compiled, lambda x: plain(x, x), X)
    product.register_autograd(lambda ctx, grad: (grad * 3, grad * 2))
    torch._dynamo.reset()
    assert_same_gradients(compiled, lambda x: 5 * x, X)


# Subclasses and modes -------------------------------------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    """Notes the ops that reach it, and runs them."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


class Wrapper(Tensor):
    """Holds a tensor, and passes everything on to it."""

    ops: list[Any] = []  # noqa: RUF012

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, requires_grad=inner.requires_grad
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Wrapper({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.ops.append(func)
        args, kwargs = torch.utils._pytree.tree_map_only(Wrapper, lambda w: w.inner, (args, kwargs or {}))
        return torch.utils._pytree.tree_map_only(Tensor, Wrapper, func(*args, **kwargs))


def test_a_dispatch_mode(product: Any) -> None:
    with Recorder() as recorder:
        assert_same_gradients(lambda x, y: product(x, y) * 2, lambda x, y: plain(x, y) * 2, X, X + 1)
    assert recorder.ops.count(product._opoverload) == 1


def test_a_tensor_subclass(product: Any, combine: Any) -> None:
    combine.register_autograd(lambda ctx, grad: [grad * f for f in ctx.factors], setup_context=combine_setup)
    Wrapper.ops.clear()
    x = Wrapper(X[:2].clone()).requires_grad_()
    y = combine([product(x, x * 2), x])
    assert isinstance(y, Wrapper)
    (y * 3).sum().backward()
    assert isinstance(x.grad, Wrapper)
    reference = X[:2].clone().requires_grad_()
    (weighted_sum([plain(reference, reference * 2), reference]) * 3).sum().backward()
    assert reference.grad is not None
    assert torch.allclose(x.grad.inner, reference.grad)
    assert [Wrapper.ops.count(op._opoverload) for op in (product, combine)] == [1, 1]


def test_a_subclass_through_torch_function_alone(product: Any) -> None:
    class Named(Tensor):
        pass

    x = X.as_subclass(Named).clone().requires_grad_()
    y = product(x, x)
    assert isinstance(y, Named)
    y.sum().backward()
    reference = X.clone().requires_grad_()
    plain(reference, reference).sum().backward()
    assert torch.equal(torch.Tensor(x.grad), reference.grad)


def test_parameters(product: Any) -> None:
    weight = torch.nn.Parameter(X.clone())
    product(weight, X).sum().backward()
    assert weight.grad is not None
    assert torch.allclose(weight.grad, 2 * X * X)


@pytest.mark.parametrize("gaps", [(None, "x"), ("x", None), (None, "x", None)])
def test_lists_with_gaps_are_differentiated(registry: Registry, ns: str, gaps: tuple[Any, ...]) -> None:
    def total(xs: List[Optional[Tensor]]) -> Tensor:
        return sum((x * 3 for x in xs if x is not None), torch.zeros(2))

    op = registry.custom_op(f"{ns}::total", total, mutates_args=())
    op.register_autograd(lambda ctx, grad: [grad * 3 if need else None for need in ctx.needs_input_grad[0]])
    x = torch.ones(2, requires_grad=True)
    op([x if gap else None for gap in gaps]).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3.0, 3.0]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_layouts_without_tangents_inside_a_level(registry: Registry, ns: str, layout: torch.layout) -> None:
    op = registry.custom_op(f"{ns}::twice", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor")
    x = torch.eye(2).to_sparse(layout=layout)
    with fwAD.dual_level():
        assert torch.equal(op(x).to_dense(), 2 * torch.eye(2))


def product_by_name(registry: Registry, ns: str, backward: Any) -> Any:
    op = registry.custom_op(
        f"{ns}::product",
        lambda x, y, by: x * y * by,
        mutates_args=(),
        schema="(Tensor x, Tensor y, float by=2.0) -> Tensor",
    )
    op.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:2]))
    return op


@pytest.mark.parametrize("by", [(), (2.0,), (3.0,)])
def test_gradients_by_name(registry: Registry, ns: str, by: tuple[float, ...]) -> None:
    factor = by[0] if by else 2.0
    op = product_by_name(registry, ns, lambda ctx, grad: {"y": grad * ctx.saved_tensors[0] * factor})
    x, y = leaf(1.0, 2.0), leaf(3.0, 4.0)
    assert_same = torch.testing.assert_close
    detached = x.detach()
    assert_same(torch.autograd.grad(op(detached, y, *by).sum(), y), torch.autograd.grad((x * y * factor).sum(), y))
    with pytest.raises(AutogradError, match="None for an argument that needs a gradient") as raised:
        op(x, y, *by).sum().backward()
    assert raised.value.argument == "x"


def test_gradients_by_a_wrong_name(registry: Registry, ns: str) -> None:
    op = product_by_name(registry, ns, lambda ctx, grad: {"x": grad, "z": grad})
    with pytest.raises(AutogradError, match="has the name of no argument that could have a gradient") as caught:
        op(leaf(1.0), leaf(2.0)).backward()
    assert (caught.value.argument, caught.value.expected) == ("z", "x, y, by")


@pytest.mark.parametrize(
    "backward", [lambda ctx, grad: (grad, grad, grad), lambda ctx, grad: {"x": grad, "y": grad, "by": grad}]
)
def test_a_gradient_for_a_number(registry: Registry, ns: str, backward: Any) -> None:
    op = product_by_name(registry, ns, backward)
    with pytest.raises(AutogradError, match="does not fit its input") as caught:
        op(leaf(1.0), leaf(2.0), 3.0).backward()
    assert (caught.value.argument, caught.value.expected) == ("by", "None: the argument is a float")
