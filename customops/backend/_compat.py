"""The private torch names that a device needs; `require` says which of them this torch lacks.

torch marks Python's hook and guard as experimental.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import functools
import importlib
import operator
import struct
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from customops import _torch as _core
from customops._versions import NEWEST, OLDEST, spelled
from customops.backend._imports import when_loaded
from customops.backend.errors import BackendError
from customops.errors import UnsupportedError

#: Plenty; torch keeps a device's index in eight bits.
MAX_DEVICES = 64


class Library(_core.library.Library):
    """A library of this package's own: `watch_kernels` tells them from others."""

    def __init__(self, namespace: str, kind: str, dispatch_key: str = "") -> None:
        super().__init__(namespace, kind, dispatch_key)  # type: ignore[no-untyped-call]


#: What a device needs of torch, as paths below `torch`. `require` looks them up once more, before anything is changed.
NEEDED: list[str] = []


def _find(path: str) -> Any:
    NEEDED.append(path)
    return lookup(path)


def lookup(path: str) -> Any:
    """None where there is no such name."""
    try:
        return operator.attrgetter(path)(torch)
    except AttributeError:
        return None


_to_dlpack = _find("_C._to_dlpack")
_from_dlpack = _find("_C._from_dlpack")
_register_hook = _find("_C._acc.register_python_privateuseone_hook")
_register_guard = _find("_C._acc.register_python_privateuseone_device_guard")
_Hooks = _find("_C._acc.PrivateUse1Hooks")
_Guard = _find("_C._acc.DeviceGuard")
_PrivateUse1 = _find("_C._autograd.DeviceType.PrivateUse1")
#: What PrivateUse1 is called now; ``privateuseone`` until it is renamed.
backend_name: Callable[[], str] = _find("_C._get_privateuse1_backend_name")
rename: Callable[[str], None] = _find("utils.backend_registration.rename_privateuse1_backend")
generate_methods: Callable[..., None] = _find("utils.backend_registration.generate_methods_for_privateuse1_backend")
register_device_module: Callable[[str, Any], None] = _find("_register_device_module")
set_conj: Callable[[torch.Tensor, bool], None] = _find("_C._set_conj")
set_neg: Callable[[torch.Tensor, bool], None] = _find("_C._set_neg")
is_functional: Callable[[torch.Tensor], bool] = _find("_is_functional_tensor")
is_zero_tensor: Callable[[torch.Tensor], bool] = _find("Tensor._is_zerotensor")
neg_view: Callable[[torch.Tensor], torch.Tensor] = _find("_neg_view")
StorageBase: Any = _find("storage._StorageBase")
#: May a Python number be given to an op of ``aten`` where the schema says Tensor?
numbers_are_tensors: Callable[[str], bool] = _find("_C._should_allow_numbers_as_tensors")
_run_backward = _find("autograd.graph._engine_run_backward")
_schemas_of_op = _find("_C._jit_get_schemas_for_operator")
_schema_in_dispatcher = _find("_C._dispatch_find_schema_or_throw")
_all_ops = _find("_C._dispatch_get_all_op_names")
#: Has somebody registered a fallback for all ops at a dispatch key?
has_fallback: Callable[[Any], bool] = _find("_C._dispatch_has_backend_fallback")
parse_key: Callable[[str], Any] = _find("_C._parse_dispatch_key")
NEEDED += [  # replaced below, and what torch's functions and those of `_core` that are used here look up when called
    "autograd._engine_run_backward",
    "_C._rename_privateuse1_backend",
    "_C._dispatch_has_kernel_for_dispatch_key",
    "_C._dynamo.eval_frame",
    "_C._functorch.is_functorch_wrapped_tensor",
    "library.Library._destroy",
    "library._defs",
]

#: By these keys redispatching runs the CPU's kernel on the tensors as they are.
CPU_KEYS: Any = _core.dispatcher.key_set("CPU")


