"""Fixtures that several files of this folder use."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.generated_kernels import plus

from customops import Registry


@pytest.fixture
def op(registry: Registry, ns: str) -> Any:
    made = registry.custom_op(f"{ns}::f", plus(1), mutates_args=(), schema="(Tensor x) -> Tensor")
    assert made(torch.zeros(1)).item() == 1  # the direct kernel is known from here on
    return made
