"""The private torch names that a device needs; `require` says which of them this torch lacks.

Seen to exist on torch 2.11 to 2.15. Python's hook and guard are marked experimental there.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import operator
import struct
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from customops import _torch as _core
from customops.backend.errors import BackendError

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
custom_mod_func: Callable[[str], Any] = _find("utils.backend_registration._get_custom_mod_func")
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
        fix = "use a torch that has them; customops was tested with 2.11 to 2.15"
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

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return op.redispatch(CPU_KEYS, *args, **kwargs)

    return outside_dynamo(kernel)


#: The hook and the guard: torch does not keep them alive.
_installed: dict[str, Any] = {}


def install_hooks() -> None:
    """Tell torch that the device is there, before it has a name; raise if somebody else has. It cannot be undone."""

    def yes(self: Any, *_: Any) -> bool:
        return True

    hook = type("Hooks", (_Hooks,), {"is_available": yes, "is_built": yes, "has_primary_context": yes})
    guard = type("Guard", (_Guard,), {"type_": lambda self: _PrivateUse1})
    for what, made, register in (("hooks", hook(), _register_hook), ("a device guard", guard(), _register_guard)):
        if what in _installed:
            continue
        if not register(made):
            problem = f"somebody has registered {what} for PrivateUse1 in this process, which torch takes once"
            fix = "leave that to register_backend; or write the whole device in C++, as examples/cpp_device does"
            raise BackendError(problem, fix=fix)
        _installed[what] = made


def outside_dynamo(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel`, whose frames Dynamo does not trace; of a bound method, the function has the code object."""
    if isinstance(kernel, types.MethodType):
        _core.dynamo.outside_dynamo(kernel.__func__)
        return kernel
    return _core.dynamo.outside_dynamo(kernel)


# Memory ---------------------------------------------------------------------------------------------------------

#: Device types of DLPack: kDLCPU, and kDLExtDev, which torch reads as PrivateUse1.
_CPU, EXTENSION = 1, 12
#: The start of a capsule's struct in units of 64 bits: the pointer to the data, then device type and index in one.
_pointer_of: Any = ctypes.PYFUNCTYPE(ctypes.POINTER(ctypes.c_int64), ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)  # not its attribute, which is one for all: others set other types
)
_NAME = ctypes.c_char_p(b"dltensor")


def _device_field(type_: int, index: int) -> int:
    return int.from_bytes(struct.pack("=ii", type_, index), sys.byteorder, signed=True)


_HOST = _device_field(_CPU, 0)
_DEVICES = [_device_field(EXTENSION, index) for index in range(MAX_DEVICES)]
_ANY_DEVICE = frozenset(_DEVICES)


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
    fields[1] = _HOST
    return _from_dlpack(capsule)  # type: ignore[no-any-return]


def replace(undo: contextlib.ExitStack, path: str, value: Any) -> None:
    """Put `value` at a path below `torch`, until `undo` is closed."""
    place, _, attribute = path.rpartition(".")
    owner = lookup(place)
    if attribute in vars(owner):
        undo.callback(setattr, owner, attribute, vars(owner)[attribute])
    else:
        undo.callback(delattr, owner, attribute)  # it is inherited
    setattr(owner, attribute, value)


#: Where ``torch.accelerator`` looks for what it asks the C++ part of a device.
ACCELERATOR = "_C._accelerator_"


# Autograd -------------------------------------------------------------------------------------------------------


def single_threaded_backward(undo: contextlib.ExitStack) -> None:
    """Have ``backward`` run in the calling thread, until `undo` is closed.

    The engine starts a thread for each device with the first backward of a process, and fails an internal assertion
    (engine.cpp) for one that was not there then. The guard that Python can register says that there is one device, so
    the second one is never there. In the calling thread it needs none of them; kernels in Python take turns anyway.
    """

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.set_multithreading_enabled(False):
            return _run_backward(*args, **kwargs)

    for module in ("autograd", "autograd.graph"):
        replace(undo, f"{module}._engine_run_backward", run_backward)


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


# torch's own tests of ops ---------------------------------------------------------------------------------------


def op_infos() -> list[Any]:
    """torch's database of ops with sample inputs. It takes seconds to load."""
    return list(importlib.import_module("torch.testing._internal.common_methods_invocations").op_db)
