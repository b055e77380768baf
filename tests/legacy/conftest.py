"""Fixtures that several files of this folder use."""

from __future__ import annotations