def require(paths: Iterable[str], ops: Iterable[str]) -> None:
    """Raise BackendError where torch lacks one of these names, of those in `NEEDED`, or of these ops of ``aten``."""
    missing = [f"torch.{path}" for path in (*NEEDED, *paths) if lookup(path) is None]
    missing += [f"aten::{op}" for op in ops if not missing and find_op(f"aten::{op}") is None]
    if missing:
        problem = "this torch cannot have a device from Python"
        got = f"torch {torch.__version__} without these names"
        fix = f"use a torch that has them; customops was tested with {spelled(OLDEST)} to {spelled(NEWEST)}"
        raise BackendError(problem, expected=", ".join(missing), got=got, fix=fix)
    field = _pointer_of(_to_dlpack(torch.empty(1, dtype=torch.uint8, device="cpu")), _NAME)[1]
    if field != _HOST:
        problem = "this torch has DLPack capsules of an unknown layout: tensors cannot change device in place"
        raise BackendError(problem, expected=f"{_HOST:#x} for the device of a CPU tensor", got=f"{field:#x}")


# The dispatcher -------------------------------------------------------------------------------------------------


def find_op(qualname: str) -> _core.library.OpOverload | None:
    """``ns::name`` or ``ns::name.overload`` to the OpOverload."""
    name, _, overload = qualname.partition(".")
    overload = "" if overload == "default" else overload
    if f"{name}.{overload}".removesuffix(".") not in overload_names(name):  # TorchScript has more, for Python numbers
        return None
    return _core.library.find_overload(name, overload)


def overload_names(qualname: str) -> list[str]:
    """``ns::name.overload`` for each overload of an op in the dispatcher; none where there is no such op."""
    names = []
    for schema in _schemas_of_op(qualname):
        with contextlib.suppress(RuntimeError):  # TorchScript has overloads of its own
            _schema_in_dispatcher(qualname, schema.overload_name)
            names.append(f"{qualname}.{schema.overload_name}".removesuffix("."))
    return names


def composites_of_the_cpu() -> list[str]:
    """Ops that torch composes of others for any device, and that the CPU has a kernel for, if only by ``out=``."""
    names = [name for name in _all_ops() if name.startswith("aten::")]
    outs = {name for name in names if "out" in name.partition(".")[2]}
    has_kernel = _core.dispatcher.has_kernel
    with_out = {name.partition(".")[0] for name in outs if has_kernel(name, "CPU")}
    composites = ("CompositeExplicitAutogradNonFunctional", "CompositeExplicitAutograd")
    return sorted(
        name
        for name in names
        if any(has_kernel(name, key) for key in composites)
        and (has_kernel(name, "CPU") or (name.partition(".")[0].removesuffix("_") in with_out and name not in outs))
    )


def watch_kernels(undo: contextlib.ExitStack, added: Callable[[str], object]) -> None:
    """Call ``added(qualname)`` after somebody else registered a kernel for the device through a Library."""

    def then(library: Any, op_name: Any, fn: Any, dispatch_key: str = "", **_: Any) -> None:
        if (dispatch_key or library.dispatch_key) == "PrivateUse1" and not isinstance(library, Library):
            added(_core.library.name_in(library, op_name))

    replace(undo, "library.Library.impl", _core.library.followed(_core.library.Library.impl, then))


def kernel_of_the_cpu(op: Any) -> Callable[..., Any]:
    """A kernel of the device that runs the CPU's on the tensors as they are: for ops that touch sizes and strides."""
    return functools.partial(op.redispatch, CPU_KEYS)


#: The hook and the guard: torch does not keep them alive.
_installed: dict[str, Any] = {}


_raise_what_is_pending: Any = ctypes.PYFUNCTYPE(ctypes.c_int)(("Py_IsInitialized", ctypes.pythonapi))


class _Unwound(threading.local):
    """The exception that C++ is on its way out with, in this thread."""

    error: BaseException | None = None


_unwound = _Unwound()


