"""`CustomOpDef`: a definition and its rules, as one callable object. `Ops`: the ops of a registry."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.compiler import is_dynamo_compiling

from customops import _describe, _torch
from customops._codegen import bypass
from customops._codegen.function import source_of
from customops._codegen.lowering import Lowering
from customops._dispatch import fingerprint, names
from customops._dispatch.callbacks import Fn, bind_kernel
from customops._dispatch.current_kernel import add_observable, observed_call, observers
from customops._dispatch.devices import check_devices
from customops._dispatch.names import Name
from customops._dispatch.operator import OperatorHandle, OpSpec, remove
from customops._dispatch.options import Options
from customops._dispatch.preference import prefer
from customops._dispatch.registrations import Registration, Undo, lock
from customops._dispatch.scopes import record_in_scope
from customops._op.callback_types import P, R
from customops._op.register import Register
from customops._op.samples import Sample, samples_of
from customops._places import cut, entry, location_of, name_of
from customops._rules import Rules
from customops._schema.model import Schema
from customops._schema.parse import has_signature, signature_of
from customops._torch.library import Library, OpOverload
from customops.errors import (
    CustomOpsError,
    DefinitionError,
    RegistrationError,
    UnknownAttributeError,
    UnregisteredError,
    did_you_mean,
)

if TYPE_CHECKING:
    from customops._describe.description import Description
    from customops._describe.explanation import Explanation

__tracebackhide__ = True  # pytest leaves the frames out

#: The name of a method in other interfaces -> its name here.
_OTHER_NAMES = {
    "impl": "register_kernel",
    "impl_abstract": "register_fake",
    "register_abstract": "register_fake",
    "register_meta": "register_fake",
    "register_backward": "register_autograd",
    "register_forward": "register_kernel",
}


class _SignatureOfOp:
    """The ``__signature__`` of ops whose ``__wrapped__`` has none. `inspect.signature` asks the class, too."""

    def __get__(self, op: CustomOpDef[Any, Any] | None, cls: Any = None) -> inspect.Signature | None:
        if op is None:
            return None
        if op._init_fn is not None and has_signature(op._init_fn):
            raise AttributeError("__signature__", name="__signature__", obj=op)
        return signature_of(op.schema)


class CustomOpDef(Register[P, R]):
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
    _owner: Ops
    _opoverload: OpOverload
    #: The function that a call of the object runs, outside compilers.
    _entry: Fn
    #: Whether arguments may go to kernels without a conversion: see `_look_for_observers`.
    _takes_objects: bool = False
    #: Used if `_takes_objects`: passes arguments by position that a call gives by keyword.
    _by_position: Callable[[tuple[Any, ...], dict[str, Any]], Any] | None = None
    #: The options of the last `_choose_call`.
    _called_as: Options | None = None
    #: After the scope of the op has ended: the op that replaces it, if any.
    _instead: tuple[CustomOpDef[Any, Any] | None, ...] = ()

    def __init__(self, owner: Ops, name: Name, fn: Fn | None = None) -> None:
        self._owner, self._qualname, self._init_fn = owner, name.qualname, fn
        self.__name__ = name.name
        if fn is not None:
            functools.update_wrapper(cast(Any, self), cast(Any, fn), updated=())

    def _become(self, operator: OperatorHandle, rules: Rules | None = None) -> CustomOpDef[P, R]:
        """Become the object of an op that is defined now."""
        self._samples = None
        self._rules = rules or Rules()
        self._bind(operator)
        fingerprint.ops.add(self)
        add_observable(self)
        return self

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if is_dynamo_compiling():
            return self._opoverload(*args, **kwargs)  # type: ignore[no-any-return]
        if kwargs and self._by_position is not None:
            args, kwargs = self._by_position(args, kwargs)
        try:
            return self._entry(*args, **kwargs)  # type: ignore[no-any-return]
        except RuntimeError as error:
            try:
                self._definition.explain(error, args, kwargs)
                raise
            except CustomOpsError as explained:
                cut(explained)
                raise

    # Traced where a compiled function calls it, but not compiled as a frame of its own after a graph break.
    _torch.dynamo.outside_dynamo(__call__)

    if not TYPE_CHECKING:  # type checkers must know the attributes of an op

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

    # With `__get__`, the object is a routine to `help`, which then shows the function's signature and docstring.
    def __get__(self, instance: object, owner: type | None = None) -> CustomOpDef[P, R]:
        return self

    __signature__ = _SignatureOfOp()

    # A copy of a module that holds an op holds the same op: there is one in the dispatcher.
    def __copy__(self) -> CustomOpDef[P, R]:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> CustomOpDef[P, R]:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return self._owner._reduce(self._qualname)

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
        """Return where the op and its samples were defined: a helper may define the ops of a project."""
        return [self.source] if self._samples is None else [self.source, location_of(self._samples.fn)]

    def describe(self) -> Description:
        """Describe the op: its schema, kernels and rules, and what is missing for compilers, training and vmap.

        Example:
            >>> print(double.describe())
            >>> double.describe().missing
        """
        return _describe.describe(self)

    def explain(self, /, *args: P.args, **kwargs: P.kwargs) -> Explanation:
        """Explain which kernel a call with these arguments would run, in this thread, and why, without running it.

        The `Explanation` has a step for each dispatch key of the call.

        Raises:
            ArgumentError: the arguments do not match the op's schema.
            UnregisteredError: the op was unregistered.

        Example:
            >>> print(double.explain(torch.ones(2)))
            >>> double.explain(torch.ones(2)).kernel.where
        """
        return _describe.explain(self, args, kwargs)

    def explain_call(self) -> str:
        """Return the Python code that runs between the dispatcher and the kernels in each call.

        Example:
            >>> print(double.explain_call())
            # Autograd
            def autograd(_keyset, /, x): ...
        """
        texts: dict[str, str] = {}
        options = self._definition.options
        if options.skip_dispatcher and (problem := bypass.obstacle(self.schema, eager=options.eager)):
            texts["eager=True" if options.eager else "bypass=True"] = f"# Calls take the dispatcher: {problem}.\n"
        if self._calls:
            texts["A call of the object"] = "\n".join(map(source_of, self._calls))
        for key, kernel in self._definition.newest_kernels().items():
            texts[key] = source_of(kernel.fn)
            if kernel.current_kernel is not None and kernel.current_kernel.direct is not kernel.fn:
                texts[f"{key}, called directly"] = source_of(kernel.current_kernel.direct)
        texts |= self._rules.autograd.sources()
        return "\n".join(f"# {key}\n{text}" for key, text in texts.items() if text)

    def lower(self, /, *args: P.args, **kwargs: P.kwargs) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Convert the arguments of a call of this object to those of ``torch.ops``.

        They differ if the op has parameters of types that are lowered to the schema's types.

        Example:
            >>> args, kwargs = double.lower(torch.ones(2))
            >>> torch.ops.mylib.double(*args, **kwargs)
        """
        if self._lowering is None:
            return args, kwargs
        lowered: tuple[tuple[Any, ...], dict[str, Any]] = self._lowering.lower(*args, **kwargs)
        return lowered

    # Parts that were registered ------------------------------------------------------------------------------------

    @property
    def reference(self) -> Fn | None:
        """The plain function that was registered as the reference, or None."""
        found = self._rules.reference
        return None if found is None else found.plain

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

    @entry
    def samples(self) -> list[Sample]:
        """The op's sample inputs, as for `pytest.mark.parametrize`. Each call creates new ones."""
        return [*samples_of(self._samples.fn, self._qualname)] if self._samples is not None else []

    # Kernels of a call --------------------------------------------------------------------------------------------

    @entry
    def prefer(self, *names: str) -> AbstractContextManager[None]:
        """Context manager: prefer kernels of the op, by their names, in this thread, as `customops.prefer` does.

        Raises:
            RegistrationError: the op has no kernel of a name.

        Example:
            >>> with double.prefer("rows", "reference"):
            ...     double(x)
        """
        variant = self._rules.out_variant
        known = self._rules.kernel.names() + (variant._rules.kernel.names() if variant is not None else [])
        for name in names or ("",):
            if name not in known:
                raise RegistrationError(
                    f"the op has no kernel {name!r}" if name else "prefer() takes names of kernels",
                    op=self._qualname,
                    expected=f"some of {', '.join(dict.fromkeys(known))}",
                    fix=did_you_mean(str(name), known),
                )
        return prefer({self._qualname: names})

    @entry
    def set_kernel_enabled(self, device_type: str, enabled: bool = True) -> AbstractContextManager[None]:
        """Context manager that disables (or enables) the kernel of a device type.

        While it is disabled, the op's function runs instead, in all threads. The earlier state is restored on exit.
        """
        return self._rules.kernel.enabled(device_type, enabled)

    # Compilers --------------------------------------------------------------------------------------------------

    def _names_in_graphs(self) -> tuple[str, ...]:
        """Return the names of the op in graphs; none if it was removed."""
        operator = self._definition
        if operator.removed is not None:
            return ()
        variant = operator.mutation_only
        return (self._qualname,) if variant is None else (self._qualname, variant.qualname)

    @property
    def _digest_key(self) -> str:
        return self._qualname

    def _traced(self) -> tuple[Any, ...]:
        """Return all that compilers may trace through, or decide by."""
        operator = self._definition
        return (
            operator.schema.exact_key,
            [str(tag) for tag in operator.tags],
            operator.differentiable,
            operator.spec.signature,  # what formulas see of an enum or a class is not in the schema
            operator.options.direct_in_graphs,
            *self._rules.traced(),
        )

    @property
    def _abstract_fn(self) -> Fn | None:
        """The fake impl: torch reads this attribute to know whether an op has one."""
        return self._rules.fake.fn

    # Lifetime ---------------------------------------------------------------------------------------------------

    def unregister(self) -> None:
        """Remove the op from ``torch.ops``, the dispatcher, torch's registry of fake impls and its own registry.

        Its name can be used again. Calling this object, or an OpOverload taken from it, raises UnregisteredError.
        An adopted op stays defined; only what was registered through this object is removed.

        Raises:
            UnregisteredError: the op was unregistered before.
        """
        with lock:
            if not self._owner._drop(self):
                raise UnregisteredError("the op is no longer registered", op=self._qualname)

    def _bind(self, operator: OperatorHandle) -> None:
        """Become the object of `operator`: bind the rules, and enter an op of ours into torch's tables."""
        self._definition, self._opoverload = operator, operator.overload
        if self._called_as != operator.options:  # else it comes back, and has its call
            self._choose_call()
        may_take = operator.has_own_rules and _torch.library.dispatch_objects is not None
        self._takes_objects = may_take and operator.schema.is_of_tensors
        self._look_for_observers()
        self._rules.bind(operator, self._compute_entry)
        if operator.has_own_rules:
            self._count_flops()
        if operator.has_own_rules and operator.library is not None:
            self._torch_view = _torch.library.claim(operator.qualname, self, operator.library)
            _torch.library.on_library_destroyed(
                operator.library, functools.partial(self._owner._library_destroyed, self, operator.library)
            )

    def _choose_call(self) -> None:
        """Generate the ``__call__`` of the object, if it does more than that of `CustomOpDef`."""
        spec, options, calls = self._definition.spec, self._definition.options, []
        lowering = None
        if spec.fn is not None:
            if options.skip_dispatcher and bypass.obstacle(spec.schema, eager=options.eager) is None:
                call = bypass.call(spec, options.check, eager=options.eager)
                calls.append(_torch.dynamo.outside_dynamo(call))
            if spec.signature is not None:
                lowering = Lowering(spec.signature, spec.schema, spec.qualname)
                calls.insert(0, lowering.call(*calls))
        self._calls, self._lowering, self._called_as = calls, lowering, options
        if calls:
            for each in calls:
                _torch.dynamo.hide_file(each.__code__.co_filename)
            cls: type[Any] = type(CustomOpDef.__name__, (CustomOpDef,), {"__call__": calls[0]})
            self.__class__ = cast(Any, cls)

    def _compute_entry(self) -> None:
        """Compute what a call of this object runs: the C++ function, unless a rule or an observer comes before it."""
        entry = _torch.library.entry_of(self._opoverload)
        guarded = self._rules.autograd.call_guard(entry) if self._definition.removed is None else entry
        self._entry = observed_call(self, guarded)

    def _look_for_observers(self) -> None:
        """Skip the conversion of arguments unless observers or unchecked results need it: see `dispatch_objects`."""
        dispatch_objects = _torch.library.dispatch_objects
        if self._takes_objects and dispatch_objects is not None and self._definition.removed is None:
            enabled = not observers and self._definition.options.check == "always"
            dispatch_objects(self._opoverload, enabled)
            order = [argument.name for argument in self._definition.schema.positional]
            self._by_position = _torch.library.by_position(order) if enabled else None
        self._compute_entry()

    def _end(self, error: UnregisteredError) -> None:
        """Take everything out of the dispatcher; calls raise `error` if the op was one of ours."""
        if self._rules.has_out:
            self._rules.out.end(error)
        remove(self._definition, error)
        self._compute_entry()


