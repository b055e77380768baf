"""Dispatch keys and key sets, and the dispatch state of the current thread."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, cast

import torch

_C: Any = torch._C

__tracebackhide__ = True  # pytest leaves the frames out


#: Without: no kernel can be registered or called
DispatchKey: Any = _C.DispatchKey
DispatchKeySet: Any = _C.DispatchKeySet
#: Keys below Autograd, and below ADInplaceOrView: ``keyset & after_autograd`` is where a kernel redispatches to.
after_autograd: Any = _C._after_autograd_keyset
after_adinplaceorview: Any = _C._after_ADInplaceOrView_keyset
#: Guard object: while it lives, dispatch starts below the autograd keys (``with below_autograd():``).
below_autograd: Any = _C._AutoDispatchBelowAutograd
#: Dispatch key of a device type: "cpu" -> "CPU" (RuntimeError listing the device types torch knows).
device_key: Callable[[str], str] = _C._dispatch_key_for_device
#: Is a text the name of a dispatch key?
is_dispatch_key: Callable[[str], Any] = _C._parse_dispatch_key
#: Has the dispatcher an op of this name, or kernels that wait for one?
is_known: Callable[[str], bool] = _C._dispatch_has_kernel
#: ``has_kernel(qualname, key)``: is a kernel registered at exactly this dispatch key?
has_kernel: Callable[[str, str], bool] = _C._dispatch_has_kernel_for_dispatch_key
#: ``computed_kernel(qualname, key)``: what the dispatcher would run at `key` now; has ``call_boxed(keyset, *args)``.
computed_kernel: Callable[[str, str], Any] = _C._dispatch_get_computed_kernel_for_dispatch_key
#: Context manager: dispatch as if none of the keys (a DispatchKeySet) were there.
exclude_keys: Any = _C._ExcludeDispatchKeyGuard


def is_device_type(text: str) -> bool:
    try:
        device_key(text)
    except RuntimeError:
        return False
    return True


def device_of_key(key: str) -> str | None:
    """The device type of a dense backend: "CPU" -> "cpu"; None for other dispatch keys."""
    if not hasattr(DispatchKey, f"Autograd{key}") or key in ("Other", "NestedTensor", "Meta"):
        return None
    return cast(str, _C._get_privateuse1_backend_name()) if key == "PrivateUse1" else key.lower()


def key_set(key: str) -> Any:
    return DispatchKeySet(getattr(DispatchKey, key))


#: Without: modes and transforms around a call are not seen
#: Is a dispatch key left out in this thread?
is_excluded: Callable[[Any], bool] = _C._dispatch_tls_is_dispatch_key_excluded
is_torch_function_mode_enabled: Callable[[], bool] = _C._is_torch_function_mode_enabled
#: Context manager in which no ``__torch_function__`` is asked, of modes or of subclasses.
without_torch_function: Callable[[], Any] = _C.DisableTorchFunction
#: Context manager in which no ``__torch_dispatch__`` is asked.
without_torch_dispatch: Callable[[], Any] = _C._DisableTorchDispatch
#: The module whose ``_is_profiler_enabled`` says whether a profiler records, in whatever thread.
profiler: Any = torch.autograd.profiler
#: How many dispatch modes are active in this thread?
mode_count: Callable[[], int] = _C._len_torch_dispatch_stack
#: The innermost functorch transform that is running, or None.
innermost_transform: Callable[[], Any] = _C._functorch.peek_interpreter_stack
#: Is a functorch transform running?
transforms_active: Callable[[], bool] = _C._are_functorch_transforms_active


#: Without: no kernel can be registered or called
@functools.cache  # torch looks for the name of a key among those of all keys
def plain_backend(raw_keyset: int, writes: bool) -> str | None:
    """The key of the one dense device that a key set at Autograd is for, or None if it holds anything else.

    Keys that have no part in an op are not in the set: it is what the dispatcher would go through. One at
    ADInplaceOrView has no autograd key: those are left out in inference mode, and below Autograd.
    """
    keyset = DispatchKeySet.from_raw_repr(raw_keyset)
    top = keyset.highestPriorityTypeId().name
    if top.startswith("Autograd"):
        backend = top.removeprefix("Autograd")
        above = key_set(top) | key_set("ADInplaceOrView") if writes else key_set(top)
    else:
        above = key_set("ADInplaceOrView")
        backend = keyset.remove(DispatchKey.ADInplaceOrView).highestPriorityTypeId().name
    is_plain = is_dense(backend) and keyset == above | key_set(backend)
    return cast(str, backend) if is_plain else None


def is_dense(backend: str) -> bool:
    """Is this the key of a device's dense tensors?"""
    known = hasattr(DispatchKey, backend) and hasattr(DispatchKey, f"Autograd{backend}")
    return known and backend not in ("Meta", "NestedTensor")


