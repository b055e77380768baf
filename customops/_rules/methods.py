"""The methods of an op that register its rules."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar, overload

import torch
from typing_extensions import Unpack

from customops._autograd.options import BackwardOptions, FromOptions, GradientOptions
from customops._autograd.recompute import formulas
from customops._compat.libraries import Library
from customops._dispatch.callbacks import Fn
from customops._dispatch.devices import DeviceTypes, device_list
from customops._dispatch.operator import OperatorHandle
from customops._dispatch.registrations import Registration, lock
from customops._lowering.lowering import Lowering
from customops._rules import Rules

__tracebackhide__ = True  # pytest leaves the frames out

F = TypeVar("F", bound=Callable[..., Any])


class Register:
    """The ``register_*`` methods of `CustomOpDef`."""

    _definition: OperatorHandle
    _rules: Rules
    #: What callbacks go through, of an op whose signature is not simply its schema.
    _lowering: Lowering | None = None

    @property
    def _qualname(self) -> str:
        return self._definition.qualname

    def _register(self, lib: Library | None, register: Callable[..., Registration], *args: Any) -> None:
        """``register(*args)``; what it did ends with `lib`, or with the open scope of the registry."""
        raise NotImplementedError

    # Kernels ----------------------------------------------------------------------------------------------------

    @overload
    def register_kernel(
        self, device_types: DeviceTypes, fn: None = None, /, *, lib: Library | None = None
    ) -> Callable[[F], F]: ...
    @overload
    def register_kernel(self, device_types: DeviceTypes, fn: F, /, *, lib: Library | None = None) -> F: ...
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
    ) -> Callable[[F], F]: ...
    @overload
    def register_fake(self, fn: F, /, *, lib: Library | None = None, allow_override: bool = True) -> F: ...
    def register_fake(self, fn: Fn | None = None, /, *, lib: Library | None = None, allow_override: bool = True) -> Any:
        """Register how the op runs on tensors without data: FakeTensor (compile, export) and meta tensors.

        Args:
            fn: takes what the op takes; returns tensors of the right shape, stride, dtype and device.
                For sizes that depend on data, see `get_ctx`.
            lib: the registration ends when this library is destroyed; an earlier one then counts again.
            allow_override: False raises if there is a fake already.

        Raises:
            RegistrationError: the op has a fake and may not be overridden, or has no use for one.
            CallbackError: `fn` cannot be called with the op's arguments.

        Example:
            >>> @double.register_fake
            ... def _(x):
            ...     return torch.empty_like(x)
        """
        if fn is None:
            return functools.partial(self.register_fake, lib=lib, allow_override=allow_override)
        fake = fn if self._lowering is None else self._lowering.kernel(fn, "fake impl")
        self._register(lib, self._rules.fake.register, fake, allow_override)
        return fn

    @property
    def _abstract_fn(self) -> Fn | None:
        """What torch asks its own ops for to know whether they have a fake."""
        return self._rules.fake.fn

    # Autograd ---------------------------------------------------------------------------------------------------

    def register_autograd(
        self,
        backward: Fn | None = None,
        /,
        *,
        setup_context: Fn | None = None,
        lib: Library | None = None,
        **options: Unpack[BackwardOptions],
    ) -> Any:
        """Register the gradient formula.

        Args:
            backward: ``backward(ctx, *grads)``, one gradient for each return, a list for a list of tensors (without it,
                a decorator is returned). Returns one
                gradient for each positional argument, then for each tensor that is keyword-only: a Tensor like the
                argument, None where there is none, or a list of these; or a dict of these by argument names.
            setup_context: ``setup_context(ctx, inputs, output)`` saves what backward needs, with
                ``ctx.save_for_backward`` for tensors; for an op with keyword-only arguments it is
                ``setup_context(ctx, inputs, keyword_only_inputs, output)``. Defaults are filled in.
            lib: the registration ends when this library is destroyed.
            nondiff_args: names of tensors that have no gradient, even if they require grad.
            grads_of: names of arguments the op writes to whose new values have gradients: backward gets these after
                those of the returns. The default is none; for an op that returns nothing, all. (An in-place op returns
                what it writes to.)
            originals: names of arguments the op writes to, of which setup_context is to get copies from before that.
            materialize_grads: False gives backward None, instead of zeros, for returns that were not used.
            once_differentiable: nothing that backward does is recorded, and a second derivative raises.

        Raises:
            RegistrationError: the op has ``torch.Tag.out``, or nothing that could have a gradient.
            CallbackError: a callback has parameters that do not fit.

        Example:
            >>> double.register_autograd(lambda ctx, grad: grad * 2)
        """
        if backward is None:
            return functools.partial(self.register_autograd, setup_context=setup_context, lib=lib, **options)
        formula, setup = backward, setup_context
        if self._lowering is not None:
            options = self._lowering.options(options)
            formula, setup = self._lowering.backward(backward, options), self._lowering.setup_context(setup_context)
        self._register(lib, self._rules.autograd.register, formula, setup, options)
        return backward

    def register_jvp(
        self, jvp: Fn | None = None, /, *, setup_context: Fn | None = None, lib: Library | None = None,
        **options: Unpack[GradientOptions],
    ) -> Any:  # fmt: skip
        """Register the rule for forward mode: ``torch.func.jvp``, ``jacfwd``, ``linearize``, dual numbers.

        Args:
            jvp: ``jvp(ctx, *tangents)``, one tangent for each input in the order of `register_autograd`, a list for a
                list of tensors, None for what has none; returns one for each return, like it. As
                ``autograd.Function.jvp``.
            setup_context: as in `register_autograd`, with ``ctx.save_for_forward`` for tensors. If both have one, both
                are called.
            lib: the registration ends when this library is destroyed.
            **options: those of `register_autograd`.

        Raises:
            RegistrationError: the op has ``torch.Tag.out``, returns a view, or nothing that could have a gradient.
            CallbackError: a callback has parameters that do not fit.

        Example:
            >>> double.register_jvp(lambda ctx, tangent: tangent * 2)
        """
        if jvp is None:
            return functools.partial(self.register_jvp, setup_context=setup_context, lib=lib, **options)
        formula, setup = jvp, setup_context
        if self._lowering is not None:
            formula, setup = self._lowering.jvp(jvp), self._lowering.setup_context(setup_context)
            options = self._lowering.options(options)
        self._register(lib, self._rules.autograd.register_jvp, formula, setup, options)
        return jvp

    def register_autograd_from(self, fn: F, /, *, lib: Library | None = None, **options: Unpack[FromOptions]) -> F:
        """Register formulas for both modes at once: those of `fn`, which computes the same in plain torch operations.

        It takes the op's arguments and returns what the op returns; then the new values of what it writes, if these are
        differentiated (`nondiff_args`, `grads_of`: see `register_autograd`). Backward runs it again, on the inputs that
        were saved, and derives it. With ``recompute=False`` it runs after the kernel, and what it saved is kept.

        Raises:
            RegistrationError, CallbackError: as `register_autograd`.

        Example:
            >>> @gelu.register_autograd_from
            ... def _(x):
            ...     return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
        """
        function: Fn = fn
        recompute = options.pop("recompute", True)
        if self._lowering is not None:
            options = self._lowering.options(options)
            function = self._lowering.function(fn, with_written=bool(options.get("grads_of")))
        found = formulas(function, self._definition, recompute=recompute)
        both: Any = {"originals": found.originals, **options}
        rule = self._rules.autograd
        with lock:
            self._register(lib, rule.register_jvp, found.jvp, found.setup_context, both)
            self._register(lib, rule.register, found.backward, found.setup_context, both)
        return fn

    # Autocast ---------------------------------------------------------------------------------------------------

    def register_autocast(self, device_type: str, cast_inputs: torch.dtype, *, lib: Library | None = None) -> None:
        """Under ``torch.autocast(device_type)``, cast floating inputs (also in lists) to `cast_inputs`.

        Raises:
            DefinitionError: the device type has no autocast, or `cast_inputs` is no dtype.
        """
        self._register(lib, self._rules.autocast.register, device_type, cast_inputs)

    # vmap, modes and subclasses ---------------------------------------------------------------------------------

    @overload
    def register_vmap(self, func: None = None, *, lib: Library | None = None) -> Callable[[F], F]: ...
    @overload
    def register_vmap(self, func: F, *, lib: Library | None = None) -> F: ...
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
    ) -> Callable[[F], F]: ...
    @overload
    def register_torch_dispatch(self, torch_dispatch_class: type, fn: F, /, *, lib: Library | None = None) -> F: ...
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
