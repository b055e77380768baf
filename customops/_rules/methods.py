"""The methods of an op that register its rules; those for gradients are in `gradient_methods`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Concatenate, overload

import torch
from torch import Tensor
from typing_extensions import Never

from customops._compat.libraries import Library
from customops._dispatch.callbacks import Fn
from customops._dispatch.devices import DeviceTypes, device_list
from customops._dispatch.registrations import Registration
from customops._rules.compiler_methods import RegisterForCompilers
from customops._rules.fits import (
    DeclaredF,
    Decorator,
    F,
    Items,
    MayTakeNothing,
    OpFor,
    P,
    Q,
    R,
    ResultAndDims,
    ReturnsItems,
    ReturnsNumber,
    ReturnsTensor,
    Strategy,
    TakesModeAndCall,
)
from customops._rules.like import declared
from customops._schema.differentiability import Names
from customops.errors import entries

__tracebackhide__ = True  # pytest leaves the frames out


@entries
class Register(RegisterForCompilers[P, R]):
    """The ``register_*`` methods of `CustomOpDef`."""

    # Kernels ----------------------------------------------------------------------------------------------------

    @overload
    def register_kernel(
        self, device_types: DeviceTypes, fn: None = None, /, *, lib: Library | None = None
    ) -> Decorator[P, R]: ...
    @overload
    def register_kernel(
        self: OpFor[Tensor], device_types: DeviceTypes, fn: ReturnsTensor, /, *, lib: Library | None = None
    ) -> ReturnsTensor: ...
    @overload
    def register_kernel(
        self: OpFor[Items], device_types: DeviceTypes, fn: ReturnsItems, /, *, lib: Library | None = None
    ) -> ReturnsItems: ...
    @overload
    def register_kernel(
        self: OpFor[float], device_types: DeviceTypes, fn: ReturnsNumber, /, *, lib: Library | None = None
    ) -> ReturnsNumber: ...
    @overload
    def register_kernel(
        self, device_types: DeviceTypes, fn: Callable[Concatenate[Any, Q], R], /, *, lib: Library | None = None
    ) -> Callable[Concatenate[Any, Q], R]: ...
    @overload
    def register_kernel(
        self: MayTakeNothing, device_types: DeviceTypes, fn: Callable[Q, R], /, *, lib: Library | None = None
    ) -> Callable[Q, R]: ...
    @overload
    def register_kernel(
        self: OpFor[Never], device_types: DeviceTypes, fn: F, /, *, lib: Library | None = None
    ) -> F: ...
    def register_kernel(self, device_types: DeviceTypes, fn: Fn | None = None, /, *, lib: Library | None = None) -> Any:
        """Register the kernel for one or several device types, or (None) for every device that has no kernel.

        Args:
            device_types: "cuda", or ["cpu", "cuda"]. Each of several can be overridden later; the others stay.
            fn: the kernel. It takes every argument of the op, with defaults filled in. Without it, a decorator is
                returned.
            lib: the registration ends when this library is destroyed.

        Raises:
            RegistrationError: torch does not know the device type.
            CallbackError: `fn` cannot be called with the op's arguments.

        Example:
            >>> @double.register_kernel("cuda")
            ... def double_cuda(x):
            ...     return launch(x)
        """
        devices: Any = device_list(device_types, self._qualname)  # a decorator without any fails at its own line
        if fn is None:
            return functools.partial(self.register_kernel, devices, lib=lib)
        kernel = fn if self._lowering is None else self._lowering.kernel(fn)
        self._register(lib, self._rules.kernel.register, devices, kernel)
        return fn

    def set_kernel_enabled(self, device_type: str, enabled: bool = True) -> AbstractContextManager[None]:
        """Context manager that disables (or enables) the kernel of a device type.

        While the kernel is disabled, the op's function runs instead. This applies to all threads. The earlier state is
        restored on exit.
        """
        return self._rules.kernel.enabled(device_type, enabled)

    def _impl(self, keys: tuple[str, ...], fn: Fn, lib: Library | None) -> None:
        """Put `fn` at dispatch keys as it is."""
        self._register(lib, self._rules.raw.register, keys, fn)

    # Fake impl --------------------------------------------------------------------------------------------------

    @overload
    def register_fake(
        self, fn: None = None, /, *, lib: Library | None = None, allow_override: bool = True
    ) -> Decorator[P, R]: ...
    @overload
    def register_fake(
        self: OpFor[Tensor], fn: ReturnsTensor, /, *, lib: Library | None = None, allow_override: bool = True
    ) -> ReturnsTensor: ...
    @overload
    def register_fake(
        self: OpFor[Items], fn: ReturnsItems, /, *, lib: Library | None = None, allow_override: bool = True
    ) -> ReturnsItems: ...
    @overload
    def register_fake(
        self: OpFor[float], fn: ReturnsNumber, /, *, lib: Library | None = None, allow_override: bool = True
    ) -> ReturnsNumber: ...
    @overload
    def register_fake(
        self, fn: Callable[Concatenate[Any, Q], R], /, *, lib: Library | None = None, allow_override: bool = True
    ) -> Callable[Concatenate[Any, Q], R]: ...
    @overload
    def register_fake(
        self: MayTakeNothing, fn: Callable[Q, R], /, *, lib: Library | None = None, allow_override: bool = True
    ) -> Callable[Q, R]: ...
    @overload
    def register_fake(
        self: OpFor[Never], fn: F, /, *, lib: Library | None = None, allow_override: bool = True
    ) -> F: ...
    @overload
    def register_fake(
        self, fn: DeclaredF, /, *, lib: Library | None = None, allow_override: bool = True
    ) -> DeclaredF: ...
    def register_fake(self, fn: Any = None, /, *, lib: Library | None = None, allow_override: bool = True) -> Any:
        """Register the fake impl, which runs on tensors without data: fake tensors (compile, export), meta tensors.

        Args:
            fn: takes the arguments of the op, and returns tensors of the right shape, strides, dtype and device.
                For sizes that depend on data, see `get_ctx`. Instead of a function, pass the result of `like` (a tuple
                of these for several returns), or "kernel" if the op's function calls only torch's ops and also runs on
                tensors without data. Without `fn`, a decorator is returned.
            lib: the registration ends when this library is destroyed; an earlier one then applies again.
            allow_override: if False, raise if the op already has a fake impl.

        Raises:
            RegistrationError: the op has a fake impl that must not be overridden, or needs none.
            CallbackError: `fn` cannot be called with the op's arguments.

        Example:
            >>> @double.register_fake
            ... def _(x):
            ...     return torch.empty_like(x)
            >>> double.register_fake(like("x"))
        """
        if fn is None:
            return functools.partial(self.register_fake, lib=lib, allow_override=allow_override)
        if not callable(fn):
            fake = declared(fn, self._definition.spec)
        else:
            fake = fn if self._lowering is None else self._lowering.kernel(fn, "fake impl")
        self._register(lib, self._rules.fake.register, fake, allow_override)
        return fn

    @property
    def _abstract_fn(self) -> Fn | None:
        """What torch asks its own ops for to know whether they have a fake."""
        return self._rules.fake.fn

    # Out variant ------------------------------------------------------------------------------------------------

    @overload
    def register_out(
        self,
        fn: None = None,
        /,
        *,
        device_types: DeviceTypes = None,
        inplace: Names = (),
        lib: Library | None = None,
    ) -> Callable[[F], F]: ...
    @overload
    def register_out(
        self, fn: F, /, *, device_types: DeviceTypes = None, inplace: Names = (), lib: Library | None = None
    ) -> F: ...
    def register_out(
        self,
        fn: Fn | None = None,
        /,
        *,
        device_types: DeviceTypes = None,
        inplace: Names = (),
        lib: Library | None = None,
    ) -> Any:
        """Register a kernel that writes the results into tensors of the caller: ``fn(*args, out=...)``.

        The first registration defines the op's out variant, ``ns::name.out``, which is available as `out`. Inductor
        calls it instead of the op, so that inductor plans the memory of the results. For a device without a kernel, the
        op gets one that allocates the results described by the fake impl and calls `fn` to fill them.

        Args:
            fn: takes every argument of the op, and the keyword argument `out`: a tensor with the shape, strides and
                dtype of the fake impl's result, or a tuple of these if the op returns a tuple. It fills `out`, and
                returns None or `out`. Without `fn`, a decorator is returned.
            device_types: the device types that `fn` is the kernel for; None means every device that has no out kernel.
            inplace: names of tensors that may also be passed as `out`, because `fn` reads each of their elements before
                it writes that element. If any other tensor overlaps `out`, `fn` writes to a temporary tensor.
            lib: the registration ends when this library is destroyed.

        Raises:
            RegistrationError: the op mutates an argument, returns a view, or does not return a fixed number of
                tensors; or an op named ``ns::name.out`` exists.
            CallbackError: `fn` cannot be called with the op's arguments and `out`.

        Example:
            >>> @double.register_out
            ... def _(x, *, out):
            ...     torch.mul(x, 2, out=out)
            >>> double.out(torch.ones(2), out=torch.empty(2))
            tensor([2., 2.])
        """
        devices: Any = device_list(device_types, self._qualname)
        if fn is None:
            return functools.partial(self.register_out, device_types=devices, inplace=inplace, lib=lib)
        self._register(lib, self._register_out, devices, fn, inplace)
        return fn

    def _register_out(self, device_types: DeviceTypes, fn: Fn, inplace: Names) -> Registration:
        """`register_out`; what it did is undone by the registration."""
        raise NotImplementedError

    @property
    def out(self) -> Any:
        """The op's out variant, a separate operator: ``op.out(*args, out=...)`` fills `out` and returns it.

        `out` is a tensor with the shape, dtype and device of the result, or a tuple of such tensors. It is neither
        resized nor cast. As in torch's functions, tensors that require grad raise.

        Raises:
            AttributeError: the op has no out variant. `register_out` defines one.
        """
        variant = self._rules.out_variant
        if variant is None:
            raise AttributeError(
                f"{self._qualname} has no out variant: op.register_out(fn) makes it", name="out", obj=self
            )
        return variant

    # Autocast ---------------------------------------------------------------------------------------------------

    def register_autocast(self, device_type: str, cast_inputs: torch.dtype, *, lib: Library | None = None) -> None:
        """Under ``torch.autocast(device_type)``, cast floating-point inputs of the op to `cast_inputs`.

        Tensors in lists are cast too.

        Raises:
            DefinitionError: the device type does not support autocast, or `cast_inputs` is not a dtype.
        """
        self._register(lib, self._rules.autocast.register, device_type, cast_inputs)

    # vmap, modes and subclasses ---------------------------------------------------------------------------------

    @overload
    def register_vmap(
        self, func: None = None, *, lib: Library | None = None
    ) -> Callable[[ResultAndDims], ResultAndDims]: ...
    @overload
    def register_vmap(self, func: Strategy, *, lib: Library | None = None) -> Strategy: ...
    @overload
    def register_vmap(self, func: ResultAndDims, *, lib: Library | None = None) -> ResultAndDims: ...
    def register_vmap(self, func: Fn | str | None = None, *, lib: Library | None = None) -> Any:
        """Register the batching rule: ``func(info, in_dims, *args, **kwargs) -> (result, out_dims)``.

        `in_dims` has one entry for each positional argument, then one per keyword-only tensor: its batch dimension,
        or None if it is not batched. `info` has the attributes ``batch_size`` and ``randomness``. See
        ``torch.library.register_vmap``.

        Instead of a function, `func` may be the name of a strategy. "sequential" calls the op for each element of the
        batch. "expand_dims" and "broadcast_all" are for ops that accept any leading dimensions: they call the op once,
        with the batch dimension first. "expand_dims" gives tensors that are not batched a leading dimension of size 1;
        "broadcast_all" expands them to the batch size. Without `func`, a decorator is returned.

        Raises:
            CallbackError: `func` cannot be called with the op's arguments.

        Example:
            >>> double.register_vmap(lambda info, in_dims, x: (double(x), in_dims[0]))
        """
        if func is None:
            return functools.partial(self.register_vmap, lib=lib)
        rule = func if self._lowering is None or isinstance(func, str) else self._lowering.vmap(func)
        self._register(lib, self._rules.vmap.register, rule)
        return func

    @overload
    def register_torch_dispatch(
        self, torch_dispatch_class: type, fn: None = None, /, *, lib: Library | None = None
    ) -> Callable[[TakesModeAndCall], TakesModeAndCall]: ...
    @overload
    def register_torch_dispatch(
        self, torch_dispatch_class: type, fn: TakesModeAndCall, /, *, lib: Library | None = None
    ) -> TakesModeAndCall: ...
    def register_torch_dispatch(
        self, torch_dispatch_class: type, fn: Fn | None = None, /, *, lib: Library | None = None
    ) -> Any:
        """Register a function that replaces the ``__torch_dispatch__`` of a mode or tensor subclass for this op.

        It is called as ``fn(mode_or_cls, func, types, args, kwargs)``; see ``torch.library.register_torch_dispatch``.
        Without `fn`, a decorator is returned.
        """
        if fn is None:
            return functools.partial(self.register_torch_dispatch, torch_dispatch_class, lib=lib)
        self._register(lib, self._rules.torch_dispatch.register, torch_dispatch_class, fn)
        return fn

    def register_effect(self, effect: Any) -> None:
        """Mark the op as having a side effect (a member of torch's ``EffectType``), or as having none (None)."""
        self._register(None, self._rules.effect.register, effect)
