"""`Registry`: owns ops and their lifetimes. The default one is the last line."""

from __future__ import annotations

import atexit
import functools
import logging
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, ParamSpec, TypeVar, get_args, overload

import torch
from typing_extensions import Unpack

from customops import _describe, _torch
from customops._dispatch import names
from customops._dispatch.callbacks import Fn
from customops._dispatch.devices import DeviceTypes, dispatch_keys
from customops._dispatch.names import Callback, Name, find_op, own_name
from customops._dispatch.operator import OperatorHandle, check_library, define_in
from customops._dispatch.registrations import Registration, Undo, lock, nothing
from customops._dispatch.results import CheckPolicy
from customops._dispatch.scopes import Owner, in_scope, open_scope, outside_scopes, record_in_scope
from customops._dispatch.spec import OpSpec
from customops._op import definitions
from customops._op.classes import Undefined, is_wanted
from customops._op.definitions import OnConflict, check_on_conflict
from customops._op.lazy import LazyOp
from customops._op.op import CustomOpDef
from customops._op.settings import Configurable
from customops._rules import Rules
from customops._schema.infer import mutates_args_names
from customops._schema.model import Names, names_in
from customops._schema.parse import check_nameless, parse
from customops._schema.tags import Layout, Tags, normalize_tags
from customops._torch.library import Library, OpOverload, OpOverloadPacket
from customops.errors import (
    CallbackError,
    DefinitionError,
    RegistrationError,
    UnregisteredError,
    asked_for_at,
    brief,
    entries,
    entry,
    location_of,
    user_source,
)

# Ops that are defined by their schema alone, and kernels that are registered as they are ------------------------------

#: What `Registry.impl` does where there is a kernel.
ImplConflict = Literal["replace", "error", "skip"]


