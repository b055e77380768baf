"""Tests of what older versions of torch cannot do."""

from __future__ import annotations

import torch


def is_before(*version: int) -> bool:
    """Is this torch older than a release? ``is_before(2, 14)``"""
    return bool(torch.__version__ < version)  # type: ignore[operator]  # a TorchVersion
