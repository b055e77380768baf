"""`CustomOpDef`: a definition and its rules, as one callable object. `Ops`: the ops of a registry.

`DeclaredOp` is a lazy op until its first use, `Undefined` what stands for an op whose option ``when`` is False.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch.compiler import is_dynamo_compiling

from customops import _torch
from customops._codegen import bypass, computed
from customops._codegen.function import generate_again, source_of
from customops._codegen.lowering import Lowering
from customops._describe import Described
from customops._dispatch import fingerprint, names
from customops._dispatch.callbacks import Fn, bind_kernel
from customops._dispatch.current_kernel import add_observable, observed_call, observers, remove_observable
from customops._dispatch.names import Name, check_devices, device_list
from customops._dispatch.operator import OperatorHandle, OpSpec, Options, remove
from customops._dispatch.registrations import Registration, Undo, lock, nothing
from customops._dispatch.results import of_environment
from customops._dispatch.scopes import in_scope, outside_scopes, record_in_scope
from customops._op.register import REGISTRATIONS, Register
from customops._rules import Rules, compilers
from customops._rules.fake import Like
from customops._schema.model import Schema
from customops._schema.parse import has_signature, signature_of
from customops._torch.library import Library, OpOverload
from customops.errors import (
    CustomOpsError,
    DefinitionError,
    RegistrationError,
    UndefinedError,
    UnknownAttributeError,
    UnregisteredError,
    asked_for_at,
    brief,
    cut,
    did_you_mean,
    entry,
    location_of,
    name_of,
    user_source,
    where,
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
    _owner: Ops
    _opoverload: OpOverload
    #: What a call of the object runs, outside compilers.
    _entry: Fn
    #: ``_complete(*args, **kwargs) -> (args, kwargs)``, with what is computed, of an op with ``computed_args``.
    _complete: Fn | None
    #: May arguments go to kernels without a conversion? See `look_for_observers`.
    _takes_objects: bool = False
    #: Then: what passes by position what was passed by keyword.
    _by_position: Callable[[tuple[Any, ...], dict[str, Any]], Any] | None = None
    #: What `_choose_call` was last done for.
    _called_as: Options | None = None
    #: Of a lazy op that is not defined yet, or is being defined. It has neither `_definition` nor `_rules` then, and
    #: what asks for them defines it.
    _declaration: Declaration | None = None
    #: Of an op whose scope has ended: what is restored in its place, if anything is.
    _instead: tuple[CustomOpDef[Any, Any] | None, ...] = ()

    def __init__(self, owner: Ops, name: Name, fn: Fn | None = None) -> None:
        self._owner, self._qualname, self._init_fn = owner, name.qualname, fn
        self.__name__ = name.name
        if fn is not None:
            functools.update_wrapper(cast(Any, self), cast(Any, fn), updated=())

    def _become(self, operator: OperatorHandle, rules: Rules | None = None) -> CustomOpDef[P, R]:
        """Be the object of an op that is defined now."""
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

    if not TYPE_CHECKING:  # a type checker is to know what an op has

        @entry
        def __getattr__(self, name: str) -> Any:
            if self._declaration is not None and not self._defined_here():
                # No attribute of an op is called like this: notebooks, copy and others ask whether there is one.
                if name.startswith("__") or name.endswith("_"):
                    return object.__getattribute__(self, name)
                self._define()
                return getattr(self, name)
            if name.startswith("_") or hasattr(type(self), name):  # of the latter, a property raised
                return object.__getattribute__(self, name)
            public = [each for each in dir(type(self)) if not each.startswith("_")]
            raise UnknownAttributeError(
                f"an op has no attribute {name!r}",
                op=self._qualname,
                fix=did_you_mean(_OTHER_NAMES.get(name, name), public) or f"it has {', '.join(public)}",
            )

    def __repr__(self) -> str:
        if self._declaration is not None:
            return f"<CustomOpDef({self._qualname}) not defined yet>"
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
        return self._definition.spec.source if self._declaration is None else self._declaration.source

    def _places(self) -> list[str]:
        """Where the op was defined, and where its samples are: a helper may define the ops of a project."""
        if self._declaration is not None:
            functions = [each.args[0] for each in self._declaration.remembered if each.method == "register_samples"]
        else:
            functions = [] if self._samples is None else [self._samples.fn]
        return [self.source, *map(location_of, functions)]

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
        return (
            operator.schema.exact_key,
            [str(tag) for tag in operator.tags],
            operator.differentiable,
            operator.spec.signature,  # what formulas see of an enum or a class is not in the schema
            operator.options.direct_in_graphs,
            *self._rules.traced(),
        )

    # Lifetime ---------------------------------------------------------------------------------------------------

    def unregister(self) -> None:
        """Remove the op from ``torch.ops``, the dispatcher, torch's registry of fake impls and its own registry.

        Its name can be used again. Calling this object, or an OpOverload taken from it, raises UnregisteredError.
        An adopted op stays defined; only what was registered through this object is removed.

        Raises:
            UnregisteredError: the op was unregistered before.
        """
        with lock:
            if not self._owner.drop(self):
                raise UnregisteredError("the op is no longer registered", op=self._qualname)

    def _bind(self, operator: OperatorHandle) -> None:
        """Be the object of `operator`: put the rules there and, if it is one of ours, itself into torch's tables."""
        self._definition, self._opoverload = operator, operator.overload
        if self._called_as != operator.options:  # else it comes back, and has its call
            self._choose_call()
        may_take = operator.has_own_rules and _torch.library.CAN_DISPATCH_OBJECTS
        self._takes_objects = may_take and operator.schema.is_of_tensors
        self.look_for_observers()
        self._rules.bind(operator, self._compute_entry)
        if operator.has_own_rules and operator.library is not None:
            self._torch_view = _torch.library.claim(operator.qualname, self, operator.library)
            _torch.library.on_library_destroyed(
                operator.library, functools.partial(self._owner.library_destroyed, self, operator.library)
            )

    def _choose_call(self) -> None:
        """Generate the ``__call__`` of the object, where it has to do more than that of `CustomOpDef`."""
        spec, options, calls = self._definition.spec, self._definition.options, []
        lowering, completed = None, None
        if spec.fn is not None:
            if options.skip_dispatcher and bypass.obstacle(spec.schema, eager=options.eager) is None:
                call = bypass.call(spec, options.check, eager=options.eager)
                calls.append(_torch.dynamo.outside_dynamo(call))
            parameters = spec.schema
            if spec.signature is not None:
                lowering = Lowering(spec.signature, spec.schema, spec.qualname)
                parameters = lowering.parameters
                calls.insert(0, lowering.call(*calls))
            if spec.computed_args:
                inner = calls[0] if calls else CustomOpDef.__call__
                call, complete = computed.functions(parameters, spec.computed_args, spec.qualname, inner)
                completed = functools.partial(complete, None)
                calls.insert(0, _torch.dynamo.outside_dynamo(call))
        self._calls, self._lowering, self._complete, self._called_as = calls, lowering, completed, options
        if self._declaration is None:
            self._take_class()

    def _take_class(self) -> None:
        """Be of the class that has the ``__call__``. A lazy op takes it last: until then, other threads wait."""
        cls: type[CustomOpDef[Any, Any]] = CustomOpDef
        if self._calls:
            _torch.dynamo.hidden_files.update(call.__code__.co_filename for call in self._calls)
            members, spec = {"__call__": self._calls[0]}, self._definition.spec
            if spec.fn is not None and spec.computed_args and has_signature(spec.fn):
                members["__signature__"] = computed.signature(spec.fn, spec.computed_args)
            cls = type(CustomOpDef.__name__, (CustomOpDef,), members)
        self.__class__ = cast(Any, cls)

    def _set_options(self, options: Options) -> None:
        """Be called as `options` say, from now on."""
        operator = self._definition
        before, operator.options = operator.options, options
        if before.check != options.check:
            for kernel in (each for kernels in operator._kernels.values() for each in kernels if not each.raw):
                generate_again(kernel.fn, when=options.check)
                if kernel.current_kernel is not None:
                    kernel.current_kernel.unchecked = True
                    if kernel.current_kernel.direct is not None:
                        generate_again(kernel.current_kernel.direct, when=options.check)
            self._rules.check_changed()
            self.look_for_observers()
        self._choose_call()
        if before.direct_in_graphs != options.direct_in_graphs:
            compilers.bind_direct_calls(operator)
        operator.recompile()

    def _compute_entry(self) -> None:
        """Compute what a call of this object runs: the C++ function, unless a rule or an observer comes before it."""
        if self._declaration is not None:
            return
        operator = self._definition
        entry = _torch.library.entry_of(self._opoverload)
        guarded = self._rules.autograd.call_guard(entry) if operator.removed is None else entry
        self._entry = observed_call(self, guarded)
        if operator.removed is None and names.waits(operator.name.namespace):
            self._entry = functools.partial(self._first_call, self._entry)

    def look_for_observers(self) -> None:
        """See `dispatch_objects` for who needs the conversion: profilers, and results that we do not check."""
        if self._takes_objects and self._definition.removed is None:
            enabled = not observers and self._definition.options.check == "always"
            _torch.library.dispatch_objects(self._opoverload, enabled)
            order = [argument.name for argument in self._definition.schema.positional]
            self._by_position = _torch.library.by_position(order) if enabled else None
        self._compute_entry()

    def _first_call(self, entry: Fn, /, *args: Any, **kwargs: Any) -> Any:
        """A call before which the entry points of the namespace are loaded. If these make it, they are being loaded."""
        names.use(self._definition.name.namespace)
        if not names.waits(self._definition.name.namespace):
            self._compute_entry()
            entry = self._entry
        return entry(*args, **kwargs)

    def _end(self, error: UnregisteredError) -> None:
        """Take everything out of the dispatcher; calls raise `error` if the op was one of ours."""
        if self._rules.has_out:
            self._rules.out.end(error)
        remove(self._definition, error)
        self._compute_entry()

    # Lazy ops: any use defines them -----------------------------------------------------------------------------

    def _declare(self) -> None:
        assert self._declaration is not None
        self._declaration.removed = None
        self._torch_view = _torch.library.claim(self._qualname, self)
        names.declare(self._qualname, self)

    def _defined_here(self) -> bool:
        """Is this thread defining the op?"""
        return self._declaration is not None and self._declaration.definer == threading.get_ident()

    def _taken(self) -> None:
        """torch.library.custom_op is defining an op of the name."""
        self._owner.drop(self, UnregisteredError("torch.library.custom_op redefined the op", op=self._qualname))

    def _define(self) -> None:
        """Be defined, with all that was registered. Where that fails, everything is as before."""
        with lock:
            declaration = self._declaration
            if declaration is None or self._defined_here():
                return
            if declaration.removed is not None:
                raise declaration.removed
            before = dict(vars(self))
            declaration.definer = threading.get_ident()
            try:
                with outside_scopes(), _torch.tensors.without_modes():
                    with asked_for_at(declaration.source):
                        spec, name = declaration.make_spec(), declaration.name
                        if _torch.library.is_defined(name.packet, name.overload):
                            reason = "it was defined after this one was declared"
                            raise conflict(spec.qualname, reason, "choose another name", where(self.__wrapped__))
                        self._owner.add(spec, op=self)
                    try:
                        for each in declaration.remembered:
                            with asked_for_at(each.source):
                                getattr(CustomOpDef, each.method)(self, *each.args, **each.kwargs)
                    except BaseException:
                        self._owner.drop(self, UnregisteredError("the definition of the op failed", op=self._qualname))
                        raise
            except BaseException:
                fingerprint.ops.discard(self)
                remove_observable(self)
                vars(self).update(before)
                for added in vars(self).keys() - before.keys():
                    del vars(self)[added]
                self._torch_view = _torch.library.claim(self._qualname, self)
                self._owner.enter(self, nothing)
                raise
            finally:
                declaration.definer = None
            names.retract(self._qualname)
            self._declaration = None
            self._compute_entry()
            self._take_class()
            self._owner.apply_settings(self)
            declaration.call = type(self).__call__
        names.look_up(self._definition.name.packet, is_use=False)  # the packet is known now, and not asked for again


