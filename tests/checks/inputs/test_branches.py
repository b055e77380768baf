"""Inputs for which the code of an op takes a branch that it took for no other; and sizes that go together."""

from __future__ import annotations

import sys
from typing import Any, Union

import torch
from torch import Tensor

import customops
from customops import Registry
from customops.checks._trial import Trial
from customops.checks.inputs import Branches, derive, probe
from customops.checks.inputs.jumps import jumps_of


def scaled(x: Tensor, alpha: float = 1.0, causal: bool = False, block: int = 4) -> Tensor:
    if causal and x.shape[-1] > 2 * block and alpha != 1.0:
        return x * alpha * alpha
    return x * alpha


def plain(x: Tensor, alpha: float = 1.0, causal: bool = False, block: int = 4) -> Tensor:
    return x * alpha


def test_three_conditions_at_once(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::scaled", scaled, mutates_args=())
    op.register_fake(lambda x, *_: torch.empty_like(x))
    sample = (torch.randn(3, 5), 1.0, False, 4)
    assert customops.check(op, [sample], reference=plain, effort="quick").passed
    failure = customops.check(op, [sample], reference=plain).failures[0]
    assert failure.check == "test_kernels"
    assert "causal=True" in failure.input
    assert "alpha=" in failure.input


def choose(x: Tensor, flag: bool) -> Tensor:
    return x * 2 if flag else x * 3  # one line


def test_what_was_taken(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::choose", choose, mutates_args=())
    trial = Trial(op._opoverload, (torch.randn(3), True))
    branches = Branches(trial)
    before = sys.gettrace()
    with branches.recorded():
        trial.run()
    assert branches.count == 1
    assert not branches.is_complete
    with branches.recorded():
        trial.with_arguments(flag=False).run()
    assert branches.is_complete
    assert sys.gettrace() is before
    trial.run()  # not recorded
    assert branches.count == 2


IS_FAST = False


def made(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return x.clone() if dtype is None else x.to(dtype)


def careful(x: Tensor, n: int) -> Tensor:
    if n > 7:
        raise ValueError("n may be 7 at most")
    if IS_FAST and n > 5:
        return x * 3
    assert x.dim() == 1
    with torch.no_grad():
        return made(x * n if isinstance(n, int) else x)


def test_ways_that_no_accepted_input_goes(registry: Registry, ns: str) -> None:
    """They end in an exception, or are for a flag of the module, or for None or a type that no argument has."""
    op = registry.custom_op(f"{ns}::careful", careful, mutates_args=())
    assert Branches(Trial(op._opoverload, (torch.randn(3), 2))).is_complete


def caught(x: Tensor, n: int) -> Tensor:
    try:
        if n > 7:
            raise ValueError("too many")
    except ValueError:
        return x * 8
    except KeyError:
        raise RuntimeError("no such key") from None
    return x * n


def test_an_exception_that_is_caught_is_a_way(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::caught", caught, mutates_args=())
    trial = Trial(op._opoverload, (torch.randn(3), 2))
    branches = Branches(trial)
    assert sorted(dict(jumps_of(caught, False, False))[caught.__code__].values()) == [1, 2]
    for n in (2, 9):
        assert not branches.is_complete
        with branches.recorded():
            trial.with_arguments(n=n).run()
    assert branches.is_complete


def of_optional(x: Tensor, scale: float | None = None, n: int = 1) -> Tensor:
    return x * n if scale is None else x * scale


def test_an_argument_that_may_be_none(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::of_optional", of_optional, mutates_args=())
    assert not Branches(Trial(op._opoverload, (torch.randn(3),))).is_complete


def of_either(x: Tensor, scale: Union[Tensor, float]) -> Tensor:
    return x * scale if isinstance(scale, float) else x + scale


def test_an_argument_of_two_types(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::of_either", of_either, mutates_args=())
    args, kwargs = op.lower(torch.randn(3), 2.0)
    assert not Branches(Trial(op._opoverload, args, kwargs)).is_complete


def in_groups(x: Tensor, weight: Tensor) -> Tensor:
    torch._check(x.shape[-1] % 8 == 0, lambda: "a multiple of 8 is needed")
    torch._check(weight.shape[0] == 2 * x.shape[-1], lambda: "a weight twice as long is needed")
    return torch.cat([x, x], -1) * weight


def labels_accepted(op: Any, *args: Any) -> list[str]:
    outcomes: dict[str, bool] = {}
    cases = derive(Trial(op._opoverload, args), effort="normal", outcomes=outcomes)
    probed = probe(cases, at_most=60, outcomes=outcomes)
    return [case.label for case in probed.accepted if case.is_named]


def test_sizes_that_go_together(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::in_groups", in_groups, mutates_args=())
    op.register_fake(in_groups)
    found = labels_accepted(op, torch.randn(3, 16), torch.randn(32))
    assert {"sizes: 16 to 24, 32 to 48", "sizes: 16 to 40, 32 to 80"} <= {*found}


def test_sizes_that_need_no_care(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::scaled", scaled, mutates_args=())
    op.register_fake(lambda x, *_: torch.empty_like(x))
    assert not [label for label in labels_accepted(op, torch.randn(3, 16)) if label == "sizes: 16 to 24"]
