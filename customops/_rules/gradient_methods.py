"""The methods of an op that register how it is differentiated."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, overload

from torch import Tensor
from typing_extensions import Unpack

from customops._autograd.options import BackwardOptions, FromOptions, GradientOptions, ResultOptions
from customops._autograd.recompute import formulas
from customops._compat.libraries import Library
from customops._dispatch.callbacks import Fn
from customops._dispatch.operator import OperatorHandle
from customops._dispatch.registrations import Registration, lock
from customops._lowering.lowering import Lowering
from customops._rules import Rules
from customops._rules.fits import (
    AnySetupContext,
    Called,
    F,
    Items,
    MayTakeNothing,
    OpFor,
    P,
    Q,
    R,
    ReturnsItems,
    ReturnsTensor,
    TakesGradients,
)
from customops._schema.differentiability import Names

__tracebackhide__ = True  # pytest leaves the frames out


class RegisterGradients(Called[P, R]):
    """``register_autograd``, ``register_jvp`` and ``register_autograd_from`` of `CustomOpDef`."""

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

    @overload
    def register_autograd(
        self,
        backward: None = None,
        /,
        *,
        setup_context: AnySetupContext[R] | None = None,
        lib: Library | None = None,
        **options: Unpack[BackwardOptions],
    ) -> Callable[[TakesGradients], TakesGradients]: ...
    @overload
    def register_autograd(
        self,
        backward: TakesGradients,
        /,
        *,
        setup_context: AnySetupContext[R] | None = None,
        lib: Library | None = None,
        **options: Unpack[BackwardOptions],
    ) -> TakesGradients: ...
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
            backward: ``backward(ctx, *grads)``, with one gradient for each return, a list for a list of tensors. It
                returns one gradient for each positional argument, then for each keyword-only tensor: a Tensor like the
                argument, None, or a list of these; or a dict of these by argument name. Without it, a decorator is
                returned.
            setup_context: ``setup_context(ctx, inputs, output)`` saves what backward needs, tensors with
                ``ctx.save_for_backward``. For an op with keyword-only arguments it is
                ``setup_context(ctx, inputs, keyword_only_inputs, output)``. Defaults are filled in.
            lib: the registration ends when this library is destroyed.
            nondiff_args: names of tensors that have no gradient, even if they require grad.
            grads_of: names of written arguments whose new values have gradients: backward gets these after those of
                the returns. The default is none; for an op that returns nothing, all. (An in-place op returns the
                argument that it writes.)
            originals: names of written arguments of which setup_context gets copies from before the write.
            materialize_grads: False gives backward None, instead of zeros, for returns that were not used.
            once_differentiable: backward runs without recording, and a second derivative raises.

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

    @overload
    def register_jvp(
        self,
        jvp: None = None,
        /,
        *,
        setup_context: AnySetupContext[R] | None = None,
        lib: Library | None = None,
        **options: Unpack[GradientOptions],
    ) -> Callable[[TakesGradients], TakesGradients]: ...
    @overload
    def register_jvp(
        self,
        jvp: TakesGradients,
        /,
        *,
        setup_context: AnySetupContext[R] | None = None,
        lib: Library | None = None,
        **options: Unpack[GradientOptions],
    ) -> TakesGradients: ...
    def register_jvp(
        self, jvp: Fn | None = None, /, *, setup_context: Fn | None = None, lib: Library | None = None,
        **options: Unpack[GradientOptions],
    ) -> Any:  # fmt: skip
        """Register the rule for forward mode: ``torch.func.jvp``, ``jacfwd``, ``linearize``, dual numbers.

        Args:
            jvp: ``jvp(ctx, *tangents)``, with one tangent for each input in the order of `register_autograd`, a list
                for a list of tensors, None for an input without one. It returns one for each return, as
                ``autograd.Function.jvp`` does.
            setup_context: as in `register_autograd`; it saves tensors with ``ctx.save_for_forward``. If you register
                both, both are called.
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

    @overload
    def register_autograd_from(
        self: OpFor[Tensor], fn: ReturnsTensor, /, *, lib: Library | None = None,
        **options: Unpack[ResultOptions],
    ) -> ReturnsTensor: ...  # fmt: skip
    @overload
    def register_autograd_from(
        self: OpFor[Items], fn: ReturnsItems, /, *, lib: Library | None = None,
        **options: Unpack[ResultOptions],
    ) -> ReturnsItems: ...  # fmt: skip
    @overload
    def register_autograd_from(
        self: OpFor[None] | MayTakeNothing, fn: F, /, *, lib: Library | None = None,
        **options: Unpack[ResultOptions],
    ) -> F: ...  # fmt: skip
    @overload
    def register_autograd_from(
        self, fn: Callable[Concatenate[Any, Q], R], /, *, lib: Library | None = None, **options: Unpack[ResultOptions]
    ) -> Callable[Concatenate[Any, Q], R]: ...
    @overload
    def register_autograd_from(
        self, fn: F, /, *, grads_of: Names | None, lib: Library | None = None, **options: Unpack[ResultOptions]
    ) -> F: ...
    def register_autograd_from(self, fn: Fn, /, *, lib: Library | None = None, **options: Unpack[FromOptions]) -> Any:
        """Register the gradients of `fn`, which computes the same in plain torch operations, for both modes.

        `fn` takes the op's arguments and returns what the op returns, then the new values of written arguments if
        these are differentiated (`nondiff_args`, `grads_of`: see `register_autograd`). Backward runs `fn` on the saved
        inputs, and differentiates it. With ``recompute=False`` it runs after the kernel instead, and autograd keeps its
        intermediate results.

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
