"""test_vmap: rules that differ from a loop, rules that fail, and rules that refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.libraries import Ops

from customops import Registry, custom_op
from customops.checks import NotExercised, Trial, vmap
from customops.checks._trial import resolve
from customops.errors import CheckError

aten = torch.ops.aten


def front(tensor: torch.Tensor, dim: int | None, size: int) -> torch.Tensor:
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def binary(define: Ops, rule: Callable[..., Any]) -> Trial:
    op = define("f(Tensor x, Tensor y) -> Tensor", torch.mul, key="CompositeExplicitAutograd")
    torch.library.register_vmap(op, rule, lib=define.lib)
    return Trial(op, (torch.randn(4, 3), torch.randn(4, 3)))


def right(info: Any, in_dims: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    return front(x, in_dims[0], info.batch_size) * front(y, in_dims[1], info.batch_size), 0


def forgets_dims(info: Any, in_dims: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    return x * y, 0


def forgets_unbatched(info: Any, in_dims: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    return x.movedim(in_dims[0], 0) * y.movedim(in_dims[1], 0), 0


def wrong_out_dim(info: Any, in_dims: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    return right(info, in_dims, x, y)[0], in_dims[0] or 0


def squeezes(info: Any, in_dims: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    result = right(info, in_dims, x, y)[0]
    return (result[0] if info.batch_size == 1 else result), (None if info.batch_size == 1 else 0)


def swaps(info: Any, in_dims: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    return right(info, in_dims, x, y)[0].flip(0), 0


@pytest.mark.parametrize("rule", [forgets_dims, forgets_unbatched, wrong_out_dim, swaps])
def test_faults(define: Ops, rule: Callable[..., Any]) -> None:
    with pytest.raises(CheckError, match=r"vmap gives another result|the vmap rule fails") as caught:
        vmap.check(binary(define, rule))
    assert "in_dims" in str(caught.value.fix)


def refuses(info: Any, in_dims: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    if None in in_dims:
        raise ValueError("both or none")
    return right(info, in_dims, x, y)


def not_implemented(info: Any, in_dims: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    raise NotImplementedError


@pytest.mark.parametrize("rule", [right, refuses, squeezes])
def test_right_rules(define: Ops, rule: Callable[..., Any]) -> None:
    vmap.check(binary(define, rule))


def test_a_rule_that_refuses_everything(define: Ops) -> None:
    with pytest.raises(NotExercised, match="refuses"):
        vmap.check(binary(define, not_implemented))


def test_no_rule(define: Ops) -> None:
    with pytest.raises(NotExercised, match="no vmap rule"):
        vmap.check(Trial(define("f(Tensor x) -> Tensor", torch.clone), (torch.ones(3),)))


@pytest.mark.parametrize(
    ("shift", "is_right"), [(lambda x, d: d % (x.dim() - 1) + 1, True), (lambda x, d: d + 1, False)]
)
def test_a_dimension_as_argument(define: Ops, shift: Callable[..., int], is_right: bool) -> None:
    op = define("f(Tensor x, int dim) -> Tensor", lambda x, dim: x.cumsum(dim), key="CompositeExplicitAutograd")

    def rule(info: Any, in_dims: Any, x: torch.Tensor, dim: int) -> Any:
        x = x.movedim(in_dims[0], 0)
        return x.cumsum(shift(x, dim)), 0

    torch.library.register_vmap(op, rule, lib=define.lib)
    trial = Trial(op, (torch.randn(4, 3), 1))
    if is_right:
        vmap.check(trial)
    else:
        with pytest.raises(CheckError, match="vmap gives another result"):
            vmap.check(trial)


@pytest.mark.parametrize("randomness", ["right", "same", "different"])
def test_randomness(ns: str, randomness: str) -> None:
    @custom_op(f"{ns}::noisy", mutates_args=(), tags=torch.Tag.nondeterministic_seeded)
    def op(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(x.shape)

    @op.register_vmap
    def _(info: Any, in_dims: Any, x: torch.Tensor) -> Any:
        x = front(x, in_dims[0], info.batch_size)
        how = info.randomness if randomness == "right" else randomness
        return (op(x) if how == "different" else x + op(torch.zeros(x.shape[1:]))), 0

    trial = Trial(resolve(op), (torch.zeros(8),))
    if randomness == "right":
        vmap.check(trial)
    else:
        with pytest.raises(CheckError, match="randomness="):
            vmap.check(trial)


@pytest.mark.parametrize("is_right", [True, False])
def test_gradients_of_the_elements(registry: Registry, ns: str, is_right: bool) -> None:
    """The vmap rule of the op is right. Its backward calls another op, whose rule may be wrong."""

    def rule(info: Any, in_dims: Any, grad: torch.Tensor, x: torch.Tensor) -> Any:
        result = 2 * front(grad, in_dims[0], info.batch_size) * front(x, in_dims[1], info.batch_size)
        return result if is_right else result.flip(0), 0

    schema = "(Tensor grad, Tensor x) -> Tensor"
    slope = registry.custom_op(f"{ns}::slope", lambda grad, x: 2 * grad * x, mutates_args=(), schema=schema)
    slope.register_vmap(rule)
    square = registry.custom_op(f"{ns}::square", lambda x: x * x, mutates_args=(), schema="(Tensor x) -> Tensor")
    square.register_vmap("broadcast_all")
    square.register_autograd(
        lambda ctx, grad: slope(grad, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    trial = Trial(square._opoverload, (torch.randn(3, requires_grad=True),))
    if is_right:
        vmap.check(trial)
    else:
        with pytest.raises(CheckError, match="vmap gives another result than a loop: gradients of the elements"):
            vmap.check(trial)


def test_a_batch_of_one_that_is_squeezed(define: Ops) -> None:
    op = define("f(Tensor x) -> Tensor", torch.sum, key="CompositeExplicitAutograd")

    def rule(info: Any, in_dims: Any, x: torch.Tensor) -> Any:
        return x.movedim(in_dims[0], 0).sum(-1).squeeze(), 0

    torch.library.register_vmap(op, rule, lib=define.lib)
    with pytest.raises(CheckError, match="the vmap rule fails: batch of one"):
        vmap.check(Trial(op, (torch.randn(3),)))


@pytest.mark.parametrize("is_right", [True, False])
def test_an_empty_batch(define: Ops, is_right: bool) -> None:
    op = define("f(Tensor x) -> Tensor", torch.sin, key="CompositeExplicitAutograd")

    def rule(info: Any, in_dims: Any, x: torch.Tensor) -> Any:
        x = x.movedim(in_dims[0], 0)
        return (x.sin() if is_right else torch.stack([row.sin() for row in x.unbind()])), 0

    torch.library.register_vmap(op, rule, lib=define.lib)
    trial = Trial(op, (torch.randn(3),))
    vmap.check(trial)
    if is_right:
        vmap.check(trial, empty=True)
    else:
        with pytest.raises(CheckError, match="the vmap rule fails"):
            vmap.check(trial, empty=True)


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.mul.Tensor, (torch.randn(4, 3, requires_grad=True), torch.randn(3))),
        (aten.mm.default, (torch.randn(4, 3), torch.randn(3, 5))),
        (aten.sort.default, (torch.randn(4, 3),)),
        (aten.add_.Tensor, (torch.randn(4, 3), torch.randn(4, 3))),
        (aten.cat.default, ([torch.randn(4, 3), torch.randn(4, 3)],)),
        (aten.index_select.default, (torch.randn(4, 3), 0, torch.tensor([1, 3]))),
        (aten.linalg_inv.default, (torch.randn(3, 3),)),
    ],
)
def test_operators_of_torch(op: Any, args: tuple[Any, ...]) -> None:
    vmap.check(Trial(op, args))