def _type_of_device(guard: Any) -> Any:
    """What a guard asks for. While a hook's exception unwinds the engine, it asks for that in its destructor.

    torch then leaves the exception pending, with which no function of Python can return, and the process ends. So it is
    taken here: ctypes raises what is pending after a call of Python's C API. `run_backward` raises it again.
    """
    try:
        _raise_what_is_pending()
    except BaseException as error:
        _unwound.error = error
        is_of_here = error.__traceback__ is not None and error.__traceback__.tb_next is None
        if isinstance(error, KeyboardInterrupt) and is_of_here:  # a Ctrl-C came now: it is raised later, as C++ cannot
            _thread.interrupt_main()
    return _PrivateUse1


def install_hooks() -> None:
    """Tell torch that the device is there, before it has a name; raise if somebody else has. It cannot be undone."""

    def yes(self: Any, *_: Any) -> bool:
        return True

    hook = type("Hooks", (_Hooks,), {"is_available": yes, "is_built": yes, "has_primary_context": yes})
    guard = type("Guard", (_Guard,), {"type_": _type_of_device})
    for what, made, register in (("hooks", hook(), _register_hook), ("a device guard", guard(), _register_guard)):
        if what in _installed:
            continue
        if not register(made):
            problem = f"somebody has registered {what} for PrivateUse1 in this process, which torch takes once"
            fix = "leave that to register_backend; or write the whole device in C++, as examples/cpp_device does"
            raise BackendError(problem, fix=fix)
        _installed[what] = made


# Memory ---------------------------------------------------------------------------------------------------------

#: PrivateUse1 among torch's device types, as `torch.Stream` is told it.
DEVICE_TYPE = int(_PrivateUse1) if _PrivateUse1 is not None else 20
#: Device types of DLPack: kDLCPU, and kDLExtDev, which torch reads as PrivateUse1.
_CPU, EXTENSION = 1, 12
#: The start of a capsule's struct in units of 64 bits: the pointer to the data, then device type and index in one,
#: dimensions and dtype, the pointers to sizes and to strides.
_pointer_of: Any = ctypes.PYFUNCTYPE(ctypes.POINTER(ctypes.c_int64), ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)  # not its attribute, which is one for all: others set other types
)
_NAME = ctypes.c_char_p(b"dltensor")


def _device_field(type_: int, index: int) -> int:
    return int.from_bytes(struct.pack("=ii", type_, index), sys.byteorder, signed=True)


_HOST = _device_field(_CPU, 0)
_DEVICES = [_device_field(EXTENSION, index) for index in range(MAX_DEVICES)]
_ANY_DEVICE = frozenset(_DEVICES)
#: Below this address a process has no memory: it is the offset of a tensor in a storage that has none.
_NOWHERE = 1 << 22