def plain_tensors(tensors: Iterable[torch.Tensor]) -> str | None:
    """The device key of plain dense tensors, in a thread without modes or transforms, or None.

    Tensors of inference mode have no autograd keys. They are plain there, and beside others; alone outside, a kernel
    for them runs with autograd on. A tensor also has the key of its device's autocast, which is excluded in a thread
    until autocast is on. Inside ``__torch_dispatch__``, and below ADInplaceOrView, no write is counted.
    """
    if is_excluded(DispatchKey.ADInplaceOrView):
        return None
    return _plain_tensors(_keys_of(tensors).raw_repr(), _C._dispatch_tls_local_include_set().raw_repr())


def _keys_of(tensors: Iterable[torch.Tensor]) -> Any:
    return functools.reduce(operator.or_, map(_C._dispatch_keys, tensors), DispatchKeySet.from_raw_repr(0))


@functools.cache
def _plain_tensors(raw_keys: int, raw_included: int) -> str | None:
    keys, included = DispatchKeySet.from_raw_repr(raw_keys), DispatchKeySet.from_raw_repr(raw_included)
    quiet = key_set("BackendSelect")
    if included not in (quiet, quiet | key_set("ADInplaceOrView")):
        return None
    top = keys.highestPriorityTypeId().name
    if top.startswith("Autocast"):
        keys = keys.remove(getattr(DispatchKey, top))
        top = keys.highestPriorityTypeId().name
    if top.startswith("Autograd"):
        return plain_backend(keys.raw_repr(), True)
    return top if is_dense(top) and keys == key_set(top) and included == quiet else None


def registered_at(qualname: str) -> dict[str, list[str]]:
    """Dispatch key or alias -> where kernels of an op were registered, those that others override included."""
    found: dict[str, list[str]] = {}
    for line in _C._dispatch_dump(qualname).splitlines():
        key, is_kernel, rest = line.partition(": registered at ")
        if is_kernel and key != "debug":
            found.setdefault(key.partition("[")[0].partition(" ")[0], []).append(rest.partition(" :: ")[0])
    return found


def in_order(keyset: Any) -> Iterator[str]:
    """The names of the keys, in the order of the dispatcher."""
    while (key := keyset.highestPriorityTypeId()) != DispatchKey.Undefined:
        yield key.name
        keyset = keyset.remove(key)


def runs_python(qualname: str) -> bool:
    """Are all kernels of an op functions of Python? Those of C++ have a signature, by which they are called unboxed."""
    lines = [line for line in _C._dispatch_dump(qualname).splitlines() if ": registered at " in line]
    kernels = [line for line in lines if not line.startswith("debug: ")]
    return bool(kernels) and all(":: (none) [" in line for line in kernels)


#: Without: modes and transforms around a call are not seen
def functionalizing() -> bool:  # what runs, by AOTAutograd
    return _C._get_dispatch_mode(_C._TorchDispatchModeKey.FUNCTIONAL) is not None


