"""The state in which kernels run: autocast off, nothing recorded, no dispatch key left out."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from customops._torch.autograd import forward_ad
from customops._torch.dispatcher import device_key, exclude_keys, has_kernel, key_set, transforms_active
from customops._torch.library import followed
from customops._torch.tensors import tree_leaves

_C: Any = torch._C

__tracebackhide__ = True  # pytest leaves the frames out


#: Without: a kernel computes other numbers below a mode, or under autocast
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
    """Call a formula or a rule, in which ``torch.autocast`` still switches autocast on.

    While functorch runs an op, each level further out has autocast as it was when the op was called. So it gets nothing
    to cast there: the dtype is that of the arguments.
    """
    with contextlib.ExitStack() as stack:
        if transforms_active() and autocast_is_on():
            tensors = [x for x in tree_leaves([args, kwargs]) if isinstance(x, torch.Tensor)]
            dtypes = (x.dtype for x in tensors if x.is_floating_point() and x.dtype != torch.float64)
            dtype = next(dtypes, torch.float32)
            for device in {x.device.type for x in tensors if torch.amp.is_autocast_available(x.device.type)}:
                stack.callback(torch.set_autocast_dtype, device, torch.get_autocast_dtype(device))
                torch.set_autocast_dtype(device, dtype)
        stack.enter_context(exclude_keys(_excluded_in_plain_state()))
        return fn(*args, **kwargs)


def call_view_plainly(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`call_plainly` for a view: torch's own kernel, above, excludes keys that have to be."""
    with torch.no_grad():
        return call_without_autocast(fn, *args, **kwargs)


def casting_key(qualname: str, tensors: Iterable[torch.Tensor]) -> Any:
    """The first key at which autocast would cast the inputs of an op now, as a key set, or None."""
    for device in {tensor.device.type for tensor in tensors}:
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            key = "Autocast" + device_key(device)
            if has_kernel(qualname, key):
                return key_set(key)
    return None


# ----------------------------------------------------------------------------------------------------------------------
# One look at all tensors of a call and at the state of the thread: is this call like an earlier one?

#: Without: no op can be called without the dispatcher
_guards: Any = torch._C._dynamo.guards
#: ``look(*tensors)``: is the call of the kind that the look was made of? It wants as many tensors.
Look = Callable[..., bool]


def look_of(tensors: Sequence[Tensor]) -> Look | None:
    """A look for calls like the one with these tensors, which it does not keep; None if it would not know them again.

    It compares the type, dtype, device, number of dimensions and dispatch keys of each tensor, to the keys adding those
    that are active in the thread, and taking away those that are excluded there: so it sees dispatch modes, transforms,
    functionalization, tracing and inference mode. It compares ``requires_grad``, too, but does not look at gradient
    mode. Autocast must be off, for all devices. Sizes and strides may be any.

    It must not be called with a nested tensor: looking for strides of one ends the process.
    """
    if autocast_is_on():
        return None
    if all(tensor.is_cpu for tensor in tensors):
        look = _guard(tensors)
        if torch.accelerator.is_available():
            look = functools.partial(_look_without_autocast, look)
    else:  # the keys of a tensor say whether autocast is on for its device
        on_cpu = torch.empty(0)
        look = functools.partial(_guard([on_cpu, *tensors]), on_cpu)
    return look if look(*tensors) else None


def _guard(tensors: Sequence[Tensor]) -> Look:
    dims = [[None] * tensor.dim() for tensor in tensors]
    look: Look = _guards.TensorGuards(*tensors, dynamic_dims_sizes=dims, dynamic_dims_strides=dims).check
    return look


def _look_without_autocast(look: Look, *tensors: Tensor) -> bool:
    return not autocast_is_on() and look(*tensors)


# Profilers: when one starts and stops, and named ranges in what it records --------------------------------------------

_profiler: Any = torch.autograd.profiler

#: Without: kernels have no names in profiles
#: Context manager: a range of this name, for all profilers of torch, NVTX and ITT (``emit_nvtx``, ``emit_itt``).
named_range: Callable[[str], Any] = torch._C._profiler._RecordFunctionFast


def when_profiling(changed: Callable[[bool], object]) -> None:
    """Call ``changed(True)`` when a profiler of torch starts, and ``changed(False)`` when it stops.

    torch has no hook for it, so the two functions that all of them call are wrapped.
    """
    for name, profiles in (("_run_on_profiler_start", True), ("_run_on_profiler_stop", False)):
        if hasattr(_profiler, name):  # else kernels have no names in profiles
            setattr(_profiler, name, followed(getattr(_profiler, name), functools.partial(changed, profiles)))
