"""The methods of an op that register gradients, and the reference, from which gradients and more follow."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, overload

from torch import Tensor
from typing_extensions import Unpack

from customops._autograd.layout import BackwardOptions, FromOptions, GradientOptions, ResultOptions
from customops._autograd.recompute import RecomputedFormula
from customops._codegen.lowering import Lowering
from customops._dispatch.callbacks import Fn, completer
from customops._dispatch.operator import OperatorHandle, check_library
from customops._dispatch.registrations import Registration, lock
from customops._dispatch.scopes import Samples, record_in_scope
from customops._op.callback_types import (
    AnySetupContext,
    F,
    HasSignature,
    Items,
    Lib,
    MayTakeNothing,
    OpFor,
    P,
    Q,
    R,
    ReturnsItems,
    ReturnsTensor,
    TakesGradients,
)
from customops._rules import Rules
from customops._rules.cost import Cost, bytes_of
from customops._rules.reference import ReferenceOptions
from customops._rules.shapes import DTypes, Shapes
from customops._schema.model import Names
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

    @overload
    def register_autograd_from(
        self: OpFor[Tensor], fn: ReturnsTensor, /, *, lib: Lib = None, **options: Unpack[ResultOptions]
    ) -> ReturnsTensor: ...
    @overload
    def register_autograd_from(
        self: OpFor[Items], fn: ReturnsItems, /, *, lib: Lib = None, **options: Unpack[ResultOptions]
    ) -> ReturnsItems: ...
    @overload
    def register_autograd_from(
        self: OpFor[None] | MayTakeNothing, fn: F, /, *, lib: Lib = None, **options: Unpack[ResultOptions]
    ) -> F: ...
    @overload
    def register_autograd_from(
        self, fn: Callable[Concatenate[Any, Q], R], /, *, lib: Lib = None, **options: Unpack[ResultOptions]
    ) -> Callable[Concatenate[Any, Q], R]: ...
    @overload
    def register_autograd_from(
        self, fn: F, /, *, grads_of: Names | None, lib: Lib = None, **options: Unpack[ResultOptions]
    ) -> F: ...
    def register_autograd_from(self, fn: Fn, /, *, lib: Lib = None, **options: Unpack[FromOptions]) -> Any:
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
        found = RecomputedFormula(function, self._definition, recompute=recompute)
        self._register(lib, self._rules.autograd.register_from, found, options)
        return fn

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
        """Register a plain PyTorch function that computes what the op does, and what follows from it.

        These follow: the fake impl, the gradients in both modes and of any order, the batching rule of vmap, the
        sharding of DTensors, and the count of floating-point operations. `customops.check` compares the kernels and
        gradients with it. Each can be registered by hand, before or after, and then counts instead.

        Args:
            fn: takes the arguments of the op, and returns what the op returns. It writes nothing: for an op that
                writes, the new value of each written argument that is not returned follows, in the order of the schema.
                That of an op with ``Tag.out`` does not take what is written. Without `fn`, a decorator is returned.
            like: the strides of the results, where the kernel has others than the function: the name of a tensor
                argument that they are like, or a memory format; a tuple of these for several returns.
            gradients: if False, no gradients follow.
            recompute, nondiff_args, grads_of: options of the gradients, as in `register_autograd_from`.
            vmap: how the op is batched: "reference" batches the function; "sequential", "expand_dims" and
                "broadcast_all" call the op, as in `register_vmap`.
            autocast: under autocast, cast the inputs and results to the dtypes that they have in the function.
            decompose: which compilers take the function in the place of the op, as ``when=`` of
                `register_decomposition`; a tuple for both. None: none.
            on_other_devices: on devices without a kernel, run the function.
            lib: the registration ends when this library is destroyed.

        Raises:
            CallbackError: `fn` cannot be called with the op's arguments.
            RegistrationError, DefinitionError: an option has an invalid value.
            UnsupportedError: `decompose` or `vmap` is not possible for the op.

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

    def register_shapes(
        self,
        line: str | Fn,
        /,
        *,
        parallel: str = "",
        reduces: str = "",
        flops: str | None = None,
        dtype: DTypes | None = None,
        lib: Lib = None,
    ) -> None:
        """Register what the shapes of the tensors are, and what follows from it.

        Calls are validated: an error names the dimension and the tensors that disagree. These follow: the fake impl,
        whose results are contiguous; the vmap rule, if all results begin with ``*name`` or ``...``, which is parallel;
        the sharding of DTensors along `parallel` and `reduces`.

        Args:
            line: as ``"*batch n k, k m -> *batch n m"``: an entry for each tensor argument and each returned tensor.
                A dimension is a name, a number, ``_`` (any), or an expression of names and integer arguments with
                ``+ - * //``; ``?k`` is a size of a result that depends on data. ``*batch`` or ``...`` is any number of
                dimensions. The entry of a list is for each of its tensors; ``*n`` in it is a size that they need not
                share, and in a result the sum of these. Or a function of the op's arguments that returns a line.
            parallel: the dimensions of all results along which the op computes independently, as ``"*batch n m"``.
            reduces: the dimensions over which it sums, as ``"k"``. They are in no result.
            flops: the number of floating-point operations of a call, as ``"2*batch*n*k*m"``.
            dtype: the dtype of the results, or the name of a tensor that has it; a tuple for several. None: that
                of the first tensor.
            lib: the registration ends when this library is destroyed.

        Raises:
            DefinitionError: the line does not fit the schema, or leaves the size of a result open; an option names what
                the line does not, or a dimension that cannot be split; the op returns other things than new tensors.

        Example:
            >>> matmul.register_shapes("*batch n k, k m -> *batch n m", flops="2*batch*n*k*m")
        """
        shapes = Shapes(line, self._definition, parallel, reduces, flops, dtype)
        self._register(lib, self._rules.register_shapes, shapes)

    def register_flops(self, fn: Fn | None = None, /, *, lib: Lib = None) -> Any:
        """Register the number of floating-point operations of a call.

        `torch.utils.flop_counter` and `cost` use it. Without it, they count those of the reference.

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

    def cost(self, /, *args: P.args, **kwargs: P.kwargs) -> Cost:
        """What a call with these arguments costs: ``Cost(flops, bytes)``. Nothing is computed.

        The arguments may be tensors without data. `flops` is None, and logged once, if nothing tells it.

        Raises:
            MissingFakeError: the op has no fake impl, which tells the sizes of the results.

        Example:
            >>> matmul.cost(torch.ones(2, 3), torch.ones(3, 4))
            Cost(flops=48, bytes=104)
        """
        given = completer(self._definition.schema)(*self.lower(*args, **kwargs))
        return Cost(self._flops(*given), bytes_of(self._definition, *given))

    def _flops(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """The operations of a call of ``torch.ops``; None if nothing tells them."""
        if self._functional is not None:
            written = {argument.name for argument in self._definition.schema.mutated}
            kwargs = {name: value for name, value in kwargs.items() if name not in written}
            return self._functional._flops(args, kwargs)  # type: ignore[no-any-return]
        given = completer(self._definition.schema)(args, kwargs)
        return self._rules.flops.count(self._rules.reference, self._rules.shapes, *given)
