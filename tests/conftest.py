"""Fixtures that keep tests apart: a registry, a namespace, fixed seeds, no stale graphs."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator

import pytest
import torch

import customops

_counter = itertools.count()


def pytest_configure() -> None:
    # Workers share the cores, and sums split over threads need not repeat to the last bit.
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_device() -> Iterator[None]:
    """A device of one's own is registered in a process of its own (`isolated`): it would stay for all other tests."""
    yield
    assert torch._C._get_privateuse1_backend_name() == "privateuseone"


@pytest.fixture(autouse=True)
def _reset_dynamo() -> Iterator[None]:
    """Drop compiled code after a test, if anything has loaded dynamo; do not load it for that."""
    yield
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()


@pytest.fixture
def registry() -> Iterator[customops.Registry]:
    """A fresh registry; its ops are gone after the test."""
    fresh = customops.Registry()
    yield fresh
    fresh.clear()


@pytest.fixture
def ns() -> str:
    """A namespace no other test uses, in this process or a parallel one."""
    return f"t_{next(_counter)}_{os.getpid()}"
