"""The methods of an op that register its rules."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, Never, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from customops import _torch
from customops._autograd.layout import BackwardOptions, GradientOptions
from customops._codegen.choice import taking
from customops._codegen.lowering import Lowering
from customops._dispatch.callbacks import Fn, bind
from customops._dispatch.devices import DeviceTypes, device_list
from customops._dispatch.operator import OperatorHandle
from customops._dispatch.registrations import Registration, check_library, lock
from customops._dispatch.scopes import record_in_scope
from customops._op.callback_types import (
    AnySetupContext,
    Decorator,
    F,
    Items,
    KernelOptions,
    Lib,
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
    TakesGradients,
    TakesModeAndCall,
    Vary,
    YieldsArguments,
)
from customops._op.samples import Constraints, GradientIs, Samples, samples_with, samples_with_out
from customops._places import entries
from customops._rules import Rules
from customops._rules.compilers import When
from customops._rules.fake import of_kernel
from customops._rules.flops import COUNTER, count
from customops._rules.reference import ReferenceOptions
from customops._schema.defaults import completer
from customops._schema.model import Names
from customops.errors import ArgumentError, RegistrationError, UnsupportedError, check_choice, did_you_mean

__tracebackhide__ = True  # pytest leaves the frames out


@entries
class Register(Generic[P, R]):
    """The ``register_*`` methods of `CustomOpDef`."""

    if TYPE_CHECKING:  # what type checkers ask for the op's parameters

        def _call(self, /, *args: P.args, **kwargs: P.kwargs) -> R: ...

        def _replace_by(self, fn: Callable[P, R], /) -> None: ...

    _owner: Any  #: an `Ops`
    _qualname: str
    _definition: OperatorHandle
    _rules: Rules
    #: The arguments of ``torch.ops`` of those of a call of the object.
    lower: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]
    #: What callbacks go through, of an op whose signature is not simply its schema.
    _lowering: Lowering | None
    _samples: Samples | None
    #: Of an out variant, the op that it is one of.
    _functional: Any = None

    def _register(self, lib: Lib, register: Callable[..., Registration], *args: Any) -> None:
        """``register(*args)``; what it did ends with `lib`, or with the open scope of the registry."""
        with lock:
            if self._definition.removed is not None:
                raise self._definition.removed
            if lib is self._definition.library:
                lib = None  # it ends with the op
            if lib is not None:
                check_library(lib, self._definition.name.namespace, self._qualname)
            registration = register(*args)
            ends_with_scope = record_in_scope(self._owner, registration)
            if lib is not None:
                registration.end_with(lib)
            elif not ends_with_scope:
                registration.keep()

    # Kernels ------------------------------------------------------------------------------------------------------

    @overload
    def register_kernel(
        self, device_types: DeviceTypes, fn: None = None, /, **options: Unpack[KernelOptions]
    ) -> Decorator[P, R]: ...
    @overload
    def register_kernel(
        self: OpFor[Tensor], device_types: DeviceTypes, fn: ReturnsTensor, /, **options: Unpack[KernelOptions]
    ) -> ReturnsTensor: ...
    @overload
    def register_kernel(
        self: OpFor[Items], device_types: DeviceTypes, fn: ReturnsItems, /, **options: Unpack[KernelOptions]
    ) -> ReturnsItems: ...
    @overload
    def register_kernel(
        self: OpFor[float], device_types: DeviceTypes, fn: ReturnsNumber, /, **options: Unpack[KernelOptions]
    ) -> ReturnsNumber: ...
    @overload
    def register_kernel(
        self, device_types: DeviceTypes, fn: Callable[Concatenate[Any, Q], R], /, **options: Unpack[KernelOptions]
    ) -> Callable[Concatenate[Any, Q], R]: ...
    @overload
    def register_kernel(
        self: MayTakeNothing, device_types: DeviceTypes, fn: Callable[Q, R], /, **options: Unpack[KernelOptions]
    ) -> Callable[Q, R]: ...
    @overload
    def register_kernel(
        self: OpFor[Never], device_types: DeviceTypes, fn: F, /, **options: Unpack[KernelOptions]
    ) -> F: ...
    def register_kernel(
        self,
        device_types: DeviceTypes,
        fn: Fn | None = None,
        /,
        *,
        calls_torch: bool = False,
        name: str | None = None,
        when: Callable[..., bool | str] | None = None,
        priority: float = 0,
        key: Callable[..., Any] | Literal["arguments"] | None = "arguments",
        lib: Lib = None,
    ) -> Any:
        """Register a kernel for one or several device types, or (None) for every device that has no kernel.

        A device may have several, of different names. The first one that has no `when`, or whose `when` says yes, runs.
        They are asked by their `priority`; of equal ones those of the device before those for all devices, and the one
        registered last first. The op's reference comes last, under the name "reference".

        Args:
            device_types: "cuda", or ["cpu", "cuda"]. Each of several can be overridden later; the others stay.
            fn: the kernel. It takes every argument of the op, with defaults filled in. None: return a decorator.
            calls_torch: True for a kernel that calls torch functions, of an op that says ``kernel_calls_torch=False``.
            name: registering it again for the device replaces the kernel. None: the one without a name, "default".
            when: takes the arguments of the op, and returns True, or False, or a string: no, for this reason.
            priority: the highest is asked first.
            key: how long an answer of `when` is kept. "arguments": for arguments that look the same. `when` then gets
                tensors without data, of their sizes, strides, dtypes and devices. Or a function of the arguments: as
                long as it returns the same. None: `when` is asked in each call.
            lib: the registration ends when this library is destroyed.

        Raises:
            RegistrationError: torch does not know the device type, or an option has an invalid value.
            CallbackError: `fn`, `when` or `key` cannot be called with the op's arguments.

        Example:
            >>> @double.register_kernel("cuda")
            ... def double_cuda(x):
            ...     return launch(x)
            >>> @double.register_kernel("cuda", name="rows", when=lambda x: x.dim() == 2 or "takes 2 dimensions")
            ... def double_rows(x):
            ...     return launch_rows(x)
        """
        devices: Any = device_list(device_types, self._qualname)  # a decorator without any fails at its own line
        options: dict[str, Any] = {"name": name, "when": when, "priority": priority, "key": key}
        if fn is None:
            return functools.partial(self.register_kernel, devices, calls_torch=calls_torch, lib=lib, **options)
        parameters = self._definition.schema if self._lowering is None else self._lowering.parameters
        for option, role in (("when", "predicate"), ("key", "key function")):
            if callable(options[option]):
                taken = taking(options[option], parameters, self._qualname, role)
                lowering = self._lowering
                options[option] = taken if lowering is None else lowering.kernel(taken, role, lower_result=False)
        kernel = fn if self._lowering is None else self._lowering.kernel(fn)
        self._register(lib, self._rules.kernel.register, devices, kernel, calls_torch, *options.values())
        return fn

    # Fake impl ----------------------------------------------------------------------------------------------------

    @overload
    def register_fake(self, fn: None = None, /, *, lib: Lib = None, allow_override: bool = True) -> Decorator[P, R]: ...
    @overload
    def register_fake(
        self: OpFor[Tensor], fn: ReturnsTensor, /, *, lib: Lib = None, allow_override: bool = True
    ) -> ReturnsTensor: ...
    @overload
    def register_fake(
        self: OpFor[Items], fn: ReturnsItems, /, *, lib: Lib = None, allow_override: bool = True
    ) -> ReturnsItems: ...
    @overload
    def register_fake(
        self: OpFor[float], fn: ReturnsNumber, /, *, lib: Lib = None, allow_override: bool = True
    ) -> ReturnsNumber: ...
    @overload
    def register_fake(
        self, fn: Callable[Concatenate[Any, Q], R], /, *, lib: Lib = None, allow_override: bool = True
    ) -> Callable[Concatenate[Any, Q], R]: ...
    @overload
    def register_fake(
        self: MayTakeNothing, fn: Callable[Q, R], /, *, lib: Lib = None, allow_override: bool = True
    ) -> Callable[Q, R]: ...
    @overload
    def register_fake(self: OpFor[Never], fn: F, /, *, lib: Lib = None, allow_override: bool = True) -> F: ...
    @overload
    def register_fake(self, fn: Literal["kernel"], /, *, lib: Lib = None, allow_override: bool = True) -> str: ...
    def register_fake(self, fn: Any = None, /, *, lib: Lib = None, allow_override: bool = True) -> Any:
        """Register the fake impl, which runs on tensors without data: fake tensors (compile, export), meta tensors.

        Args:
            fn: takes the arguments of the op, and returns tensors of the right shape, strides, dtype and device.
                For sizes that depend on data, see `get_ctx`. "kernel" is the op's function, if it calls only torch's
                ops and also runs on tensors without data. Without `fn`, a decorator is returned.
            lib: the registration ends when this library is destroyed; an earlier one then applies again.
            allow_override: if False, raise if the op already has a fake impl.

        Raises:
            RegistrationError: the op has a fake impl that must not be overridden, or needs none.
            CallbackError: `fn` cannot be called with the op's arguments.

        Example:
            >>> @double.register_fake
            ... def _(x):
            ...     return torch.empty_like(x)
        """
        if fn is None:
            return functools.partial(self.register_fake, lib=lib, allow_override=allow_override)
        if not callable(fn):
            fake = of_kernel(fn, self._definition.spec)
        else:
            fake = fn if self._lowering is None else self._lowering.kernel(fn, "fake impl")
        self._register(lib, self._rules.fake.register, fake, allow_override)
        return fn

    # Gradients ----------------------------------------------------------------------------------------------------

    @overload
    def register_autograd(
        self, backward: None = None, /, *, setup_context: AnySetupContext[R] = None, lib: Lib = None,
        **options: Unpack[BackwardOptions],
    ) -> Callable[[TakesGradients], TakesGradients]: ...  # fmt: skip
    @overload
    def register_autograd(
        self, backward: TakesGradients, /, *, setup_context: AnySetupContext[R] = None, lib: Lib = None,
        **options: Unpack[BackwardOptions],
    ) -> TakesGradients: ...  # fmt: skip
    def register_autograd(
        self, backward: Fn | None = None, /, *, setup_context: Fn | None = None, lib: Lib = None,
        **options: Unpack[BackwardOptions],
    ) -> Any:  # fmt: skip
        """Register the gradient formula for reverse mode (backward).

        Args:
            backward: ``backward(ctx, *grads)``. It gets one gradient for each return, a list for a list of tensors. It
                returns one gradient for each positional argument, then one for each keyword-only tensor: a tensor with
                the shape of the argument, None, or a list of these; or it returns a dict of these by argument name.
                Without `backward`, a decorator is returned.
            setup_context: ``setup_context(ctx, inputs, output)`` saves what backward needs; it saves tensors with
                ``ctx.save_for_backward``. For an op with keyword-only arguments it is
                ``setup_context(ctx, inputs, keyword_only_inputs, output)``. Defaults are filled in.
            lib: the registration ends when this library is destroyed.
            nondiff_args: names of tensors that get no gradient, even if they require grad.
            grads_of: names of mutated arguments whose new values have gradients. Backward gets these gradients after
                those of the returns. By default none, or all if the op returns nothing.
            originals: names of mutated arguments for which setup_context gets copies made before the mutation.
            materialize_grads: if False, backward gets None, instead of zeros, for returns that were not used.
            once_differentiable: if True, backward is not recorded by autograd, and a second derivative raises.

        Raises:
            RegistrationError: the op has ``torch.Tag.out``, or has no differentiable tensors.
            CallbackError: the parameters of a callback do not match.

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

    @overload
    def register_jvp(
        self, jvp: None = None, /, *, setup_context: AnySetupContext[R] = None, lib: Lib = None,
        **options: Unpack[GradientOptions],
    ) -> Callable[[TakesGradients], TakesGradients]: ...  # fmt: skip
    @overload
    def register_jvp(
        self, jvp: TakesGradients, /, *, setup_context: AnySetupContext[R] = None, lib: Lib = None,
        **options: Unpack[GradientOptions],
    ) -> TakesGradients: ...  # fmt: skip
    def register_jvp(
        self,
        jvp: Fn | None = None,
        /,
        *,
        setup_context: Fn | None = None,
        lib: Lib = None,
        **options: Unpack[GradientOptions],
    ) -> Any:
        """Register the formula for forward mode: ``torch.func.jvp``, ``jacfwd``, ``linearize``, dual numbers.

        Args:
            jvp: ``jvp(ctx, *tangents)``. It gets one tangent for each input, in the order of `register_autograd`: a
                list for a list of tensors, None for an input without a tangent. It returns one tangent for each return,
                as ``autograd.Function.jvp`` does. Without `jvp`, a decorator is returned.
            setup_context: as in `register_autograd`, but it saves tensors with ``ctx.save_for_forward``. If both
                formulas have a setup_context, both are called.
            lib: the registration ends when this library is destroyed.
            **options: those of `register_autograd`.

        Raises:
            RegistrationError: the op has ``torch.Tag.out``, returns a view, or has no differentiable tensors.
            CallbackError: the parameters of a callback do not match.

        Example:
            >>> double.register_jvp(lambda ctx, tangent: tangent * 2)
        """
        if jvp is None:
            return functools.partial(self.register_jvp, setup_context=setup_context, lib=lib, **options)
        formula, setup = jvp, setup_context
        if self._lowering is not None:
            formula, setup = self._lowering.jvp(jvp), self._lowering.setup_context(setup_context)
            options = self._lowering.options(options)
        self._register(lib, self._rules.autograd.register, formula, setup, options, "jvp")
        return jvp

    # The reference, and the number of operations ------------------------------------------------------------------

    @overload
    def register_reference(
        self, fn: None = None, /, *, lib: Lib = None, **options: Unpack[ReferenceOptions]
    ) -> Callable[[F], F]: ...
    @overload
    def register_reference(self, fn: F, /, *, lib: Lib = None, **options: Unpack[ReferenceOptions]) -> F: ...
    def register_reference(
        self, fn: Fn | None = None, /, *, lib: Lib = None, **options: Unpack[ReferenceOptions]
    ) -> Any:
        """Register a plain PyTorch function that computes the same results as the op, and the rules that it gives.

        `customops.check` compares the kernels and gradients with the function. A rule that you register by hand,
        before or after, takes precedence over a rule that the function gives. Another function replaces all of these.

        Args:
            fn: takes the arguments of the op, and returns what the op returns. It writes nothing: for an op that
                writes, the new value of each written argument that is not returned follows, in the order of the schema.
                The function of an op with ``Tag.out`` does not take the written arguments. None: return a decorator.
            gives: the rules that the function gives. "fake": the fake impl. "gradients": the formulas of both modes,
                of any order. "vmap": the batching rule. "flops": the number of floating-point operations. "kernel":
                the kernel of devices without one. "inductor" and "export": the decomposition for this compiler. By
                default the first four.
            recompute: True: backward runs `fn` on the saved inputs and differentiates it. False: `fn` runs after the
                kernel in the forward pass, and autograd keeps its intermediate results. For a random op, `fn` draws
                the random numbers of the kernel again.
            nondiff_args, grads_of: as in `register_autograd`.
            lib: the registration ends when this library is destroyed.

        Raises:
            CallbackError: `fn` cannot be called with the op's arguments.
            RegistrationError, DefinitionError: an option has an invalid value.
            UnsupportedError: a rule of `gives` is not possible for the op.

        Example:
            >>> @rms_norm.register_reference
            ... def _(x, weight, eps=1e-6):
            ...     return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
        """
        known = [*ReferenceOptions.__annotations__]
        for option in options:
            if option not in known:
                problem, fix = f"register_reference has no option {option!r}", did_you_mean(option, known)
                raise RegistrationError(problem, op=self._qualname, expected=", ".join(["lib", *known]), fix=fix)
        if fn is None:
            return functools.partial(self.register_reference, lib=lib, **options)
        function: Fn = fn
        if self._lowering is not None:
            options = self._lowering.options(options)
            with_written = any(argument.is_mutated for argument in self._definition.schema.arguments)
            function = self._lowering.function(fn, with_written=with_written, role="reference")
        self._register(lib, self._rules.register_reference, function, options)
        self._count_flops()
        return fn

    def register_flops(self, fn: Fn | None = None, /, *, lib: Lib = None) -> Any:
        """Register the number of floating-point operations of a call.

        `torch.utils.flop_counter` uses it. Without it, the operations of the reference are counted.

        Args:
            fn: takes the arguments of the op, and returns an int. Without it, a decorator is returned.
            lib: the registration ends when this library is destroyed.

        Raises:
            CallbackError: `fn` cannot be called with the op's arguments.

        Example:
            >>> matmul.register_flops(lambda x, y: 2 * x.shape[0] * x.shape[1] * y.shape[1])
        """
        if fn is None:
            return functools.partial(self.register_flops, lib=lib)
        formula = fn if self._lowering is None else self._lowering.plain(fn, "formula")
        self._register(lib, self._rules.flops.register, formula)
        self._count_flops()
        return fn

    def _count_flops(self) -> None:
        """Let `torch.utils.flop_counter` count the calls of the op."""
        operator, rule = self._definition, functools.partial(count, self._flops)
        operator.on_removal.append(_torch.library.enter_named_rule(operator.qualname, COUNTER, rule))

    def _flops(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """Return the number of operations of a call of ``torch.ops``, or None if it is unknown."""
        if self._functional is not None:
            written = {argument.name for argument in self._definition.schema.mutated}
            kwargs = {name: value for name, value in kwargs.items() if name not in written}
            return self._functional._flops(args, kwargs)  # type: ignore[no-any-return]
        given = completer(self._definition.schema)(args, kwargs)
        return self._rules.flops.count(self._rules.reference, *given)

    # Out variant --------------------------------------------------------------------------------------------------

    @overload
    def register_out(
        self, fn: None = None, /, *, device_types: DeviceTypes = None, inplace: Names = (), lib: Lib = None
    ) -> Callable[[F], F]: ...
    @overload
    def register_out(
        self, fn: F, /, *, device_types: DeviceTypes = None, inplace: Names = (), lib: Lib = None
    ) -> F: ...
    def register_out(
        self, fn: Fn | None = None, /, *, device_types: DeviceTypes = None, inplace: Names = (), lib: Lib = None
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

        def register() -> Registration:  # the rule is made then, and not where the op or `lib` is refused
            return self._rules.out.register(self, self._owner._add, devices, fn, inplace)

        with lock:
            self._register(lib, register)
            self._join_out()
        return fn

    def _join_out(self) -> None:
        """Give the out variant, if there is one, autocast and samples; inductor may call it in the place of the op."""
        variant = self._rules.out_variant
        if variant is not None:
            variant._functional = self
            self._rules.autocast.follow(variant._definition)
            _torch.inductor.call(self._definition.overload)
            if self._samples is not None:
                variant._samples = replace(self._samples, fn=functools.partial(samples_with_out, self))

    # Autocast, vmap, modes, subclasses, sharding and effects ------------------------------------------------------

    def register_autocast(self, device_type: str, cast_inputs: torch.dtype, *, lib: Lib = None) -> None:
        """Under ``torch.autocast(device_type)``, cast floating-point inputs of the op to `cast_inputs`.

        Tensors in lists are cast too.

        Raises:
            DefinitionError: the device type does not support autocast, or `cast_inputs` is not a dtype.
        """
        self._register(lib, self._rules.autocast.register, device_type, cast_inputs)

    @overload
    def register_vmap(self, func: None = None, *, lib: Lib = None) -> Callable[[ResultAndDims], ResultAndDims]: ...
    @overload
    def register_vmap(self, func: Strategy, *, lib: Lib = None) -> Strategy: ...
    @overload
    def register_vmap(self, func: ResultAndDims, *, lib: Lib = None) -> ResultAndDims: ...
    def register_vmap(self, func: Fn | str | None = None, *, lib: Lib = None) -> Any:
        """Register the batching rule: ``func(info, in_dims, *args, **kwargs) -> (result, out_dims)``.

        `in_dims` has one entry for each positional argument, then one per keyword-only tensor: its batch dimension,
        or None if it is not batched. `info` has ``batch_size`` and ``randomness``: see ``torch.library.register_vmap``.

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
        self, torch_dispatch_class: type, fn: None = None, /, *, lib: Lib = None
    ) -> Callable[[TakesModeAndCall], TakesModeAndCall]: ...
    @overload
    def register_torch_dispatch(
        self, torch_dispatch_class: type, fn: TakesModeAndCall, /, *, lib: Lib = None
    ) -> TakesModeAndCall: ...
    def register_torch_dispatch(self, torch_dispatch_class: type, fn: Fn | None = None, /, *, lib: Lib = None) -> Any:
        """Register a function that replaces the ``__torch_dispatch__`` of a mode or tensor subclass for this op.

        It is called as ``fn(mode_or_cls, func, types, args, kwargs)``; see ``torch.library.register_torch_dispatch``.
        Without `fn`, a decorator is returned.
        """
        if fn is None:
            return functools.partial(self.register_torch_dispatch, torch_dispatch_class, lib=lib)
        self._register(lib, self._rules.torch_dispatch.register, torch_dispatch_class, fn)
        return fn

    @overload
    def register_sharding(self, rule: None = None, /, *, lib: Lib = None) -> Callable[[F], F]: ...
    @overload
    def register_sharding(self, rule: F, /, *, lib: Lib = None) -> F: ...
    def register_sharding(self, rule: Fn | None = None, /, *, lib: Lib = None) -> Any:
        """Register the sharding rule: how DTensor splits a call of the op over the processes of a mesh.

        Args:
            rule: takes the arguments of the op, with a ``DTensorSpec`` (``shape``, ``ndim``, ``placements``) in the
                place of each tensor. It returns a list of pairs ``(output placements, input placements)``, each of
                which is right along one dimension of a mesh: the kernel, called with such parts of the inputs, returns
                such parts of the outputs. There is one output for each return, and one input for each tensor; None
                stands for what is no tensor. The inputs may be a dict by argument name instead, where a tensor that is
                not named is replicated; a placement for a list is that of all its tensors. None: return a decorator.
            lib: the registration ends when this library is destroyed.

        Raises:
            CallbackError: `rule` cannot be called with the op's arguments.

        Example:
            >>> @double.register_sharding
            ... def _(x):
            ...     return [([Shard(dim)], [Shard(dim)]) for dim in range(x.ndim)] + [([Partial()], [Partial()])]
        """
        if rule is None:
            return functools.partial(self.register_sharding, lib=lib)
        self._register(lib, self._rules.sharding.register, rule, self._lowering)
        return rule

    def register_effect(self, effect: Any) -> None:
        """Mark the op as having a side effect (a member of torch's ``EffectType``), or as having none (None)."""
        self._register(None, self._rules.effect.register, effect)

    # Compilers ----------------------------------------------------------------------------------------------------

    @overload
    def register_decomposition(self, fn: None = None, /, *, when: When = "inductor", lib: Lib = None) -> Any: ...
    @overload
    def register_decomposition(self, fn: F, /, *, when: When = "inductor", lib: Lib = None) -> F: ...
    def register_decomposition(self, fn: Fn | None = None, /, *, when: When = "inductor", lib: Lib = None) -> Any:
        """Register plain torch code that replaces the op in compiled or exported graphs.

        Args:
            fn: takes the arguments of the op, and computes its results with torch's own ops. It is called with tensors
                without data. If it returns NotImplemented, the op is kept.
            when: where the op is replaced. "inductor": in code compiled by inductor. "export": by
                ``program.run_decompositions()`` of an exported program. A predicate on the op's arguments: in both, for
                calls for which it returns True.
            lib: the registration ends when this library is destroyed.

        Raises:
            UnsupportedError: the op mutates an argument, or does not return only new tensors.
            RegistrationError: `when` has another value.
            CallbackError: `fn` or the predicate cannot be called with the op's arguments.

        Example:
            >>> @double.register_decomposition
            ... def _(x):
            ...     return x + x
            >>> double.register_decomposition(lambda x: x + x, when=lambda x: x.numel() < 1000)
        """
        if fn is None:
            return functools.partial(self.register_decomposition, when=when, lib=lib)
        decomposition = fn
        if self._lowering is not None:
            decomposition = self._lowering.kernel(fn, "decomposition")
            if callable(when):
                raise UnsupportedError(
                    "when= cannot be a predicate for this op",
                    op=self._qualname,
                    argument="when",
                    expected="an op whose parameters are one schema argument each",
                    fix='when="inductor" or when="export"',
                )
        self._register(lib, self._rules.decomposition.register, decomposition, when)
        return fn

    @overload
    def register_lowering(self, fn: None = None, /, *, lib: Lib = None) -> Any: ...
    @overload
    def register_lowering(self, fn: F, /, *, lib: Lib = None) -> F: ...
    def register_lowering(self, fn: Fn | None = None, /, *, lib: Lib = None) -> Any:
        """Register plain torch code from which inductor generates code instead of calling the op.

        Inductor fuses that code with the code around it. Before that step the op is one node of the graph, so its
        gradient formula, the tensors saved for backward, and pattern matching do not change.

        Args:
            fn: takes the arguments of the op, and computes its results with torch's own ops. It is called with tensors
                without data that have the sizes, strides, dtypes and devices of those in the graph. If it returns
                NotImplemented, the generated code calls the kernel.
            lib: the registration ends when this library is destroyed.

        Raises:
            UnsupportedError: the op mutates an argument, or does not return only new tensors.
            CallbackError: `fn` cannot be called with the op's arguments.

        Example:
            >>> @double.register_lowering
            ... def _(x):
            ...     return x + x if x.device.type == "cuda" else NotImplemented
        """
        if fn is None:
            return functools.partial(self.register_lowering, lib=lib)
        lowering = fn if self._lowering is None else self._lowering.kernel(fn, "lowering")
        self._register(lib, self._rules.inductor_lowering.register, lowering)
        return fn

    # Samples ------------------------------------------------------------------------------------------------------

    @overload
    def register_samples(
        self,
        fn: YieldsArguments,
        /,
        *,
        vary: Vary = None,
        fixed: Names = (),
        constraints: Constraints = (),
        gradient: GradientIs = "exact",
    ) -> YieldsArguments: ...
    @overload
    def register_samples(
        self,
        fn: None = None,
        /,
        *,
        vary: Vary = None,
        fixed: Names = (),
        constraints: Constraints = (),
        gradient: GradientIs = "exact",
    ) -> Callable[[YieldsArguments], YieldsArguments]: ...
    def register_samples(
        self,
        fn: Any = None,
        /,
        *,
        vary: Vary = None,
        fixed: Names = (),
        constraints: Constraints = (),
        gradient: GradientIs = "exact",
    ) -> Any:
        """Attach sample inputs: a function that yields ``args`` tuples or ``(args, kwargs)`` pairs.

        `customops.check` derives further inputs from them, and skips those that the kernel rejects. If a kernel accepts
        inputs that the op does not support, restrict the derived inputs with these options.

        Args:
            fn: the function. Without it, a decorator is returned.
            vary: values to try for an argument (``"dim"``), for the dtype of a tensor (``"x.dtype"``) or for its shape
                (``"x.shape"``), instead of the derived ones. Either the values, or a function that takes the value in
                a sample and returns the values to try.
            fixed: what must not be changed: arguments (``"dim"``), kinds of change (``"size"``, ``"layout"``,
                ``"dtype"``, ``"value"``, ``"choice"``, ``"optional"``, ``"list"``, ``"same"``, ``"device"``), or a kind
                of one argument (``"x.layout"``).
            constraints: conditions on the arguments: a function, or several. Each takes arguments by name and returns
                a bool; only inputs for which all return True are used.
            gradient: "chosen" if the op's gradient is meant to differ from the slope of what it computes, as that of a
                straight-through estimator: it is not compared with finite differences.

        Raises:
            ArgumentError: an option names an argument or a kind that does not exist, or has an invalid value.

        Example:
            >>> @double.register_samples
            ... def _():
            ...     yield (torch.randn(3),)
            ...     yield (torch.randn(2, 3, requires_grad=True),), {}

            >>> @scatter.register_samples(
            ...     vary={"dim": lambda dim: range(-2, 2), "x.dtype": [torch.float32, torch.float64]},
            ...     fixed=("index.value", "layout"),
            ...     constraints=lambda x, index: len(x) == len(index),
            ... )
            ... def _():
            ...     yield torch.randn(3, 4), torch.tensor([2, 0, 1]), 0
        """
        if fn is None:
            return functools.partial(
                self.register_samples, vary=vary, fixed=fixed, constraints=constraints, gradient=gradient
            )
        check_choice("gradient", gradient, GradientIs, self._qualname, ArgumentError)
        bind(fn, self._qualname, "samples function")
        if self._lowering is None:
            holds_tensors = {each.name: each.holds_tensors for each in self._definition.schema.arguments}
        else:
            holds_tensors = {each.name: each.node.holds_tensors for each in self._lowering.signature.parameters}
        samples = samples_with(fn, self._qualname, holds_tensors, vary, fixed, constraints, gradient)

        def undo() -> None:
            if self._samples is samples:
                self._samples = before

        with lock:
            before, self._samples = self._samples, samples
            record_in_scope(self._owner, Registration(undo))
            self._join_out()
        return fn
