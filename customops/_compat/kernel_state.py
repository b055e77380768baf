"""The state in which kernels run: autocast off, nothing recorded, no dispatch key left out."""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Callable
from typing import Any

import torch

from customops._compat.autograd import forward_ad
from customops._compat.dispatch import exclude_keys, key_set

_C: Any = torch._C

__tracebackhide__ = True  # pytest leaves the frames out


#: Is autocast on in this thread, for any device?
autocast_is_on: Callable[[], bool] = _C._is_any_autocast_enabled


def set_deterministic(on: bool, warn_only: bool) -> None:
    """`torch.use_deterministic_algorithms` without what it tells inductor, which it would load."""
    _C._set_deterministic_algorithms(on, warn_only=warn_only)


set_grad_enabled: Callable[[bool], None] = _C._set_grad_enabled


@functools.cache
def _excluded_in_plain_state() -> Any:
    """The keys that are left out in a thread in which nothing is active: those of autocast."""
    with concurrent.futures.ThreadPoolExecutor(1) as fresh:
        return fresh.submit(_C._dispatch_tls_local_exclude_set).result()


def call_plainly(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a kernel as if no mode, transform, autocast or compiler had called its op."""
    return _call_with_excluded(_excluded_in_plain_state(), fn, args, kwargs)


def call_plainly_writing(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The same for an op that writes: where writes are not counted, as below a mode, they are not in the kernel either.

    They were counted above; and there a tensor of inference mode may be written outside of it.
    """
    counting = key_set("ADInplaceOrView") & _C._dispatch_tls_local_exclude_set()
    return _call_with_excluded(_excluded_in_plain_state() | counting, fn, args, kwargs)


def call_plainly_in_trace(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The same for plain torch code that is called while a compiler traces a call of the op.

    AOTAutograd leaves out autograd and `torch.func`, and includes its functionalization, which is not `torch.func`'s.
    """
    included = _C._dispatch_tls_local_include_set().remove(_C.DispatchKey.Functionalize)
    return _call_with_excluded(_excluded_in_plain_state(), fn, args, kwargs, included)


def _call_with_excluded(excluded: Any, fn: Callable[..., Any], args: Any, kwargs: Any, included: Any = None) -> Any:
    with (
        _C._ForceDispatchKeyGuard(_C._dispatch_tls_local_include_set() if included is None else included, excluded),
        forward_ad._set_fwd_grad_enabled(False),
        torch.no_grad(),
    ):
        return fn(*args, **kwargs)


def call_without_autocast(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with exclude_keys(_excluded_in_plain_state()), torch.no_grad():
        return fn(*args, **kwargs)
