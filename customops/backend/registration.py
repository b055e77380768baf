"""`register_backend`: everything is checked, then everything is done."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import multiprocessing.reduction
import re
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.multiprocessing.reductions
from torch import Tensor

from customops import _torch
from customops._dispatch import options as call_options
from customops._dispatch import results
from customops._dispatch.options import CheckPolicy
from customops.backend import _compat, kernels
from customops.backend import memory as of_host
from customops.backend._backend import Backend
from customops.backend.device_memory import DeviceMemory, HandleMemory
from customops.backend.device_module import DeviceModule
from customops.backend.errors import BackendError, BackendNameError
from customops.backend.fallbacks import Fallback, Policy, check_policy
from customops.backend.kernels import UserKernels
from customops.backend.memory import Memory
from customops.backend.streams import Stream, Streams, standing_in
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
    check_free(name)


def check_free(name: str) -> None:
    """Raise where the name would hide an attribute of torch."""
    if taken := _hidden_by(name):
        raise BackendNameError("the name is taken", expected="a name that torch does not use", got=", ".join(taken))


def _hidden_by(name: str) -> list[str]:
    """The attributes of torch that a device of this name would hide."""
    taken = [f"torch.{name}"] if hasattr(torch, name) else []
    if hasattr(getattr(torch.distributed, "Backend", None), name.upper()):
        taken.append(f"torch.distributed.Backend.{name.upper()}")
    return taken + [f"{cls.__name__}.{name}" for classes in METHODS.values() for cls in classes if hasattr(cls, name)]


def check_spelling(name: object) -> str:
    """Raise for a name that no device of one's own could ever have."""
    if not isinstance(name, str) or not re.fullmatch("[a-z][a-z_]*", name):
        problem = "torch cannot read this as a device"
        cured = re.sub("[^a-z]+", "_", re.sub("[0-9]+", "", name.lower())).strip("_") if isinstance(name, str) else ""
        is_free = cured and cured not in (*TAKEN, UNNAMED) and not _hidden_by(cured)
        fix = f"name it {cured!r}" if is_free else None
        raise BackendNameError(problem, expected="a string of a-z and _ (no digits)", got=repr(name), fix=fix)
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
    function: Callable[..., Any] | None = getattr(getattr(torch, name, None), func_name, None)
    if function is None:
        fix = f"register_backend makes torch.{name}; or define {func_name} in the module given to torch"
        raise BackendError(f"Try to call torch.{name}.{func_name}: there is none", fix=fix)
    return function


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
#: one device, no memory and no streams.
ACCELERATOR = {
    "getDeviceIndex": "current_device",
    **dict.fromkeys(("setDeviceIndex", "exchangeDevice", "maybeExchangeDevice"), "exchange_device"),
    "synchronizeDevice": "synchronize",
    "isAllocatorInitialized": "is_initialized",
    **dict.fromkeys(("emptyCache", "emptyHostCache"), "empty_cache"),
    "getDeviceStats": "device_statistics",
    "getMemoryInfo": "mem_get_info",
    "resetAccumulatedStats": "reset_accumulated_memory_stats",
    "resetPeakStats": "reset_peak_memory_stats",
    "getStream": "current_stream",
    "setStream": "set_stream",
}

#: The same, where torch has it: from 2.15 on.
NEWER = {"getDefaultGenerator": "default_generator"}
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
        streams = self.module._streams
        _compat.replace(undo, "Stream", standing_in(torch.Stream, streams.make_stream))
        _compat.replace(undo, "Event", standing_in(torch.Event, streams.make_event))
        for name, method in (ACCELERATOR | NEWER).items():
            path = _compat.ACCELERATOR + name
            if name in ACCELERATOR or _compat.lookup(path) is not None:
                _compat.replace(undo, path, getattr(self, method, None) or self._of_module(method))

    def _of_module(self, name: str) -> Callable[..., Any]:
        """A function of ``torch.<name>``, which a user may replace: it is asked for in each call."""
        return lambda *args: getattr(self.module, name)(*args)

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

    def resize_storage(self, original: Any, storage: Any, size: int) -> Any:
        """FSDP empties storages, and fills them again. Torch would ask an allocator of the device, in C++."""
        memory, index, kept = self.fallback.memory, storage.device.index, min(size, storage.nbytes())
        flat = memory.empty((size,), (1,), torch.uint8, index)
        if kept:
            memory.copy(memory.over(storage, index)[:kept], flat[:kept])
        _compat.swap_memory(storage, flat.untyped_storage())
        return storage

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

    def exchange_device(self, index: int) -> int:
        before = self.module.current_device()
        if index >= 0:
            self.module.set_device(index)
        return before

    def device_statistics(self, index: int) -> dict[str, Any]:
        return self.fallback.memory.statistics(self.module.index_of(index))