class _Remembered(NamedTuple):
    """A registration on an op that is not defined yet."""

    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    source: str


class Declaration:
    """What a lazy op knows before it is defined."""

    def __init__(self, name: Name, make_spec: Callable[[], OpSpec]) -> None:
        self.name, self.make_spec, self.source = name, make_spec, user_source()
        self.remembered: list[_Remembered] = []
        #: The thread that is defining the op.
        self.definer: int | None = None
        #: What to raise for an op that was removed before it was defined.
        self.removed: UnregisteredError | None = None
        #: The ``__call__`` of the op, once it is defined.
        self.call: Fn = _called_too_early


def _called_too_early(op: CustomOpDef[Any, Any], /, *args: Any, **kwargs: Any) -> Any:
    raise DefinitionError("the op was called while it was being defined", op=op._qualname)


@_torch.dynamo.while_tracing
def _define_by_name(qualname: str) -> int:
    """Define a lazy op, if that was not done; the number is of no meaning."""
    op = names.declared(qualname)
    if op is not None:
        op._define()
    return 0


class DeclaredOp(CustomOpDef[P, R]):
    """The class of a lazy op until it is defined: a call defines it, and registrations are remembered."""

    #: Its `_declaration`, which stays for calls that began before the op was defined.
    _lazy: Declaration

    def __init__(self, owner: Ops, name: Name, fn: Fn, make_spec: Callable[[], OpSpec]) -> None:
        super().__init__(owner, name, fn)
        self._lazy = self._declaration = Declaration(name, make_spec)
        self._declare()

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if is_dynamo_compiling():
            _define_by_name(self._qualname)
        else:
            self._define()
        return self._lazy.call(self, *args, **kwargs)  # type: ignore[no-any-return]

    _torch.dynamo.outside_dynamo(__call__)

    def _remember(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Keep a registration for the definition, after what can be checked without it."""
        at, defines = REGISTRATIONS[method]
        with lock:
            if defines or kwargs.get("lib") is not None or in_scope(self._owner):
                self._define()  # what ends earlier than the op is registered now
            declaration = self._declaration
            if declaration is None or self._defined_here():
                return getattr(CustomOpDef, method)(self, *args, **kwargs)
            if declaration.removed is not None:
                raise declaration.removed
            fn = _function_in(method, self, args, kwargs)
            if at is not None and fn is None:
                return functools.partial(self._remember, method, *args[:at], **kwargs)
            if not (fn is None or callable(fn) or isinstance(fn, (str, Like, tuple, list))):
                raise RegistrationError(f"{method} takes a function", op=self._qualname, got=brief(fn))
            declaration.remembered.append(_Remembered(method, args, kwargs, user_source()))
        return fn


def _remembering(method: str) -> Fn:
    @functools.wraps(getattr(CustomOpDef, method))
    def register(self: DeclaredOp[Any, Any], /, *args: Any, **kwargs: Any) -> Any:
        return self._remember(method, *args, **kwargs)

    return entry(register)


@functools.cache
def _places(method: str, count: int, keywords: tuple[str, ...]) -> dict[str, int | str]:
    """Where arguments of a registration stand, so many by position and these by name; TypeError if it takes no such."""
    bind = inspect.signature(getattr(CustomOpDef, method)).bind
    return dict(bind(None, *range(count), **dict(zip(keywords, keywords, strict=True))).arguments)


def _function_in(method: str, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The function among the arguments of a registration that is not made now; None if there is none.

    Raises:
        TypeError: the method does not take them. RegistrationError, DefinitionError: there is no such device type.
    """
    if (place := _places(method, len(args), tuple(kwargs)).get("device_types")) is not None:
        device_list(args[place] if isinstance(place, int) else kwargs[place], op._qualname)
    at = REGISTRATIONS[method].function
    return args[at] if at is not None and len(args) > at else kwargs.get("func")


# The place of an op that is not defined -------------------------------------------------------------------------------


class Undefined(CustomOpDef[P, R]):
    """What `custom_op` returns if its option ``when`` is False. Calling it calls the function.

    No operator is defined. Rules can be registered on this object, but have no effect.
    """

    def __init__(self, qualname: str, fn: Callable[P, R], computed_args: Any = None) -> None:
        self.__name__ = qualname.partition("::")[2].partition(".")[0]
        functools.update_wrapper(cast(Any, self), cast(Any, fn), updated=())
        self._fn: Any = computed.plain(fn, computed_args, qualname) if computed_args else fn
        self._source = user_source()
        self._qualname = qualname

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._fn(*args, **kwargs)  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return f"<Undefined({self._qualname})>"

    def __getattr__(self, name: str) -> Any:
        raise UndefinedError(
            f"the op is not defined, because when= is False, so it has no {name!r}",
            op=self._qualname,
            where=self._source,
            fix="call it: that runs the function; isinstance(op, customops.Undefined) tells that there is no op",
        )

    def __reduce__(self) -> tuple[Any, ...]:
        raise UndefinedError("an op that is not defined here cannot be pickled", op=self._qualname)

    @property
    def source(self) -> str:
        """``file:line`` where the op would have been defined."""
        return self._source

    def lower(self, /, *args: P.args, **kwargs: P.kwargs) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs

    def prefer(self, *args: Any, **kwargs: Any) -> Any:
        return contextlib.nullcontext()

    set_kernel_enabled = prefer

    def samples(self, *args: Any, **kwargs: Any) -> list[Any]:
        return []

    autotune = samples

    def unregister(self) -> None:
        """Do nothing: there is no op to remove."""


def _ignored(method: str) -> Fn:
    """A registration that has no effect."""
    takes_function = REGISTRATIONS[method].function is not None

    def register(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        fn = _function_in(method, self, args, kwargs)
        return (lambda fn: fn) if fn is None and takes_function else fn

    return functools.wraps(getattr(CustomOpDef, method))(register)


for _method in REGISTRATIONS:
    setattr(DeclaredOp, _method, _remembering(_method))
    setattr(Undefined, _method, _ignored(_method))


# The ops of a registry ------------------------------------------------------------------------------------------------

#: Of whatever parameters and results.
AnyOp = CustomOpDef[Any, Any]

_registries: weakref.WeakSet[Ops] = weakref.WeakSet()


class Ops:
    """The ops of a registry, how long they last, and how they are called: what an op knows of its `Registry`."""

    def __init__(self) -> None:
        self._ops: dict[str, AnyOp] = {}
        self._adopted: dict[str, AnyOp] = {}
        #: What `Registry.configure` was told, by namespace. The environment counts more, the definition of an op less.
        self._settings: dict[str, dict[str, Any]] = {}
        _registries.add(self)

    def add(self, spec: OpSpec, rules: Rules | None = None, op: AnyOp | None = None) -> AnyOp:
        """Define an op whose name is free; `op` is its object, if it was declared."""
        if (stale := self._adopted.get(spec.qualname)) is not None:  # of an op of others that had the name
            self.drop(stale, replaced(spec.qualname, spec.place, spec.fn))
        gone = _torch.library.torch_library_of(spec.qualname)
        if gone is not None and not _torch.library.library_alive(gone):
            _torch.library.destroy_library(gone)  # whoever destroyed it: see there what it would do to the new op
        op = self._define_op(spec, rules, op)
        self.enter(op, functools.partial(end, op))
        return op

    def _define_op(self, spec: OpSpec, rules: Rules | None = None, op: AnyOp | None = None) -> AnyOp:
        """Define an op, with `rules` that hold nothing yet. The dispatcher is as before if that fails."""
        check_spec(spec)
        known = _torch.library.exists(spec.name.namespace)
        operator = OperatorHandle.define(spec)
        try:
            return (op or CustomOpDef(self, spec.name, spec.fn))._become(operator, rules)
        except BaseException:
            remove(operator, UnregisteredError("the definition of the op failed", op=spec.qualname))
            if not known:
                _torch.library.forget(spec.name.namespace)
            raise

    def enter(self, op: AnyOp, undo: Undo) -> None:
        """An op was defined, or declared; `undo` undoes it, also where a callback of `when_defined` raises."""
        self._ops[op._qualname] = op
        if op._declaration is None:
            self.apply_settings(op)
            try:
                names.defined(op._definition.name.packet)
            except BaseException:
                undo()
                raise
        record_in_scope(self, Registration(undo))

    def drop(self, op: AnyOp, error: UnregisteredError | None = None) -> bool:
        """Remove an op if it is here; was it? Calling it raises `error` from then on."""
        for table in (self._ops, self._adopted):
            if table.get(op._qualname) is op:
                del table[op._qualname]
                error = error or UnregisteredError("the op was unregistered", op=op._qualname, fix=AGAIN)
                if op._declaration is not None and "_definition" not in vars(op):
                    op._declaration.removed = error
                    names.retract(op._qualname)
                    del op._torch_view
                    return True
                if op._definition.library is not None:
                    _torch.library.disclaim(op._qualname, op._definition.library)
                op._end(error)
                return True
        return False

    def restore(self, op: AnyOp) -> None:
        """Put a removed op back, with the rules it had."""
        if op._declaration is not None:
            op._declare()
        else:
            op._bind(op._definition.restored())
            if op._rules.has_out:
                op._rules.out.restore()
                op._join_out()
        self._ops[op._qualname] = op
        self.apply_settings(op)

    def library_destroyed(self, op: AnyOp, library: Library) -> None:
        """The library of an op was destroyed outside customops, as by torch.library.custom_op redefining its name."""
        if _torch.library.library_alive(library):
            return  # the interpreter exits: nobody will call the op any more
        if op._definition.library is library and self._ops.get(op._qualname) is op:
            del self._ops[op._qualname]
            op._end(destroyed(op._qualname))

    def reduce(self, qualname: str) -> tuple[Any, ...]:
        """How an op is pickled."""
        raise NotImplementedError

    def apply_settings(self, op: AnyOp) -> None:
        """Let an op be called as was configured. A lazy op that is not defined is left for later."""
        if op._declaration is not None or op._definition.removed is not None:
            return
        options, settings = op._definition.spec.options, self._settings.get(op._qualname.partition("::")[0])
        if settings:
            given = {option: of_environment(option, op._qualname) for option in settings}
            options = options._replace(**{k: settings[k] if value is None else value for k, value in given.items()})
        if options != op._definition.options:
            op._set_options(options)


def check_spec(spec: OpSpec) -> None:
    """Raise what can be found wrong without changing anything."""
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
    if isinstance(old, CustomOpDef) and old._declaration is None:
        variant = old._definition.mutation_only
    if taken is not None and (variant is None or variant.overload is not taken):
        raise DefinitionError(
            f"an op {name} exists: the variant of this one that returns nothing has that name",
            op=spec.qualname,
            fix="rename one of them",
        )


def conflict(qualname: str, reason: str, fix: str, at: str | None, **fields: str) -> DefinitionError:
    """The error for an op that exists; `at` is where the other one is defined."""
    problem = f"an op of this name exists, defined at {place(qualname)}: {reason}"
    return DefinitionError(problem, op=qualname, where=at, fix=fix, **fields)


def place(qualname: str) -> str:
    """``file:line`` where an op was defined."""
    found = (each._ops.get(qualname) for each in list(_registries))
    known = next((op for op in found if op is not None), None)
    return _torch.schema.defined_at(qualname) if known is None else known.source


# The ends of ops ------------------------------------------------------------------------------------------------------

AGAIN = "define it again, or use the new object"


def replaced(qualname: str, place: str, fn: Any = None) -> UnregisteredError:
    """What calls of an op raise once the one of this place, and this function, has its name."""
    by = "" if fn is None else f" ({name_of(fn)})"
    return UnregisteredError(f"the op was replaced by the definition at {place}{by}", op=qualname, fix=AGAIN)


def destroyed(qualname: str) -> UnregisteredError:
    """What calls of an op raise whose library others destroyed."""
    problem = "the library of the op was destroyed (torch.library.custom_op redefining its name does that)"
    return UnregisteredError(problem, op=qualname)


def end(op: AnyOp, old: AnyOp | None = None) -> None:
    """Remove an op for good: its scope or library has ended. `old`, which it replaced, comes back.

    If another op has taken the name in the meantime, `old` waits until that one ends, in its own scope.
    """
    op._instead = (old,)
    op._owner.drop(op)
    while old is not None and old._instead:
        (old,) = old._instead
    if old is not None and not names.exists(Name.parse(old._qualname)):
        old._owner.restore(old)
