"""test_determinism: equal calls have equal results, and randomness is declared."""

from __future__ import annotations

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
    return Finds(repeat.check_determinism, registry, ns)


def doubled(x: Tensor) -> Tensor:
    return x * 2


def noisy(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


def test_random_without_the_tag(op: Finds) -> None:
    error = op.finds(noisy, torch.randn(3), match="results are random, and the operator has no tag that says so")
    assert "nondeterministic_seeded" in str(error.fix)
    op.passes(op.define(noisy, tags=(torch.Tag.nondeterministic_seeded,)), torch.randn(3))


def test_numbers_from_elsewhere(op: Finds) -> None:
    def jittered(x: Tensor) -> Tensor:
        return x + float(np.random.rand())

    tags = (torch.Tag.nondeterministic_seeded,)
    op.finds(op.define(jittered, tags=tags), torch.randn(3), match="the same torch seed have different results")


def test_a_tag_without_randomness(op: Finds) -> None:
    random = {"tags": (torch.Tag.nondeterministic_seeded,)}
    op.finds(op.define(doubled, **random), torch.randn(3), match="results do not depend on torch's seed")


def test_a_generator_of_its_own_with_a_fixed_seed(op: Finds) -> None:
    def rotated(x: Tensor) -> Tensor:
        return x @ torch.randn(3, 3, generator=torch.Generator().manual_seed(1))

    op.passes(rotated, torch.randn(2, 3))


def test_memory_that_was_not_written_is_left_to_its_check(op: Finds) -> None:
    op.has_nothing(aten.empty_like.default, torch.randn(3))


def test_generators(op: Finds, ns: str) -> None:
    lib = torch.library.Library(ns, "FRAGMENT")
    tags = (torch.Tag.nondeterministic_seeded,)
    for name in ("used", "ignored"):
        lib.define(f"{name}(Tensor x, Generator? generator=None) -> Tensor", tags=tags)
    lib.impl("used", lambda x, generator=None: x + torch.rand(x.shape, generator=generator), "CPU")
    lib.impl("ignored", lambda x, generator=None: x + torch.rand(x.shape), "CPU")
    namespace = getattr(torch.ops, ns)
    op.passes(namespace.used.default, torch.randn(3))
    op.finds(namespace.ignored.default, torch.randn(3), match="given a generator depends on torch's default generator")
    lib._destroy()


def test_random_operators_of_torch(op: Finds) -> None:
    op.passes(aten.bernoulli.default, torch.rand(5))
    op.passes(aten.native_dropout.default, torch.rand(5), 0.5, True)
