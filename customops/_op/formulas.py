"""The methods of an op that register gradients, and the reference, from which gradients and more follow."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, overload

from typing_extensions import Unpack

from customops._autograd.layout import BackwardOptions, GradientOptions
from customops._codegen.lowering import Lowering
from customops._dispatch.callbacks import Fn, completer
from customops._dispatch.operator import OperatorHandle, check_library
from customops._dispatch.registrations import Registration, lock
from customops._dispatch.scopes import Samples, record_in_scope
from customops._op.callback_types import (
    AnySetupContext,
    F,
    HasSignature,
    Lib,
    P,
    R,
    TakesGradients,
)
from customops._rules import Rules
from customops._rules.reference import ReferenceOptions
from customops.errors import RegistrationError, did_you_mean, entries

__tracebackhide__ = True  # pytest leaves the frames out


@entries
class RegisterFormulas(HasSignature[P, R]):
    """The methods of `CustomOpDef` that register gradients, and the reference, from which more follows."""

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

    # Gradients --------------------------------------------------------------------------------------------------

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
                those of the returns. By default none; all, for an op that returns nothing. (An in-place op returns the
                argument that it mutates.)
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

    # The reference ----------------------------------------------------------------------------------------------

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
        before or after, takes precedence over a rule that the function gives. Registering another function replaces
        this one with all rules that it gave.

        Args:
            fn: takes the arguments of the op, and returns what the op returns. It writes nothing: for an op that
                writes, the new value of each written argument that is not returned follows, in the order of the schema.
                The function of an op with ``Tag.out`` does not take the written arguments. Without `fn`, a decorator
                is returned.
            gives: the rules that the function gives. "fake": the fake impl. "gradients": the formulas of both modes,
                of any order. "vmap": the batching rule. "flops": the number of floating-point operations. "kernel":
                the kernel of devices without one. "inductor" and "export": the decomposition for this compiler. By
                default the first four.
            recompute: True: backward runs `fn` on the saved inputs and differentiates it. False: `fn` runs after the
                kernel in the forward pass, and autograd keeps its intermediate results. For a random op, `fn` draws
                the random numbers of the kernel again.
            nondiff_args, grads_of: as in `register_autograd`. By default, an op that returns nothing has the gradients
                of all written arguments.
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
        return fn

    @property
    def reference(self) -> Fn | None:
        """The plain function that was registered as the reference; None if there is none."""
        found = self._rules.reference
        return None if found is None else found.plain

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
        return fn

    def _flops(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """Return the number of operations of a call of ``torch.ops``, or None if it is unknown."""
        if self._functional is not None:
            written = {argument.name for argument in self._definition.schema.mutated}
            kwargs = {name: value for name, value in kwargs.items() if name not in written}
            return self._functional._flops(args, kwargs)  # type: ignore[no-any-return]
        given = completer(self._definition.schema)(args, kwargs)
        return self._rules.flops.count(self._rules.reference, *given)
