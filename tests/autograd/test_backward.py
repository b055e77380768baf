"""What setup_context and backward are given, and what backward may return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

import pytest
import torch
from helpers.formulas import times
from helpers.tensors import leaf, slope
from torch import Tensor

from customops import Registry
from customops.errors import AutogradError, CallbackError

# Keyword-only arguments and defaults ----------------------------------------------------------------------------------


@pytest.mark.parity(50, 53)
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


@pytest.mark.parity(50)
def test_setup_context_by_keyword_needs_the_keywords(scale: Any) -> None:
    with pytest.raises(CallbackError, match="setup_context does not fit"):
        scale.register_autograd(times(3), setup_context=lambda ctx, inputs, output: None)


# When setup_context runs, and ops without a formula -------------------------------------------------------------------


@pytest.mark.parity(51)
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


def test_grad_mode_is_off_in_kernels_and_setup_context(double: Any) -> None:
    modes = []
    double.register_kernel("cpu", lambda x: modes.append(torch.is_grad_enabled()) or x * 2)
    double.register_autograd(times(2), setup_context=lambda ctx, inputs, output: modes.append(torch.is_grad_enabled()))
    double(leaf(1.0))
    assert modes == [False, False]


@pytest.mark.parity(52)
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


# What backward returns ------------------------------------------------------------------------------------------------


@pytest.fixture
def power(registry: Registry, ns: str) -> Any:
    """``x * a * b`` with defaults, without a formula."""

    @registry.custom_op(f"{ns}::power", mutates_args=())
    def power(x: Tensor, a: float = 2.0, b: int = 3, c: Optional[Tensor] = None) -> Tensor:
        return x * a * b if c is None else x * a * b * c

    return power


@pytest.mark.parity(53)
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


@pytest.mark.parity(53)
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


@pytest.mark.parity(54)
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
    assert "test_backward.py" in str(raised.value.where)


@pytest.mark.parity(54)
def test_the_number_of_gradients_of_an_op_with_one_input(double: Any) -> None:
    double.register_autograd(lambda ctx, grad: ())
    with pytest.raises(RuntimeError, match=r"incorrect number of gradients \(expected 1, got 0\)"):
        double(leaf(1.0)).backward()


@pytest.mark.parametrize(
    ("returned", "argument", "got", "expected"),
    [
        (lambda g: (1.0, None, None, None), "x", "float", "a Tensor or None"),
        (lambda g: (g, "a", None, None), "a", "str", "None: the argument is a float"),
        (lambda g: (g, None, [g], None), "b", "list of 1 (Tensor)", "None: the argument is a SymInt"),
        (lambda g: (g, None, None, (g, g)), "c", "tuple of 2 (Tensor, Tensor)", "a Tensor or None"),
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


@pytest.mark.parametrize("more", ["Tensor d, Tensor e", "Tensor[] more"])
@pytest.mark.parametrize("i", range(5))
def test_one_of_five_tensors_requires_grad(registry: Registry, ns: str, i: int, more: str) -> None:
    weights, is_list = (2.0, 3.0, 5.0, 7.0, 11.0), more == "Tensor[] more"

    def weighted(*tensors: Any) -> Tensor:
        flat = (*tensors[:3], *tensors[3]) if is_list else tensors
        return torch.stack([w * x for w, x in zip(weights, flat, strict=True)]).sum()

    def backward(ctx: Any, grad: Tensor) -> Any:
        grads = [w * grad for w in weights]
        return (*grads[:3], grads[3:]) if is_list else tuple(grads)

    schema = f"(Tensor a, Tensor b, Tensor c, {more}) -> Tensor"
    op = registry.custom_op(f"{ns}::weighted", weighted, mutates_args=(), schema=schema)
    op.register_autograd(backward)
    for _ in range(2):  # the second call takes the fast path
        tensors = [torch.ones(()).requires_grad_(k == i) for k in range(5)]
        result = op(*tensors[:3], tensors[3:]) if is_list else op(*tensors)
        result.backward()
        found = [None if x.grad is None else x.grad.item() for x in tensors]
        assert found == [weights[i] if k == i else None for k in range(5)]
