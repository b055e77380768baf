"""`register_backend`: everything is checked, then everything is done."""

from __future__ import annotations

import collections
import contextlib
import importlib.util
import multiprocessing.reduction
import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.multiprocessing.reductions

from customops.backend import _compat, essential_kernels, kernels, patches
from customops.backend._backend import Backend
from customops.backend.device_module import DeviceModule, Devices
from customops.backend.errors import BackendError, BackendNameError
from customops.backend.fallbacks import Fallback, Policy, check_policy
from customops.backend.kernels import Shortcuts, boxed
from customops.backend.memory import Allocate, Memory
from customops.backend.substitutes import SUBSTITUTES
from customops.errors import UnsupportedError

# ----------------------------------------------------------------------------------------------------------------------
# Tensors of the device on their way to another process: in a queue, from a worker of a data loader, with a dataset
# What is sent is a copy: the memory of the device is that of one process. torch's own way would raise, but in
# the thread that feeds a queue, where nobody sees it, and the other end would wait for ever.


class _Here:
    """The memory of this process's device."""

    memory: Memory | None = None


def install(memory: Memory, undo: contextlib.ExitStack) -> None:
    """Have storages of the device pickled by `reduce` between processes, until `undo` is closed."""
    _Here.memory = memory
    undo.callback(setattr, _Here, "memory", None)
    multiprocessing.reduction.register(torch.UntypedStorage, reduce)
    undo.callback(
        multiprocessing.reduction.register, torch.UntypedStorage, torch.multiprocessing.reductions.reduce_storage
    )


def reduce(storage: torch.UntypedStorage) -> Any:
    """As torch reduces a storage of the CPU, with the device beside it."""
    memory = _Here.memory
    if memory is None or storage.device.type != memory.name:
        return torch.multiprocessing.reductions.reduce_storage(storage)
    return rebuild, (memory.name, storage.device.index, storage.cpu())


def rebuild(name: str, index: int, host: torch.UntypedStorage) -> torch.UntypedStorage:
    """A storage of the device, from what `reduce` sent.

    Raises:
        BackendError: this process has no such device.
    """
    memory = _Here.memory
    if memory is None or memory.name != name:
        raise BackendError(
            f"a tensor of the device {name!r} was sent to a process that has not made this device",
            fix=f"register_backend({name!r}) at the top of the file, which a spawned process runs too, and not under "
            "if __name__ == '__main__'; or send x.cpu()",
        )
    flat = torch.empty(0, dtype=torch.uint8, device="cpu").set_(host, 0, (host.nbytes(),), (1,))
    return memory.place(flat, memory.check_index(index)).untyped_storage()


# ----------------------------------------------------------------------------------------------------------------------
# The name of the device and the methods called after it: torch's functions, with all that can fail found before
# torch takes nearly any string for a name, for good, and finds out later that no device can be called so, or that
# ``Tensor`` has a method of that name. Here a call either does everything or raises and changes nothing.

#: What PrivateUse1 is called until somebody renames it.
UNNAMED = "privateuseone"

#: Device types that torch has code for. ("maia", "fpga" and the like are only reserved, and can be had.)
TAKEN = frozenset("cpu cuda hip xpu mps mtia hpu xla ipu meta lazy vulkan mkldnn ideep opengl opencl".split())

METHODS = ("tensor", "module", "packed_sequence", "storage")


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
        raise BackendError(
            f"the name of the device has already been set to {current!r}, once for this process",
            got=repr(name),
            fix="use one name in a process; run_isolated of customops.testing starts another one",
        )
    taken = [f"torch.{name}"] if hasattr(torch, name) else []
    taken += [f"{cls.__name__}.{name}" for cls in _all_classes() if hasattr(cls, name)]
    if taken:
        raise BackendNameError("the name is taken", expected="a name that torch does not use", got=", ".join(taken))


def check_spelling(name: object) -> str:
    """Raise for a name that no device of one's own could ever have."""
    if not isinstance(name, str) or not re.fullmatch("[a-z][a-z_]*", name):
        raise BackendNameError(
            "torch cannot read this as a device", expected="a string of a-z and _ (no digits)", got=repr(name)
        )
    if name in TAKEN or name == UNNAMED:
        raise BackendNameError("this device type is torch's own", got=repr(name), fix="choose another name")
    return name


def _all_classes() -> list[type]:
    return [cls for classes in _compat.classes_with_methods().values() for cls in classes]


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
    check_methods([method for method, wanted in flags.items() if wanted], unsupported_dtype)
    _compat.generate_methods(
        for_tensor=for_tensor,
        for_module=for_module,
        for_packed_sequence=for_packed_sequence,
        for_storage=for_storage,
        unsupported_dtype=list(unsupported_dtype) if unsupported_dtype is not None else None,
    )