# What `register_backend` was called with, and whether it can be done --------------------------------------------------

#: The dispatch keys of what a device written in Python cannot hold.
REFUSED = ("SparsePrivateUse1", "SparseCsrPrivateUse1", "QuantizedPrivateUse1", "NestedTensorPrivateUse1")
#: The dispatch keys that get a fallback for all ops.
FALLBACKS = ("PrivateUse1", "AutocastPrivateUse1", *REFUSED)


@dataclass(frozen=True)
class BackendOptions:
    name: str
    device_count: int
    allocate: of_host.Allocate | None
    fallback: Policy
    methods: tuple[str, ...]
    amp_dtypes: tuple[torch.dtype, ...]
    pin_memory: bool
    memory: DeviceMemory | None
    stream: type[Stream]
    collectives: Callable[[Any], object] | None
    check: CheckPolicy

    def require(self, force: bool) -> None:
        """Raise whatever would go wrong, and change nothing."""
        _compat.require(REPLACED_PATHS, of_host.NEEDED_OPS)
        check_name(self.name)
        count = self.device_count
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= _compat.MAX_DEVICES:
            expected = f"1 to {_compat.MAX_DEVICES}"
            raise BackendNameError("device_count is out of range", expected=expected, got=repr(count))
        for option, value, form in (
            ("allocate", self.allocate, "allocate(nbytes, index)"),
            ("collectives", self.collectives, "collectives(group)"),
        ):
            if value is not None and not callable(value):
                raise BackendNameError(f"{option} is not callable", expected=form, got=repr(value))
        self._check_memory()
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

    def _check_memory(self) -> None:
        given, kind = cast(Any, self.memory), cast(Any, self.stream)
        if given is not None and not isinstance(given, DeviceMemory):
            expected = "an object of a subclass of customops.backend.DeviceMemory"
            raise BackendNameError("memory= takes hooks", expected=expected, got=repr(given))
        if not (isinstance(kind, type) and issubclass(kind, Stream)):
            expected = "a subclass of customops.backend.Stream, such as ThreadStream"
            raise BackendNameError("stream= takes a class", expected=expected, got=repr(kind))
        if (given is None and kind is not Stream) or (given is not None and self.allocate is not None):
            problem = "stream= orders what the hooks of memory= do, and allocate= is for memory of the host"
            raise BackendNameError(problem, fix="give memory=, and no allocate=")


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
    allocate: of_host.Allocate | None = None,
    fallback: Policy = "cpu",
    methods: Iterable[str] = tuple(METHODS),
    amp_dtypes: Iterable[torch.dtype] = (torch.bfloat16, torch.float16),
    pin_memory: bool = True,
    memory: DeviceMemory | None = None,
    stream: type[Stream] = Stream,
    collectives: Callable[[Any], object] | None = None,
    check: CheckPolicy = "never",
    force: bool = False,
) -> Backend:
    """Register a device type of this name, for the rest of the process.

    Its tensors are plain tensors in memory of the process, or in `memory`. Every op works immediately, because it falls
    back to the CPU kernel; `Backend.kernel` replaces these kernels one by one.

    Args:
        name: the device type, made of a-z and _, as in ``torch.device(name)``.
        device_count: the number of devices: ``name:0``, ``name:1``, ...
        allocate: ``allocate(nbytes, index)`` returns the memory of a tensor as a NumPy array of uint8.
        fallback: what happens for an op without a kernel: "cpu", "warn" or "error" (see `Backend.fallback_policy`).
        methods: the classes that get ``.<name>()`` and ``.is_<name>``: tensor, module, packed_sequence, storage.
        amp_dtypes: the dtypes that ``torch.autocast(name)`` supports.
        pin_memory: if True, ``.pin_memory()`` of CPU tensors returns a copy that reports itself as pinned.
        memory: hooks that allocate and copy, for memory that the host does not read. See `DeviceMemory`.
        stream: the class of the streams of a device whose work runs later, with `memory`. See `Stream`.
        collectives: ``collectives(group)`` returns an object whose methods (``all_reduce(tensor, op)``) communicate
            for a process group of `torch.distributed`. What has no method goes through gloo.
        check: when the results of a kernel are compared with the sizes and dtypes that torch computes for the op:
            "always", in the "first" call of each kernel, or "never". ``CUSTOMOPS_BACKEND_CHECK`` overrides it.
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
    check = call_options.check_policy(check, str(name), "backend_check")
    options = BackendOptions(
        name, device_count, allocate, fallback, methods, amp_dtypes, pin_memory, memory, stream, collectives, check
    )
    global _registered
    with _lock:
        if _registered is None:
            options.require(force)
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
    streams = Streams(name, options.stream)
    if options.memory is None:
        own_memory = Memory(name, options.device_count, streams.here, options.allocate)
    else:
        own_memory = HandleMemory(options.device_count, options.memory, streams)
    module = DeviceModule(own_memory, options.amp_dtypes, streams)
    user_kernels = UserKernels(Fallback(own_memory, module, options.fallback), options.check)
    with contextlib.ExitStack() as undo:
        _install_kernels(undo, options, user_kernels)
        user_kernels.install_shortcuts(undo)
        Patches(user_kernels.fallback).install(undo)
        register, torchs = multiprocessing.reduction.register, torch.multiprocessing.reductions.reduce_storage
        register(torch.UntypedStorage, reduce)
        undo.callback(register, torch.UntypedStorage, torchs)
        _compat.single_threaded_backward(undo, options.name, pin_memory=options.pin_memory)
        _compat.install_hooks()
        rename_privateuse1_backend(name)
        _compat.register_device_module(name, module)
        for_each: dict[str, Any] = {f"for_{method}": method in options.methods for method in METHODS}
        generate_methods_for_privateuse1_backend(**for_each)
        if torch.distributed.is_available():
            process_group = importlib.import_module("customops.backend.process_group")
            process_group.install(module, options.collectives, undo)
        module._is_called = user_kernels.is_called
        _compat.tell_compilers(name, user_kernels.key_of_code, user_kernels.is_called)
        results.WRAPS.append("for its device backend.wrap(result)")
        return Backend(user_kernels, options, undo.pop_all())


def _install_kernels(undo: contextlib.ExitStack, options: BackendOptions, user_kernels: UserKernels) -> None:
    fallback, outside_dynamo = user_kernels.fallback, _torch.dynamo.outside_dynamo
    essentials = of_host.Essentials(fallback.memory, user_kernels.counts)

    def library(namespace: str, key: str = "") -> Any:
        made = _compat.Library(namespace, "IMPL", key)
        undo.callback(_torch.library.destroy_library, made)
        return made

    def refuse(op: Any, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(
            "a device written in Python holds strided tensors of plain dtypes: not sparse, nested or quantized ones",
            op=_torch.library.name_of_overload(op),
            fix="call .to_dense(), .to_padded_tensor() or .dequantize() on the CPU, before .to(device)",
        )

    aten = library("aten")
    own: dict[str, Any] = {op: outside_dynamo(getattr(essentials, op.partition(".")[0])) for op in of_host.ESSENTIAL}
    own |= {op: _compat.kernel_of_the_cpu(_compat.find_op(f"aten::{op}")) for op in of_host.METADATA}
    for op, kernel in own.items():
        _torch.library.impl(aten, op, kernel, "PrivateUse1")
    for op in SUBSTITUTES:  # torch has kernels for some of these, which raise
        substitute = _compat.find_op(op)
        if substitute is not None:
            _torch.library.impl(aten, op.partition("::")[2], functools.partial(fallback, substitute), "PrivateUse1")
    # Copying resolves conj and neg bits by copying: without these the dispatcher never comes to an end.
    for key in ("Conjugate", "Negative"):
        for op in ("_copy_from", "_copy_from_and_resize"):
            _torch.library.impl(aten, op, torch.library.fallthrough_kernel, key)
    library("_", "PrivateUse1").fallback(fallback)
    for key in REFUSED:
        library("_", key).fallback(outside_dynamo(refuse))

    refusal = None if options.pin_memory else "register_backend(..., pin_memory=True)"
    for key, why in (("CPU", refusal), ("PrivateUse1", "pin the CPU tensor, before .to(device)")):
        pinned = of_host.PinnedMemory(options.name, why)
        for op in of_host.PINNING:
            _torch.library.impl(aten, op, outside_dynamo(getattr(pinned, op)), key)

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
