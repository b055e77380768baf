"""Tests of what older versions of torch cannot do: they say since when it can, and why."""

from __future__ import annotations

import pytest
import torch


def is_before(*version: int) -> bool:
    """Is this torch older than a release? ``is_before(2, 12)``"""
    return bool(torch.__version__ < version)  # type: ignore[operator]  # a TorchVersion


def needs_torch(*version: int, because: str) -> pytest.MarkDecorator:
    """Marks a test that older versions skip: ``needs_torch(2, 12, because="...")``."""
    return pytest.mark.skipif(is_before(*version), reason=_reason(version, because))


def skip_before(*version: int, because: str) -> None:
    """The same, inside a test, for some of its parameters."""
    if is_before(*version):
        pytest.skip(_reason(version, because))


def _reason(version: tuple[int, ...], because: str) -> str:
    return f"needs torch {'.'.join(map(str, version))}: {because}"
