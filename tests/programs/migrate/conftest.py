"""The helper that a file is about, and how to register by hand."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
from helpers.migration import ROOT, forget, load
from torch.library import Library

import customops


@pytest.fixture(scope="module")
def by_hand() -> Iterator[ModuleType]:
    module = load(ROOT / "tests" / "programs" / "migrate" / "by_hand.py")
    yield module
    forget(module)


@pytest.fixture(scope="module")
def helpers(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """The module of ``examples/migrate`` that the file is named after; its ops, and those of the tests, go with it."""
    name = request.path.stem.removeprefix("test_")
    with customops.default_registry.scope():
        module = load(ROOT / "examples" / "migrate" / f"from_{name}.py")
        yield module
    forget(module)


@pytest.fixture
def hand(ns: str) -> Iterator[Library]:
    """The library for what is registered by hand."""
    library = Library(f"{ns}_hand", "FRAGMENT")
    yield library
    library._destroy()
