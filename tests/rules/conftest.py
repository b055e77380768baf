"""Fixtures that several files of this folder use."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.functions import scale_fn

from customops import Registry


@pytest.fixture
def scale(registry: Registry, ns: str) -> Any:
    return registry.custom_op(f"{ns}::scale", scale_fn, mutates_args=())
