"""`register_backend`: everything is checked, then everything is done."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import multiprocessing.reduction
import re
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.multiprocessing.reductions
from torch import Tensor

from customops import _torch
from customops.backend import _compat, kernels, memory
from customops.backend._backend import Backend
from customops.backend.device_module import DeviceModule
from customops.backend.errors import BackendError, BackendNameError
from customops.backend.fallbacks import Fallback, Policy, check_policy
from customops.backend.kernels import UserKernels
from customops.backend.memory import Memory
from customops.backend.substitutes import SUBSTITUTES
from customops.errors import UnsupportedError

# ----------------------------------------------------------------------------------------------------------------------
# The name of the device and the methods called after it: torch's functions, with all that can fail found before
# torch takes nearly any string for a name, for good, and finds out later that no device can be called so, or that
# ``Tensor`` has a method of that name. Here a call either does everything or raises and changes nothing.

#: What PrivateUse1 is called until somebody renames it.
UNNAMED = "privateuseone"
#: Device types that torch has code for. ("maia", "fpga" and the like are only reserved, and can be had.)
TAKEN = frozenset("cpu cuda hip xpu mps mtia hpu xla ipu meta lazy vulkan mkldnn ideep opengl opencl".split())

#: The classes that get ``<name>`` and ``is_<name>``, by the option that has torch set them.
METHODS: dict[str, list[type]] = {
    "tensor": [torch.Tensor],
    "module": [torch.nn.Module],
    "packed_sequence": [torch.nn.utils.rnn.PackedSequence],
    "storage": [_compat.StorageBase, torch.TypedStorage],
}


def rename_privateuse1_backend(backend_name: str) -> None:
    """Set the name of PrivateUse1, once per process. Setting the same name again does nothing.

    Raises:
        BackendNameError: torch cannot parse the name as a device, or the name would hide an attribute of torch.
        BackendError: it has another name already.
    """
    check_name(backend_name)
    _compat.rename(backend_name)


def check_name(name: object) -> None:
    """Raise what `rename_privateuse1_backend` raises, and change nothing."""
    name = check_spelling(name)
    current = _compat.backend_name()
    if current == name:
        return
    if current != UNNAMED:
        problem = f"the name of the device has already been set to {current!r}, once for this process"
        fix = "use one name in a process; run_isolated of customops.testing starts another one"
        raise BackendError(problem, got=repr(name), fix=fix)
    taken = [f"torch.{name}"] if hasattr(torch, name) else []
    taken += [f"{cls.__name__}.{name}" for classes in METHODS.values() for cls in classes if hasattr(cls, name)]
    if taken:
        raise BackendNameError("the name is taken", expected="a name that torch does not use", got=", ".join(taken))


def check_spelling(name: object) -> str:
    """Raise for a name that no device of one's own could ever have."""
    if not isinstance(name, str) or not re.fullmatch("[a-z][a-z_]*", name):
        problem = "torch cannot read this as a device"
        raise BackendNameError(problem, expected="a string of a-z and _ (no digits)", got=repr(name))
    if name in TAKEN or name == UNNAMED:
        raise BackendNameError("this device type is torch's own", got=repr(name), fix="choose another name")
    return name


def generate_methods_for_privateuse1_backend(
    for_tensor: bool = True,
    for_module: bool = True,
    for_packed_sequence: bool = True,
    for_storage: bool = False,
    unsupported_dtype: Iterable[torch.dtype] | None = None,
) -> None:
    """Add ``.<name>()`` and ``.is_<name>`` to tensors, modules, packed sequences and storages.

    Args:
        unsupported_dtype: dtypes whose typed storages cannot be moved to the device; trying to raises.

    Raises:
        BackendError: the device has no name yet, or one of the methods exists.
    """
    flags = dict(zip(METHODS, (for_tensor, for_module, for_packed_sequence, for_storage), strict=True))
    dtypes = list(unsupported_dtype) if unsupported_dtype is not None else None
    check_methods([method for method, wanted in flags.items() if wanted], dtypes)
    _compat.generate_methods(*flags.values(), dtypes)


