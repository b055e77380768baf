"""Profilers: when one starts and stops, and named ranges in what it records."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from customops._compat.late import followed

_profiler: Any = torch.autograd.profiler

#: Context manager: a range of this name, for all profilers of torch, NVTX and ITT (``emit_nvtx``, ``emit_itt``).
named_range: Callable[[str], Any] = torch._C._profiler._RecordFunctionFast


def when_profiling(changed: Callable[[bool], object]) -> None:
    """Call ``changed(True)`` when a profiler of torch starts, and ``changed(False)`` when it stops.

    torch has no hook for it, so the two functions that all of them call are wrapped.
    """
    for name, profiles in (("_run_on_profiler_start", True), ("_run_on_profiler_stop", False)):
        if hasattr(_profiler, name):  # else kernels have no names in profiles: `customops doctor` says so
            setattr(_profiler, name, followed(getattr(_profiler, name), functools.partial(changed, profiles)))
