"""Gradients of lists of tensors, as arguments and as results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, List, Tuple

import pytest
import torch
from helpers.formulas import assert_same_gradients, combine_setup, split_fn, weighted_sum
from helpers.tensors import leaf
from torch import Tensor

from customops import Registry
from customops.errors import AutogradError

# Lists of tensors -----------------------------------------------------------------------------------------------------


@pytest.mark.parity(55)
@pytest.mark.parametrize("trailing", [True, False])
def test_a_list_of_inputs(combine: Any, trailing: bool) -> None:
    # Needs_input_grad has a list for the list; the None for what was left out may be there or not.
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
        (lambda g: [g], "xs", "a list of 2 gradients", "list of 1 (Tensor)"),
        (lambda g: ([g, g, g], None), "xs", "a list of 2 gradients", "list of 3 (Tensor, Tensor, Tensor)"),
        (lambda g: g, "xs", "a list of 2 gradients", "Tensor"),
        (lambda g: [g, 1.0], "xs[1]", "a Tensor or None", "float"),
        (lambda g: [[g], g], "xs[0]", "a Tensor or None", "list of 1 (Tensor)"),
    ],
)
def test_gradients_that_do_not_fit_a_list(
    combine: Any, returned: Callable[[Tensor], Any], argument: str, expected: str, got: str
) -> None:
    combine.register_autograd(lambda ctx, grad: returned(grad))
    with pytest.raises(AutogradError, match="does not fit its input") as raised:
        combine([leaf(1.0, 2.0), torch.ones(2)]).sum().backward()
    assert (raised.value.argument, raised.value.expected, raised.value.got) == (argument, expected, got)


@pytest.mark.parity(55)
@pytest.mark.parametrize("trailing", [True, False])
def test_a_list_of_outputs(split: Any, trailing: bool) -> None:
    # The gradients come as one list, and the same freedom holds for what backward returns.
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
