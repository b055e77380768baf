"""How long a call takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

_ROUNDS = 9  #: of which the median counts: what disturbs the machine disturbs few of them


def synchronize() -> None:
    """Wait for the accelerator, if there is one: what was launched there may still run."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def seconds_per_call(fn: Callable[[], Any], seconds: float = 0.1) -> float:
    """The time of a call of `fn`, as the median of rounds that take `seconds` together. It is called at least once."""
    fn()
    synchronize()
    count, taken = 1, _time(fn, 1)
    while taken < seconds / _ROUNDS and count < 1_000_000:
        count = max(count + 1, min(count * 10, int(count * seconds / _ROUNDS / max(taken, 1e-9))))
        taken = _time(fn, count)
    if taken > seconds:
        return taken / count
    return statistics.median([taken, *(_time(fn, count) for _ in range(_ROUNDS - 1))]) / count


def _time(fn: Callable[[], Any], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        fn()
    synchronize()
    return time.perf_counter() - start


def in_words(seconds: float) -> str:
    """``12.3 us``."""
    for limit, factor, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms")):
        if seconds < limit:
            return f"{seconds * factor:.3g} {unit}" if seconds * factor < 1000 else f"{seconds * factor:.0f} {unit}"
    return f"{seconds:.3g} s"