# The ops of a registry ------------------------------------------------------------------------------------------------

#: An op of any parameters and results.
AnyOp = CustomOpDef[Any, Any]

_registries: weakref.WeakSet[Ops] = weakref.WeakSet()


class Ops:
    """The ops of a registry, and their lifetimes: the part of `Registry` that an op knows."""

    def __init__(self) -> None:
        self._ops: dict[str, AnyOp] = {}
        self._adopted: dict[str, AnyOp] = {}
        _registries.add(self)

    def _add(self, spec: OpSpec, rules: Rules | None = None) -> AnyOp:
        """Define an op whose name is free."""
        if (stale := self._adopted.get(spec.qualname)) is not None:  # of an op of others that had the name
            self._drop(stale, replaced(spec.qualname, spec.place, spec.fn))
        gone = _torch.library.torch_library_of(spec.qualname)
        if gone is not None and not _torch.library.library_alive(gone):
            _torch.library.destroy_library(gone)  # whoever destroyed it: see there what it would do to the new op
        op = self._define_op(spec, rules)
        self._enter(op, functools.partial(end, op))
        return op

    def _define_op(self, spec: OpSpec, rules: Rules | None = None) -> AnyOp:
        """Define an op, with `rules` that are empty. If that fails, the dispatcher does not change."""
        check_spec(spec)
        operator = OperatorHandle.define(spec)
        try:
            return CustomOpDef(self, spec.name, spec.fn)._become(operator, rules)
        except BaseException:
            remove(operator, UnregisteredError("the definition of the op failed", op=spec.qualname))
            if operator.made_namespace:
                _torch.library.forget(spec.name.namespace)
            raise

    def _enter(self, op: AnyOp, undo: Undo) -> None:
        """Enter a defined op; `undo` removes it at the end of a scope."""
        self._ops[op._qualname] = op
        record_in_scope(self, Registration(undo))

    def _drop(self, op: AnyOp, error: UnregisteredError | None = None) -> bool:
        """Remove an op, whose calls then raise `error`. Return whether the op was in this registry."""
        for table in (self._ops, self._adopted):
            if table.get(op._qualname) is op:
                del table[op._qualname]
                error = error or UnregisteredError("the op was unregistered", op=op._qualname, fix=AGAIN)
                if op._definition.library is not None:
                    _torch.library.disclaim(op._qualname, op._definition.library)
                op._end(error)
                return True
        return False

    def _restore(self, op: AnyOp) -> None:
        """Put a removed op back, with the rules it had."""
        op._bind(op._definition.restored())
        if op._rules.has_out:
            op._rules.out.restore()
            op._join_out()
        self._ops[op._qualname] = op

    def _library_destroyed(self, op: AnyOp, library: Library) -> None:
        """Remove an op whose library was destroyed outside customops, as torch.library.custom_op does."""
        if _torch.library.library_alive(library):
            return  # the interpreter exits: nobody will call the op any more
        if op._definition.library is library and self._ops.get(op._qualname) is op:
            del self._ops[op._qualname]
            op._end(destroyed(op._qualname))

    def _reduce(self, qualname: str) -> tuple[Any, ...]:
        """Return how an op is pickled."""
        raise NotImplementedError


