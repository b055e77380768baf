"""The only module that touches private torch names.

Everything here was seen to exist on torch 2.13 and 2.15. What differs between versions is probed here, and the rest of
the package calls a function that does the right thing on each.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import functools
import importlib
import inspect
import re
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
import torch._functorch.autograd_function as _functorch_function
import torch._functorch.pyfunctorch as _functorch
import torch.autograd.forward_ad
from torch._functorch.utils import enable_single_level_autograd_function
from torch._library import custom_ops as _torch_custom_ops
from torch._library import opaque_object as _opaque
from torch._library import simple_registry as _torch_registry
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch._ops import _OpNamespace, _refresh_packet
from torch._subclasses.functional_tensor import FunctionalTensorMode as FunctionalTensorMode
from torch.autograd.function import _SingleLevelFunction
from torch.library import Library as Library

from customops._compat_tracing import followed as followed

__tracebackhide__ = True  # pytest leaves the frames out

_C: Any = torch._C
DispatchKey: Any = _C.DispatchKey
DispatchKeySet: Any = _C.DispatchKeySet
forward_ad: Any = torch.autograd.forward_ad

#: Keys below Autograd, and below ADInplaceOrView: ``keyset & after_autograd`` is where a kernel redispatches to.
after_autograd: Any = _C._after_autograd_keyset
after_adinplaceorview: Any = _C._after_ADInplaceOrView_keyset

#: Guard object: while it lives, dispatch starts below the autograd keys (``with below_autograd():``).
below_autograd: Any = _C._AutoDispatchBelowAutograd

#: ``increment_version(tensors)``: autograd then knows that they were written.
increment_version: Callable[[Iterable[torch.Tensor]], None] = _C._increment_version

#: ``any_requires_grad(*args, **kwargs)``: looks into lists one level deep.
any_requires_grad: Callable[..., bool] = _C._any_requires_grad

#: ``any_alias(args, kwargs, outputs)``: does an output share memory with an input or with another output?
any_alias: Callable[..., bool] = _C._any_output_is_alias_to_input_or_output


class SingleLevelFunction(_SingleLevelFunction):
    """The autograd.Function that functorch itself applies at one level; see `apply_function`."""

    # Compiled autograd asks for it; torch defines it on the public autograd.Function alone.
    _compiled_autograd_key = staticmethod(torch.autograd.Function._compiled_autograd_key)


_F = TypeVar("_F", bound=Callable[..., Any])


# Schemas and lookup ---------------------------------------------------------------------------------------------


#: Parses ``name(args) -> returns`` (RuntimeError on bad text).
parse_schema: Callable[[str], Any] = _C.parse_schema


@functools.cache
def _dtypes_by_number() -> dict[int, torch.dtype]:
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    schemas = {dtype: f"f(ScalarType x={str(dtype).removeprefix('torch.')}) -> ()" for dtype in dtypes}
    return {_C.parse_schema(text).arguments[0].default_value: dtype for dtype, text in schemas.items()}


def dtype_from_number(number: int) -> torch.dtype:
    """The dtype behind the number by which schemas hold it (6 -> torch.float32)."""
    return _dtypes_by_number()[number]


#: In the order of c10::Layout and c10::MemoryFormat.
_ENUMS = {
    "Layout": "strided sparse_coo sparse_csr _mkldnn sparse_csc sparse_bsr sparse_bsc jagged".split(),
    "MemoryFormat": "contiguous_format preserve_format channels_last channels_last_3d".split(),
}


def enum_from_number(type_: str, number: int) -> Any:
    """The torch.layout or torch.memory_format behind the number by which schemas hold it."""
    return getattr(torch, _ENUMS[type_][number])


def enum_to_number(value: torch.layout | torch.memory_format) -> int:
    names = _ENUMS["Layout" if isinstance(value, torch.layout) else "MemoryFormat"]
    return names.index(str(value).removeprefix("torch."))


def find_overload(qualname: str, overload: str = "") -> OpOverload | None:
    """The OpOverload of an op, or None where no such op is defined (without making a namespace in `torch.ops`)."""
    if all(schema.overload_name != overload for schema in _C._jit_get_schemas_for_operator(qualname)):
        return None
    return overload_of(qualname, overload)


def name_of_overload(overload: OpOverload) -> str:
    return overload._name


def overload_of(qualname: str, overload: str = "") -> OpOverload:
    """The OpOverload of an op that is defined."""
    namespace, name = qualname.split("::")
    return cast(OpOverload, getattr(getattr(getattr(torch.ops, namespace), name), overload or "default"))


def is_word_of_schema(part: str) -> bool:
    """May a part of the name of an op be spelled so, or is it a keyword of torch's parser? ("" stands for no part.)"""
    try:
        _C.parse_schema(f"{part or 'op'}() -> ()")
    except RuntimeError:
        return False
    return True


