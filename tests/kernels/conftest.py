"""Fixtures that several files of this folder use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.several import Several

from customops import Registry
from customops._dispatch import preference


@pytest.fixture(autouse=True)
def nothing_waits() -> Iterator[None]:
    """What one test prefers of ops that it has not is not said in another."""
    yield
    preference.waiting.clear()


@pytest.fixture
def several(registry: Registry, ns: str) -> Several:
    return Several(registry, f"{ns}::f")