def check_methods(methods: Collection[str], unsupported_dtype: Any, *, name: str | None = None) -> None:
    """Raise what `generate_methods_for_privateuse1_backend` raises, and change nothing."""
    name = name or _compat.backend_name()
    if name == UNNAMED:
        raise BackendError("the device has no name yet", fix='rename_privateuse1_backend("...") comes first')
    check_dtypes("unsupported_dtype", unsupported_dtype or ())
    needy = [method for method in methods if method != "storage"]
    if needy and "tensor" not in needy and not hasattr(torch.Tensor, name):
        raise BackendError(f"the methods of {needy[0]} call Tensor.{name}(), which is not there", fix="for_tensor=True")
    for method in methods:
        for cls in METHODS[method]:
            for attribute in [name] if method == "module" else [name, f"is_{name}"]:
                if hasattr(cls, attribute):
                    problem = f"The custom device module of {cls} has already been registered with {attribute}"
                    raise BackendError(problem, fix="call it once, or leave this class out")


def check_dtypes(option: str, dtypes: Iterable[object]) -> None:
    for dtype in dtypes:
        if not isinstance(dtype, torch.dtype):
            raise BackendNameError(f"{option} takes torch dtypes only", expected="torch dtypes", got=repr(dtype))


def get_custom_mod_func(func_name: str) -> Callable[..., Any]:
    """The function of this name in the device module, ``torch.<name>``.

    Raises:
        BackendError: there is no device module, or it has no such function.
    """
    if not isinstance(func_name, str):
        raise BackendNameError("the name of a function is a string", got=repr(func_name))
    name = _compat.backend_name()
    function = getattr(getattr(torch, name, None), func_name, None)
    if function is None:
        fix = f"register_backend makes torch.{name}; or define {func_name} in the module given to torch"
        raise BackendError(f"Try to call torch.{name}.{func_name}: there is none", fix=fix)
    return _compat.custom_mod_func(func_name)  # type: ignore[no-any-return]


# ----------------------------------------------------------------------------------------------------------------------
# Places where torch ends the process, or says nothing helpful, for a device that has no C++ part: each replaces one
# attribute of torch with a function that asks whether our device is meant, and else does as before

#: What is replaced, as a path below `torch`, by which method of `Patches`.
REPLACED = {
    "UntypedStorage.new": "storage_like",
    "UntypedStorage.__new__": "new_storage",
    "UntypedStorage.resize_": "resize_storage",
    "UntypedStorage.share_memory_": "share_memory",
    "UntypedStorage.is_shared": "is_shared",
    "Tensor.__repr__": "show",
    "Tensor.__dlpack_device__": "dlpack_device",
}

#: What ``torch.accelerator`` calls (`_compat.ACCELERATOR`), by which method: the guard that Python can register knows
#: one device, and no memory.
ACCELERATOR = {
    "getDeviceIndex": "current_device",
    **dict.fromkeys(("setDeviceIndex", "exchangeDevice", "maybeExchangeDevice"), "exchange_device"),
    "synchronizeDevice": "synchronize",
    "isAllocatorInitialized": "is_initialized",
    "emptyCache": "empty_cache",
    **dict.fromkeys(
        ("getDeviceStats", "getMemoryInfo", "resetAccumulatedStats", "resetPeakStats"), "refuse_statistics"
    ),
}

#: The same, where torch has it: from 2.13 and 2.15 on.
NEWER = {"emptyHostCache": "empty_cache", "getDefaultGenerator": "default_generator"}
#: All that have to be there.
REPLACED_PATHS = (*REPLACED, *(_compat.ACCELERATOR + name for name in ACCELERATOR))


