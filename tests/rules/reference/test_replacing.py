"""Registrations in every order: hand-written rules precede given rules, and a new reference replaces all of the old."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.covers import every
from torch import Tensor

from customops import CustomOpDef, Registry
from customops._dispatch.registrations import Registration
from customops.errors import AutogradError, MissingFakeError

Op = CustomOpDef[..., Tensor]


def times(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * factor


def fake(size: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x.new_empty(size)


def reference(factor: float, size: int, *gives: Any) -> Callable[[Op], object]:
    """Return a registration of a function with a gradient of `factor`, whose results have `size` elements on meta."""

    def plain(x: Tensor) -> Tensor:
        return x.new_empty(size) if x.is_meta else x * factor

    return lambda op: op.register_reference(plain, gives=gives)


#: Five kinds of registrations.
REGISTER: dict[str, Callable[[Op], object]] = {
    "fake": lambda op: op.register_fake(fake(5)),
    "backward": lambda op: op.register_autograd(lambda ctx, grad: grad * 7),
    "vmap": lambda op: op.register_vmap(lambda info, in_dims, x: (x * 11, in_dims[0])),
    "first": reference(2, 2, "fake", "gradients", "vmap", "flops"),
    "second": reference(3, 3, "gradients", "kernel", "export"),
}
#: What each gives: for each rule, the number by which `observed` tells it.
GIVES: dict[str, dict[str, float]] = {
    "fake": {"fake": 5},
    "backward": {"gradient": 7},
    "vmap": {"vmap": 11},
    "first": {"fake": 2, "gradient": 2, "vmap": 2},
    "second": {"gradient": 3, "kernel": 3, "export": 3},
}


def expected(registered: list[str]) -> dict[str, float | None]:
    """Return the rules that apply: of the newest reference, then of hand-written rules, which take precedence."""
    found: dict[str, float | None] = dict.fromkeys(("fake", "gradient", "vmap", "kernel", "export"))
    references = [kind for kind in registered if kind in ("first", "second")]
    for kind in [*references[-1:], *(kind for kind in registered if kind not in references)]:
        found |= GIVES[kind]
    return found


def observed(op: Op) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    x = torch.ones(4, requires_grad=True)
    try:
        found["fake"] = len(op(torch.empty(4, device="meta")))
    except MissingFakeError:
        found["fake"] = None
    kernels = [rule for rule in op.describe().rules if rule.kind == "kernel" and rule.origin == "derived"]
    found["kernel"] = op._rules.kernel.values[None, "default"].fn(x.detach())[0].item() if kernels else None
    by_export = op._rules._others and next(
        (rule.values.get("export") for kind, rule in op._rules._others.items() if kind.__name__ == "DecompositionRule"),
        None,
    )
    found["export"] = by_export[0].fn(x.detach())[0].item() if by_export else None
    try:
        found["gradient"] = torch.autograd.grad(op(x).sum(), x)[0][0].item()
    except AutogradError:
        found["gradient"] = None
    registered = op._rules.vmap.registered
    found["vmap"] = None if registered is None else torch.vmap(op)(torch.ones(2, 4))[0, 0].item()
    return found


@pytest.mark.parametrize("order", every(6, map(" ".join, itertools.permutations(REGISTER))))
def test_every_order_of_five_kinds(registry: Registry, ns: str, order: str) -> None:
    """Register in one order and unregister in every other: the rules are those that the remaining kinds give."""
    op: Op = registry.custom_op(f"{ns}::f", times(1), schema="(Tensor x) -> Tensor", device_types="cpu")
    made: dict[str, list[Registration]] = {}
    registered: list[str] = []
    kinds = order.split()
    for kind in kinds:
        with pytest.MonkeyPatch.context() as patch:
            made[kind] = []
            patch.setattr(
                "customops._op.register.record_in_scope", lambda owner, each, k=kind: not made[k].append(each)
            )
            REGISTER[kind](op)
        registered.append(kind)
        assert observed(op) == expected(registered), registered
    for kind in kinds[1:] + kinds[:1]:
        for registration in made[kind]:
            registration.unregister()
        registered.remove(kind)
        assert observed(op) == expected(registered), registered


def test_a_reference_that_cannot_give_its_rules_leaves_the_old_one(registry: Registry, ns: str) -> None:
    def two(x: Tensor) -> Tensor:
        return x * 2

    def write(x: Tensor) -> None:
        x.mul_(2)

    op = registry.custom_op(f"{ns}::f", write, mutates_args={"x"})
    op.register_reference(two, gives="gradients")
    with pytest.raises(Exception, match="decomposition"):
        op.register_reference(lambda x: x * 3, gives=("gradients", "inductor"))
    assert op.reference is two
    x = torch.ones(3, requires_grad=True)
    y = x * 1
    op(y)
    assert torch.autograd.grad(y.sum(), x)[0].tolist() == [2, 2, 2]
