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

__tracebackhide__ = True  # pytest leaves the frames out


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
        """Register the kernel for a device type, several, or (None) every device without one of its own.

        Args:
            device_types: e.g. "cuda", or ["cpu", "cuda"]; overriding one of several later leaves the others.
            fn: takes every argument of the op, defaults filled in. Without it, a decorator is returned.
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
        """Context manager that switches a device's kernel off (or on again); off, the op's own function runs.

        The switch holds for all threads. What it was before is restored on exit.
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
        """Register how the op runs on tensors without data: FakeTensor (compile, export) and meta tensors.

        Args:
            fn: takes what the op takes; returns tensors of the right shape, stride, dtype and device.
                For sizes that depend on data, see `get_ctx`. Or what `like` returns, for several returns a tuple of
                these; or "kernel", if the op's function is made of torch's ops and runs on tensors without data.
            lib: the registration ends when this library is destroyed; an earlier one then counts again.
            allow_override: False raises if there is a fake already.

        Raises:
            RegistrationError: the op has a fake and may not be overridden, or has no use for one.
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

        The first one makes the op's out variant ``ns::name.out``: `out` calls it, and inductor does, too, in the place
        of the op, so that it plans the memory of the results. Where the op has no kernel for a device, it gets one that
        allocates what the fake impl says and has that filled.

        Args:
            fn: takes every argument of the op, and by keyword `out`: a tensor of the shape, strides and dtype that the
                fake impl says, or a tuple of such tensors where the op returns one. It fills them, and returns nothing,
                or `out`. Without it, a decorator is returned.
            device_types: the device types that it is the kernel for; None stands for every device without one.
            inplace: names of tensors that may be given as `out`, too: `fn` has read an element of them before it writes
                the one at that place. Else the result goes by way of a tensor of its own.
            lib: the registration ends when this library is destroyed.

        Raises:
            RegistrationError: the op writes, or returns a view or anything but a fixed number of tensors; or an op of
                the name ``ns::name.out`` exists.
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
        """The op's out variant, an operator of its own: ``op.out(*args, out=...)`` fills `out`, and returns it.

        `out` is a tensor of the shape and dtype of the result, on its device, or a tuple of such tensors. It is neither
        resized nor cast. Tensors that require grad are refused, as by torch's functions.

        Raises:
            AttributeError: there is none; `register_out` makes it.
        """
        variant = self._rules.out_variant
        if variant is None:
            raise AttributeError(
                f"{self._qualname} has no out variant: op.register_out(fn) makes it", name="out", obj=self
            )
        return variant

    # Autocast ---------------------------------------------------------------------------------------------------

    def register_autocast(self, device_type: str, cast_inputs: torch.dtype, *, lib: Library | None = None) -> None:
        """Under ``torch.autocast(device_type)``, cast floating inputs (also in lists) to `cast_inputs`.

        Raises:
            DefinitionError: the device type has no autocast, or `cast_inputs` is no dtype.
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

        `in_dims` has an entry for each positional argument, then for each tensor that is keyword-only: the batched
        dimension, or None. `info` has ``batch_size`` and ``randomness``. See ``torch.library.register_vmap``.

        Instead of a function, the name of a strategy: "sequential" calls the op for each element of the batch;
        "expand_dims" and "broadcast_all" call it once, batch dimensions in front, for ops that take any leading
        dimensions: tensors that are not batched get a dimension of size 1 there, or are expanded to the batch's size.

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
        """Register what runs for this op instead of the ``__torch_dispatch__`` of a mode or tensor subclass.

        ``fn(mode_or_cls, func, types, args, kwargs)``; see ``torch.library.register_torch_dispatch``.
        """
        if fn is None:
            return functools.partial(self.register_torch_dispatch, torch_dispatch_class, lib=lib)
        self._register(lib, self._rules.torch_dispatch.register, torch_dispatch_class, fn)
        return fn

    def register_effect(self, effect: Any) -> None:
        """Mark the op as having a side effect (a member of torch's ``EffectType``), or (None) as having none."""
        self._register(None, self._rules.effect.register, effect)