@entries
class SchemaOnly(Owner):
    """`Registry.define` and `Registry.impl`."""

    def __init__(self) -> None:
        super().__init__()
        self._early: list[Registration] = []  # of kernels that came before their op

    @abstractmethod
    def adopt(self, op: Any) -> CustomOpDef[Any, Any]:
        """The object to register rules on."""

    def define(
        self,
        qualname: str,
        schema: str,
        *,
        lib: Library | None = None,
        tags: Tags = (),
        on_conflict: OnConflict = "error",
    ) -> None:
        """Define an op by its schema alone. Register its kernels with `impl`, and its rules with ``register_*``.

        Args:
            qualname: ``namespace::name``, or ``namespace::name.overload``.
            schema: the schema without the name, e.g. ``"(Tensor x) -> Tensor"``.
            lib: the op is removed with this library, and gets its namespace. None: it is removed with the registry.
            tags: the tags of the op; no others are added.
            on_conflict: what to do if an op of this name exists: raise an "error"; "reuse" it if it has the same schema
                and tags, and raise if not; "skip" the definition, whatever the op is; or "replace" an op of customops.

        Raises:
            DefinitionError: the name is invalid, there is a conflict, or torch rejects the schema or the tags.
            SchemaError: `schema` starts with a name.

        Example:
            >>> define("mylib::double", "(Tensor x) -> Tensor")
            >>> impl("mylib::double", "default", lambda x: x * 2)
        """
        if lib is not None and "::" in qualname:
            qualname = f"{lib.ns}::{qualname.partition('::')[2]}"
        name, all_tags = Name.parse(qualname), normalize_tags(tags)
        name.check_new()
        check_nameless(schema, name.qualname)
        check_on_conflict(on_conflict, name.qualname)
        names.look_up(name.packet, is_use=False)
        with lock:
            old = self._taken(name, schema, all_tags, on_conflict)
            if old is not None and on_conflict != "replace":
                return
            if old is not None and lib is not None and in_scope(old._owner):
                raise DefinitionError(
                    "with lib= the op may outlive the scope, and the one that it replaces could not come back then",
                    op=name.qualname,
                    got=schema,
                    where=user_source(),
                    fix="replace it without lib=, or outside the scope",
                )
            undo = definitions.put_aside(old, name.qualname, user_source()) if old is not None else nothing
            try:
                self._define_text(name, schema, all_tags, lib, old)
            except BaseException:
                undo()
                raise

    def _taken(
        self, name: Name, schema: str, tags: tuple[torch.Tag, ...], on_conflict: OnConflict
    ) -> CustomOpDef[Any, Any] | None:
        """The op that has the name, if it may stay or be replaced; else an error says why not."""
        found = _torch.library.find_overload(name.packet, name.overload)
        if found is None:
            return None
        if on_conflict == "error":
            place = definitions.place(name.qualname, self)
            problem = f"tried to register an operator multiple times; it is defined at {place}"
            fix = 'use another name, impl for kernels, or on_conflict="reuse" or "skip"'
            raise DefinitionError(problem, op=name.qualname, got=schema, where=user_source(), fix=fix)
        old = self.adopt(found)
        if on_conflict == "replace" and old._definition.library is None:
            reason = "customops did not define it, so it cannot be replaced"
            raise definitions.conflict(name.qualname, self, reason, "choose another name", user_source(), got=schema)
        if on_conflict == "reuse":
            fix = 'the same schema and tags, on_conflict="skip", or another name'
            definitions.check_same(old, parse(schema), tags, self, fix, user_source())
        return old

    def _define_text(
        self,
        name: Name,
        schema: str,
        tags: tuple[torch.Tag, ...],
        lib: Library | None,
        old: CustomOpDef[Any, Any] | None,
    ) -> None:
        if lib is not None:
            define_in(lib, name, schema, tags)
            names.defined(name.packet)
            return
        operator = OperatorHandle.define_from_text(name, schema, tags, user_source())
        op: CustomOpDef[Any, Any] = CustomOpDef(self, operator)
        self.enter(op, functools.partial(definitions.end, op, old))

    def impl(
        self,
        qualname: str,
        types: str | Iterable[str],
        func: Fn | None = None,
        *,
        lib: Library | None = None,
        on_conflict: ImplConflict = "replace",
    ) -> Any:
        """Register a kernel at dispatch keys without a wrapper: it gets no defaults, and nothing is checked.

        See `register_kernel` for kernels that are wrapped.

        Args:
            qualname: the op. If it is not defined yet, the kernel takes effect when it is.
            types: a dispatch key ("CPU", "AutogradCUDA"), a device type ("cpu"), "default" (every device), or several.
            func: the kernel, or ``torch.library.fallthrough_kernel``. Without it, a decorator is returned.
            lib: the kernel is removed with this library. None: with the op, or with the registry.
            on_conflict: what to do if a key has a kernel, whoever registered it: "replace" it, raise an "error", or
                "skip" the key.

        Raises:
            RegistrationError: torch does not know the dispatch key or device type, or there is a conflict. Nothing is
                registered then.
            CallbackError: `func` is not callable.
        """
        keys = dispatch_keys(types, qualname)
        _check_impl_conflict(on_conflict, qualname)
        if func is None:
            return functools.partial(self.impl, qualname, keys, lib=lib, on_conflict=on_conflict)
        if not callable(func):
            raise CallbackError("the kernel must be callable", op=qualname, got=brief(func), where=user_source())
        name = Name.parse(qualname)
        names.look_up(name.packet, is_use=False)
        with lock:
            if on_conflict != "replace":
                keys = _free_keys(name.qualname, keys, on_conflict)
            if not keys:
                return func
            if _torch.library.is_defined(name.packet, name.overload):
                self.adopt(qualname)._impl(keys, func, lib)
                return func
            library = lib or Library(name.namespace, "FRAGMENT")
            if lib is None:
                self._early.append(Registration(functools.partial(_torch.library.destroy_library, library)))
                self.record(self._early[-1])
            for key in keys:
                library.impl(name.qualname, func, key)  # the full name: torch refuses a library of another namespace
        return func