def taken_by_torch(name: tuple[str, str, str]) -> str | None:
    """The part of ``(namespace, name, overload)`` by which `torch.ops` has an attribute that is no op, or None."""
    namespace, op, overload = name
    of_namespaces, of_packets = _attributes_in_ops()
    found = inspect.getattr_static(torch.ops, namespace, None)
    if found is not None and not isinstance(found, _OpNamespace):
        return f"torch.ops.{namespace}"
    if op in of_namespaces:
        return f"torch.ops.{namespace}.{op}"
    return f"torch.ops.{namespace}.{op}.{overload}" if overload in of_packets else None


@functools.cache
def _attributes_in_ops() -> tuple[frozenset[str], frozenset[str]]:
    """Names that each namespace, and each packet of overloads, has as attributes of its own."""
    namespace, packet = _OpNamespace("_"), torch.ops.aten.sin
    of_packet = {*dir(type(packet)), *vars(packet)}.difference(packet.overloads())
    return frozenset({*dir(type(namespace)), *vars(namespace)}), frozenset(of_packet)


def entry_of(overload: OpOverload) -> Callable[..., Any]:
    """The C++ function behind an OpOverload."""
    return overload._op


def defined_at(qualname: str) -> str:
    """``file:line`` of the registration that defined an op, as the dispatcher remembers it."""
    for line in _C._dispatch_dump(qualname).splitlines():
        if line.startswith("debug: "):
            return cast(str, line.removeprefix("debug: registered at "))
    return "<unknown>"


def opaque_type_name(annotation: Any, *, as_return: bool = False) -> str | None:
    """The schema name of a class made known through torch's `register_opaque_type`, or None."""
    if not isinstance(annotation, type):  # torch logs a warning for anything else
        return None
    newer, older = _OPAQUE_PREDICATES["return" if as_return else "parameter"]
    known = getattr(_opaque, newer, None) or getattr(_opaque, older)
    info = _opaque._resolve_opaque_type_info(annotation) if known(annotation) else None
    return info.class_name if info is not None else None


#: The older names log a deprecation on 2.15, the newer ones are not on 2.13.
_OPAQUE_PREDICATES = {
    "parameter": ("is_custom_class", "is_opaque_type"),
    "return": ("is_opaque_symbolic_type", "is_opaque_reference_type"),
}


def group_name_type() -> Any | None:
    """torch.distributed's GroupName, or None where torch was built without distributed."""
    if not torch.distributed.is_available():
        return None
    return importlib.import_module("torch.distributed.distributed_c10d").GroupName


# Dispatch keys --------------------------------------------------------------------------------------------------


def device_key(device_type: str) -> str:
    """Dispatch key of a device type: "cpu" -> "CPU" (RuntimeError listing the device types torch knows)."""
    return cast(str, _C._dispatch_key_for_device(device_type))


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


def devices_with_kernel(qualname: str) -> list[str]:
    """The device types that an op has a kernel of their own for."""
    return [device for key in count_kernels(qualname) if (device := device_of_key(key)) is not None]


def is_dispatch_key(text: str) -> bool:
    return bool(_C._parse_dispatch_key(text))


def has_kernel(qualname: str, key: str) -> bool:
    """Is a kernel registered at exactly this dispatch key?"""
    return bool(_C._dispatch_has_kernel_for_dispatch_key(qualname, key))


def key_set(key: str) -> Any:
    return DispatchKeySet(getattr(DispatchKey, key))


#: The dispatch keys of a tensor, and those that are active in this thread whatever the tensors.
keys_of: Callable[[torch.Tensor], Any] = _C._dispatch_keys
included_keys: Callable[[], Any] = _C._dispatch_tls_local_include_set

#: Is a dispatch key left out in this thread?
is_excluded: Callable[[Any], bool] = _C._dispatch_tls_is_dispatch_key_excluded

