"""Hypothesis strategies for inputs of operators: `arguments` of a call, and `tensors`.

This module needs hypothesis, which is an optional dependency: ``pip install customops[strategies]``.
"""

from __future__ import annotations

try:
    import hypothesis as hypothesis
except ImportError as error:
    raise ImportError(
        "customops.testing.strategies needs hypothesis, which is not installed\n"
        "  fix:      pip install hypothesis, or customops[strategies]"
    ) from error

from customops.testing.strategies._arguments import arguments
from customops.testing.strategies._tensors import LAYOUTS, tensors

__all__ = ["LAYOUTS", "arguments", "tensors"]
