"""Fixtures that several files of this folder use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from helpers.libraries import Ops


@pytest.fixture
def define(ns: str) -> Iterator[Ops]:
    ops = Ops(ns)
    yield ops
    ops.lib._destroy()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3)
