"""What defining an op costs, in calls, and what ops of one shape share."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

import customops
from customops import Registry
from customops.errors import AliasError

PACKAGE = str(Path(customops.__file__).parent)

#: Calls of functions of the package that a definition of an op and its first call make, and changes of file among them.
MOST_CALLS, MOST_HOPS = 460, 390


def scale(x: Tensor, y: Tensor, by: float) -> Tensor:
    return x * y * by


def define(registry: Registry, name: str) -> Any:
    return registry.custom_op(name, scale, mutates_args=())


def count(fn: Callable[[], object]) -> tuple[int, int]:
    """Calls of functions of the package, and how often one was in another file than what was before it."""
    files: list[str] = []

    def profile(frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith((PACKAGE, "<customops")):
            files.append(file)

    sys.setprofile(profile)
    try:
        fn()
    finally:
        sys.setprofile(None)
    return len(files), sum(one != next_ for one, next_ in itertools.pairwise(files))


def test_a_definition_and_a_first_call_make_few_calls(registry: Registry, ns: str) -> None:
    x = torch.ones(2)
    define(registry, f"{ns}::first")(x, x, 2.0)
    calls, hops = count(lambda: define(registry, f"{ns}::second")(x, x, 2.0))
    assert calls <= MOST_CALLS
    assert hops <= MOST_HOPS


def test_a_spec_is_frozen(registry: Registry, ns: str) -> None:
    op = define(registry, f"{ns}::f")
    with pytest.raises(dataclasses.FrozenInstanceError):
        op._definition.spec.check = "never"


def codes(op: Any) -> list[Any]:
    return [kernel.fn.__code__ for key, kernel in op._definition.newest_kernels().items() if key != "FuncTorchBatched"]


def test_ops_of_one_shape_share_their_generated_code(registry: Registry, ns: str) -> None:
    x = torch.ones(2)
    ops = [define(registry, f"{ns}::f{i}") for i in range(2)]
    for op in ops:
        op(x, x, 2.0)
    first, second = map(codes, ops)
    assert len(first) == 2
    assert all(one is other for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("check", ["always", "first"])
def test_errors_name_the_op_also_where_the_code_is_shared(registry: Registry, ns: str, check: Any) -> None:
    def same(x: Tensor) -> Tensor:
        return x

    for name in (f"{ns}::f", f"{ns}::g"):
        op = registry.custom_op(name, same, mutates_args=(), check=check)
        with pytest.raises(AliasError, match=name):
            op(torch.ones(1))


def test_defaults_that_are_equal_but_not_the_same_are_not_shared(registry: Registry, ns: str) -> None:
    seen: list[Any] = []

    def kernel(x: Tensor, k: Any = None) -> Tensor:
        seen.append(k)
        return x.clone()

    for i, default in enumerate(["1", "1.0", "True"]):
        schema = f"(Tensor x, Scalar k={default}) -> Tensor"
        registry.custom_op(f"{ns}::f{i}", kernel, mutates_args=(), schema=schema)(torch.ones(1))
    assert [repr(k) for k in seen] == [repr(k) for k in _given(registry, ns)]


def _given(registry: Registry, ns: str) -> list[Any]:
    return [registry[f"{ns}::f{i}"].schema.arguments[1].default for i in range(3)]


def test_a_gradient_of_one_op_is_not_that_of_another(registry: Registry, ns: str) -> None:
    x = torch.ones(2, requires_grad=True)
    for i in (1, 2):
        op = define(registry, f"{ns}::f{i}")
        op.register_autograd(lambda ctx, grad, i=i: (grad * i, None, None))
        (grad,) = torch.autograd.grad(op(x, x.detach(), 2.0).sum(), x)
        assert grad.tolist() == [i, i]
