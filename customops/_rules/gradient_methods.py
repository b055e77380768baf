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
from customops.errors import entries

__tracebackhide__ = True  # pytest leaves the frames out


@entries
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
        """Register the gradients of `fn`, which computes the same with plain torch ops, for reverse and forward mode.

        `fn` takes the op's arguments and returns what the op returns. If mutated arguments are differentiated, their
        new values follow (`nondiff_args`, `grads_of`: see `register_autograd`). Backward runs `fn` on the saved inputs
        and differentiates it. With ``recompute=False``, `fn` runs after the kernel in the forward pass instead, and
        autograd keeps its intermediate results. For a random op, `fn` draws the random numbers of the kernel again.

        Raises:
            RegistrationError, CallbackError: as for `register_autograd`.

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
