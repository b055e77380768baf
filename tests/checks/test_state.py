"""test_state: calls do not depend on each other, nor on what surrounds them."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.numeric_checks import Finds
from torch import Tensor

import customops
from customops.checks import repeat

aten = torch.ops.aten


@pytest.fixture
def op(registry: customops.Registry, ns: str) -> Finds:
    return Finds(repeat.check_state, registry, ns)


def doubled(x: Tensor) -> Tensor:
    return x * 2


DEPENDS = "results depend on earlier calls"


class Scaled:
    """Divides by a number that it keeps under a key."""

    def __init__(self, key: Any) -> None:
        self.key = key
        self.cache: dict[Any, Tensor] = {}

    def __call__(self, x: Tensor) -> Tensor:
        key = self.key(x)
        if key not in self.cache:
            self.cache[key] = x.abs().max()
        return x / self.cache[key].to(x.dtype)


def kernel_of(scaled: Scaled) -> Callable[[Tensor], Tensor]:
    def f(x: Tensor) -> Tensor:
        return scaled(x)

    return f


DTYPES = (torch.float32, torch.float64)

KEYS = {
    "shape": lambda x: x.shape,
    "shape and dtype": lambda x: (x.shape, x.dtype),
    "address": lambda x: x.data_ptr(),
    "id": id,
}


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS.keys())
def test_caches_that_do_not_know_the_values(op: Finds, key: Any) -> None:
    op.finds(kernel_of(Scaled(key)), torch.randn(5), match=DEPENDS)


def test_addresses_that_earlier_calls_had(op: Finds) -> None:
    scaled, x = Scaled(torch.Tensor.data_ptr), torch.randn(5)
    before = [x.repeat(count).to(dtype) for count in (1, 2, 3) for dtype in DTYPES for _ in range(3000)]
    for tensor in before:
        scaled(tensor)
    del tensor, before  # the allocator hands these addresses out again
    op.finds(kernel_of(scaled), x, match=DEPENDS)


def test_caches_of_what_depends_on_the_key(op: Finds) -> None:
    tables: dict[Any, Tensor] = {}

    def f(x: Tensor) -> Tensor:
        if x.shape not in tables:
            tables[x.shape] = torch.arange(x.numel()).view(x.shape)
        return x * tables[x.shape].to(x.dtype)

    op.passes(f, torch.randn(5))
    assert tables


def test_counters(op: Finds) -> None:
    last: list[Tensor] = [torch.zeros(())]

    def f(x: Tensor) -> Tensor:
        before, last[0] = last[0], x.sum().detach().clone()
        return x + before.to(x.dtype)

    op.finds(f, torch.randn(5), match=DEPENDS)


def test_a_number_that_is_not_in_the_key(op: Finds) -> None:
    cache: dict[Any, Tensor] = {}

    def f(x: Tensor, factor: float) -> Tensor:
        key = (id(x), x._version)
        if key not in cache:
            cache[key] = x * factor
        return cache[key].clone()

    op.finds(f, torch.randn(5), 0.5, match=DEPENDS)
    op.passes(lambda_scaled, torch.randn(5), 0.5)


def lambda_scaled(x: Tensor, factor: float) -> Tensor:
    return x * factor


def test_buffers_that_are_returned_again(op: Finds) -> None:
    buffers: dict[Any, Tensor] = {}

    def f(x: Tensor) -> Tensor:
        buffer = buffers.setdefault((x.shape, x.dtype), torch.empty_like(x))
        return buffer.copy_(x)

    op.finds(f, torch.randn(5), match="what a call returned is changed by the next call")

    constants: dict[Any, Tensor] = {}

    def constant(x: Tensor) -> Tensor:
        return constants.setdefault((x.shape, x.dtype), torch.ones_like(x))

    op.finds(constant, torch.randn(5), match="two calls return the same memory")


def test_inputs_that_are_kept(op: Finds) -> None:
    kept: list[Tensor] = []

    def f(x: Tensor) -> Tensor:
        for tensor in kept:
            tensor.zero_()
        kept[:] = [x]
        return x * 2

    op.finds(f, torch.randn(5), match="writes to a tensor that an earlier call was given")


def left_dtype(x: Tensor) -> Tensor:
    torch.set_default_dtype(x.dtype)
    return x * 2


def left_threads(x: Tensor) -> Tensor:
    torch.set_num_threads(1)
    return x * 2


def left_deterministic(x: Tensor) -> Tensor:
    torch.use_deterministic_algorithms(True, warn_only=True)
    return x * 2


@pytest.mark.parametrize("f", [left_dtype, left_threads, left_deterministic])
def test_settings_that_are_left_changed(op: Finds, f: Any) -> None:
    before = torch.get_default_dtype(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    op.finds(f, torch.randn(5), match="changes a setting of the program")
    assert before == (
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
    )


def test_seeds(op: Finds) -> None:
    def f(x: Tensor) -> Tensor:
        np.random.seed(0)
        return x + float(np.random.rand())

    op.finds(f, torch.randn(5), match="seeds the random numbers of numpy")

    def own(x: Tensor) -> Tensor:
        return x + float(np.random.default_rng(0).random())

    op.passes(own, torch.randn(5))


def test_the_default_dtype(op: Finds) -> None:
    def f(x: Tensor) -> Tensor:
        return x + torch.zeros(x.shape)

    op.finds(f, torch.randn(5), match="depend on a setting of the program: the default dtype")

    def own(x: Tensor) -> Tensor:
        return (x * torch.rand(x.shape, generator=torch.Generator().manual_seed(0))).to(x.dtype)

    op.passes(own, torch.randn(5))


@pytest.mark.parametrize(
    ("overload", "args"),
    [
        (aten.mul.Tensor, (torch.randn(3), torch.randn(3))),
        (aten.add_.Tensor, (torch.randn(3), torch.randn(3))),
        (aten.zeros_like.default, (torch.randn(3),)),
        (aten.select.int, (torch.randn(3, 4), 0, 1)),
        (aten.index_put_.default, (torch.randn(3), [torch.tensor([1, 2])], torch.randn(2))),
        (aten.linalg_inv.default, (torch.randn(3, 3) + 3 * torch.eye(3),)),
    ],
)
def test_operators_of_torch(op: Finds, overload: Any, args: Any) -> None:
    op.passes(overload, *args)


def test_tensors_that_are_kept(op: Finds) -> None:
    log: list[Tensor] = []

    def logged(x: Tensor) -> Tensor:
        log.append(x)
        return x * 2

    op.finds(logged, torch.randn(3), match="keeps tensors alive")


def test_caches_of_a_fixed_size(op: Finds) -> None:
    recent: collections.deque[Tensor] = collections.deque(maxlen=128)

    def f(x: Tensor) -> Tensor:
        recent.append(x)
        return x * 2

    op.passes(f, torch.randn(3))


def test_an_argument_that_is_unequal_to_itself(op: Finds) -> None:
    """A NaN is no change."""

    def scaled(x: Tensor, by: complex) -> Tensor:
        return x * by.imag

    op.passes(scaled, torch.randn(3), complex(float("nan"), 2.0))