def check_methods(
    methods: Iterable[str], unsupported_dtype: Iterable[torch.dtype] | None, *, name: str | None = None
) -> None:
    """Raise what `generate_methods_for_privateuse1_backend` raises, and change nothing."""
    name = name or _compat.backend_name()
    if name == UNNAMED:
        raise BackendError("the device has no name yet", fix='rename_privateuse1_backend("...") comes first')
    wrong = [dtype for dtype in unsupported_dtype or () if not isinstance(dtype, torch.dtype)]
    if wrong:
        raise BackendNameError("unsupported_dtype takes torch dtypes only", expected="torch dtypes", got=repr(wrong[0]))
    methods = list(methods)
    if "tensor" not in methods and not hasattr(torch.Tensor, name):
        needy = [method for method in methods if method != "storage"]
        if needy:
            raise BackendError(
                f"the methods of {needy[0]} call Tensor.{name}(), which is not there", fix="for_tensor=True"
            )
    for method in methods:
        for cls in _compat.classes_with_methods()[method]:
            attributes = [name] if method == "module" else [name, f"is_{name}"]
            there = [attribute for attribute in attributes if hasattr(cls, attribute)]
            if there:
                raise BackendError(
                    f"The custom device module of {cls} has already been registered with {there[0]}",
                    fix="call it once, or leave this class out",
                )


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
        raise BackendError(
            f"Try to call torch.{name}.{func_name}: there is none",
            fix=f"register_backend makes torch.{name}; or define {func_name} in the module given to torch",
        )
    return _compat.custom_mod_func(func_name)  # type: ignore[no-any-return]


# `register_backend`: everything is checked, then everything is done ---------------------------------------------------

AMP_DTYPES = (torch.bfloat16, torch.float16)

#: The dispatch keys of what a device written in Python cannot hold.
REFUSED = ("SparsePrivateUse1", "SparseCsrPrivateUse1", "QuantizedPrivateUse1", "NestedTensorPrivateUse1")

#: The dispatch keys that get a fallback for all ops.
FALLBACKS = ("PrivateUse1", "AutocastPrivateUse1", *REFUSED)


@dataclass(frozen=True)
class BackendOptions:
    """What `register_backend` was called with."""

    name: str
    device_count: int
    allocate: Allocate | None
    fallback: Policy
    methods: tuple[str, ...]
    amp_dtypes: tuple[torch.dtype, ...]
    pin_memory: bool

    def check(self, force: bool) -> None:
        """Raise whatever would go wrong, and change nothing."""
        _compat.require(patches.NEEDED, essential_kernels.NEEDED)
        check_name(self.name)
        count = self.device_count
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= _compat.MAX_DEVICES:
            raise BackendNameError(
                "device_count is out of range", expected=f"1 to {_compat.MAX_DEVICES}", got=repr(count)
            )
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
        wrong = [dtype for dtype in self.amp_dtypes if not isinstance(dtype, torch.dtype)]
        if wrong:
            raise BackendNameError("amp_dtypes takes torch dtypes only", expected="torch dtypes", got=repr(wrong[0]))
        self._check_process(force)

    def _check_process(self, force: bool) -> None:
        """Raise if this process cannot have the device."""
        if hasattr(torch, self.name):
            raise BackendError(
                f"torch.{self.name} is there already, and a device has one module",
                got=repr(getattr(torch, self.name)),
                fix="leave registering it to register_backend",
            )
        for key in FALLBACKS:
            if _compat.has_fallback(key):
                raise BackendError(
                    f"somebody has registered a fallback for all ops at {key}, and torch takes one",
                    fix="destroy that library, or leave the device to it",
                )
        other = torch.accelerator.current_accelerator()
        if other is not None and other.type != self.name and torch.accelerator.is_available() and not force:
            raise BackendError(
                f"this process has a device of type {other.type!r}: torch knows one accelerator, and a second one "
                "breaks the autograd of the first (pytorch PR 161130)",
                fix="hide it, as CUDA_VISIBLE_DEVICES= does; or force=True, if this process does not use it",
            )


@dataclass
class _Registered:
    """The device of this process."""

    backend: Backend | None = None
    options: BackendOptions | None = None


_registered = _Registered()
_lock = threading.Lock()

#: What would undo the registration: it keeps the libraries alive, and with them the kernels.
_kept: list[contextlib.ExitStack] = []


def get_backend() -> Backend | None:
    """The device that `register_backend` registered in this process, or None."""
    return _registered.backend


