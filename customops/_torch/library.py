"""torch.library.Library: defining, registering, looking up, and removing without a trace."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import operator
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch._library import custom_ops as _torch_custom_ops
from torch._library import simple_registry as _torch_registry
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch._ops import _refresh_packet
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.library import Library as Library

from customops._torch import hooks
from customops._torch.dispatcher import has_kernel
from customops.errors import UnregisteredError

# torch.ops: what is done before an op is found there, and before a namespace is first used ----------------------------

__tracebackhide__ = True  # pytest leaves the frames out


def followed(function: Any, then: Callable[..., object]) -> Any:
    """A function that calls `function`, then `then` with the same arguments."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        then(*args, **kwargs)
        return result

    return wrapper


#: Namespaces of torch's own operators.
TORCHS = frozenset(
    """aten prim prims c10d _c10d_functional _c10d_functional_autograd c10d_functional _dtensor _native _quantized _test
    debug_mode_ops debugprims export fsdp higher_order inductor inductor_prims mkl mkldnn mkldnn_prepacked onednn onnx
    prepacked profiler quantization quantized quantized_decomposed rngprims sparse static_runtime streams symm_mem
    xnnpack""".split()
)

#: Without: a definition that fails leaves its namespace in torch.ops
_ops: Any = torch.ops
_Ops: Any = type(_ops)


def namespace_of_ops(name: str) -> Any:
    """Return ``torch.ops.<name>``."""
    return getattr(_ops, name)


def exists(name: str) -> bool:  # torch makes ``torch.ops.<name>`` on first look
    return name in vars(_ops)


def forget(name: str) -> None:
    """Undo that look."""
    if vars(_ops).pop(name, None) is not None and name in _ops._dir:
        _ops._dir.remove(name)


# torch.library.Library: defining, registering, looking up, and removing without a trace -------------------------------

_C: Any = torch._C


#: Without: ops cannot be looked up, replaced or removed
def is_defined(qualname: str, overload: str = "") -> bool:
    """Does the dispatcher have an op?"""
    return overload in map(_overload_name, _C._jit_get_schemas_for_operator(qualname))


_overload_name = operator.attrgetter("overload_name")


def names_in(namespace: str = "") -> list[str]:
    """The ops of a namespace, or all, as ``ns::name``, without their overloads."""
    start = namespace and f"{namespace}::"
    names = (name.partition(".")[0] for name in _C._dispatch_get_all_op_names() if name.startswith(start))
    return list(dict.fromkeys(names))


def find_overload(qualname: str, overload: str = "") -> OpOverload | None:
    """The OpOverload of an op, or None where no such op is defined (without making a namespace in `torch.ops`)."""
    return overload_of(qualname, overload) if is_defined(qualname, overload) else None


def called_overload(packet: OpOverloadPacket, args: Sequence[Any], kwargs: Mapping[str, Any]) -> OpOverload:
    """The OpOverload that a call of a packet is one of; torch's own error, if it is of none."""
    names = packet.overloads()
    name = names[0] if len(names) == 1 else _C._jit_resolve_packet(packet._qualified_op_name, *args, **kwargs)
    return cast(OpOverload, getattr(packet, name))


