"""Fixtures that several files of this folder use."""

from __future__ import annotations

import pytest
from helpers.several import Several

from customops import Registry


@pytest.fixture
def several(registry: Registry, ns: str) -> Several:
    return Several(registry, f"{ns}::f")
