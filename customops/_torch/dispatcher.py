"""Dispatch keys and key sets, the dispatch state of the current thread, and the state in which kernels run."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.autograd.forward_ad
from torch import Tensor

from customops._torch.trees import tree_leaves

_C: Any = torch._C

__tracebackhide__ = True  # pytest leaves the frames out


#: Without: no kernel can be registered or called
DispatchKey: Any = _C.DispatchKey
DispatchKeySet: Any = _C.DispatchKeySet
#: Keys below Autograd, and below ADInplaceOrView: ``keyset & after_autograd`` is where a kernel redispatches to.
after_autograd: Any = _C._after_autograd_keyset
after_adinplaceorview: Any = _C._after_ADInplaceOrView_keyset
#: The same, below those of tensors that are to be conjugated, or negated, when they are read.
after_lazy: Any = after_adinplaceorview - DispatchKeySet(DispatchKey.Conjugate) - DispatchKeySet(DispatchKey.Negative)
#: Guard object: while it lives, dispatch starts below the autograd keys (``with below_autograd():``).
below_autograd: Any = _C._AutoDispatchBelowAutograd
#: The same, below ADInplaceOrView: a write is not counted.
below_adinplaceorview: Any = _C._AutoDispatchBelowADInplaceOrView
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
profiler: Any = torch.autograd.profiler
#: Does no profiler record, in whatever thread? As source for generated functions: ``$profiler`` is the module.
NO_PROFILER = "not $profiler._is_profiler_enabled"
TorchDispatchMode = torch.utils._python_dispatch.TorchDispatchMode
#: How many dispatch modes are active in this thread?
mode_count: Callable[[], int] = _C._len_torch_dispatch_stack
#: The innermost functorch transform that is running, or None.
innermost_transform: Callable[[], Any] = _C._functorch.peek_interpreter_stack
#: Is a functorch transform running?
transforms_active: Callable[[], bool] = _C._are_functorch_transforms_active


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


# The state in which kernels run: autocast off, nothing recorded, no dispatch key left out -----------------------------

#: Without: a kernel computes other numbers below a mode, or under autocast
#: Is autocast on in this thread, for any device?
autocast_is_on: Callable[[], bool] = _C._is_any_autocast_enabled


def set_deterministic(on: bool, warn_only: bool) -> None:
    """`torch.use_deterministic_algorithms` without what it tells inductor, which it would load."""
    _C._set_deterministic_algorithms(on, warn_only=warn_only)


set_grad_enabled: Callable[[bool], None] = _C._set_grad_enabled
_set_fwd_grad_enabled: Any = torch.autograd.forward_ad._set_fwd_grad_enabled


@functools.cache
def excluded_in_plain_state() -> Any:
    """The keys that are left out in a thread in which nothing is active: those of autocast."""
    with concurrent.futures.ThreadPoolExecutor(1) as fresh:
        return fresh.submit(_C._dispatch_tls_local_exclude_set).result()


def call_plainly(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a kernel as if no mode, transform, autocast or compiler had called its op."""
    return _call_with_excluded(excluded_in_plain_state(), fn, args, kwargs)