def any_mode_of_users() -> bool:
    """Is a mode active, other than the default device, and those inside of compiled code?"""
    functions: list[Any] = torch.overrides._get_current_function_mode_stack()
    modes: list[Any] = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    return any(not type(mode).__module__.startswith("torch.") for mode in functions) or any(
        not type(mode).__module__.startswith("torch._functorch._aot_autograd") for mode in modes
    )


#: Without: no kernel can be registered or called
def autograd_key(tensors: Iterable[torch.Tensor]) -> str | None:
    """The autograd key at which the dispatcher enters an operator called with `tensors`, or None without one."""
    return next((key for key in in_order(_keys_of(tensors)) if key.startswith("Autograd")), None)


def without_device_kernel(overload: Any) -> Callable[..., Any]:
    """A function that runs the kernel for all devices of an operator, whatever the device of its tensors.

    For that it redispatches to the key of a device that torch itself has no kernels for.
    """
    return functools.partial(overload.redispatch, key_set("Lazy"))


def devices_at_hand() -> list[str]:
    """The device types, but for the CPU, on which tensors can be made: accelerators, and a device made in Python."""
    found = [torch.accelerator.current_accelerator().type] if torch.accelerator.is_available() else []  # type: ignore[union-attr]
    own = _C._get_privateuse1_backend_name()
    if own != "privateuseone" and own not in found and hasattr(torch, own):
        found.append(own)
    return found


# ----------------------------------------------------------------------------------------------------------------------
# What the dispatcher has for an op, key by key, and the keys of a call: for who explains, not for who calls


class Entry(NamedTuple):
    """What the dispatcher runs at a key."""

    place: str  #: ``file:line`` of the registration, as torch knows it
    falls_through: bool  #: it is left out of the keys of a call
    kind: str  #: "kernel", "autograd kernel", "default backend kernel", "math kernel", "backend fallback"


#: Without: op.describe() and op.explain() do not work
def runs_at(qualname: str) -> dict[str, Entry]:
    """Dispatch key -> what runs there, aliases and fallbacks resolved."""
    found = {}
    for line in _C._dispatch_dump_table(qualname).splitlines():
        key, is_entry, rest = line.partition(": ")
        before, is_place, place = rest.partition("registered at ")
        if is_entry and is_place:
            place, _, kind = place.rpartition(" [")
            found[key] = Entry(place, before.startswith("fallthrough"), kind.rstrip("]"))
    return found


def keys_of_call(tensors: Iterable[torch.Tensor]) -> Any:
    """The key set of a call with these tensors in this thread, before keys that fall through are left out."""
    return (_C._dispatch_tls_local_include_set() | _keys_of(tensors)) - _C._dispatch_tls_local_exclude_set()


def innermost_mode() -> str | None:
    """The name of the innermost dispatch mode."""
    count = _C._len_torch_dispatch_stack()
    return type(_C._get_dispatch_stack_at(count - 1)).__name__ if count else None


def infra_mode() -> str | None:
    """The class of the mode of compilers that is active: fake, proxy or functional tensors."""
    kinds = _C._TorchDispatchModeKey
    modes = map(_C._get_dispatch_mode, (kinds.FUNCTIONAL, kinds.PROXY, kinds.FAKE))
    return next((type(mode).__name__ for mode in modes if mode is not None), None)


def transform() -> str | None:
    """The innermost functorch transform: "Vmap", "Grad", "Jvp", "Functionalize"."""
    interpreter = _C._functorch.peek_interpreter_stack()
    return None if interpreter is None else str(interpreter.key()).rpartition(".")[2]


#: Without: op.describe() does not know the rules of DTensor
def sharding_of(overload: Any) -> Callable[..., Any] | None:
    """The rule of DTensor for an operator: the function given to `register_sharding`, or torch's own."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    if module is None:
        return None
    propagator = module.DTensor._op_dispatcher.sharding_propagator
    found: Callable[..., Any] | None = propagator.op_strategy_funcs.get(overload)
    return found.args[0] if isinstance(found, functools.partial) and found.args else found