def check_spec(spec: OpSpec) -> None:
    """Raise all errors that can be found without changing anything."""
    assert spec.kernel is not None
    bind_kernel(spec.kernel, spec.schema, spec.qualname, "kernel")
    if spec.schema.keyword_only:
        _ = spec.schema.call  # raises for a keyword of Python
    if spec.device_types is not None:
        check_devices(spec.device_types, spec.schema, spec.qualname)
    if spec.mutation_only is None:
        return
    name = spec.mutation_only.name
    taken = _torch.library.find_overload(name.packet, name.overload)
    old = _torch.library.torch_op_of(spec.qualname)
    variant = None
    if isinstance(old, CustomOpDef):
        variant = old._definition.mutation_only
    if taken is not None and (variant is None or variant.overload is not taken):
        raise DefinitionError(
            f"an op {name} exists: the variant of this one that returns nothing has that name",
            op=spec.qualname,
            fix="rename one of them",
        )


def conflict(qualname: str, reason: str, fix: str, at: str | None, **fields: str) -> DefinitionError:
    """Return the error for an op that exists; `at` is where the other one is defined."""
    problem = f"an op of this name exists, defined at {place(qualname)}: {reason}"
    return DefinitionError(problem, op=qualname, where=at, fix=fix, **fields)


def place(qualname: str) -> str:
    """Return ``file:line`` where an op was defined."""
    found = (each._ops.get(qualname) for each in list(_registries))
    known = next((op for op in found if op is not None), None)
    return _torch.schema.defined_at(qualname) if known is None else known.source


# The ends of ops ------------------------------------------------------------------------------------------------------

AGAIN = "define it again, or use the new object"


def replaced(qualname: str, place: str, fn: Any = None) -> UnregisteredError:
    """Return the error for calls of an op that a definition at this place, of this function, replaced."""
    by = "" if fn is None else f" ({name_of(fn)})"
    return UnregisteredError(f"the op was replaced by the definition at {place}{by}", op=qualname, fix=AGAIN)


def destroyed(qualname: str) -> UnregisteredError:
    """Return the error for calls of an op whose library others destroyed."""
    problem = "the library of the op was destroyed (torch.library.custom_op redefining its name does that)"
    return UnregisteredError(problem, op=qualname)


def end(op: AnyOp, old: AnyOp | None = None) -> None:
    """Remove an op whose scope or library has ended, and restore `old`, which it replaced.

    If another op has the name, `old` waits until that op ends.
    """
    op._instead = (old,)
    op._owner._drop(op)
    while old is not None and old._instead:
        (old,) = old._instead
    if old is not None and not names.exists(Name.parse(old._qualname)):
        old._owner._restore(old)
