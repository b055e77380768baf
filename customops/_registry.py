"""`Registry`: owns ops and their lifetimes. The default one is the last line."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar, overload

from typing_extensions import Unpack

from customops import _compat, _conflict, _describe, _spec
from customops._calls.settings import Configurable
from customops._calls.undefined import Undefined, is_wanted
from customops._compat.libraries import Library, OpOverload, OpOverloadPacket
from customops._dispatch import first_use
from customops._dispatch.devices import DeviceTypes
from customops._dispatch.lookup import find_op
from customops._dispatch.name import Name, own_name
from customops._dispatch.operator import OperatorHandle, check_library
from customops._dispatch.registrations import Registration, Undo, lock
from customops._dispatch.results import CheckPolicy
from customops._dispatch.spec import OpSpec
from customops._lazy import LazyOp
from customops._lifetime import open_scope, record_in_scope
from customops._op import CustomOpDef
from customops._rules import Rules
from customops._schema.differentiability import Names, names_in
from customops._schema.layout import Layout
from customops._schema.tags import Tags
from customops._schema.writes import mutates_args_names
from customops._schema_only import SchemaOnly
from customops._when_defined import WhenDefined
from customops.errors import DefinitionError, UnregisteredError, brief, entries, entry, location_of, user_source

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
        self, name: str, fn: None = None, /, **options: Unpack[_spec.ComputingOptions]
    ) -> Callable[[Callable[..., R]], CustomOpDef[..., R]]: ...
    @overload
    def custom_op(
        self, name: str, fn: Callable[..., R], /, **options: Unpack[_spec.ComputingOptions]
    ) -> CustomOpDef[..., R]: ...
    @overload
    def custom_op(
        self, name: str, fn: None = None, /, **options: Unpack[_spec.PlainOptions]
    ) -> Callable[[Callable[P, R]], CustomOpDef[P, R]]: ...
    @overload
    def custom_op(
        self, name: str, fn: Callable[P, R], /, **options: Unpack[_spec.PlainOptions]
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
        on_conflict: _spec.OnConflict = "replace",
        check: CheckPolicy | None = None,
        bypass: bool = False,
        eager: bool = False,
        direct_in_graphs: bool | None = None,
        traceable: bool = False,
        computed_args: _spec.ComputedArgs = None,
        when: _spec.When = True,
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
            "nondiff_args": names_in(nondiff_args, "nondiff_args", str(name)),
        }
        _spec.check_on_conflict(on_conflict, name)
        check_library(lib, parsed.namespace, name)
        define = self._declare if _spec.is_lazy(self.lazy if lazy is None else lazy, name) else self._define
        request = functools.partial(self._defined, define, lib, when, parsed, on_conflict, options)
        return request if fn is None else request(fn)

    @entry
    def _defined(
        self,
        define: Callable[..., CustomOpDef[Any, Any]],
        lib: Library | None,
        when: _spec.When,
        name: Name,
        on_conflict: _spec.OnConflict,
        options: dict[str, Any],
        fn: Callable[..., Any],
        /,
    ) -> CustomOpDef[Any, Any]:
        if not callable(fn):
            raise DefinitionError("custom_op decorates a function", op=str(name), got=brief(fn))
        if not is_wanted(when, str(name)):
            return Undefined(str(name), fn, options["computed_args"])
        with lock:
            if on_conflict == "skip" and first_use.exists(name):
                return first_use.declared(str(name)) or self.adopt(str(name))
            reuses = lib is not None and on_conflict == "reuse" and first_use.exists(name)
            op = define(name, on_conflict, options, fn)
            if lib is not None and not reuses:
                Registration(functools.partial(_conflict.end, op)).end_with(lib)
        return op

    def _declare(
        self, name: Name, on_conflict: _spec.OnConflict, options: dict[str, Any], fn: Callable[..., Any], /
    ) -> CustomOpDef[Any, Any]:
        """Have an op defined on its first use, if its name is free, or to be taken from such an op."""
        old = first_use.declared(str(name))
        if _compat.libraries.is_defined(name.packet, name.overload) or (old is not None and on_conflict != "replace"):
            return self._define(name, on_conflict, options, fn)
        if old is not None:
            old._owner.drop(old, _conflict.replaced(str(name), location_of(fn), fn))
        op: CustomOpDef[Any, Any] = LazyOp(self, name, fn, functools.partial(_spec.spec_of, name, fn, **options))
        self.enter(op, functools.partial(_conflict.end, op, old))
        return op

    def _define(
        self, name: Name, on_conflict: _spec.OnConflict, options: dict[str, Any], fn: Callable[..., Any], /
    ) -> CustomOpDef[Any, Any]:
        spec = _spec.spec_of(name, fn, **options)
        with lock:
            if not first_use.exists(name):
                return self.add(spec)
            if on_conflict == "replace":
                return _conflict.replace(spec, self)
            if on_conflict == "reuse":
                return _conflict.reuse(spec, self)
            fix = 'on_conflict="replace", "reuse" or "skip", or another name'
            raise _conflict.conflict(spec.qualname, self, "on_conflict='error'", fix, _conflict.function_of(spec))

    def add(self, spec: OpSpec, rules: Rules | None = None, make: _spec.Make = _spec.make) -> CustomOpDef[Any, Any]:
        """Define an op whose name is free."""
        if (stale := self._adopted.get(spec.qualname)) is not None:  # of an op of others that had the name
            self.drop(stale, _conflict.replaced(spec.qualname, spec.place, spec.fn))
        gone = _compat.registries.torch_library_of(spec.qualname)
        if gone is not None and not _compat.libraries.library_alive(gone):
            _compat.libraries.destroy_library(gone)  # whoever destroyed it: see there what it would do to the new op
        op = _spec.define_op(spec, self, rules, make)
        self.enter(op, functools.partial(_conflict.end, op))
        return op

    def enter(self, op: CustomOpDef[Any, Any], undo: Undo) -> None:
        """An op was defined, or declared; `undo` undoes it, also where a callback of `when_defined` raises."""
        self._ops[op._qualname] = op
        if not isinstance(op, LazyOp):
            self.apply_settings(op)
            try:
                first_use.defined(op._definition.name.packet)
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
        qualname = _compat.libraries.name_of_overload(found)
        with lock:
            for known in (
                _compat.registries.torch_op_of(qualname),
                self._ops.get(qualname),
                self._adopted.get(qualname),
            ):
                if isinstance(known, CustomOpDef) and known._opoverload is found:
                    return known
            if (stale := self._adopted.get(qualname)) is not None:  # of an op that is gone, redefined by its owner
                self.drop(stale)
            adopted: CustomOpDef[Any, Any] = CustomOpDef(self, OperatorHandle.attach(found, user_source()))
            self._adopted[qualname] = adopted
            library = _compat.libraries.library_of(qualname)
            if library is not None:
                lost = functools.partial(self._lost, qualname, weakref.ref(library))
                _compat.libraries.on_library_destroyed(library, lost)
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
                op._unbind(error or UnregisteredError("the op was unregistered", op=op._qualname, fix=_conflict.AGAIN))
                return True
        return False

    def restore(self, op: CustomOpDef[Any, Any]) -> None:
        """Put a removed op back, with the rules it had."""
        op._rebind()
        self._ops[op._qualname] = op
        self.apply_settings(op)

    def library_destroyed(self, op: CustomOpDef[Any, Any], library: Library) -> None:
        """The library of an op was destroyed outside customops, as by torch.library.custom_op redefining its name."""
        if _compat.libraries.library_alive(library):
            return  # the interpreter exits: nobody will call the op any more
        if op._definition.library is library and self._ops.get(op._qualname) is op:
            del self._ops[op._qualname]
            op._end(_conflict.destroyed(op._qualname))

    def _lost(self, qualname: str, library: weakref.ref[Library]) -> None:
        """The library of an op that may have been adopted was destroyed, or collected."""
        found = library()
        if found is None or not _compat.libraries.library_alive(found):  # else the interpreter exits
            with lock:
                if (op := self._adopted.get(qualname)) is not None:
                    op._disconnect(_conflict.destroyed(qualname))


def _load(qualname: str) -> CustomOpDef[Any, Any]:
    return default.adopt(qualname)


#: The registry that `customops.custom_op` and the function forms use.
default = Registry()