#: Is autocast on in this thread, for any device?
autocast_is_on: Callable[[], bool] = _C._is_any_autocast_enabled

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


def _call_with_excluded(excluded: Any, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    with (
        _C._ForceDispatchKeyGuard(_C._dispatch_tls_local_include_set(), excluded),
        forward_ad._set_fwd_grad_enabled(False),
        torch.no_grad(),
    ):
        return fn(*args, **kwargs)


def call_without_autocast(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with exclude_keys(_excluded_in_plain_state()), torch.no_grad():
        return fn(*args, **kwargs)


is_torch_function_mode_enabled: Callable[[], bool] = _C._is_torch_function_mode_enabled


def plain_backend(keyset: Any, *, writes: bool) -> str | None:
    """The key of the one dense device that a key set at Autograd is for, or None if it holds anything else.

    Keys that have no part in an op are not in the set: it is what the dispatcher would go through.
    """
    top = keyset.highestPriorityTypeId().name
    backend = getattr(DispatchKey, top.removeprefix("Autograd"), None)
    if not top.startswith("Autograd") or backend is None or top in ("AutogradMeta", "AutogradNestedTensor"):
        return None
    plain = key_set(top) | key_set(backend.name)
    return cast(str, backend.name) if keyset == (plain | key_set("ADInplaceOrView") if writes else plain) else None


def plain_tensor(keys: Any, included: Any) -> tuple[str | None, bool]:
    """The key of the device of a dense tensor without anything to it, in a thread in which nothing acts, or None.

    And whether it counts versions: a tensor of inference mode does not, and is plain in inference mode alone; outside,
    a kernel for it runs with autograd on. A tensor also has the key of its device's autocast, which is excluded in a
    thread until autocast is on.
    """
    quiet = key_set("BackendSelect")
    if included not in (quiet, quiet | key_set("ADInplaceOrView")):
        return None, False
    top = keys.highestPriorityTypeId().name
    if top.startswith("Autocast"):
        keys = keys.remove(getattr(DispatchKey, top))
        top = keys.highestPriorityTypeId().name
    if top.startswith("Autograd"):
        return plain_backend(keys, writes=True), True
    is_dense = hasattr(DispatchKey, f"Autograd{top}") and top not in ("Meta", "NestedTensor")
    return top if is_dense and keys == key_set(top) and included == quiet else None, False


def count_kernels(qualname: str) -> collections.Counter[str]:
    """How many kernels are registered at each dispatch key, those included that others override."""
    lines = _C._dispatch_dump(qualname).splitlines()
    return collections.Counter(re.split(r"[\[ :]", line)[0] for line in lines if ": registered at " in line)


def watch_registrations(changed: Callable[[str | None], object]) -> None:
    """Call ``changed(qualname)`` when a kernel is registered for an op through any Library, and ``changed(None)`` when
    a shared library was loaded, whatever it may have registered.

    torch has no hook for it, so two methods are wrapped. What C++ code registers when Python imports it as a module
    goes unseen.
    """
    Library.impl = followed(  # type: ignore[method-assign]
        Library.impl, lambda library, op_name, *_, **__: changed(name_in(library, op_name))
    )
    ops: Any = type(torch.ops)
    ops.load_library = followed(ops.load_library, lambda *_, **__: changed(None))


def name_in(library: Library, op: str | OpOverload) -> str:
    name = (op if isinstance(op, str) else op._name).removesuffix(".default")
    return name if "::" in name else f"{library.ns}::{name}"


#: Context manager: dispatch as if none of the keys (a DispatchKeySet) were there.
exclude_keys: Any = _C._ExcludeDispatchKeyGuard


def forward_ad_active() -> bool:  # ``forward_ad.dual_level`` or ``torch.func.jvp``
    return bool(forward_ad._current_level >= 0)


def tangents_may_hide() -> bool:
    """May a level of forward mode be open although `forward_ad_active` does not know?

    A graph of Dynamo opens it in C++: when it runs, and when AOTAutograd traces it. Else, looking for tangents is not
    wanted while a mode is active, which would see that.
    """
    if transforms_active() or not any_dispatch_mode():
        return True
    return torch._guards.TracingContext.try_get() is not None


def call_jvp(jvp: Callable[..., Any], *args: Any) -> Any:
    """Call a jvp with forward mode on if it may be nested: torch has it off, and an outer level would get zeros."""
    if not transforms_active():
        return jvp(*args)
    with forward_ad._set_fwd_grad_enabled(True):
        return jvp(*args)


def tangents_of(call: Callable[[], tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
    """The tangents that the results of ``call()`` have, from what it uses."""
    with forward_ad._set_fwd_grad_enabled(True):
        duals = [forward_ad.unpack_dual(result, level=0) for result in call()]
        return [torch.zeros_like(dual.primal) if dual.tangent is None else dual.tangent for dual in duals]


def without_tangent(value: Any) -> Any:
    """A tangent, without the one of its own that it got in `call_jvp`."""
    if isinstance(value, torch.Tensor) and transforms_active():
        return forward_ad.unpack_dual(value, level=0).primal
    return value


def is_captured(tensor: torch.Tensor) -> bool:
    """Does a tensor come from outside of the innermost transform that differentiates? A write to it would be lost."""
    kinds = _C._functorch.TransformType
    levels = [i.level() for i in _C._functorch.get_interpreter_stack() or () if i.key() in (kinds.Grad, kinds.Jvp)]
    of_tensor = set()
    while _C._functorch.is_functorch_wrapped_tensor(tensor):
        of_tensor.add(_C._functorch.maybe_get_level(tensor))
        tensor = _C._functorch.get_unwrapped(tensor)
    return bool(levels) and max(levels) not in of_tensor


def is_tracked_further_out(tensor: torch.Tensor) -> bool:
    """Does a transform around the present one differentiate with respect to a tensor?"""
    while _C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _C._functorch.get_unwrapped(tensor)
        if tensor.requires_grad or any_tangent((tensor,)):
            return True
    return False


def functionalizing() -> bool:  # what runs, by AOTAutograd
    return _C._get_dispatch_mode(_C._TorchDispatchModeKey.FUNCTIONAL) is not None


#: Is a functorch transform running?
transforms_active: Callable[[], bool] = _C._are_functorch_transforms_active


def apply_function(function: Any, *args: Any) -> Any:
    """``function.apply(*args)`` of a subclass of `SingleLevelFunction`, also inside functorch transforms."""
    if not transforms_active():
        return function.apply(*args)
    with enable_single_level_autograd_function():
        return function.apply(*args)


def context_class(function: Any) -> Any:  # of the ``ctx`` of an autograd.Function
    return function._backward_cls


#: In a backward: will there be another one, through the same graph?
keeps_graph: Callable[[], bool] = _C._autograd._get_current_graph_task_keep_graph

#: ``saved_tensors_hooks(True)``: the hooks that act on what is saved for backward, or None.
saved_tensors_hooks: Callable[[bool], Any] = _C._autograd._top_saved_tensors_default_hooks


def metadata(tensor: torch.Tensor) -> tuple[Any, torch.dtype, torch.device]:
    """Shape, dtype and device of a tensor, to be compared with those of another; put the expected one on the left."""
    if tensor.is_nested:
        return None, tensor.dtype, tensor.device  # has no shape, or one that is hard to compare
    shape: Any = tensor.shape
    if type(tensor) not in _PLAIN or cast(Any, tensor)._has_symbolic_sizes_strides:
        shape = _SymbolicShape(shape)
    return shape, tensor.dtype, tensor.device


_PLAIN = {torch.Tensor, torch.nn.Parameter}


class _SymbolicShape(tuple[Any, ...]):
    """A shape that may be compared while tracing. It equals others unless they are known to differ: nothing is decided
    by asking.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        if other is None:
            return True
        sizes = tuple(cast(Any, other))
        return len(self) == len(sizes) and not any(map(_differ, self, sizes))

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = tuple.__hash__


def _differ(size: Any, other: Any) -> bool:
    if type(size) is int and type(other) is int:
        return size != other
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(size != other)


def sums_to(shape: Sequence[Any], wanted: Any) -> bool:
    """May ``sum_to_size`` make `wanted`, a shape that `metadata` gave, of `shape`?"""
    if len(shape) < len(wanted):
        return False
    sizes = zip(reversed(shape), reversed(wanted), strict=False)
    return all((type(of) is int and of == 1) or not _differ(size, of) for size, of in sizes)


def without_history(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same memory that has no history at the present level of functorch; it is not a view."""
    if not transforms_active():
        return tensor.detach()
    level = _functorch.retrieve_current_functorch_interpreter().level()
    return cast(torch.Tensor, _C._functorch._wrap_for_grad(_C._functorch._unwrap_for_grad(tensor, level), level))


#: Context manager: a write to these tensors is not counted.
uncounted: Any = cast(Any, torch.autograd)._unsafe_preserve_version_counter


def is_fresh_view(tensor: torch.Tensor) -> bool:
    """May autograd follow a write to this view? Not if it was made without grad, by unbind, or in inference mode."""
    return bool(_C._autograd._get_creation_meta(tensor) == _C._autograd.CreationMeta.DEFAULT)


def call_vmap_rule(rule: Any, overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Unwrap batched tensors, call ``rule(info, in_dims, *args, **kwargs)``, wrap what it returns."""
    interpreter: Any = _functorch.retrieve_current_functorch_interpreter()
    return _functorch_function.custom_function_call_vmap_helper(interpreter, rule, overload, *args, **kwargs)


#: ``keyset & below_vmap_mode``: below the key that sees each call inside vmap; and a guard: dispatch without that key.
below_vmap_mode: Any = _C._dispatch_keyset_full_after(DispatchKey.FuncTorchVmapMode)
without_vmap_mode: Any = functools.partial(exclude_keys, key_set("FuncTorchVmapMode"))


class Batch:
    """The innermost level of vmap. Is anything in `values` batched there?"""

    def __init__(self, values: Any) -> None:
        interpreter: Any = _functorch.retrieve_current_functorch_interpreter()
        self.size, self.randomness, self.level = interpreter.batch_size(), interpreter.randomness(), interpreter.level()
        get_level = _C._functorch.maybe_get_level
        self.is_batched = any(isinstance(x, torch.Tensor) and get_level(x) == self.level for x in tree_leaves(values))

    def wrap(self, result: Any) -> Any:
        """A result with the batch in front -> one of an element, as seen inside vmap."""
        leaves, structure = tree_flatten(result)
        leaves = [_C._functorch._add_batch_dim(x, 0, self.level) if isinstance(x, torch.Tensor) else x for x in leaves]
        return tree_unflatten(leaves, structure)


def any_dispatch_mode() -> bool:
    return bool(_C._len_torch_dispatch_stack() > 0)


def any_tangent(values: tuple[Any, ...]) -> bool:
    """Does a tensor among `values` (lists opened one level) carry a tangent? torch has one level of them, 0."""
    guard = _C._DisableTorchDispatch()  # looking is an op, which a tracer would record
    try:
        for value in values:
            for item in value if isinstance(value, (list, tuple)) else (value,):
                # Other layouts cannot carry one, and torch fails to look.
                if isinstance(item, torch.Tensor) and item.layout is torch.strided and not item.is_nested:
                    if forward_ad.unpack_dual(item, level=0).tangent is not None:
                        return True
        return False
    finally:
        del guard


# Library --------------------------------------------------------------------------------------------------------


def on_library_destroyed(library: Library, callback: Callable[[], object]) -> None:
    """Call `callback` when `library` is destroyed, by whoever does it (torch's own redefinition too)."""
    handle: Any = types.SimpleNamespace(destroy=callback)
    library._registration_handles.append(handle)


def library_alive(library: Library) -> bool:
    return library.m is not None


def destroy_library(library: Library) -> None:
    if library.m is not None:
        library._destroy()
    # When the object is collected, torch takes down the ops of these names once more: whoever has them by then.
    torch.library._clear_torch_ops_cache(library._op_defs)
    torch.library._defs.difference_update(library._op_defs)
    library._op_defs.clear()
    library._op_impls.clear()


def remember_kernel(namespace: str, name: str, key: str, kernel: tuple[Callable[..., Any], bool] | None) -> None:
    """Make `kernel` (or none) the Python function that torch remembers for an op and a key.

    Beside the dispatcher's own table torch keeps the last Python function given for each op and key, and calls it
    while a dispatch mode is active. It is not taken back when its library is destroyed: then the wrong kernel runs, and
    all that the function refers to stays alive. Only another function takes its place.
    """
    library = Library(namespace, "FRAGMENT")
    fn, with_keyset = kernel or (_gone, False)
    with _overriding_quietly():
        library.m.impl(name, key, fn, with_keyset)  # type: ignore[union-attr]
    library._destroy()


def _gone(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError(
        "a kernel was taken back; under a dispatch mode torch cannot find the one of another library below"
    )


def install_view_fallback(library: Library, name: str) -> None:
    """Make outputs of a view op true views of their input (torch's own ADInplaceOrView kernel)."""
    library.m.register_ad_inplace_or_view_fallback(name)  # type: ignore[union-attr]


def computed_kernel(qualname: str, key: str) -> Any:
    """The kernel the dispatcher would run at `key` now; has ``call_boxed(keyset, *args, **kwargs)``."""
    return _C._dispatch_get_computed_kernel_for_dispatch_key(qualname, key)


def impl(library: Library, name: str, fn: Callable[..., Any], key: str, *, with_keyset: bool = False) -> None:
    """Install a kernel, in the place of one that is there."""
    is_new = f"{library.ns}::{name}" in library._op_defs  # only what came with the op has gone through its library
    if is_new or not has_kernel(f"{library.ns}::{name}", key):
        library.impl(name, fn, key, with_keyset=with_keyset)
        return
    with _overriding_quietly():
        library.impl(name, fn, key, with_keyset=with_keyset)


@contextlib.contextmanager
def _overriding_quietly() -> Iterator[None]:
    """Overriding is what the caller asked for; torch mentions it, once per process for all operators."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators", category=UserWarning)
        yield


def forget_dispatch(overload: OpOverload) -> None:
    """Drop what an overload remembers of which kernel a key leads to: kernels came or went.

    torch keeps it for calls under modes, and does not drop it where a library is destroyed.
    """
    overload._dispatch_cache.clear()


def retire_overload(overload: OpOverload, error: Exception) -> None:
    """Make a handle to a removed op raise: the dispatcher's own would read freed memory (a segfault on 2.13)."""
    dead = _Retired(error)
    overload._op = dead
    overload._op_dk = dead
    overload.__dict__["_handle"] = dead
    packet = overload._overloadpacket
    packet.__dict__.pop(overload._overloadname, None)
    qualname = packet._qualified_op_name
    if _C._jit_get_schemas_for_operator(qualname):  # other overloads live on: the packet stays, without this one
        _refresh_packet(packet)
        namespace, name = qualname.split("::")
        setattr(getattr(torch.ops, namespace), name, packet)
    else:
        packet._op = dead


class _Retired:
    """Stands where a removed op's C++ handle was: calling it, or any of its methods, raises."""

    __module__ = "torch.ops"

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise self._error

    def redispatch_boxed(self, *args: Any, **kwargs: Any) -> Any:
        raise self._error


def namespace_exists(namespace: str) -> bool:  # torch makes ``torch.ops.<namespace>`` on first look
    return namespace in vars(torch.ops)


def forget_namespace(namespace: str) -> None:
    """Undo that look."""
    vars(torch.ops).pop(namespace, None)
    if namespace in torch.ops._dir:
        torch.ops._dir.remove(namespace)


def forget_signature(qualname: str, overload: str) -> None:
    """Drop FX's cached Python signature of a removed op: the next op of that name has its own."""
    cache = importlib.import_module("torch.fx.operator_schemas")._SCHEMA_TO_SIGNATURE_CACHE
    cache.pop((qualname, overload), None)


# torch's own tables of custom ops -------------------------------------------------------------------------------


def torch_library_of(qualname: str) -> Library | None:
    """The Library through which `torch.library.custom_op` (or we) defined `qualname`, or None."""
    return _torch_custom_ops.OPDEF_TO_LIB.get(qualname)


class _TorchView(_torch_custom_ops.CustomOpDef):
    """What torch's tables hold for an op of ours: an object of torch's class, every attribute of which is ours.

    torch's functions ask ``isinstance`` before they call a method of what they find in the table.
    """

    def __init__(self, op: Any) -> None:
        object.__setattr__(self, "_customops_op", op)

    def __getattribute__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_customops_op"), name)


def torch_op_of(qualname: str) -> Any | None:
    """The object in torch's table of custom ops: one of ours, or one of `torch.library.custom_op`'s, or None."""
    found = _torch_custom_ops.OPDEFS.get(qualname)
    return object.__getattribute__(found, "_customops_op") if type(found) is _TorchView else found


def claim(qualname: str, op: Any, library: Library) -> object:
    """Enter an op of ours in torch's tables of custom ops, for as long as the object returned is kept.

    Then torch's ``register_*`` functions call our methods when given the name, `has_fake_kernel` asks ``_abstract_fn``
    instead of taking the raising default fake for a real one, and a later `torch.library.custom_op` of the same name
    replaces ours instead of failing.
    """
    view = _torch_custom_ops.OPDEFS[qualname] = _TorchView(op)
    _torch_custom_ops.OPDEF_TO_LIB[qualname] = library
    return view


def disclaim(qualname: str, library: Library) -> None:
    """Undo `claim`, unless another library has taken the name since."""
    if _torch_custom_ops.OPDEF_TO_LIB.get(qualname) is library:
        del _torch_custom_ops.OPDEF_TO_LIB[qualname]
        _torch_custom_ops.OPDEFS.pop(qualname, None)


def register_fake(library: Library, name: str, fn: Callable[..., Any], stacklevel: int) -> None:
    """Enter a fake in torch's registry, where FakeTensorMode and meta tensors look.

    `stacklevel` leads from the caller to the frame that torch is to take for the place of the registration.
    """
    library._register_fake(name, fn, _stacklevel=stacklevel + 1)


def enter_fake(library: Library, qualname: str, fn: Callable[..., Any], source: str) -> None:
    """`register_fake` for an op that Python defined, by someone who knows the place: finding it is most of the cost."""
    holder = _torch_registry.singleton.find(qualname).fake_impl
    library._registration_handles.append(holder.register(fn, source, lib=library, allow_override=True))


register_torch_dispatch: Callable[..., None] = Library._register_torch_dispatch_rule
register_effect: Callable[..., None] = Library._register_effectful_op


def set_fake_source(qualname: str, source: str) -> None:
    """Tell torch's registry where the fake that a trampoline now calls was written."""
    record = fake_record(qualname)
    if record is not None:
        record.source = source


def forget_entry(qualname: str) -> None:
    """Drop what torch's registry keeps for a removed op, unless somebody has something registered there."""
    entry = _torch_registry.singleton.get(qualname)
    if entry is not None and not (entry.fake_impl.kernels or entry.torch_dispatch_rules._data):
        del _torch_registry.singleton._data[qualname]


def fake_record(qualname: str) -> Any | None:
    """torch's record of the newest fake of an op (fields ``func`` and ``source``), or None."""
    entry = _torch_registry.singleton.get(qualname)
    return entry.fake_impl.kernel if entry is not None else None


# Dynamo ---------------------------------------------------------------------------------------------------------


def outside_dynamo(fn: _F) -> _F:
    """Keep Dynamo from tracing the frames of `fn`, which C++ calls, and all frames below them.

    Marks the code object, so one call serves every closure made from the same ``def``, and calls cost nothing. Where
    torch cannot, the function is wrapped as `torch.compiler.disable` wraps it.
    """
    frames = _C._dynamo.eval_frame
    if not hasattr(frames, "set_code_exec_strategy"):
        return cast(_F, torch.compiler.disable(fn))
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(fn.__code__, frames._FrameExecStrategy(skip, skip))
    return fn


#: How many tensors and Python objects hold the storage at an address.
storage_uses: Callable[[int], int] = _C._storage_Use_Count


def outputs_share_memory(inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> bool:
    """Does an output share its storage, or the address where it starts, with an input or another output?"""
    return any_alias(inputs, {}, outputs) or share_data(inputs, outputs)


def share_data(inputs: Iterable[Any], outputs: Iterable[Any]) -> bool:
    """Does an output start at the address of an input or of another output?"""
    seen = {address for value in inputs for address in _addresses(value)}
    for value in outputs:
        for address in _addresses(value):
            if address in seen:
                return True
            seen.add(address)
    return False


def _addresses(value: Any) -> list[int]:
    """The addresses of the elements of a tensor, or of the tensors in a list; of none where there are no elements."""
    items = value if isinstance(value, (list, tuple)) else (value,)
    strided = (x for x in items if isinstance(x, torch.Tensor) and x.layout is torch.strided and not x.is_nested)
    return [address for x in strided if has_storage(x) and (address := _C._data_address(x))]


def storage_id(tensor: torch.Tensor) -> int:
    return cast(int, tensor.untyped_storage()._cdata)


# Checks ---------------------------------------------------------------------------------------------------------

_fake_tensor: Any = torch._subclasses.fake_tensor

#: What FakeTensorMode raises: for a tensor without a fake, an operator without a fake impl, one that must see data.
NoFakeTensor: Any = _fake_tensor.UnsupportedFakeTensorException
NoFakeImpl: Any = _fake_tensor.UnsupportedOperatorException

TorchDispatchMode = torch.utils._python_dispatch.TorchDispatchMode
tree_flatten = torch.utils._pytree.tree_flatten
tree_unflatten = torch.utils._pytree.tree_unflatten
tree_leaves = torch.utils._pytree.tree_leaves


def schema_of(op: OpOverload) -> Any:
    return op._schema


def is_abstract(tensor: torch.Tensor) -> bool:
    """Does the tensor hold no data of its own: meta, fake, or wrapped by a functorch transform?"""
    return tensor.is_meta or _fake_tensor.is_fake(tensor) or _C._functorch.is_functorch_wrapped_tensor(tensor)


def wrapped_by(tensor: Any) -> list[torch.Tensor] | None:
    """The tensors inside a wrapper subclass, or None for other tensors."""
    if not torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor):
        return None
    return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]


def coo_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [tensor._indices(), tensor._values()]  # the public names refuse uncoalesced tensors


def has_storage(tensor: torch.Tensor) -> bool:
    return bool(_C._has_storage(tensor))


def version_of(tensor: torch.Tensor) -> int | None:
    """How often autograd saw the tensor written, or None where it does not count."""
    return None if tensor.is_inference() else tensor._version


def count_versions() -> Any:
    """Context manager for `__torch_dispatch__`: kernels run with version counting on, as they do without a mode."""
    include, exclude = _C._dispatch_tls_local_include_set(), _C._dispatch_tls_local_exclude_set()
    return _C._ForceDispatchKeyGuard(include, exclude.remove(DispatchKey.ADInplaceOrView))


def autograd_key(tensors: Iterable[torch.Tensor]) -> str | None:
    """The autograd key at which the dispatcher enters an operator called with `tensors`, or None without one."""
    keys = DispatchKeySet.from_raw_repr(0)
    for tensor in tensors:
        keys = keys | _C._dispatch_keys(tensor)
    while (key := keys.highestPriorityTypeId()) != DispatchKey.Undefined:
        if key.name.startswith("Autograd"):
            return cast(str, key.name)
        keys = keys.remove(key)
    return None


def set_autograd_fallback(mode: str) -> str:
    """What torch does for operators without an autograd kernel: "nothing", "warn" or "error"; returns what it did."""
    before: str = _C._get_autograd_fallback_mode()
    _C._set_autograd_fallback_mode(mode)
    return before


def needs_data(error: BaseException) -> bool:
    """Was something asked of a fake tensor that only data can tell?"""
    symbolic_shapes = importlib.import_module("torch.fx.experimental.symbolic_shapes")
    kinds = (
        _fake_tensor.DataDependentOutputException,
        _fake_tensor.DynamicOutputShapeException,
        symbolic_shapes.GuardOnDataDependentSymNode,
    )
    return isinstance(error, kinds)


def fake_mode() -> Any:
    """A FakeTensorMode in which sizes that depend on data may be made up."""
    symbolic_shapes = importlib.import_module("torch.fx.experimental.symbolic_shapes")
    return torch._subclasses.FakeTensorMode(shape_env=symbolic_shapes.ShapeEnv())


def aot_function(fn: Callable[..., Any], *, dynamic: bool) -> Callable[..., Any]:
    """`fn` run through AOTAutograd when called: traced, functionalized, partitioned, and executed as traced."""
    aot = importlib.import_module("torch._functorch.aot_autograd")  # torch's AOT stack, with dynamo
    partitioners = importlib.import_module("torch._functorch.partitioners")
    return aot.aot_function(  # type: ignore[no-any-return]
        fn,
        fw_compiler=lambda graph, _inputs: aot.make_boxed_func(graph),
        partition_fn=partitioners.min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
        dynamic=dynamic,
    )


def ignoring_aliases() -> Any:
    """Context manager: AOTAutograd does not look for undeclared aliases (else it warns, and raises where CI is set)."""
    return importlib.import_module("torch._functorch.config").patch(check_custom_op_aliasing=False)