class Patches:
    """The functions that are put in their place, for one device."""

    def __init__(self, fallback: Fallback) -> None:
        self.fallback = fallback
        self.module = fallback.module
        self.name = fallback.name

    def install(self, undo: contextlib.ExitStack) -> None:
        """Replace all of them, until `undo` is closed."""
        for path, method in REPLACED.items():
            _compat.replace(undo, path, self._replacement(getattr(self, method), _compat.lookup(path)))
        for name, method in (ACCELERATOR | NEWER).items():
            path = _compat.ACCELERATOR + name
            if name in ACCELERATOR or _compat.lookup(path) is not None:
                _compat.replace(undo, path, getattr(self, method))

    def _replacement(self, function: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
        """`original` but for tensors and storages of the device: `function`, which gets it as its first argument."""
        name = self.name

        @functools.wraps(original)
        def replacement(owner: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(owner, type) or owner.device.type == name:
                return function(original, owner, *args, **kwargs)
            return original(owner, *args, **kwargs)

        return replacement

    def new_storage(self, original: Any, cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        """torch has no allocator for the device, and calls it all the same: a segfault (pytorch issue 184032)."""
        if device is None:
            return original(cls, *args, **kwargs)
        if torch.device(device).type != self.name:
            return original(cls, *args, device=device, **kwargs)
        if args and not isinstance(args[0], int):
            return torch.tensor(list(args[0]), dtype=torch.uint8, device=device).untyped_storage()
        size = args[0] if args else kwargs.get("size", 0)
        return torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()

    # Of a tensor or storage of the device:

    def storage_like(self, original: Any, storage: Any, *args: Any) -> Any:
        return torch.UntypedStorage(*args, device=storage.device)

    def show(self, original: Any, tensor: Tensor, **options: Any) -> Any:
        """To print is no op of the program's: a debugger may do it where there is to be no fallback."""
        with self.fallback.with_policy("cpu"):
            return original(tensor, **options)

    def resize_storage(self, original: Any, storage: Any, *args: Any) -> Any:
        problem = "storage of a device written in Python cannot be resized"
        fix = "resize the tensor: x.resize_(...); or take the C++ route (docs/backend.md)"
        raise UnsupportedError(problem, op="UntypedStorage.resize_", got=str(storage.device), fix=fix)

    def share_memory(self, original: Any, storage: Any) -> Any:
        problem = "memory of a device written in Python is not shared with other processes"
        fix = "share a tensor of the CPU; one of the device that is sent to a process arrives as a copy"
        raise UnsupportedError(problem, op="share_memory_", got=f"a tensor on {storage.device}", fix=fix)

    def is_shared(self, original: Any, storage: Any) -> bool:
        return False

    def dlpack_device(self, original: Any, tensor: Tensor) -> Any:
        # torch compares with the literal "privateuse1" (pytorch PR 195815), and fails for any device that has a name.
        plain = type(tensor) in (Tensor, torch.nn.Parameter)
        return (_compat.EXTENSION, tensor.get_device()) if plain else original(tensor)

    def default_generator(self, index: int) -> torch.Generator:
        return self.module.default_generators[self.module.index_of(index)]

    # The functions of ``torch.<name>``, which a user may replace, are asked for in each call.
    def current_device(self) -> int:
        return self.module.current_device()

    def synchronize(self, device: Any = None) -> None:
        self.module.synchronize(device)

    def is_initialized(self) -> bool:
        return self.module.is_initialized()

    def exchange_device(self, index: int) -> int:
        before = self.module.current_device()
        if index >= 0:
            self.module.set_device(index)
        return before

    def empty_cache(self) -> None:
        """There is no cache."""

    def refuse_statistics(self, *_: Any) -> Any:
        problem = "a device written in Python counts its memory, and keeps no other statistics"
        raise UnsupportedError(problem, op="torch.accelerator", fix=f"torch.{self.name}.memory_allocated()")


# What `register_backend` was called with, and whether it can be done --------------------------------------------------

#: The dispatch keys of what a device written in Python cannot hold.
REFUSED = ("SparsePrivateUse1", "SparseCsrPrivateUse1", "QuantizedPrivateUse1", "NestedTensorPrivateUse1")
#: The dispatch keys that get a fallback for all ops.
FALLBACKS = ("PrivateUse1", "AutocastPrivateUse1", *REFUSED)


@dataclass(frozen=True)
class BackendOptions:
    name: str
    device_count: int
    allocate: memory.Allocate | None
    fallback: Policy
    methods: tuple[str, ...]
    amp_dtypes: tuple[torch.dtype, ...]
    pin_memory: bool

    def check(self, force: bool) -> None:
        """Raise whatever would go wrong, and change nothing."""
        _compat.require(REPLACED_PATHS, memory.NEEDED_OPS)
        check_name(self.name)
        count = self.device_count
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= _compat.MAX_DEVICES:
            expected = f"1 to {_compat.MAX_DEVICES}"
            raise BackendNameError("device_count is out of range", expected=expected, got=repr(count))
        if self.allocate is not None and not callable(self.allocate):
            raise BackendNameError(
                "allocate is not callable", expected="allocate(nbytes, index)", got=repr(self.allocate)
            )
        if self.allocate is not None and importlib.util.find_spec("numpy") is None:
            raise BackendError("allocate= returns NumPy arrays, and NumPy is not installed", fix="pip install numpy")
        check_policy(self.fallback)
        unknown = [method for method in self.methods if method not in METHODS]
        if unknown:
            raise BackendNameError("unknown methods", expected=", ".join(METHODS), got=repr(unknown[0]))
        check_methods(self.methods, None, name=self.name)
        check_dtypes("amp_dtypes", self.amp_dtypes)
        if hasattr(torch, self.name):
            problem = f"torch.{self.name} is there already, and a device has one module"
            fix = "leave registering it to register_backend"
            raise BackendError(problem, got=repr(getattr(torch, self.name)), fix=fix)
        for key in FALLBACKS:
            if _compat.has_fallback(_compat.parse_key(key)):
                problem = f"somebody has registered a fallback for all ops at {key}, and torch takes one"
                raise BackendError(problem, fix="destroy that library, or leave the device to it")
        other = torch.accelerator.current_accelerator()
        if other is not None and other.type != self.name and torch.accelerator.is_available() and not force:
            raise BackendError(
                f"this process has a device of type {other.type!r}: torch knows one accelerator, and a second one "
                "breaks the autograd of the first (pytorch PR 161130)",
                fix="hide it, as CUDA_VISIBLE_DEVICES= does; or force=True, if this process does not use it",
            )


# `register_backend`, and tensors of the device on their way to another process ----------------------------------------

#: The device of this process.
_registered: Backend | None = None
_lock = threading.Lock()


def get_backend() -> Backend | None:
    """The device that `register_backend` registered in this process, or None."""
    return _registered


def register_backend(
    name: str,
    *,
    device_count: int = 1,
    allocate: memory.Allocate | None = None,
    fallback: Policy = "cpu",
    methods: Iterable[str] = tuple(METHODS),
    amp_dtypes: Iterable[torch.dtype] = (torch.bfloat16, torch.float16),
    pin_memory: bool = True,
    force: bool = False,
) -> Backend:
    """Register a device type of this name, for the rest of the process.

    Its tensors are plain tensors in memory of the process. Every op works immediately, because it falls back to the CPU
    kernel; `Backend.kernel` replaces these kernels one by one.

    Args:
        name: the device type, made of a-z and _, as in ``torch.device(name)``.
        device_count: the number of devices: ``name:0``, ``name:1``, ...
        allocate: ``allocate(nbytes, index)`` returns the memory of a tensor as a NumPy array of uint8.
        fallback: what happens for an op without a kernel: "cpu", "warn" or "error" (see `Backend.fallback_policy`).
        methods: the classes that get ``.<name>()`` and ``.is_<name>``: tensor, module, packed_sequence, storage.
        amp_dtypes: the dtypes that ``torch.autocast(name)`` supports.
        pin_memory: if True, ``.pin_memory()`` of CPU tensors returns a copy that reports itself as pinned.
        force: if True, register even if the process has another accelerator.

    Returns:
        The device. A second call with the same arguments returns the same object.

    Raises:
        ValueError: a name or option is invalid. Nothing was changed.
        BackendError: the process has a device already, or torch cannot register one. Nothing was changed.
    """
    methods = _as_tuple(methods, "methods", str)
    methods = tuple(sorted(methods, key=(*METHODS, *methods).index))
    amp_dtypes = _as_tuple(amp_dtypes, "amp_dtypes", torch.dtype)
    options = BackendOptions(name, device_count, allocate, fallback, methods, amp_dtypes, pin_memory)
    global _registered
    with _lock:
        if _registered is None:
            options.check(force)
            _registered = _register(options)
        elif options != _registered._options:
            check_spelling(name)
            problem = "this process has a device already, with other options"
            fix = "get_backend() returns it; run_isolated of customops.testing starts another process"
            raise BackendError(problem, expected=repr(_registered._options), got=repr(options), fix=fix)
        return _registered


def _as_tuple(value: Any, argument: str, single: type) -> tuple[Any, ...]:
    if isinstance(value, single):
        return (value,)
    if not isinstance(value, Iterable):
        raise BackendNameError(f"{argument} takes several", expected="an iterable; () for none", got=repr(value))
    return tuple(value)


def _register(options: BackendOptions) -> Backend:
    """Do everything that can be undone, and then what cannot: hooks, and the name."""
    name = options.name
    own_memory = Memory(name, options.device_count, options.allocate)
    module = DeviceModule(own_memory, options.amp_dtypes)
    user_kernels = UserKernels(Fallback(own_memory, module, options.fallback))
    with contextlib.ExitStack() as undo:
        _install_kernels(undo, options, user_kernels)
        user_kernels.install_shortcuts(undo)
        Patches(user_kernels.fallback).install(undo)
        register, torchs = multiprocessing.reduction.register, torch.multiprocessing.reductions.reduce_storage
        register(torch.UntypedStorage, reduce)
        undo.callback(register, torch.UntypedStorage, torchs)
        _compat.single_threaded_backward(undo)
        _compat.install_hooks()
        rename_privateuse1_backend(name)
        _compat.register_device_module(name, module)
        for_each: dict[str, Any] = {f"for_{method}": method in options.methods for method in METHODS}
        generate_methods_for_privateuse1_backend(**for_each)
        return Backend(user_kernels, options, undo.pop_all())


def _install_kernels(undo: contextlib.ExitStack, options: BackendOptions, user_kernels: UserKernels) -> None:
    fallback = user_kernels.fallback
    essentials = memory.Essentials(fallback.memory, user_kernels.counts)

    def library(namespace: str, key: str = "") -> Any:
        made = _compat.Library(namespace, "IMPL", key)
        undo.callback(_torch.library.destroy_library, made)
        return made

    def any_op(op: Any, *args: Any, **kwargs: Any) -> Any:
        return fallback(op, args, kwargs)

    def refuse(op: Any, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(
            "a device written in Python holds strided tensors of plain dtypes: not sparse, nested or quantized ones",
            op=_torch.library.name_of_overload(op),
            fix="call .to_dense(), .to_padded_tensor() or .dequantize() on the CPU, before .to(device)",
        )

    aten = library("aten")
    own = {op: _compat.outside_dynamo(getattr(essentials, op.partition(".")[0])) for op in memory.ESSENTIAL}
    own |= {op: _compat.kernel_of_the_cpu(_compat.find_op(f"aten::{op}")) for op in memory.METADATA}
    for op, kernel in own.items():
        _torch.library.impl(aten, op, kernel, "PrivateUse1")
    for op in SUBSTITUTES:  # torch has kernels for some of these, which raise
        substitute = _compat.find_op(op)
        if substitute is not None:
            _torch.library.impl(aten, op.partition("::")[2], fallback.kernel(substitute), "PrivateUse1")
    # Copying resolves conj and neg bits by copying: without these the dispatcher never comes to an end.
    for key in ("Conjugate", "Negative"):
        for op in ("_copy_from", "_copy_from_and_resize"):
            _torch.library.impl(aten, op, torch.library.fallthrough_kernel, key)
    library("_", "PrivateUse1").fallback(_compat.outside_dynamo(any_op))
    for key in REFUSED:
        library("_", key).fallback(_compat.outside_dynamo(refuse))

    refusal = None if options.pin_memory else "register_backend(..., pin_memory=True)"
    for key, why in (("CPU", refusal), ("PrivateUse1", "pin the CPU tensor, before .to(device)")):
        pinned = memory.PinnedMemory(options.name, why)
        for op in memory.PINNING:
            _torch.library.impl(aten, op, _compat.outside_dynamo(getattr(pinned, op)), key)

    # Without this, every op under autocast fails.
    library("_", "AutocastPrivateUse1").fallback(torch.library.fallthrough_kernel)
    for op in (*kernels.LOWER_PRECISION, *kernels.FLOAT32):
        overload, dtype = _compat.find_op(f"aten::{op}"), torch.float32 if op in kernels.FLOAT32 else None
        if overload is not None:
            _torch.library.impl(aten, op, kernels.casting_kernel(overload, options.name, dtype), "AutocastPrivateUse1")
    user_kernels.own = {f"aten::{op}": kernel for op, kernel in own.items()}
    user_kernels.own |= dict.fromkeys((kernels.FUSED, f"{kernels.FUSED}_backward"), kernels.no_fallback)


# What is sent to another process, in a queue, from a worker of a data loader or with a dataset, is a copy: the memory
# of the device is that of one process. torch's own way would raise, but in the thread that feeds a queue, where nobody
# sees it, and the other end would wait for ever.


def reduce(storage: torch.UntypedStorage) -> Any:
    """As torch reduces a storage of the CPU, with the device beside it."""
    if _registered is None or storage.device.type != _registered.name:
        return torch.multiprocessing.reductions.reduce_storage(storage)
    return rebuild, (_registered.name, storage.device.index, storage.cpu())


def rebuild(name: str, index: int, host: torch.UntypedStorage) -> torch.UntypedStorage:
    """A storage of the device, from what `reduce` sent."""
    if _registered is None or _registered.name != name:
        raise BackendError(
            f"a tensor of the device {name!r} was sent to a process that has not made this device",
            fix=f"register_backend({name!r}) at the top of the file, which a spawned process runs too, and not under "
            "if __name__ == '__main__'; or send x.cpu()",
        )
    flat = torch.empty(0, dtype=torch.uint8, device="cpu").set_(host, 0, (host.nbytes(),), (1,))
    own = _registered._memory
    return own.place(flat, own.check_index(index)).untyped_storage()