def _check_impl_conflict(value: Any, op: str) -> None:
    if value not in get_args(ImplConflict):
        expected = '"replace", "error" or "skip"'
        raise RegistrationError("on_conflict has an invalid value", op=op, expected=expected, got=brief(value))


def _free_keys(op: str, keys: tuple[str, ...], on_conflict: ImplConflict) -> tuple[str, ...]:
    """The keys without a kernel; if there are others, that may be an error."""
    taken = [key for key in keys if _torch.dispatcher.is_known(op) and _torch.dispatcher.has_kernel(op, key)]
    if taken and on_conflict == "error":
        raise RegistrationError(
            f"there is a kernel at {', '.join(taken)} already",
            op=op,
            where=user_source(),
            fix='on_conflict="replace" or "skip"',
        )
    return tuple(key for key in keys if key not in taken)


# Registrations on ops that are not there yet --------------------------------------------------------------------------

F = TypeVar("F", bound=Callable[[CustomOpDef[Any, Any]], object])

#: What becomes of a callback whose op was not there when the process ended.
IfNever = Literal["skip", "report"]

log = logging.getLogger("customops")

#: The callbacks to report at exit, if they still wait.
_reported: list[Callback] = []


class WhenDefined(Owner):
    """`Registry.when_defined`."""

    def __init__(self) -> None:
        super().__init__()
        self._callbacks: list[Registration] = []

    @abstractmethod
    def adopt(self, op: Any) -> CustomOpDef[Any, Any]:
        """The object to register rules on."""

    @overload
    def when_defined(self, qualname: str, fn: None = None, /, *, if_never: IfNever = "skip") -> Callable[[F], F]: ...
    @overload
    def when_defined(self, qualname: str, fn: F, /, *, if_never: IfNever = "skip") -> F: ...
    def when_defined(self, qualname: str, fn: Any = None, /, *, if_never: IfNever = "skip") -> Any:
        """Call ``fn(op)`` now if the op is defined, or else as soon as it is defined.

        `fn` is called right after customops or `torch.library.custom_op` defines the op, or a shared library that does
        is loaded. An op defined in another way is found on its first lookup in ``torch.ops``; `fn` is called before the
        lookup returns. For a lazy op, `fn` is called when the op is actually defined. `fn` is called once, even if the
        op is defined again.

        Args:
            qualname: ``namespace::name``, or ``namespace::name.overload``.
            fn: takes the `CustomOpDef` of the op, as `adopt` returns it. Without it, a decorator is returned.
            if_never: "report": log a warning at exit if `fn` was never called; "skip": do not.

        Raises:
            DefinitionError: `qualname` is not a valid name of an op.
            RegistrationError: `if_never` has an invalid value, `fn` is not callable, or `fn` raised. An error in `fn`
                is raised here, or where the op is defined.

        Example:
            >>> @when_defined("mylib::double")
            ... def _(op):
            ...     op.register_kernel("cuda", double_cuda)
        """
        name = Name.parse(qualname)
        if if_never not in get_args(IfNever):
            expected = '"skip" or "report"'
            raise RegistrationError(
                "if_never has an invalid value", op=qualname, expected=expected, got=brief(if_never)
            )
        if fn is None:
            return functools.partial(self.when_defined, qualname, if_never=if_never)
        if not callable(fn):
            raise RegistrationError("when_defined takes a function", op=qualname, got=brief(fn))
        source = user_source()
        if names.is_defined(name.qualname):
            Callback(name.qualname, functools.partial(self._call, name.qualname, fn), source)()
            return fn
        callback = Callback(name.qualname, functools.partial(self._call_later, name.qualname, fn, source), source)
        names.call_when_defined(callback)
        self._callbacks.append(Registration(functools.partial(names.cancel, callback)))
        self.record(self._callbacks[-1])
        if if_never == "report":
            _reported.append(callback)
        return fn

    def _call(self, qualname: str, fn: Callable[..., Any]) -> None:
        fn(self.adopt(qualname))

    def _call_later(self, qualname: str, fn: Callable[..., Any], source: str) -> None:
        with outside_scopes(), asked_for_at(source):
            self._call(qualname, fn)


