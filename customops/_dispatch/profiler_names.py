"""Names of kernels in profiles: ``ns::op[cuda: file.py:12]``, inside what the profiler shows for the op."""

from __future__ import annotations

import functools
import os
from typing import Any

from customops import _compat
from customops._dispatch.callbacks import Fn
from customops._dispatch.current_kernel import CurrentKernel, start, stop
from customops.errors import location_of

__tracebackhide__ = True  # pytest leaves the frames out


def name_in_profiles(current: CurrentKernel) -> str:
    """``mylib::scale[cuda: ops.py:12]``; "default" stands for the kernel of all devices without one of their own."""
    place = os.path.basename(location_of(current.registered))
    return f"{current.op}[{current.device_type or 'default'}: {place}]"


class _Naming:
    """Observes while a profiler records."""

    def around_kernel(self, current: CurrentKernel, fn: Fn) -> Fn:
        named_range, name = _compat.profiling.named_range, name_in_profiles(current)

        @functools.wraps(fn, updated=())
        def named(*args: Any, **kwargs: Any) -> Any:
            with named_range(name):
                return fn(*args, **kwargs)

        return named

    def around_call(self, op: Any, fn: Fn) -> Fn:
        return fn


_naming = _Naming()


def profiling_changed(is_on: bool) -> None:
    """A profiler started or stopped."""
    stop(_naming)  # two may be started, of which torch knows one
    if is_on:
        start(_naming)