def as_device(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """The memory of a CPU tensor as one of the device, which keeps it alive; BufferError if it is none of the CPU."""
    capsule = _to_dlpack(tensor)
    fields = _pointer_of(capsule, _NAME)
    if fields[1] != _HOST:
        raise BufferError(f"memory of {tensor.device}")
    fields[1] = _DEVICES[index]
    return _from_dlpack(capsule)  # type: ignore[no-any-return]


def as_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor of the device as a CPU tensor, without its conj and neg bits; BufferError if elsewhere."""
    capsule = _to_dlpack(tensor)
    fields = _pointer_of(capsule, _NAME)
    if fields[1] not in _ANY_DEVICE:
        raise BufferError(f"memory of {tensor.device}")
    if fields[0] < _NOWHERE and tensor.numel():
        raise emptied(tensor)
    fields[1] = _HOST
    return _from_dlpack(capsule)  # type: ignore[no-any-return]


def emptied(tensor: torch.Tensor) -> BackendError:
    """The error for a tensor that reaches beyond its storage."""
    problem = "the storage of this tensor was emptied or made smaller, by resize_ (FSDP does between uses)"
    got, fix = f"{tensor.untyped_storage().nbytes()} bytes", "x.untyped_storage().resize_(nbytes); module.unshard()"
    return BackendError(problem, op=str(tensor.device), got=got, fix=fix)


def at_handle(tensor: torch.Tensor, handle: int, index: int) -> torch.Tensor:
    """Elements of the device in a row, at a number that is no address of the host, as many as a CPU tensor has.

    They keep that tensor alive. No memory of it is used.
    """
    capsule = _to_dlpack(tensor)
    fields = _pointer_of(capsule, _NAME)
    fields[0], fields[1], fields[4] = handle, _DEVICES[index], 0  # without strides: one after another
    return _from_dlpack(capsule)  # type: ignore[no-any-return]


def swap_memory(one: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    """Have two storages of a device trade their memory: all tensors of the one are where those of the other were.

    No function of torch does it. In a StorageImpl, after two words of 64 bits, three say what the memory is and how it
    ends (DataPtr), one where it is, and one how large it is.
    """
    words = [(ctypes.c_uint64 * 7).from_address(storage._cdata) for storage in (one, other)]
    if any((each[2], each[6]) != (of.data_ptr(), of.nbytes()) for each, of in zip(words, (one, other), strict=True)):
        problem = f"storages of torch {torch.__version__} have an unknown layout: those of a device keep their size"
        raise UnsupportedError(problem, op="UntypedStorage.resize_", fix="resize the tensor: x.resize_(...)")
    for word in (2, 3, 4, 6):
        words[0][word], words[1][word] = words[1][word], words[0][word]


def replace(undo: contextlib.ExitStack, path: str, value: Any) -> None:
    """Put `value` at a path below `torch`, until `undo` is closed."""
    place, _, attribute = path.rpartition(".")
    owner = lookup(place) if place else torch
    if attribute in vars(owner):
        undo.callback(setattr, owner, attribute, vars(owner)[attribute])
    else:
        undo.callback(delattr, owner, attribute)  # it is inherited
    setattr(owner, attribute, value)


#: Where ``torch.accelerator`` looks for what it asks the C++ part of a device.
ACCELERATOR = "_C._accelerator_"


# Autograd -------------------------------------------------------------------------------------------------------


def single_threaded_backward(undo: contextlib.ExitStack, name: str, *, pin_memory: bool) -> None:
    """Have ``backward`` run in the calling thread, until `undo` is closed.

    The engine starts a thread for each device with the first backward of a process, and fails an internal assertion
    (engine.cpp) for one that was not there then. The guard that Python can register says that there is one device, so
    the second one is never there. In the calling thread it needs none of them; kernels in Python take turns anyway.

    DistributedDataParallel that looks for unused parameters takes pinned memory from the C++ part of a device, in its
    backward. For its sake, if its model is on the device `name`, it is taken from `pin_memory` there.
    """
    models: weakref.WeakSet[Any] = weakref.WeakSet()
    parallel = lookup("nn.parallel.DistributedDataParallel")

    def remember(model: Any, *_: Any, **__: Any) -> None:
        if any(parameter.device.type == name for parameter in model.parameters()):
            models.add(model)

    made = _core.library.followed(parallel.__init__, remember)
    replace(undo, "nn.parallel.DistributedDataParallel.__init__", made)

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        pins = any(model.find_unused_parameters or model.static_graph for model in models)
        if pins and not pin_memory:  # to raise in the C++ of the model would end the process
            problem = "DistributedDataParallel that looks for unused parameters takes pinned memory"
            raise UnsupportedError(problem, op="backward", fix="register_backend(..., pin_memory=True)")
        pinning: Any = _Pinning if pins else contextlib.nullcontext
        with torch.autograd.set_multithreading_enabled(False), pinning():
            _unwound.error = None
            try:
                return _run_backward(*args, **kwargs)
            except SystemError:
                error, _unwound.error = _unwound.error, None
                if error is None:
                    raise
            raise error

    for module in ("autograd", "autograd.graph"):
        replace(undo, f"{module}._engine_run_backward", run_backward)


class _Pinning(_core.dispatcher.TorchDispatchMode):
    """Pinned memory of the CPU, for C++ that asks for it."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        pins = (kwargs or {}).pop("pin_memory", None)
        result = op(*args, **kwargs or {})
        return result.pin_memory() if pins else result


@contextlib.contextmanager
def lent_generator(generator: torch.Generator) -> Iterator[None]:
    """Have the CPU's default generator go on where `generator` is, and `generator` from where that gets to."""
    default = torch.default_generator
    before = default.get_state()
    default.set_state(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(default.get_state())
        default.set_state(before)


# torch.distributed ----------------------------------------------------------------------------------------------


def gloo(store: Any, rank: int, size: int, timeout: Any) -> Any:
    make = lookup("_C._distributed_c10d.ProcessGroupGloo")
    if make is None:
        problem = "this torch was built without gloo, which the process group of a device uses"
        raise BackendError(problem, got=f"torch {torch.__version__}", fix="use a torch that has it")
    return make(store, rank, size, timeout=timeout)


def serve(group: Any, devices: Iterable[str], kind: Any, gloo: Any) -> None:
    """Say which devices the tensors of a group may be on."""
    for device in devices:
        group._register_backend(torch.device(device), kind, gloo)
    group._set_default_backend(kind)


def change_offsets(make: Callable[[torch.Tensor], Any], random: Any) -> None:
    """Have DTensor read the states of generators by ``make(state)``, where they are not those of Philox: 16 bytes."""
    philox = getattr(random, "_PhiloxState", None)
    if philox is not None:
        random._PhiloxState = lambda state: philox(state) if state.numel() == 16 else make(state)


def functional_outs() -> list[tuple[str, Callable[..., Any]]]:
    """Functional collectives with ``out=``, and kernels: C++ calls methods for these that Python cannot override."""
    wait: Any = find_op("_c10d_functional::wait_tensor")

    def into(functional: Any, *args: Any, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(wait(functional(*args)))

    names = ("all_gather_into_tensor", "reduce_scatter_tensor")
    found = {f"{name}_out": find_op(f"_c10d_functional::{name}") for name in names}
    return [(out, functools.partial(into, op)) for out, op in found.items() if find_op(f"_c10d_functional::{out}")]


# Compilers ------------------------------------------------------------------------------------------------------
# Inductor writes C++ for the CPU, and that runs wherever memory is the host's. So the device gets the same code
# generators, and where inductor tells the CPU from accelerators by name, the device counts as the CPU.

#: What inductor asks ``torch.<name>`` for when it first compiles for the device.
CODE_GENERATORS = ("Scheduling", "PythonWrapperCodegen", "CppWrapperCodegen", "WrapperFxCodegen")
#: Modules below ``torch``, and what the code generators need of each.
_INDUCTOR = {
    "_inductor.codegen.cpp": "CppScheduling",
    "_inductor.codegen.wrapper": "PythonWrapperCodegen SubgraphPythonWrapperCodegen",
    "_inductor.codegen.wrapper.PythonWrapperCodegen": "create make_allocation _generate_kernel_call_helper",
    "_inductor.codegen.common": "register_device_op_overrides",
    "_inductor.codegen.cpu_device_op_overrides": "CpuDeviceOpOverrides",
    "_inductor.cpp_builder": "get_cpp_compiler",
    "_inductor.graph": "should_fallback_by_default",
    "_inductor.scheduler.BaseSchedulerNode": "is_cpu",
    "_inductor.utils": "get_current_backend",
    "_inductor.virtualized": "V",
}


def tell_compilers(name: str, kernels: Callable[[], str], is_called: Callable[[str], bool]) -> None:
    """Enter the device where Dynamo looks for devices, and its kernels in the keys of the caches of graphs."""
    when_loaded("torch._dynamo.device_interface", functools.partial(_enter_interface, name))
    when_loaded("torch._inductor.codecache", functools.partial(_enter_kernels, name, kernels))
    when_loaded("torch._inductor.decomposition", functools.partial(_keep_whole, name, is_called))
    asked: Any = getattr(sys.modules.get("torch._inductor.codegen.common"), "init_backend_registration", None)
    if hasattr(asked, "cache_clear"):  # before 2.15 inductor asks once, and has asked if something was compiled before
        asked.cache_clear()


def _enter_interface(name: str, interfaces: Any) -> None:
    module = getattr(torch, name)
    asked = "current_device set_device device_count is_available synchronize memory_allocated stream current_stream"
    members: dict[str, Any] = {each: staticmethod(getattr(module, each)) for each in asked.split()}
    members |= {each: getattr(module, each) for each in ("device", "Stream", "Event")}
    members["is_triton_capable"] = staticmethod(lambda device=None: False)
    members["Worker"] = type("Worker", (interfaces.CpuInterface.Worker,), {"current_device": members["current_device"]})
    interfaces.register_interface_for_device(name, type("Interface", (interfaces.CpuInterface,), members))


def _enter_kernels(name: str, kernels: Callable[[], str], codecache: Any) -> None:
    def add(details: Any, gm: Any, example_inputs: Any, *_args: Any, **_kwargs: Any) -> None:
        inputs = {value.device.type for value in example_inputs if isinstance(value, torch.Tensor)}
        if name in inputs or (gm is not None and name in str(gm.graph)):
            details.customops_device = kernels()

    details = codecache.FxGraphHashDetails
    details.__init__ = _core.library.followed(details.__init__, add)


def _keep_whole(name: str, is_called: Callable[[str], bool], decomposition: Any) -> None:
    """Have inductor take no op apart that is called on the device."""
    copied = decomposition.fast_random_decomps
    for table in (decomposition.decompositions, copied() if copied.cache_info().currsize else {}):
        for op, decompose in table.items():
            if isinstance(op, _core.library.OpOverload) and not _is_view(op):
                table[op] = _unless_called(name, is_called, op, decompose)


def _unless_called(name: str, is_called: Callable[[str], bool], op: Any, decompose: Any) -> Callable[..., Any]:
    @functools.wraps(decompose)
    def decomposed(*args: Any, **kwargs: Any) -> Any:
        tensors = _core.trees.tensors_in((*args, *kwargs.values()))
        if any(tensor.device.type == name for tensor in tensors) and is_called(_core.library.name_of_overload(op)):
            return NotImplemented
        return decompose(*args, **kwargs)

    return decomposed


class NoCode:
    """Stands where inductor looks for a code generator: whatever is asked of it raises."""

    def __init__(self, problem: str, fix: str) -> None:
        self.problem, self.fix = problem, fix

    def __call__(self, *_: Any, **__: Any) -> Any:
        exc = importlib.import_module("torch._dynamo.exc")
        # An error that Dynamo neither wraps nor prints with the frames of inductor.
        members = {"__str__": lambda self: self._message(), "__module__": UnsupportedError.__module__}
        kind: Any = type("UnsupportedError", (UnsupportedError, exc.ShortenTraceback), members)
        error = kind(self.problem, fix=self.fix)
        error.first_useful_frame = sys._getframe()
        raise error

    def __getattr__(self, name: str) -> Any:
        return self()


class _Calls:
    """Mixin of what writes the Python code of a graph, which allocates tensors and calls the C++ code."""

    name: str
    refusal: NoCode | None  #: where the C++ code could not read the memory

    def make_allocation(self, buffer: str, device: torch.device, *args: Any, **kwargs: Any) -> str:
        line: str = super().make_allocation(buffer, device, *args, **kwargs)  # type: ignore[misc]
        return line.replace(f"device='{self.name}'", f"device='{device}'")  # torch leaves the index to a guard

    def _generate_kernel_call_helper(self, *args: Any, device: torch.device | None = None, **kwargs: Any) -> None:
        device = device or _graph().get_current_device_or_throw()
        if device.type == self.name:
            if self.refusal is not None:
                self.refusal()
            device = torch.device("cpu")
        super()._generate_kernel_call_helper(*args, device=device, **kwargs)  # type: ignore[misc]


def _graph() -> Any:
    """What inductor works on at the moment."""
    return lookup("_inductor.virtualized.V.graph")


@functools.cache
def code_generators(name: str, is_host: bool, is_called: Callable[[str], bool]) -> dict[str, Any]:
    """Those of `CODE_GENERATORS`, for a device whose memory is the host's, or all of whose ops are called."""
    instead = 'torch.compile(..., backend="aot_eager")'
    for path in _INDUCTOR:
        with contextlib.suppress(ImportError):
            importlib.import_module(f"torch.{path}")
    found = {needed: lookup(f"{path}.{needed}") for path, names in _INDUCTOR.items() for needed in names.split()}
    missing = ", ".join(needed for needed, value in found.items() if value is None)
    if missing:
        problem = f"inductor of torch {torch.__version__} compiles for no device written in Python: it lacks {missing}"
        return dict.fromkeys(CODE_GENERATORS, NoCode(problem, instead))
    try:
        if is_host:
            found["get_cpp_compiler"]()
    except RuntimeError as error:
        problem = f"inductor writes C++ for the device {name!r}: {error}"
        return dict.fromkeys(CODE_GENERATORS, NoCode(problem, f"install g++; or {instead}"))
    refusal = NoCode(f"inductor writes C++ for memory of the host, and that of {name!r} is its own", instead)
    members = {"name": name, "refusal": None if is_host else refusal}
    whole, part = (
        type("Wrapper", (_Calls, found[f"{kind}PythonWrapperCodegen"]), members) for kind in ("", "Subgraph")
    )
    whole.create = staticmethod(lambda is_part, *args: part(*args) if is_part else whole())  # type: ignore[attr-defined]
    found["register_device_op_overrides"](name, found["CpuDeviceOpOverrides"]())
    _count_as_cpu(name, is_called)
    problem, fix = "inductor calls what it writes for a device in Python from Python alone", "cpp_wrapper=False"
    generators = {"Scheduling": found["CppScheduling"], "PythonWrapperCodegen": whole}
    return dict.fromkeys(CODE_GENERATORS, NoCode(problem, fix)) | generators


def _count_as_cpu(name: str, is_called: Callable[[str], bool]) -> None:
    """Have inductor take the device for the CPU where it asks for no more than that, and call the ops that are."""
    node, utils, graph = (lookup(f"_inductor.{each}") for each in ("scheduler.BaseSchedulerNode", "utils", "graph"))
    is_cpu, backend_of, is_left = node.is_cpu, utils.get_current_backend, graph.should_fallback_by_default

    def get_current_backend(device_type: str | None = None) -> Any:
        device_type = device_type or _graph().get_current_device_or_throw().type
        return backend_of("cpu" if device_type == name else device_type)

    def should_fallback_by_default(node: Any) -> Any:
        values = _core.trees.tree_leaves([each.meta.get("val") for each in (node, *node.all_input_nodes)])
        is_here = any(isinstance(value, torch.Tensor) and value.device.type == name for value in values)
        is_op = is_here and isinstance(node.target, _core.library.OpOverload) and not _is_view(node.target)
        return (is_op and is_called(_core.library.name_of_overload(node.target))) or is_left(node)

    node.is_cpu = lambda self: is_cpu(self) or getattr(self.get_device(), "type", None) == name
    graph.should_fallback_by_default = should_fallback_by_default
    for module in [module for path, module in sys.modules.items() if path.startswith("torch._inductor.")]:
        if vars(module).get("get_current_backend") is backend_of:
            module.get_current_backend = get_current_backend  # type: ignore[attr-defined]


def _is_view(op: Any) -> bool:  # without reading the schema of each of some hundred ops, as for `Schema.is_view`
    infos = [each.alias_info for each in _core.schema.schema_of(op).returns]
    return any(info is not None and not info.is_write for info in infos)


# torch's own tests of ops ---------------------------------------------------------------------------------------


def op_infos() -> list[Any]:
    """torch's database of ops with sample inputs. It takes seconds to load."""
    return list(importlib.import_module("torch.testing._internal.common_methods_invocations").op_db)
