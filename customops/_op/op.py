"""`CustomOpDef`: a definition and its rules, as one callable object."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast, overload

import torch
from torch.compiler import is_dynamo_compiling

from customops import _torch
from customops._codegen import bypass
from customops._codegen.function import source_of
from customops._describe import Described
from customops._dispatch import fingerprint, names
from customops._dispatch.callbacks import Fn, bind
from customops._dispatch.current_kernel import add_observable, observed_call
from customops._dispatch.devices import DeviceTypes
from customops._dispatch.operator import OperatorHandle, check_library, remove
from customops._dispatch.registrations import Registration, Undo, lock
from customops._dispatch.scopes import Constraints, Owner, Sample, Samples, samples_of, samples_with
from customops._op.callback_types import YieldsArguments
from customops._op.methods import Register
from customops._rules import Rules
from customops._rules.out import samples_with_out
from customops._schema.model import Names, Schema
from customops._schema.parse import has_signature, signature_of
from customops._torch.library import Library, OpOverload
from customops.errors import (
    CustomOpsError,
    UnknownAttributeError,
    UnregisteredError,
    cut,
    did_you_mean,
    entry,
    location_of,
)

__tracebackhide__ = True  # pytest leaves the frames out

P = ParamSpec("P")
R = TypeVar("R")

#: What other interfaces call a method -> what it is here.
_OTHER_NAMES = {
    "impl": "register_kernel",
    "impl_abstract": "register_fake",
    "register_abstract": "register_fake",
    "register_meta": "register_fake",
    "register_backward": "register_autograd",
    "register_forward": "register_kernel",
}


class _SignatureOfOp:
    """What `inspect.signature` asks for, of ops where ``__wrapped__`` tells nothing. It asks the class, too."""

    def __get__(self, op: CustomOpDef[Any, Any] | None, cls: Any = None) -> inspect.Signature | None:
        if op is None:
            return None
        if op._init_fn is not None and has_signature(op._init_fn):
            raise AttributeError("__signature__", name="__signature__", obj=op)
        return signature_of(op.schema)


class CustomOpDef(Described[P], Register[P, R]):
    """An operator: callable, and the object on which its rules are registered.

    `custom_op` makes it; `adopt` makes it for an op that was defined outside customops. A new registration replaces the
    earlier one immediately, also for calls through ``torch.ops``.

    Example:
        >>> @custom_op("mylib::double", mutates_args=())
        ... def double(x: Tensor) -> Tensor:
        ...     return x * 2
        >>> double(torch.ones(2))
        tensor([2., 2.])
    """

    __wrapped__: Callable[P, R]
    _opoverload: OpOverload
    #: ``_complete(*args, **kwargs) -> (args, kwargs)``, with what is computed, of an op with ``computed_args``.
    _complete: Callable[..., Any] | None = None
    #: Of an op whose scope has ended: what is restored in its place, if anything is.
    _instead: tuple[CustomOpDef[Any, Any] | None, ...] = ()

    def __init__(self, owner: Owner, operator: OperatorHandle, rules: Rules | None = None) -> None:
        fn = operator.spec.fn
        self._owner = owner
        self._init_fn = fn
        self._samples: Samples | None = None
        self._rules = rules or Rules()
        self.__name__ = operator.name.name
        if fn is not None:
            functools.update_wrapper(cast(Any, self), cast(Any, fn), updated=())
        self._bind(operator)
        fingerprint.ops.add(self)
        add_observable(self)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if is_dynamo_compiling():
            return self._opoverload(*args, **kwargs)  # type: ignore[no-any-return]
        try:
            return self._entry(*args, **kwargs)  # type: ignore[no-any-return]
        except RuntimeError as error:
            try:
                self._definition.explain(error, args, kwargs)
                raise
            except CustomOpsError as said:
                cut(said)
                raise

    # Traced where a compiled function calls it, but not compiled as a frame of its own after a graph break.
    _torch.dynamo.outside_dynamo(__call__)

    if not TYPE_CHECKING:  # a type checker is to know what an op has

        @entry
        def __getattr__(self, name: str) -> Any:
            if name.startswith("_") or hasattr(type(self), name):  # of the latter, a property raised
                return object.__getattribute__(self, name)
            public = [each for each in dir(type(self)) if not each.startswith("_")]
            raise UnknownAttributeError(
                f"an op has no attribute {name!r}",
                op=self._qualname,
                fix=did_you_mean(_OTHER_NAMES.get(name, name), public) or f"it has {', '.join(public)}",
            )

    def __repr__(self) -> str:
        state = self.schema if self._definition.removed is None else "unregistered"
        return f"<CustomOpDef({self._qualname}) {state}>"

    # What has `__get__` is a routine to `help`, which then shows the signature and the docstring of the function.
    def __get__(self, instance: object, owner: type | None = None) -> CustomOpDef[P, R]:
        return self

    _torch.dynamo.gets_of_themselves.append(__get__)

    __signature__ = _SignatureOfOp()

    # A copy of a module that holds an op holds the same op: there is one in the dispatcher.
    def __copy__(self) -> CustomOpDef[P, R]:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> CustomOpDef[P, R]:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return self._owner.reduce(self._qualname)

    @property
    def schema(self) -> Schema:
        """The op's schema."""
        return self._definition.schema

    @property
    def tags(self) -> list[torch.Tag]:
        """The tags that the op has in the dispatcher."""
        return _torch.schema.of_op(self._definition.tags, self._opoverload)

    @property
    def source(self) -> str:
        """``file:line`` where the op was defined."""
        return self._definition.spec.source

    def _places(self) -> list[str]:
        """Where the op was defined, and where its samples are: a helper may define the ops of a project."""
        return [self.source, *([] if self._samples is None else [location_of(self._samples.fn)])]

    def explain_call(self) -> str:
        """The Python code that runs between the dispatcher and the kernels in each call.

        Example:
            >>> print(double.explain_call())
            # Autograd
            def autograd(_keyset, /, x): ...
        """
        texts: dict[str, str] = {}
        options = self._definition.options
        if options.skip_dispatcher and (problem := bypass.obstacle(self.schema, eager=options.eager)):
            texts["eager=True" if options.eager else "bypass=True"] = f"# Calls take the dispatcher: {problem}.\n"
        if type(self) is not CustomOpDef:
            calls = [vars(cls)["__call__"] for cls in type(self).__mro__ if issubclass(cls, CustomOpDef)]
            texts["A call of the object"] = "\n".join(map(source_of, calls[:-1]))
        for key, kernel in self._definition.newest_kernels().items():
            texts[key] = source_of(kernel.fn)
            if kernel.current_kernel is not None and kernel.current_kernel.direct is not kernel.fn:
                texts[f"{key}, called directly"] = source_of(kernel.current_kernel.direct)
        texts |= self._rules.autograd.sources()
        return "\n".join(f"# {key}\n{text}" for key, text in texts.items() if text)

    def lower(self, /, *args: P.args, **kwargs: P.kwargs) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Convert the arguments of a call of this object to those of ``torch.ops``.

        They differ if the op has computed arguments, or parameters of types that are lowered to the schema's types.

        Example:
            >>> args, kwargs = double.lower(torch.ones(2))
            >>> torch.ops.mylib.double(*args, **kwargs)
        """
        if self._complete is not None:
            args, kwargs = self._complete(*args, **kwargs)
        if self._lowering is None:
            return args, kwargs
        lowered: tuple[tuple[Any, ...], dict[str, Any]] = self._lowering.lower(*args, **kwargs)
        return lowered

    # Samples ----------------------------------------------------------------------------------------------------

    @overload
    def register_samples(
        self,
        fn: YieldsArguments,
        /,
        *,
        vary: Mapping[str, Any] | None = None,
        fixed: str | Iterable[str] = (),
        constraints: Constraints = (),
    ) -> YieldsArguments: ...
    @overload
    def register_samples(
        self,
        fn: None = None,
        /,
        *,
        vary: Mapping[str, Any] | None = None,
        fixed: str | Iterable[str] = (),
        constraints: Constraints = (),
    ) -> Callable[[YieldsArguments], YieldsArguments]: ...
    def register_samples(
        self,
        fn: Any = None,
        /,
        *,
        vary: Mapping[str, Any] | None = None,
        fixed: str | Iterable[str] = (),
        constraints: Constraints = (),
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
            return functools.partial(self.register_samples, vary=vary, fixed=fixed, constraints=constraints)
        bind(fn, self._qualname, "samples function")
        samples = samples_with(fn, self._qualname, self._parameters(), vary, fixed, constraints)
        with lock:
            before, self._samples = self._samples, samples
            self._record(functools.partial(self._unset_samples, samples, before))
            self._join_out()
        return fn

    def _parameters(self) -> dict[str, bool]:
        """The names of the op's parameters; do they hold tensors?"""
        if self._lowering is None:
            return {argument.name: argument.holds_tensors for argument in self.schema.arguments}
        return {each.name: each.node.holds_tensors for each in self._lowering.signature.parameters}

    def _unset_samples(self, samples: Samples, before: Samples | None) -> None:
        if self._samples is samples:
            self._samples = before

    def samples(self) -> Iterator[Sample]:
        """The op's sample inputs. Each call creates new ones."""
        return samples_of(self._samples.fn, self._qualname) if self._samples is not None else iter(())

    # Compilers --------------------------------------------------------------------------------------------------

    def _names_in_graphs(self) -> tuple[str, ...]:
        """The names under which graphs hold the op; none once it is removed."""
        operator = self._definition
        if operator.removed is not None:
            return ()
        variant = operator.mutation_only
        return (self._qualname,) if variant is None else (self._qualname, variant.qualname)

    @property
    def _digest_key(self) -> str:
        return self._qualname

    def _traced(self) -> tuple[Any, ...]:
        """All that compilers may trace through, or decide by."""
        operator = self._definition
        said = (operator.schema.exact_key, [str(tag) for tag in operator.tags], operator.differentiable)
        # What formulas see of an enum or a class is not in the schema.
        return (*said, operator.spec.signature, operator.options.direct_in_graphs, *self._rules.traced())

    # Lifetime ---------------------------------------------------------------------------------------------------

    def unregister(self) -> None:
        """Remove the op from ``torch.ops``, the dispatcher, torch's registry of fake impls and its own registry.

        Its name can be used again. Calling this object, or an OpOverload taken from it, raises UnregisteredError.
        An adopted op stays defined; only what was registered through this object is removed.

        Raises:
            UnregisteredError: the op was unregistered before.
        """
        self._owner.remove(self)

    def _bind(self, operator: OperatorHandle) -> None:
        """Be the object of `operator`: put the rules there and, if it is one of ours, itself into torch's tables."""
        self._definition = operator
        self._opoverload = operator.overload
        self._compute_entry()
        self._rules.bind(operator, self._compute_entry)
        if operator.has_own_rules and operator.library is not None:
            self._torch_view = _torch.library.claim(operator.qualname, self, operator.library)
            _torch.library.on_library_destroyed(
                operator.library, functools.partial(self._owner.library_destroyed, self, operator.library)
            )

    def _compute_entry(self) -> None:
        """Compute what a call of this object runs: the C++ function, unless a rule or an observer comes before it."""
        entry = _torch.library.entry_of(self._opoverload)
        guarded = self._rules.autograd.call_guard(entry) if self._definition.removed is None else entry
        self._entry = observed_call(self, guarded)
        if self._definition.removed is None and names.waits(self._definition.name.namespace):
            self._entry = functools.partial(self._first_call, self._entry)

    look_for_observers = _compute_entry

    def _first_call(self, entry: Fn, /, *args: Any, **kwargs: Any) -> Any:
        """A call before which the entry points of the namespace are loaded. If these make it, they are being loaded."""
        names.use(self._definition.name.namespace)
        if not names.waits(self._definition.name.namespace):
            self._compute_entry()
            entry = self._entry
        return entry(*args, **kwargs)

    def _rebind(self) -> None:
        """Come back after having been removed."""
        self._bind(OperatorHandle.define(self._definition.spec))
        if self._rules.has_out:
            self._rules.out.restore()
            self._join_out()

    def _unbind(self, error: UnregisteredError) -> None:
        """Take everything out of the dispatcher and torch's tables; calls raise `error` if the op was one of ours."""
        if self._definition.library is not None:
            _torch.library.disclaim(self._qualname, self._definition.library)
        self._end(error)

    def _end(self, error: UnregisteredError) -> None:
        """`_unbind`, but for the tables: who destroyed the op's library sees to these."""
        if self._rules.has_out:
            self._rules.out.end(error)
        remove(self._definition, error)
        self._compute_entry()

    def _disconnect(self, error: UnregisteredError) -> None:
        """Calls raise `error`: an adopted op is gone. What was registered for its name stays, as torch keeps it."""
        self._definition.removed = error
        self._definition.recompile()
        _torch.library.disconnect_overload(self._opoverload, error)
        self._compute_entry()

    def _register_out(self, device_types: DeviceTypes, fn: Fn, inplace: Names) -> Registration:
        registration = self._rules.out.register(self, self._owner.add, device_types, fn, inplace)
        self._join_out()
        return registration

    def _join_out(self) -> None:
        """Give the out variant, if there is one, autocast and samples; inductor may call it in the place of the op."""
        variant = self._rules.out_variant
        if variant is not None:
            self._rules.autocast.follow(variant._definition)
            _torch.inductor.plan_with(self._opoverload)
            if self._samples is not None:
                variant._samples = replace(self._samples, fn=functools.partial(samples_with_out, self))

    def _register(self, lib: Library | None, register: Callable[..., Registration], *args: Any) -> None:
        """``register(*args)``; what it did ends with `lib`, or with the open scope of the registry."""
        with lock:
            if self._definition.removed is not None:
                raise self._definition.removed
            ends_with_lib = lib is not None and lib is not self._definition.library
            if ends_with_lib:
                check_library(lib, self._definition.name.namespace, self._qualname)
            registration = register(*args)
            ends_with_scope = self._owner.record(registration)
            if lib is not None and ends_with_lib:
                registration.end_with(lib)
            elif not ends_with_scope:
                registration.keep()

    def _record(self, undo: Undo) -> None:
        self._owner.record(Registration(undo))
