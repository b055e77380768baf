"""`Backend`: a registered device, and how kernels are attached to it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from customops.backend import _compat, attention, autocast
from customops.backend.device_module import DeviceModule
from customops.backend.errors import BackendError, BackendNameError, DtypeError, WrongDeviceError
from customops.backend.fallback import Fallback, Policy, check_policy
from customops.backend.memory import Memory
from customops.backend.shortcuts import Shortcuts
from customops.backend.user_kernels import Fn, KernelHandle, UserKernels
from customops.errors import UnsupportedError

if TYPE_CHECKING:
    import numpy as np

    Array: TypeAlias = "np.ndarray[Any, Any]"

Op: TypeAlias = "str | _compat.OpOverload"


class Backend:
    """A device of your own; `register_backend` makes the one of a process.

    Attributes:
        name: the device type, as in ``torch.device(name)``.
        device_count: how many devices of it there are.
        module: ``torch.<name>``.
    """

    def __init__(
        self,
        name: str,
        memory: Memory,
        module: DeviceModule,
        fallback: Fallback,
        shortcuts: Shortcuts,
        own_kernels: dict[str, Fn],
    ) -> None:
        self.name = name
        self.device_count = memory.device_count
        self.module = module
        self._memory = memory
        self._fallback = fallback
        self._kernels = UserKernels(fallback, shortcuts, own_kernels)

    def __repr__(self) -> str:
        return f"<Backend {self.name!r}, {self.device_count} devices, fallback {self.fallback_policy!r}>"

    # Kernels ----------------------------------------------------------------------------------------------------

    def kernel(self, op: Op, *, dtypes: Iterable[torch.dtype] | None = None) -> Callable[[Fn], KernelHandle]:
        """Decorator: run the function for `op` on this device.

        It is called as the op is; Python numbers stay numbers. It returns what the schema says, on the device of its
        inputs; an op that writes to an argument may return None. Where it returns NotImplemented, what ran before does:
        the fallback, or the device's own way to make and copy tensors.
        A kernel for ``add.out`` serves ``add`` and ``add_`` as well, as for any structured op. One for an op that torch
        composes of others (``conv2d``, ``layer_norm``) runs where no derivative is wanted: else that is taken apart.

        Args:
            op: ``"aten::add.out"``, ``"ns::op"``, or an OpOverload.
            dtypes: only calls in which all tensors have one of these; for others what ran before does.

        Raises:
            KeyError: there is no such op.
            BackendError: it has a kernel already. And in a call: the kernel raises a TypeError (which the operators of
                torch would take for "not implemented"), or returns something else than the op does.
        """
        found = self._kernels.find(op)
        only = _dtypes(dtypes)

        def register(fn: Fn) -> KernelHandle:
            handle = self._kernels.install(found, "PrivateUse1", fn, self._kernels.checked(found, fn, only))
            attention.after_kernel(found, only)
            return handle

        return register

    def view_kernel(self, op: Op) -> KernelHandle:
        """Let `op` run the CPU's kernel on the device's tensors as they are: it must change sizes and strides alone."""
        found = self._kernels.find(op)
        if any(value.alias_info is None for value in _compat.schema_of(found).returns):
            raise BackendError(
                "a view kernel is for an op that returns nothing but views of its arguments, as Tensor(a) -> Tensor(a)",
                op=_compat.full_name(found),
                got=str(_compat.schema_of(found)),
                fix="backend.kernel(op)",
            )

        def view(*args: Any, **kwargs: Any) -> Any:
            return _compat.redispatch_to_cpu(found, *args, **kwargs)

        return self._kernels.install(found, "PrivateUse1", view, _compat.outside_dynamo(view))

    def autocast_kernel(self, op: Op, dtype: torch.dtype | None = None) -> KernelHandle:
        """Cast floating tensors of `op` under ``torch.autocast(name)``, to `dtype` or to that of the context."""
        found = self._kernels.find(op)
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise BackendNameError("autocast casts to a dtype", op=_compat.full_name(found), got=repr(dtype))
        kernel = autocast.casting_kernel(found, self.name, dtype)
        return self._kernels.install(found, "AutocastPrivateUse1", kernel, kernel)

    # Memory -----------------------------------------------------------------------------------------------------

    def host(self, tensor: Tensor) -> Tensor:
        """A CPU tensor over the same memory: no copy, and writing to one writes to the other.

        Raises:
            ValueError: the tensor is not on this device.
        """
        if type(tensor) is not Tensor or _compat.is_functional(tensor):
            self._memory.require_here(tensor, "host()")
        try:
            host = _compat.as_cpu(tensor)
        except (BufferError, RuntimeError):
            self._memory.require_here(tensor, "host()")
            raise
        return self._memory.with_bits(host, tensor) if tensor.is_conj() or tensor.is_neg() else host

    def numpy(self, tensor: Tensor) -> Array:
        """A NumPy array over the same memory.

        Raises:
            TypeError: NumPy has no such dtype (bfloat16, float8).
        """
        host = self.host(tensor)
        if host.is_conj() or host.is_neg():
            raise UnsupportedError(
                "NumPy has no lazily conjugated or negated arrays", op="numpy()", fix="x.resolve_conj().resolve_neg()"
            )
        try:
            return host.numpy()
        except TypeError as error:
            raise DtypeError(
                "NumPy has no such dtype",
                op="numpy()",
                got=str(tensor.dtype),
                fix="backend.host(x) is a CPU tensor over the same memory; or x.float()",
            ) from error

    def wrap(self, value: Tensor | Array, index: int | str | torch.device = 0) -> Tensor:
        """The memory of a CPU tensor or NumPy array as a tensor of this device: no copy.

        Args:
            index: the device, by number, or that of another tensor (``x.device``).

        Raises:
            ValueError: it is no plain CPU memory: on another device, sparse, quantized, meta.
        """
        if type(index) is not int or index:
            index = self._index(index)
        if not isinstance(value, Tensor):
            return self._memory.adopt(_from_numpy(value), index)
        if _compat.is_functional(value) or (type(value) is not Tensor and _compat.is_abstract(value)):
            raise WrongDeviceError("wrap() takes memory", op=self.name, got=f"a {type(value).__name__}, while tracing")
        try:
            return self._memory.adopt(self._memory.plain(value), index)
        except UnsupportedError as error:
            raise WrongDeviceError(
                "wrap() takes plain memory of the CPU",
                op=self.name,
                got=f"a tensor on {value.device}, {value.layout}, {value.dtype}",
            ) from error

    def memory_allocated(self, index: int | str | torch.device = 0) -> int:
        """Bytes of the tensors that are alive on a device."""
        return self._memory.allocated(self._index(index))

    def default_generator(self, index: int | str | torch.device = 0) -> torch.Generator:
        """The generator that random ops on a device use: a CPU generator."""
        return self.module.default_generators[self._index(index)]

    def _index(self, index: int | str | torch.device) -> int:
        return self.module.index_of(index)

    # Fallback ---------------------------------------------------------------------------------------------------

    @property
    def fallback_policy(self) -> Policy:
        """What runs where there is no kernel: "cpu", "warn" (the same, said once per op), or "error"."""
        return self._fallback.policy

    @fallback_policy.setter
    def fallback_policy(self, policy: Policy) -> None:
        self._fallback.base_policy = check_policy(policy)

    @contextlib.contextmanager
    def no_fallback(self) -> Iterator[None]:
        """Inside, and in this thread, an op without a kernel raises NotImplementedError."""
        with self._fallback.with_policy("error"):
            yield

    def fallback_counts(self) -> dict[str, int]:
        """How often each op ran on the CPU since the last reset, most frequent first."""
        return dict(self._fallback.counts.most_common())

    def reset_fallback_counts(self) -> None:
        self._fallback.counts.clear()


def _dtypes(dtypes: Iterable[torch.dtype] | torch.dtype | None) -> list[torch.dtype] | None:
    if dtypes is None or isinstance(dtypes, torch.dtype):
        return None if dtypes is None else [dtypes]
    found = list(dtypes)
    wrong = [dtype for dtype in found if not isinstance(dtype, torch.dtype)]
    if wrong or not found:
        raise BackendNameError("dtypes= takes torch dtypes", got=repr(wrong[0]) if wrong else "none")
    return found


def _from_numpy(array: Any) -> Tensor:
    if hasattr(array, "__array__") and not hasattr(array, "__setitem__"):
        array = array.__array__()  # NumPy turns results without dimensions into numbers of its own
    flags = getattr(array, "flags", None)
    if flags is not None and not flags.writeable:
        raise BackendError(
            "wrap() shares memory, which ops may write to", got="a read-only NumPy array", fix="wrap(array.copy())"
        )
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError) as error:
        raise BackendError(
            "wrap() takes a CPU tensor or a writable NumPy array", got=f"{type(array).__name__}: {error}"
        ) from error