def call_plainly_writing(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """The same for an op that writes: where writes are not counted, as below a mode, they are not in the kernel either.

    They were counted above; and there a tensor of inference mode may be written outside of it.
    """
    counting = key_set("ADInplaceOrView") & _C._dispatch_tls_local_exclude_set()
    return _call_with_excluded(excluded_in_plain_state() | counting, fn, args, kwargs)


def call_plainly_in_trace(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """The same for plain torch code that is called while a compiler traces a call of the op.

    AOTAutograd leaves out autograd and `torch.func`, and includes its functionalization, which is not `torch.func`'s.
    """
    included = _C._dispatch_tls_local_include_set().remove(_C.DispatchKey.Functionalize)
    return _call_with_excluded(excluded_in_plain_state(), fn, args, kwargs, included)


def _call_with_excluded(excluded: Any, fn: Callable[..., Any], args: Any, kwargs: Any, included: Any = None) -> Any:
    with (
        _C._ForceDispatchKeyGuard(_C._dispatch_tls_local_include_set() if included is None else included, excluded),
        _set_fwd_grad_enabled(False),
        torch.no_grad(),
    ):
        return fn(*args, **kwargs)


def call_without_autocast(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
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
        stack.enter_context(exclude_keys(excluded_in_plain_state()))
        return fn(*args, **kwargs)


def call_view_plainly(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
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
# A guard on the tensors of a call and the state of the thread: is this call like an earlier one?

#: Without: no op can be called without the dispatcher
_guards: Any = torch._C._dynamo.guards
#: ``guard(*tensors)``: is the call like the one that the guard was made of? It wants as many tensors.
Guard = Callable[..., bool]


def guard_of(tensors: Sequence[Tensor]) -> Guard | None:
    """A guard for calls like the one with these tensors, which it does not keep; None if it would not know them again.

    It compares the type, dtype, device, number of dimensions and dispatch keys of each tensor, to the keys adding those
    that are active in the thread, and taking away those that are excluded there: so it sees dispatch modes, transforms,
    functionalization, tracing and inference mode. It compares ``requires_grad``, too, but does not look at gradient
    mode. Autocast must be off, for all devices. Sizes and strides may be any.

    It must not be called with a nested tensor: looking for strides of one ends the process.
    """
    if autocast_is_on():
        return None
    if all(tensor.is_cpu for tensor in tensors):
        guard = _tensor_guard(tensors)
        if torch.accelerator.is_available():
            guard = lambda *given, plain=guard: not autocast_is_on() and plain(*given)  # noqa: E731
    else:  # the keys of a tensor say whether autocast is on for its device
        on_cpu = torch.empty(0)
        guard = functools.partial(_tensor_guard([on_cpu, *tensors]), on_cpu)
    return guard if guard(*tensors) else None


def _tensor_guard(tensors: Sequence[Tensor]) -> Guard:
    dims = [[None] * tensor.dim() for tensor in tensors]
    guard: Guard = _guards.TensorGuards(*tensors, dynamic_dims_sizes=dims, dynamic_dims_strides=dims).check
    return guard


def exact_guard_of(tensors: Sequence[Tensor]) -> Guard | None:
    """The same for tensors of these sizes and strides, whatever autocast does; None if it would not know them again."""
    are_strided = all(tensor.layout is torch.strided and not tensor.is_nested for tensor in tensors)
    if not are_strided or len({id(tensor) for tensor in tensors}) < len(tensors):
        return None
    sizes, strides = [[*tensor.shape] for tensor in tensors], [[*tensor.stride()] for tensor in tensors]
    guard: Guard = _guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return guard if guard(*tensors) else None


#: Without: kernels have no names in profiles
#: Context manager: a range of this name, for all profilers of torch, NVTX and ITT (``emit_nvtx``, ``emit_itt``).
_range: Callable[[str], Any] = torch._C._profiler._RecordFunctionFast


def in_named_range(fn: Callable[..., Any], qualname: str, name: str) -> Callable[..., Any]:
    """Return `fn` in a range `name`, and in a range of the op if the dispatcher opens none: see `dispatch_objects`."""
    packet, _, overload = qualname.partition(".")
    op = getattr(getattr(torch.ops, packet.partition("::")[0]), packet.partition("::")[2])
    in_op = getattr(getattr(op, overload or "default"), "_pyobj_dispatcher", None) is not None

    def named(*args: Any, **kwargs: Any) -> Any:
        with _range(qualname) if in_op else contextlib.nullcontext(), _range(name):
            return fn(*args, **kwargs)

    return named


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


def active_mode() -> str | None:
    """The class of the mode of compilers that is active (fake, proxy or functional tensors), else the innermost one."""
    kinds = _C._TorchDispatchModeKey
    modes = [*map(_C._get_dispatch_mode, (kinds.FUNCTIONAL, kinds.PROXY, kinds.FAKE))]
    if mode_count():
        modes.append(_C._get_dispatch_stack_at(mode_count() - 1))
    return next((type(mode).__name__ for mode in modes if mode is not None), None)


def transform() -> str | None:
    """The innermost functorch transform: "Vmap", "Grad", "Jvp", "Functionalize"."""
    interpreter = innermost_transform()
    return None if interpreter is None else str(interpreter.key()).rpartition(".")[2]
