"""`Backend`: a registered device, and how kernels are attached to it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from customops import _torch
from customops.backend import _compat, kernels
from customops.backend.device_memory import Block, HandleMemory
from customops.backend.errors import BackendError, BackendNameError, DtypeError, WrongDeviceError
from customops.backend.fallbacks import Policy, check_policy
from customops.backend.kernels import Fn, KernelHandle, UserKernels
from customops.errors import UnsupportedError

if TYPE_CHECKING:
    import numpy as np

    Array: TypeAlias = "np.ndarray[Any, Any]"

Op: TypeAlias = "str | _torch.library.OpOverload"


class Backend:
    """Your own device type. `register_backend` makes it; there is one per process.

    Attributes:
        name: the device type, as in ``torch.device(name)``.
        device_count: the number of devices of this type.
        module: the device module, ``torch.<name>``.
    """

    def __init__(self, user_kernels: UserKernels, options: object, undo: contextlib.ExitStack) -> None:
        self._kernels = user_kernels
        self._fallback = user_kernels.fallback
        self._memory = self._fallback.memory
        self._options = options
        self._undo = undo  # keeps the libraries alive, and with them the kernels
        self.name = self._memory.name
        self.device_count = self._memory.device_count
        self.module = self._fallback.module

    def __repr__(self) -> str:
        return f"<Backend {self.name!r}, {self.device_count} devices, fallback {self.fallback_policy!r}>"

    # Kernels ----------------------------------------------------------------------------------------------------

    def kernel(self, op: Op, *, dtypes: Iterable[torch.dtype] | None = None) -> Callable[[Fn], KernelHandle]:
        """Decorator that registers a function as the kernel of `op` on this device.

        The kernel gets the arguments of the op; Python numbers stay numbers. It returns what the schema declares, on
        the device of its inputs. The kernel of an op that mutates an argument may return None. If the kernel returns
        NotImplemented, the code runs that ran before it was registered: the fallback, or the device's own functions
        that create and copy tensors.

        A kernel for ``add.out`` also serves ``add`` and ``add_``, as for every structured op. A kernel for a composite
        op (``conv2d``, ``layer_norm``) runs only if no gradient is needed; otherwise torch decomposes the op.

        Args:
            op: ``"aten::add.out"``, ``"ns::op"``, or an OpOverload.
            dtypes: the kernel runs only if all tensors have one of these dtypes; otherwise as for NotImplemented.

        Raises:
            KeyError: there is no such op.
            BackendError: the op already has a kernel. In a call: the kernel raises a TypeError (which torch's operators
                would interpret as "not implemented"), or its result does not match the schema.
        """
        found = self._kernels.find(op)
        only = None if dtypes is None else [dtypes] if isinstance(dtypes, torch.dtype) else list(dtypes)
        wrong = [dtype for dtype in only or () if not isinstance(dtype, torch.dtype)]
        if wrong or only == []:
            raise BackendNameError("dtypes= takes torch dtypes", got=repr(wrong[0]) if wrong else "none")

        def register(fn: Fn) -> KernelHandle:
            return self._kernels.register(found, fn, only)

        return register

    def view_kernel(self, op: Op) -> KernelHandle:
        """Run the CPU kernel of a view op directly on this device's tensors. It may change only sizes and strides.

        Raises:
            BackendError: the op returns something other than views of its arguments.
        """
        found = self._kernels.find(op)
        if any(value.alias_info is None for value in _torch.schema.schema_of(found).returns):
            raise BackendError(
                "a view kernel is for an op that returns nothing but views of its arguments, as Tensor(a) -> Tensor(a)",
                op=_torch.library.name_of_overload(found),
                got=str(_torch.schema.schema_of(found)),
                fix="backend.kernel(op)",
            )
        kernel = _compat.kernel_of_the_cpu(found)
        return self._kernels.install(found, "PrivateUse1", kernel, kernel)

    def autocast_kernel(self, op: Op, dtype: torch.dtype | None = None) -> KernelHandle:
        """Under ``torch.autocast(name)``, cast floating-point inputs of `op` to `dtype`, or to the autocast dtype."""
        found = self._kernels.find(op)
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise BackendNameError(
                "autocast casts to a dtype", op=_torch.library.name_of_overload(found), got=repr(dtype)
            )
        kernel = kernels.casting_kernel(found, self.name, dtype)
        return self._kernels.install(found, "AutocastPrivateUse1", kernel, kernel)

    # Memory -----------------------------------------------------------------------------------------------------

    def host(self, tensor: Tensor) -> Tensor:
        """A CPU tensor that shares the memory of `tensor`. Nothing is copied; a write to one changes the other.

        Memory of ``register_backend(..., memory=)`` is shared until the kernel ends, or `access`, if at all.

        Raises:
            ValueError: the tensor is not on this device.
            UnsupportedError: the host cannot read this memory, or not here.
        """
        if type(tensor) is not Tensor or _compat.is_functional(tensor):
            self._require_here(tensor, "host()")
        try:
            host = self._memory.share(tensor)
        except (BufferError, RuntimeError):
            self._require_here(tensor, "host()")
            raise
        return self._memory.with_bits(host, tensor) if tensor.is_conj() or tensor.is_neg() else host

    def _require_here(self, tensor: object, function: str) -> None:
        """Raise unless it is a tensor with memory on this device."""
        fix = None
        if not isinstance(tensor, Tensor):
            expected, got = "a tensor", type(tensor).__name__
        elif tensor.device.type != self.name:
            expected, got, fix = "a tensor of this device", f"one on {tensor.device}", f"x.to({self.name!r})"
        elif _torch.fakes.is_abstract(tensor) or _compat.is_functional(tensor):
            expected, got = "a tensor with memory", f"{type(tensor).__name__}, while tracing"
        else:
            return
        raise WrongDeviceError(f"{function} expects {expected}", op=self.name, got=got, fix=fix)

    def numpy(self, tensor: Tensor) -> Array:
        """A NumPy array that shares the memory of `tensor`.

        Raises:
            TypeError: NumPy does not have the dtype (bfloat16, float8).
        """
        host = self.host(tensor)
        if host.is_conj() or host.is_neg():
            problem = "NumPy has no lazily conjugated or negated arrays"
            raise UnsupportedError(problem, op="numpy()", fix="x.resolve_conj().resolve_neg()")
        try:
            return host.numpy()
        except TypeError as error:
            fix = "backend.host(x) is a CPU tensor over the same memory; or x.float()"
            raise DtypeError("NumPy has no such dtype", op="numpy()", got=str(tensor.dtype), fix=fix) from error

    @contextlib.contextmanager
    def access(self) -> Iterator[None]:
        """In it, `host` and `numpy` have access to protected memory, as in kernels. Also ``@backend.access()``."""
        with self._memory.scope():
            yield

    def handle(self, tensor: Tensor) -> Block:
        """Where a tensor lies in memory of ``register_backend(..., memory=)``: handle, offset, bytes and device index.

        The bytes go from its first to its last one; its sizes and strides say which of them are its elements.
        A tensor whose storage is empty has the handle 0, and no bytes.
        """
        if not isinstance(self._memory, HandleMemory):
            problem = "this device has no memory of its own: tensors lie in memory of the host"
            raise BackendError(problem, fix="backend.host(x), x.data_ptr(); or register_backend(..., memory=)")
        self._require_here(tensor, "handle()")
        return self._memory.block(tensor)

    def submit(self, work: Callable[[], object]) -> None:
        """Have ``work()`` run on the current stream, with access as in a kernel. Without streams, it runs now.

        A kernel that allocates its results and submits the rest does not block. What `work` refers to stays alive. An
        error of work that runs later is raised where the program waits: it names the op, and the line that called it.
        """
        if not callable(work):
            raise BackendError("submit() takes a function without arguments", op=self.name, got=repr(work))
        self.module.current_stream().submit(self._memory.named(self._memory.scoped(work)))

    def wrap(self, value: Tensor | Array, index: int | str | torch.device = 0) -> Tensor:
        """A tensor of this device that shares the memory of a CPU tensor or NumPy array. Nothing is copied.

        On a device with memory of its own (``register_backend(..., memory=)``) it is a copy.

        Args:
            index: the index of the device, or a device, such as that of another tensor (``x.device``).

        Raises:
            ValueError: the value is not plain CPU memory: it is on another device, sparse, quantized or meta.
        """
        if type(index) is not int or index:
            index = self.module.index_of(index)
        if not isinstance(value, Tensor):
            array: Any = value
            if hasattr(array, "__array__") and not hasattr(array, "__setitem__"):
                array = array.__array__()  # NumPy turns results without dimensions into numbers of its own
            flags = getattr(array, "flags", None)
            if flags is not None and not flags.writeable:
                fix = "wrap(array.copy())"
                problem = "wrap() shares memory, which ops may write to"
                raise BackendError(problem, got="a read-only NumPy array", fix=fix)
            try:
                host = torch.from_numpy(array)
            except (TypeError, ValueError) as error:
                got = f"{type(array).__name__}: {error}"
                raise BackendError("wrap() takes a CPU tensor or a writable NumPy array", got=got) from error
            return self._memory.adopt(host, index)
        if _compat.is_functional(value) or (type(value) is not Tensor and _torch.fakes.is_abstract(value)):
            got = f"a {type(value).__name__}, while tracing"
            raise WrongDeviceError("wrap() takes a tensor with memory", op=self.name, got=got)
        try:
            return self._memory.adopt(self._memory.plain(value), index)
        except UnsupportedError as error:
            got = f"a tensor on {value.device}, {value.layout}, {value.dtype}"
            raise WrongDeviceError("wrap() takes plain memory of the CPU", op=self.name, got=got) from error

    def memory_allocated(self, index: int | str | torch.device = 0) -> int:
        """The memory of all live tensors on a device, in bytes."""
        return self._memory.allocated(self.module.index_of(index))

    def default_generator(self, index: int | str | torch.device = 0) -> torch.Generator:
        """The generator that random ops on a device use. It is a CPU generator."""
        return self.module.default_generators[self.module.index_of(index)]

    # Fallback ---------------------------------------------------------------------------------------------------

    @property
    def fallback_policy(self) -> Policy:
        """What an op without a kernel does: "cpu" runs the CPU kernel, "warn" also warns once, "error" raises."""
        return self._fallback.policy

    @fallback_policy.setter
    def fallback_policy(self, policy: Policy) -> None:
        self._fallback.base_policy = check_policy(policy)

    @contextlib.contextmanager
    def no_fallback(self) -> Iterator[None]:
        """Context manager: in this thread, an op without a kernel raises NotImplementedError."""
        with self._fallback.with_policy("error"):
            yield

    def fallback_counts(self) -> dict[str, int]:
        """The number of times each op fell back to the CPU since the last reset, most frequent first."""
        return dict(self._fallback.counts.most_common())

    def reset_fallback_counts(self) -> None:
        """Set the counts of calls that fell back to the CPU to zero."""
        self._fallback.counts.clear()
