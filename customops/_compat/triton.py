"""Triton kernels, and how torch's compilers see a launch. Nothing here loads Triton; who has a kernel has loaded it."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_C: Any = torch._C
_MODES: Any = _C._TorchDispatchModeKey


def is_traced(tensors: Sequence[torch.Tensor]) -> bool:
    """Does a compiler record what runs now? Then a launch has to go into its graph."""
    keys = (_MODES.PROXY, _MODES.FUNCTIONAL)
    if _C._len_torch_dispatch_stack() and any(_C._get_dispatch_mode(key) is not None for key in keys):
        return True
    return any(_C._dispatch_keys(tensor).has("Python") and not isinstance(tensor, FakeTensor) for tensor in tensors)


def is_fake(tensors: Sequence[torch.Tensor]) -> bool:
    """Is there no memory to run on?"""
    if _C._len_torch_dispatch_stack() and _C._get_dispatch_mode(_MODES.FAKE) is not None:
        return True
    return any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors)


def capture(kernel: Any, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Put a launch into the graph that is being traced: a call of torch's higher-order op for Triton kernels.

    That knows no heuristics outside of an autotuner. Here they choose their values while tracing.
    """
    heuristics = sys.modules["triton.runtime.autotuner"].Heuristics
    while isinstance(kernel, heuristics):
        for name, choose in kernel.values.items():
            kwargs = {**kwargs, name: choose({**dict(zip(kernel.arg_names, args, strict=False)), **kwargs})}
        kernel = kernel.fn
    wrapper = importlib.import_module("torch._higher_order_ops.triton_kernel_wrap").TraceableTritonKernelWrapper
    wrapper(kernel, None, None)[grid](*args, **kwargs)


def keeps_ops() -> bool:
    """Is this an export, which keeps such ops whole?"""
    config = importlib.import_module("torch._functorch.config")
    return not getattr(config, "decompose_custom_triton_ops", True)


def is_kernel(value: Any) -> bool:
    """Was `value` made by ``triton.jit``, ``triton.autotune`` or ``triton.heuristics``?"""
    jit = sys.modules.get("triton.runtime.jit")
    return jit is not None and isinstance(value, jit.KernelInterface)


def is_interpreted(kernel: Any) -> bool:
    """Does Triton's interpreter run the kernel?"""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    while interpreter is not None and is_kernel(kernel):
        if isinstance(kernel, interpreter.InterpretedFunction):
            return True
        kernel = getattr(kernel, "fn", None)  # of an autotuner, or of heuristics
    return False


def interprets() -> bool:
    """Does Triton's interpreter run what is decorated now? (``TRITON_INTERPRET=1``)"""
    triton = sys.modules.get("triton")
    return triton is not None and bool(triton.knobs.runtime.interpret)


def runs_on_cpu() -> bool:
    """Does Triton compile for the CPU here?"""
    try:
        return bool(sys.modules["triton"].runtime.driver.active.get_current_target().backend == "cpu")
    except RuntimeError:  # there is no driver
        return False


def parts_of(value: Any) -> Iterable[Any] | None:
    """What a kernel does, for a digest of it, or None for what is no kernel."""
    if not is_kernel(value):
        return None
    if isinstance(value, sys.modules["triton.runtime.jit"].JITFunction):
        return (value.cache_key, value.params and [(p.name, p.is_constexpr, str(p.annotation)) for p in value.params])
    names = ("fn", "arg_names", "keys", "values", "configs", "kwargs")  # of an autotuner, heuristics, the interpreter
    return [_plain(getattr(value, name)) for name in names if hasattr(value, name)]


def _plain(value: Any) -> Any:
    """A list of Triton's Configs as what it says."""
    if isinstance(value, list) and all(hasattr(each, "all_kwargs") for each in value):
        return [(each.all_kwargs(), each.pre_hook) for each in value]
    return value


@functools.cache
def _guard_of(device_type: str) -> Any:
    return getattr(torch.get_device_module(device_type), "device", None)


def on_device(device: torch.device) -> Any:
    """A context in which `device` is the current one, or None if it is already."""
    module = torch.get_device_module(device.type)
    current = getattr(module, "current_device", None)
    if device.index is None or current is None or current() == device.index:
        return None
    guard = _guard_of(device.type)
    return guard(device) if guard is not None else None