def why_refused(packet: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Why no overload of an op takes these arguments, in torch's words; None if one does. Nothing is called."""
    try:
        _C._jit_resolve_packet(packet, *args, **kwargs)
    except RuntimeError as error:
        lines = str(error).splitlines()  # for an op of several overloads, those of each, below a line on all
        return lines[len(lines) > 1 and lines[0].startswith("Overloaded")]
    return None


def overload_of(qualname: str, overload: str = "") -> OpOverload:
    """Return the OpOverload of an op that is defined."""
    namespace, _, name = qualname.partition("::")
    ops = namespace_of_ops(namespace)
    packet = getattr(ops, name)
    return cast(OpOverload, getattr(packet, overload or "default"))


name_of_overload: Callable[[OpOverload], str] = operator.attrgetter("_name")
#: The C++ function behind an OpOverload.
entry_of: Callable[[OpOverload], Callable[..., Any]] = operator.attrgetter("_op")
#: ``dispatch_objects(overload, enabled)``: let the dispatcher pass tensors to Python kernels without a conversion to
#: C++ and back, if they are passed by position. None before torch 2.14. If another argument is not a tensor, the
#: dispatcher finds that out, which costs more than is saved. It accepts a tensor for a list of tensors, and any
#: result of a kernel. Profilers do not see such calls.
dispatch_objects: Callable[[Any, bool], None] | None = getattr(OpOverload, "_enable_pyobj_dispatch", None)


def by_position(order: Sequence[str]) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    """``f(args, kwargs)``: all arguments by position, for `dispatch_objects`.

    Return them unchanged if the dispatcher will refuse them, or if a ``__torch_function__`` handles the call.
    """
    rest = [operator.itemgetter(*order[i:]) for i in range(len(order))]
    last, overrides = len(order) - 1, torch.overrides.has_torch_function

    def bind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = len(args)
        if given + len(kwargs) == len(order):
            try:
                found = rest[given](kwargs)
            except KeyError:
                return args, kwargs
            found = (*args, found) if given == last else (*args, *found)
            if not overrides(found):
                return found, {}
        return args, kwargs

    return bind


#: What an overload remembers of which kernel a key leads to, for calls under modes. To be cleared when kernels come or
#: go: torch does not where a library is destroyed.
dispatch_cache: Callable[[OpOverload], dict[Any, Any]] = operator.attrgetter("_dispatch_cache")
#: `Library.impl` as torch has it: `watch_registrations` does not see what goes through it.
torch_impl: Callable[..., None] = Library.impl


def watch_registrations(module: Any) -> None:
    """Call `hooks.kernel_registered` for a kernel of any Library, but not at Meta: calls with data never come there."""

    @functools.wraps(torch_impl)
    def watched(library: Any, op_name: Any, fn: Any, dispatch_key: str = "", **options: Any) -> None:
        torch_impl(library, op_name, fn, dispatch_key, **options)
        if dispatch_key != "Meta":
            hooks.kernel_registered(name_in(library, op_name))

    module.Library.impl = watched


def watch_loading(module: Any) -> None:
    """Call `hooks.kernel_registered` when ``torch.ops`` has loaded a shared library.

    C++ code that Python imports as a module goes unseen.
    """
    module._Ops.load_library = followed(module._Ops.load_library, lambda *_, **__: hooks.kernel_registered())


def name_in(library: Library, op: str | OpOverload) -> str:
    name = (op if isinstance(op, str) else op._name).removesuffix(".default")
    return name if "::" in name else f"{library.ns}::{name}"


def on_library_destroyed(library: Library, callback: Callable[[], object]) -> None:
    """Call `callback` when `library` is destroyed, by whoever does it (torch's own redefinition too)."""
    handle: Any = types.SimpleNamespace(destroy=callback)
    library._registration_handles.append(handle)


def library_of(qualname: str) -> Library | None:
    """The Library of Python code that defines an op. torch has no table of these, but a finalizer for each."""
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        library = (finalizer.peek() or (None,))[0]
        if isinstance(library, Library) and qualname in library._op_defs and library_alive(library):
            return library
    return None


def library_alive(library: Library) -> bool:
    return library.m is not None


def destroy_library(library: Library) -> None:
    if library.m is not None:
        library._destroy()
    # When the object is collected, torch takes down the ops of these names once more: whoever has them by then.
    _clear_torch_ops_cache(library._op_defs)
    torch.library._defs.difference_update(library._op_defs)
    library._op_defs.clear()
    library._op_impls.clear()


_clear_torch_ops_cache: Callable[[set[str]], None] = torch.library._clear_torch_ops_cache


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
    raise UnregisteredError("the op was unregistered")


def lost_kernel(op: str, key: str) -> Callable[..., Any]:
    """Return a function that raises in the place of the kernel of another library, which torch no longer remembers."""

    def lost(*args: Any, **kwargs: Any) -> None:
        problem = f"cannot call the {key} kernel of another library under a dispatch mode: customops once replaced it"
        fix = "register the kernel again, or call the op outside the mode"
        raise UnregisteredError(problem, op=op, fix=fix)

    return lost


def install_view_fallback(library: Library, name: str) -> None:
    """Let torch make the outputs of a view op true views of its input."""
    library.m.register_ad_inplace_or_view_fallback(name)  # type: ignore[union-attr]


def impl(library: Library, name: str, fn: Callable[..., Any], key: str, *, with_keyset: bool = False) -> None:
    """Install a kernel, in the place of one that is there."""
    with _overriding_quietly() if has_kernel(f"{library.ns}::{name}", key) else contextlib.nullcontext():
        torch_impl(library, name, fn, key, with_keyset=with_keyset, allow_override=True)


@contextlib.contextmanager
def _overriding_quietly() -> Iterator[None]:
    """Overriding is what the caller asked for; torch mentions it, once per process for all operators."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators", category=UserWarning)
        yield


def retire_overload(overload: OpOverload, error: Exception) -> None:
    """Make a handle to a removed op raise: the dispatcher's own would read freed memory (a segfault on 2.13)."""
    dead = disconnect_overload(overload, error)
    packet = overload._overloadpacket
    packet.__dict__.pop(overload._overloadname, None)
    qualname = packet._qualified_op_name
    if _C._jit_get_schemas_for_operator(qualname):  # other overloads live on: the packet stays, without this one
        _refresh_packet(packet)
        namespace, name = qualname.split("::")
        ops = namespace_of_ops(namespace)
        setattr(ops, name, packet)
        if name not in ops._dir:  # before 2.13 torch fails to destroy the library of the last overload
            ops._dir.append(name)
    else:
        packet._op = dead


def disconnect_overload(overload: OpOverload, error: Exception) -> Any:
    """The part of it for an op that others removed: torch sees to the packet."""
    dead = overload._op = overload._op_dk = overload.__dict__["_handle"] = _Retired(error)
    overload.__dict__["_pyobj_dispatcher"] = None  # of `dispatch_objects`
    return dead


#: The libraries of operators that stand for removed ones, with their schemas, by name; see `destroy_operator`.
_stand_ins: dict[str, list[tuple[Library, str]]] = {}


def destroy_operator(library: Library, qualname: str) -> None:
    """Destroy the library that defines one operator, ``ns::name`` with any overload.

    torch's JIT has an entry for each overload, and one for all overloads that take and return the same. It drops the
    latter with the first of these, and then keeps entries of the others that are destroyed, which point to freed
    memory (``deregisterOperator`` in operator.cpp of torch 2.15; a segfault later). An operator that stays, and raises
    when it is called, gives the others that entry back.
    """
    before = _C._jit_get_schemas_for_operator(qualname) if library.m is not None else []
    destroy_library(library)
    after = _C._jit_get_schemas_for_operator(qualname) if len(before) > 1 else []
    left = {_types(schema) for schema in after if not schema.overload_name.startswith(_STANDS_IN)}
    for gone in before:
        if gone.overload_name not in {schema.overload_name for schema in after} and _types(gone) in left:
            _stand_in(qualname, str(gone))


#: How the overload of an operator is called that stands for a removed one.
_STANDS_IN = "customops_removed_"
_numbers = itertools.count()


def _stand_in(qualname: str, schema: str) -> None:
    namespace, name = qualname.split("::")
    overload = f"{name}.{_STANDS_IN}{next(_numbers)}"
    library = Library(namespace, "FRAGMENT")
    library.define(overload + schema[schema.index("(") :])
    library.impl(overload, _raise_removed, "CompositeExplicitAutograd")
    _stand_ins.setdefault(qualname, []).append((library, schema))
    _C._jit_get_schemas_for_operator(qualname)  # the JIT enters what is new when somebody looks


def move_stand_ins(qualname: str) -> None:
    """Put what stands for removed operators behind one that was defined now: torch calls the first that fits."""
    for library, schema in _stand_ins.pop(qualname, []):
        types = _types(_C.parse_schema(schema))
        schemas = _C._jit_get_schemas_for_operator(qualname)
        shared = any(_types(each) == types for each in schemas if not each.overload_name.startswith(_STANDS_IN))
        if shared:  # the entry is there, for one of them to be destroyed; else the next stand-in brings it
            destroy_library(library)
        _stand_in(qualname, schema)
        if not shared:
            destroy_library(library)


def _raise_removed(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("the operator was removed")


def _types(schema: Any) -> tuple[Any, ...]:
    """What the JIT tells operators of one name by."""
    arguments = tuple((str(argument.type), argument.name, argument.kwarg_only) for argument in schema.arguments)
    return arguments, tuple((str(result.type), result.name) for result in schema.returns)


class _Retired:
    """Stands where a removed op's C++ handle was: calling it, or any of its methods, raises."""

    __module__ = "torch.ops"

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise self._error

    redispatch_boxed = __call__


def forget_signature(qualname: str, overload: str) -> None:
    """Drop FX's cached Python signature of a removed op: the next op of that name has its own."""
    cache = importlib.import_module("torch.fx.operator_schemas")._SCHEMA_TO_SIGNATURE_CACHE
    cache.pop((qualname, overload), None)


# torch's own tables of custom ops, fakes and torch_dispatch rules -----------------------------------------------------


#: Without: torch's register_* functions, given a name, do not reach ops of customops; fakes are not found
#: The Library through which `torch.library.custom_op` (or we) defined an op, or None.
torch_library_of: Callable[[str], Library | None] = _torch_custom_ops.OPDEF_TO_LIB.get


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


class TorchOp(NamedTuple):
    """The functions of an op of `torch.library.custom_op`."""

    fn: Callable[..., Any]
    fake: Callable[..., Any] | None
    backward: Callable[..., Any] | None


def made_by_torch(qualname: str) -> TorchOp | None:
    """What `torch.library.custom_op` knows of an op that it made; None for all others, and for ours."""
    op = _torch_custom_ops.OPDEFS.get(qualname)
    if type(op) is not _torch_custom_ops.CustomOpDef:
        return None
    return TorchOp(op._init_fn, op._abstract_fn, op._backward_fn)


def claim(qualname: str, op: Any, library: Library | None = None) -> object:
    """Enter an op of ours in torch's tables of custom ops, for as long as the object returned is kept.

    Then torch's ``register_*`` functions call our methods when given the name, `has_fake_kernel` asks ``_abstract_fn``
    instead of taking the raising default fake for a real one, and a later `torch.library.custom_op` of the same name
    replaces ours instead of failing. An op that is not defined yet has no library.
    """
    if library is not None:
        _torch_custom_ops.OPDEF_TO_LIB[qualname] = library
    view = _torch_custom_ops.OPDEFS[qualname] = _TorchView(op)
    return view


def disclaim(qualname: str, library: Library) -> None:
    """Undo `claim`, unless another library has taken the name since."""
    if _torch_custom_ops.OPDEF_TO_LIB.get(qualname) is library:
        del _torch_custom_ops.OPDEF_TO_LIB[qualname]
        _torch_custom_ops.OPDEFS.pop(qualname, None)


#: The modes that compilers and `make_fx` trace with.
_TRACERS = (FakeTensorMode, FunctionalTensorMode, ProxyTorchDispatchMode)


class _NamedRules(_torch_registry.GenericTorchDispatchRuleHolder):
    """The rules of one op for dispatch modes and tensor subclasses, some of them for classes given by their names.

    torch asks for the rule of a class whenever a mode or a subclass of that class sees the op. So the module that
    defines a named class is not loaded for its rule.
    """

    _named: dict[str, Callable[..., Any]]

    def find(self, torch_dispatch_class: type) -> Callable[..., Any] | None:
        if torch_dispatch_class in _TRACERS:
            in_compiler = torch._guards.TracingContext.try_get() is not None
            hooks.op_traced(self.qualname, in_compiler or torch_dispatch_class is ProxyTorchDispatchMode)
        found = super().find(torch_dispatch_class)
        name = f"{torch_dispatch_class.__module__}.{torch_dispatch_class.__qualname__}"
        return self._named.get(name) if found is None else found


def enter_named_rule(qualname: str, cls: str, rule: Callable[..., Any]) -> Callable[[], None]:
    """Register the rule of an op for the class ``module.name``, in the place of an earlier one. Return the undo."""
    entry = _torch_registry.singleton.find(qualname)
    rules: Any = entry.torch_dispatch_rules
    if not isinstance(rules, _NamedRules):
        rules.__class__, rules._named = _NamedRules, {}
    rules._named[cls] = rule

    def leave() -> None:
        if rules._named.get(cls) is rule:
            del rules._named[cls]

    return leave


def enter_fake(library: Library, qualname: str, fn: Callable[..., Any], source: str) -> None:
    """`register_fake` for an op that Python defined, by someone who knows the place: finding it is most of the cost."""
    holder = _torch_registry.singleton.find(qualname).fake_impl
    library._registration_handles.append(holder.register(fn, source, lib=library, allow_override=True))


#: As torch has them, of a Library: its fakes are where FakeTensorMode and meta tensors look.
register_fake: Callable[..., None] = Library._register_fake
register_torch_dispatch: Callable[..., None] = Library._register_torch_dispatch_rule
register_effect: Callable[..., None] = Library._register_effectful_op


def forget_entry(qualname: str) -> None:
    """Drop what torch's registry keeps for a removed op, unless somebody has something registered there."""
    entry = _torch_registry.singleton._data.get(qualname)
    if entry is not None and not (entry.fake_impl.kernels or entry.torch_dispatch_rules._data):
        del _torch_registry.singleton._data[qualname]


def fake_record(qualname: str) -> Any | None:
    """torch's record of the newest fake of an op (fields ``func`` and ``source``), or None."""
    entry = _torch_registry.singleton._data.get(qualname)
    return entry.fake_impl.kernel if entry is not None else None