@atexit.register
def _report() -> None:
    for callback in _reported:
        if names.is_waiting(callback):
            log.warning(
                "%s was never defined: what when_defined was given at %s was not called",
                callback.qualname,
                callback.source,
            )


# `Registry`: owns ops and their lifetimes. The default one is the last line -------------------------------------------

P = ParamSpec("P")
R = TypeVar("R")


@entries
class Registry(SchemaOnly, WhenDefined, Configurable, _describe.Listed):
    """Owns a set of ops, and removes them.

    Libraries use the default registry through `customops.custom_op`. A test can create its own registry and clear it.
    There is one dispatcher per process, so two registries cannot hold ops of the same name.

    Args:
        direct_in_graphs, lazy: defaults for the options of `custom_op` of these names.

    Example:
        >>> registry = Registry()
        >>> @registry.custom_op("mylib::double", mutates_args=())
        ... def double(x: Tensor) -> Tensor:
        ...     return x * 2
        >>> registry.clear()
    """

    def __init__(self, *, direct_in_graphs: bool = True, lazy: bool = False) -> None:
        super().__init__()
        for option, value in (("direct_in_graphs", direct_in_graphs), ("lazy", lazy)):
            if not isinstance(value, bool):
                raise DefinitionError(f"{option} of a Registry must be True or False", got=brief(value))
        self.direct_in_graphs = direct_in_graphs
        self.lazy = lazy
        self._ops: dict[str, CustomOpDef[Any, Any]] = {}
        self._adopted: dict[str, CustomOpDef[Any, Any]] = {}

    def __iter__(self) -> Iterator[CustomOpDef[Any, Any]]:
        """Iterate over the ops defined in this registry, oldest first."""
        return iter(list(self._ops.values()))

    def __len__(self) -> int:
        return len(self._ops)

    def __contains__(self, qualname: object) -> bool:
        return qualname in self._ops

    def __getitem__(self, qualname: str) -> CustomOpDef[Any, Any]:
        """The op of this qualified name.

        Raises:
            KeyError: the op was not defined in this registry.
        """
        return self._ops[qualname]

    # Defining ---------------------------------------------------------------------------------------------------

    @overload
    def custom_op(
        self, name: str, fn: None = None, /, **options: Unpack[definitions.ComputingOptions]
    ) -> Callable[[Callable[..., R]], CustomOpDef[..., R]]: ...
    @overload
    def custom_op(
        self, name: str, fn: Callable[..., R], /, **options: Unpack[definitions.ComputingOptions]
    ) -> CustomOpDef[..., R]: ...
    @overload
    def custom_op(
        self, name: str, fn: None = None, /, **options: Unpack[definitions.PlainOptions]
    ) -> Callable[[Callable[P, R]], CustomOpDef[P, R]]: ...
    @overload
    def custom_op(
        self, name: str, fn: Callable[P, R], /, **options: Unpack[definitions.PlainOptions]
    ) -> CustomOpDef[P, R]: ...
    def custom_op(
        self,
        name: str,
        fn: Callable[..., Any] | None = None,
        /,
        *,
        mutates_args: str | Iterable[str] | None = None,
        device_types: DeviceTypes = None,
        schema: str | None = None,
        tags: Tags = None,
        layout: Layout | None = None,
        on_conflict: definitions.OnConflict = "replace",
        check: CheckPolicy | None = None,
        bypass: bool = False,
        eager: bool = False,
        direct_in_graphs: bool | None = None,
        traceable: bool = False,
        computed_args: definitions.ComputedArgs = None,
        when: definitions.When = True,
        differentiable: bool | Sequence[bool] = True,
        nondiff_args: Names = (),
        lib: Library | None = None,
        lazy: bool | None = None,
    ) -> Any:
        """Turn a typed Python function into a dispatcher operator.

        Args:
            name: ``namespace::name``, or ``namespace::name.overload``.
            fn: the function. Without it, a decorator is returned.
            mutates_args: names of the arguments that the function writes to, or "unknown" if it may write to every
                tensor. None: those annotated with `Mutates`, or marked in `schema`.
            device_types: the device types, as "cpu", that the function is the kernel for. None: all.
            schema: e.g. ``"(Tensor x) -> Tensor"``. None: inferred from the type hints.
            tags: members of `torch.Tag`. Ops that return the tensors they write to have ``Tag.inplace`` or ``Tag.out``.
            layout: the strides of the tensors that inductor passes: "exact_strides" (those of eager mode, torch's
                default), "needs_contiguous", "stride_order" or "flexible".
            on_conflict: what to do if an op of this name exists: "replace" it; raise an "error"; "reuse" it if schema
                and tags are equal, and raise if not; or "skip" the definition and return that op, whoever defined it.
            check: when to check that results have the types of the schema and do not alias arguments: "always", the
                default, in the "first" call of each kernel, or "never". `configure` and environment variables
                (``CUSTOMOPS_CHECK``, ``CUSTOMOPS_BYPASS``, ...) override this and the next three.
            bypass: calls of the object skip the dispatcher if no gradient, mode, transform or autocast needs it.
            eager: like `bypass`, with the function as it is: results are not checked, and lists are not copied.
            direct_in_graphs: code generated by inductor calls the kernel directly. None: the registry's setting.
            traceable: compilers trace the function. It must call only torch's ops and Triton kernels: see `triton_op`.
            computed_args: for arguments that calls leave out, functions that compute them from others, which they take
                by name. Compilers trace these functions.
            when: a bool, or a function that returns one. If False, no op is defined, and calls run the function.
            differentiable: False for an op whose results never require grad, or a flag for each return.
            nondiff_args: names of tensors that get no gradient, even if they require grad.
            lib: the op is removed with this library, which must have its namespace. None: with the registry.
            lazy: define the op, and register its rules, on first use. None: the registry's setting.

        Raises:
            SchemaError: the function's hints, or `schema`, make no schema, or contradict `mutates_args`.
            DefinitionError: the name, the tags, another option, or a conflict.
            CallbackError: the function does not take the arguments of `schema`.

        Example:
            >>> @custom_op("mylib::scale", mutates_args=())
            ... def scale(x: Tensor, by: float = 2.0) -> Tensor:
            ...     return x * by
        """
        parsed = own_name(name)
        options = {
            "mutates_args": None if mutates_args is None else mutates_args_names(mutates_args, name),
            "device_types": device_types,
            "schema": schema,
            "tags": tags,
            "layout": layout,
            "check": check,
            "bypass": bypass,
            "eager": eager,
            "direct_in_graphs": self.direct_in_graphs if direct_in_graphs is None else direct_in_graphs,
            "traceable": traceable,
            "computed_args": computed_args,
            "differentiable": differentiable,
            "nondiff_args": names_in(nondiff_args, "nondiff_args", name),
        }
        definitions.check_on_conflict(on_conflict, name)
        check_library(lib, parsed.namespace, name)
        define = self._declare if definitions.is_lazy(self.lazy if lazy is None else lazy, name) else self._define
        request = functools.partial(self._defined, define, lib, when, parsed, on_conflict, options)
        return request if fn is None else request(fn)

    @entry
    def _defined(
        self,
        define: Callable[..., CustomOpDef[Any, Any]],
        lib: Library | None,
        when: definitions.When,
        name: Name,
        on_conflict: definitions.OnConflict,
        options: dict[str, Any],
        fn: Callable[..., Any],
        /,
    ) -> CustomOpDef[Any, Any]:
        if not callable(fn):
            raise DefinitionError("custom_op decorates a function", op=name.qualname, got=brief(fn))
        if not is_wanted(when, name.qualname):
            return Undefined(name.qualname, fn, options["computed_args"])
        with lock:
            if on_conflict == "skip" and names.exists(name):
                return names.declared(name.qualname) or self.adopt(name.qualname)
            reuses = lib is not None and on_conflict == "reuse" and names.exists(name)
            op = define(name, on_conflict, options, fn)
            if lib is not None and not reuses:
                Registration(functools.partial(definitions.end, op)).end_with(lib)
        return op

    def _declare(
        self, name: Name, on_conflict: definitions.OnConflict, options: dict[str, Any], fn: Callable[..., Any], /
    ) -> CustomOpDef[Any, Any]:
        """Have an op defined on its first use, if its name is free, or to be taken from such an op."""
        old = names.declared(name.qualname)
        if _torch.library.is_defined(name.packet, name.overload) or (old is not None and on_conflict != "replace"):
            return self._define(name, on_conflict, options, fn)
        if old is not None:
            old._owner.drop(old, definitions.replaced(name.qualname, location_of(fn), fn))
        op: CustomOpDef[Any, Any] = LazyOp(self, name, fn, functools.partial(definitions.spec_of, name, fn, **options))
        self.enter(op, functools.partial(definitions.end, op, old))
        return op

    def _define(
        self, name: Name, on_conflict: definitions.OnConflict, options: dict[str, Any], fn: Callable[..., Any], /
    ) -> CustomOpDef[Any, Any]:
        spec = definitions.spec_of(name, fn, **options)
        with lock:
            if not names.exists(name):
                return self.add(spec)
            if on_conflict == "replace":
                return definitions.replace(spec, self)
            if on_conflict == "reuse":
                return definitions.reuse(spec, self)
            fix = 'on_conflict="replace", "reuse" or "skip", or another name'
            raise definitions.conflict(spec.qualname, self, "on_conflict='error'", fix, definitions.function_of(spec))

    def add(
        self, spec: OpSpec, rules: Rules | None = None, make: definitions.Make = definitions.make
    ) -> CustomOpDef[Any, Any]:
        """Define an op whose name is free."""
        if (stale := self._adopted.get(spec.qualname)) is not None:  # of an op of others that had the name
            self.drop(stale, definitions.replaced(spec.qualname, spec.place, spec.fn))
        gone = _torch.library.torch_library_of(spec.qualname)
        if gone is not None and not _torch.library.library_alive(gone):
            _torch.library.destroy_library(gone)  # whoever destroyed it: see there what it would do to the new op
        op = definitions.define_op(spec, self, rules, make)
        self.enter(op, functools.partial(definitions.end, op))
        return op

    def enter(self, op: CustomOpDef[Any, Any], undo: Undo) -> None:
        """An op was defined, or declared; `undo` undoes it, also where a callback of `when_defined` raises."""
        self._ops[op._qualname] = op
        if not isinstance(op, LazyOp):
            self.apply_settings(op)
            try:
                names.defined(op._definition.name.packet)
            except BaseException:
                undo()
                raise
        self.record(Registration(undo))

    def find(self, qualname: str) -> CustomOpDef[Any, Any] | None:
        """The op of a name that is in this registry, or the default one."""
        return self._ops.get(qualname) or default._ops.get(qualname)

    # Adopting ---------------------------------------------------------------------------------------------------

    def adopt(self, op: CustomOpDef[Any, Any] | OpOverload | OpOverloadPacket | str) -> CustomOpDef[Any, Any]:
        """Return the `CustomOpDef` of any op, to register rules on. The op may be defined in C++ or with torch.library.

        Raises:
            RegistrationError: there is no such op, or the name has several overloads.

        Example:
            >>> adopt("mylib::cpp_op").register_fake(lambda x: torch.empty_like(x))
        """
        if isinstance(op, CustomOpDef):
            return op
        found = find_op(op)
        qualname = _torch.library.name_of_overload(found)
        with lock:
            for known in (
                _torch.library.torch_op_of(qualname),
                self._ops.get(qualname),
                self._adopted.get(qualname),
            ):
                if isinstance(known, CustomOpDef) and known._opoverload is found:
                    return known
            if (stale := self._adopted.get(qualname)) is not None:  # of an op that is gone, redefined by its owner
                self.drop(stale)
            adopted: CustomOpDef[Any, Any] = CustomOpDef(self, OperatorHandle.attach(found, user_source()))
            self._adopted[qualname] = adopted
            library = _torch.library.library_of(qualname)
            if library is not None:
                lost = functools.partial(self._lost, qualname, weakref.ref(library))
                _torch.library.on_library_destroyed(library, lost)
            return adopted

    # Lifetime ---------------------------------------------------------------------------------------------------

    @contextmanager
    def scope(self) -> Iterator[Registry]:
        """Context manager that undoes on exit what this thread or task does inside with this registry and its ops.

        Ops defined inside are removed, and ops of customops that were replaced inside are restored. Rules registered
        inside on earlier ops are removed. An op of `torch.library.custom_op` that was replaced is not restored.
        """
        with open_scope(self):
            yield self

    def clear(self) -> None:
        """Remove every op of this registry, and everything it registered on other ops."""
        with lock:
            for op in reversed([*self._adopted.values(), *self._ops.values()]):
                self.drop(op)
            for waiting in (self._early, self._callbacks):
                while waiting:
                    waiting.pop().unregister()
            self._settings.clear()

    def reduce(self, qualname: str) -> tuple[Any, ...]:
        """How an op is pickled: by its name, whatever the registry; the process that loads it defines it first."""
        return _load, (qualname,)

    def record(self, registration: Registration) -> bool:
        """Something was registered, here or on an op. Will it be unregistered when a scope ends?"""
        return record_in_scope(self, registration)

    def remove(self, op: CustomOpDef[Any, Any]) -> None:
        with lock:
            if not self.drop(op):
                raise UnregisteredError("the op is no longer registered", op=op._qualname)

    def drop(self, op: CustomOpDef[Any, Any], error: UnregisteredError | None = None) -> bool:
        """Remove an op if it is here; was it? Calling it raises `error` from then on."""
        for table in (self._ops, self._adopted):
            if table.get(op._qualname) is op:
                del table[op._qualname]
                op._unbind(
                    error or UnregisteredError("the op was unregistered", op=op._qualname, fix=definitions.AGAIN)
                )
                return True
        return False

    def restore(self, op: CustomOpDef[Any, Any]) -> None:
        """Put a removed op back, with the rules it had."""
        op._rebind()
        self._ops[op._qualname] = op
        self.apply_settings(op)

    def library_destroyed(self, op: CustomOpDef[Any, Any], library: Library) -> None:
        """The library of an op was destroyed outside customops, as by torch.library.custom_op redefining its name."""
        if _torch.library.library_alive(library):
            return  # the interpreter exits: nobody will call the op any more
        if op._definition.library is library and self._ops.get(op._qualname) is op:
            del self._ops[op._qualname]
            op._end(definitions.destroyed(op._qualname))

    def _lost(self, qualname: str, library: weakref.ref[Library]) -> None:
        """The library of an op that may have been adopted was destroyed, or collected."""
        found = library()
        if found is None or not _torch.library.library_alive(found):  # else the interpreter exits
            with lock:
                if (op := self._adopted.get(qualname)) is not None:
                    op._disconnect(definitions.destroyed(qualname))


def _load(qualname: str) -> CustomOpDef[Any, Any]:
    return default.adopt(qualname)


#: The registry that `customops.custom_op` and the function forms use.
default = Registry()
