"""How early an input is tried: with every effort, or only with more."""

from __future__ import annotations

from customops.checks._check import EFFORTS, Effort

QUICK, NORMAL, THOROUGH = range(len(EFFORTS))


def ranks(effort: Effort) -> range:
    """The ranks that are tried with an effort."""
    return range(EFFORTS.index(effort) + 1)
