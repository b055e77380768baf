"""Values of every type come through unchanged; metadata, copies, pickles."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from helpers.ops import increment, scale
from torch import Tensor
from torch.testing import assert_close

import customops
from customops import Registry

# Values of every type come through unchanged ------------------------------------------------------------------------


@pytest.mark.parity(13)
@pytest.mark.parametrize("given", [[1, 2], (1, 2), torch.Size([1, 2]), torch.ones(1, 2).shape])
def test_any_sequence_arrives_as_a_list(registry: Registry, ns: str, given: Any) -> None:
    seen = []

    def f(x: Tensor, sizes: Sequence[int]) -> Tensor:
        seen.append(sizes)
        return x.new_zeros(sizes)

    op = registry.custom_op(f"{ns}::f", f, mutates_args=())
    assert op(torch.ones(1), given).shape == (1, 2)
    assert seen == [[1, 2]]
    assert type(seen[0]) is list


@pytest.mark.compile
def test_numpy_in_a_kernel(registry: Registry, ns: str) -> None:
    def sine(x: Tensor) -> Tensor:
        return torch.from_numpy(np.sin(x.numpy()))

    op = registry.custom_op(f"{ns}::sine", sine, mutates_args=(), device_types="cpu")
    op.register_fake(torch.empty_like)
    x = torch.randn(5)
    assert_close(op(x), torch.sin(x))
    assert_close(torch.compile(op, fullgraph=True, backend="aot_eager")(x), torch.sin(x))


# Metadata -------------------------------------------------------------------------------------------------------


def documented(x: Tensor, by: float = 2.0, *, shift: int = 0) -> Tensor:
    """Scale, then shift."""
    return x * by + shift


@pytest.mark.parity(14)
def test_an_op_looks_like_its_function(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::other_name", documented, mutates_args=())
    assert op.__name__ == "documented"
    assert op.__qualname__ == documented.__qualname__  # type: ignore[attr-defined]
    assert op.__module__ == __name__
    assert op.__doc__ == "Scale, then shift."
    assert op.__wrapped__ is documented  # type: ignore[attr-defined]
    assert inspect.signature(op) == inspect.signature(documented)
    assert inspect.unwrap(op) is documented
    assert op.source.startswith(__file__)


class Scaler:
    """A callable object, as kernels compiled ahead of time often are."""

    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.by


@pytest.mark.parametrize("fn", [functools.partial(scale, by=3.0), Scaler(3.0), functools.partial(Scaler(3.0))])
def test_partials_and_callable_objects(registry: Registry, ns: str, fn: Any) -> None:
    op = registry.custom_op(f"{ns}::triple", fn, mutates_args=(), schema="(Tensor x) -> Tensor")
    assert op(torch.tensor(2.0)).item() == 6.0
    assert op.__name__ == "triple"
    assert repr(op) == f"<CustomOpDef({ns}::triple) {op.schema}>"
    assert next(iter(inspect.signature(op).parameters)) == "x"


def test_attributes_of_the_function_do_not_reach_into_the_op(registry: Registry, ns: str) -> None:
    def f(x: Tensor) -> Tensor:
        return x + 1

    f._rules = f._opoverload = f._samples = "mine"  # type: ignore[attr-defined]
    op = registry.custom_op(f"{ns}::f", f, mutates_args=())
    op.register_kernel("cpu", lambda x: x + 2)
    assert op(torch.tensor(1.0)).item() == 3.0
    assert list(op.samples()) == []


def test_a_copy_of_an_op_is_the_op(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::increment", increment, mutates_args=())
    assert copy.copy(op) is op
    assert copy.deepcopy(op) is op
    assert copy.deepcopy([op, {"op": op}]) == [op, {"op": op}]


def test_an_op_is_pickled_by_name(registry: Registry, ns: str) -> None:
    op = customops.custom_op(f"{ns}::increment", increment, mutates_args=())
    try:
        assert pickle.loads(pickle.dumps(op)) is op
        assert pickle.loads(pickle.dumps([op, op])) == [op, op]
    finally:
        op.unregister()


def test_an_op_of_another_registry_is_pickled_by_name(registry: Registry, ns: str) -> None:
    op = registry.custom_op(f"{ns}::increment", increment, mutates_args=())
    assert pickle.loads(pickle.dumps(op)) is op


class Holder(torch.nn.Module):
    def __init__(self, op: Any) -> None:
        super().__init__()
        self.op = op
        self.weight = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.op(x) * self.weight
        return result


@pytest.mark.compile
def test_a_module_may_hold_an_op(registry: Registry, ns: str) -> None:
    module = Holder(registry.custom_op(f"{ns}::increment", increment, mutates_args=()))
    module.op.register_fake(torch.empty_like)
    twin = copy.deepcopy(module)
    assert twin.op is module.op
    assert twin.weight is not module.weight
    assert list(module.state_dict()) == ["weight"]
    x = torch.ones(2)
    for program in (module, twin, torch.compile(module, fullgraph=True, backend="aot_eager")):
        assert_close(program(x), torch.full((2,), 4.0))
    (gradient,) = torch.autograd.grad(twin(x).sum(), twin.weight)
    assert gradient.item() == 4.0