def register_backend(
    name: str,
    *,
    device_count: int = 1,
    allocate: Allocate | None = None,
    fallback: Policy = "cpu",
    methods: Iterable[str] = METHODS,
    amp_dtypes: Iterable[torch.dtype] = AMP_DTYPES,
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
    with _lock:
        return _registered_once(options, force)


def _as_tuple(value: Any, argument: str, single: type) -> tuple[Any, ...]:
    """One item, or several, as a tuple."""
    if isinstance(value, single):
        return (value,)
    if not isinstance(value, Iterable):
        raise BackendNameError(f"{argument} takes several", expected="an iterable; () for none", got=repr(value))
    return tuple(value)


def _registered_once(options: BackendOptions, force: bool) -> Backend:
    if _registered.backend is not None:
        if options == _registered.options:
            return _registered.backend
        check_spelling(options.name)
        raise BackendError(
            "this process has a device already, with other options",
            expected=repr(_registered.options),
            got=repr(options),
            fix="get_backend() returns it; run_isolated of customops.testing starts another process",
        )
    options.check(force)
    _registered.backend = _register(options)
    _registered.options = options
    return _registered.backend


def _register(options: BackendOptions) -> Backend:
    """Do everything that can be undone, and then what cannot: hooks, and the name."""
    name = options.name
    devices = Devices()
    memory = Memory(name, options.device_count, options.allocate)
    module = DeviceModule(name, memory, devices, options.amp_dtypes)
    fallback = Fallback(name, memory, module, options.fallback)
    user_kernels: collections.Counter[str] = collections.Counter()
    essentials = essential_kernels.Essentials(memory, devices, user_kernels)
    shortcuts = Shortcuts(fallback, user_kernels)

    with contextlib.ExitStack() as undo:
        own_kernels = _install_kernels(undo, essentials, fallback)
        _install_refusals(undo)
        shortcuts.install(undo)
        _install_pinning(undo, name, options.pin_memory)
        _install_autocast(undo, name)
        patches.Patches(memory, module, fallback).install(undo)
        install(memory, undo)
        _compat.single_threaded_backward(undo)
        _compat.install_hooks()
        rename_privateuse1_backend(name)
        _compat.register_device_module(name, module)
        for_each: dict[str, Any] = {f"for_{method}": method in options.methods for method in METHODS}
        generate_methods_for_privateuse1_backend(**for_each)
        _kept.append(undo.pop_all())
    return Backend(name, memory, module, fallback, shortcuts, own_kernels)


def _library(undo: contextlib.ExitStack, namespace: str, key: str = "") -> Any:
    library = _compat.Library(namespace, "IMPL", key)
    undo.callback(_compat.destroy_library, library)
    return library


def _install_kernels(
    undo: contextlib.ExitStack, essentials: essential_kernels.Essentials, fallback: Fallback
) -> dict[str, Any]:
    """Install what every device needs; returns what is not the fallback and runs where a user's kernel does not."""
    aten = _library(undo, "aten")
    table = {op: _compat.outside_dynamo_method(kernel) for op, kernel in essentials.table().items()}
    table |= {op: essential_kernels.view_of(op) for op in essential_kernels.METADATA}
    for op, kernel in table.items():
        _compat.impl(aten, op, kernel, "PrivateUse1")
    for name in SUBSTITUTES:  # torch has kernels for some of these, which raise
        substitute = _compat.find_op(name)
        if substitute is not None:
            _compat.impl(aten, name.partition("::")[2], boxed(fallback, substitute), "PrivateUse1")
    # Copying resolves conj and neg bits by copying: without these the dispatcher never comes to an end.
    for key in ("Conjugate", "Negative"):
        for op in ("_copy_from", "_copy_from_and_resize"):
            _compat.impl(aten, op, torch.library.fallthrough_kernel, key)

    def any_op(op: Any, *args: Any, **kwargs: Any) -> Any:
        return fallback(op, args, kwargs)

    _library(undo, "_", "PrivateUse1").fallback(_compat.outside_dynamo(any_op))
    own = {f"aten::{op}": kernel for op, kernel in table.items()}
    return own | dict.fromkeys((kernels.FUSED, f"{kernels.FUSED}_backward"), kernels.no_fallback)


def _install_refusals(undo: contextlib.ExitStack) -> None:
    def refuse(op: Any, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(
            "a device written in Python holds strided tensors of plain dtypes: not sparse, nested or quantized ones",
            op=_compat.full_name(op),
            fix="call .to_dense(), .to_padded_tensor() or .dequantize() on the CPU, before .to(device)",
        )

    _compat.outside_dynamo(refuse)
    for key in REFUSED:
        _library(undo, "_", key).fallback(refuse)


def _install_pinning(undo: contextlib.ExitStack, name: str, wanted: bool) -> None:
    aten = _library(undo, "aten")
    on_cpu = (
        essential_kernels.PinnedMemory()
        if wanted
        else essential_kernels.NotPinned(name, "register_backend(..., pin_memory=True)")
    )
    of_device = essential_kernels.NotPinned(name, "pin the CPU tensor, before .to(device)")
    for pinning, key in ((on_cpu, "CPU"), (of_device, "PrivateUse1")):
        for op, kernel in pinning.table().items():
            _compat.impl(aten, op, _compat.outside_dynamo_method(kernel), key)


def _install_autocast(undo: contextlib.ExitStack, name: str) -> None:
    # Without this, every op under autocast fails.
    _library(undo, "_", "AutocastPrivateUse1").fallback(torch.library.fallthrough_kernel)
    aten = _library(undo, "aten")
    for ops, dtype in ((kernels.LOWER_PRECISION, None), (kernels.FLOAT32, torch.float32)):
        for op in ops:
            overload = _compat.find_op(f"aten::{op}")
            if overload is not None:
                _compat.impl(aten, op, kernels.casting_kernel(overload, name, dtype), "AutocastPrivateUse1")
