"""Tuning: measure the kernels of an op, store the fastest for each bucket of arguments, and let it run."""

from __future__ import annotations

from customops.tuning._choices import tuned
from customops.tuning._measure import Tuned, autotune, check_tuned

__all__ = ["Tuned", "autotune", "check_tuned", "tuned"]
