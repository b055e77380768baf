"""`Registry`: owns ops and their lifetimes. The default one is the last line."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar, overload

from typing_extensions import Unpack

from customops import _compat, _describe, _spec
from customops._compat.libraries import Library, OpOverload, OpOverloadPacket
from customops._dispatch.callbacks import Fn
from customops._dispatch.devices import DeviceTypes, dispatch_keys
from customops._dispatch.lookup import find_op
from customops._dispatch.name import Name, own_name
from customops._dispatch.operator import OperatorHandle, define_in
from customops._dispatch.registrations import Registration, lock
from customops._dispatch.results import CheckPolicy
from customops._dispatch.spec import OpSpec
from customops._lifetime import open_scope, record_in_scope
from customops._op import CustomOpDef
from customops._rules import Rules
from customops._schema.differentiability import Names, names_in
from customops._schema.layout import Layout
from customops._schema.parse import check_nameless
from customops._schema.tags import Tags, normalize_tags
from customops._schema.writes import mutates_args_names
from customops.errors import DefinitionError, UnregisteredError, brief, user_source

P = ParamSpec("P")
R = TypeVar("R")


class Registry(_describe.Listed):
    """A set of ops with one owner.

    Libraries use the default registry through `customops.custom_op`; a test makes one of its own, and clears it.
    The dispatcher underneath is one per process, so two registries cannot hold an op of the same name.

    Args:
        direct_in_graphs: what `custom_op` takes, for all ops that do not say it themselves.

    Example:
        >>> registry = Registry()
        >>> @registry.custom_op("mylib::double", mutates_args=())
        ... def double(x: Tensor) -> Tensor:
        ...     return x * 2
        >>> registry.clear()
    """

    def __init__(self, *, direct_in_graphs: bool = True) -> None:
        self.direct_in_graphs = direct_in_graphs
        self._ops: dict[str, CustomOpDef[Any, Any]] = {}
        self._adopted: dict[str, CustomOpDef[Any, Any]] = {}
        self._early: list[Registration] = []  # of kernels that came before their op

    def __iter__(self) -> Iterator[CustomOpDef[Any, Any]]:
        """The ops defined here, oldest first."""
        return iter(list(self._ops.values()))

    def __len__(self) -> int:
        return len(self._ops)

    def __contains__(self, qualname: object) -> bool:
        return qualname in self._ops

    def __getitem__(self, qualname: str) -> CustomOpDef[Any, Any]:
        """The op of that name (KeyError if it was not defined here)."""
        return self._ops[qualname]

    # Defining ---------------------------------------------------------------------------------------------------

    @overload
    def custom_op(
        self, name: str, fn: None = None, /, **options: Unpack[_spec.DefinitionOptions]
    ) -> Callable[[Callable[P, R]], CustomOpDef[P, R]]: ...
    @overload
    def custom_op(
        self, name: str, fn: Callable[P, R], /, **options: Unpack[_spec.DefinitionOptions]
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
        direct_in_graphs: bool | None = None,
        traceable: bool = False,
        differentiable: bool | Sequence[bool] = True,
        nondiff_args: Names = (),
    ) -> Any:
        """Turn a typed Python function into a dispatcher operator.

        Args:
            name: ``namespace::name``, or ``namespace::name.overload``.
            fn: the function; without it, a decorator is returned.
            mutates_args: names of the arguments the function writes to, or "unknown" for all tensors. None: what is
                annotated with `Mutates`, or named so in `schema`.
            device_types: the device types the function is the kernel of; None stands for every device.
            schema: the schema, e.g. ``"(Tensor x) -> Tensor"``, instead of inferring it from type hints.
            tags: `torch.Tag` members; ``torch.Tag.inplace`` and ``torch.Tag.out`` are for ops that return what they
                write to.
            layout: the strides that inductor has to give the op's tensors: "needs_contiguous", "exact_strides" (those
                without a compiler, the default of torch), "stride_order" or "flexible".
            on_conflict: if an op of the name exists: "replace" it, raise an "error", or "reuse" it if it has the same
                schema and tags (and raise if it has not).
            check: when to check that what a kernel returns has the types of the schema and aliases nothing: "always",
                for the "first" call of each kernel, or "never". The default, None, is "always". The environment
                variable ``CUSTOMOPS_CHECK``, read when an op is defined, counts for all ops, whatever they say.
            bypass: let a call of the object run the kernel without the dispatcher where that has nothing to do.
            direct_in_graphs: let code of inductor run the kernel without the dispatcher where nothing could tell. None:
                as the registry says. ``CUSTOMOPS_DIRECT_IN_GRAPHS=0`` or ``=1`` in the environment counts for all ops.
            traceable: the function is made of torch's ops and wrapped Triton kernels: see `triton_op`.
            differentiable: False for an op whose results never require grad, or a flag for each return.
            nondiff_args: names of tensors that have no gradient, even if they require grad.

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
            "direct_in_graphs": self.direct_in_graphs if direct_in_graphs is None else direct_in_graphs,
            "traceable": traceable,
            "differentiable": differentiable,
            "nondiff_args": names_in(nondiff_args, "nondiff_args", str(name)),
        }
        request = functools.partial(self._define, parsed, on_conflict, options)
        return request if fn is None else request(fn)

    def _define(
        self, name: Name, on_conflict: _spec.OnConflict, options: dict[str, Any], fn: Callable[..., Any], /
    ) -> CustomOpDef[Any, Any]:
        if not callable(fn):
            raise DefinitionError("custom_op decorates a function", op=str(name), got=brief(fn))
        _spec.check_on_conflict(on_conflict, str(name))
        spec = _spec.spec_of(name, fn, **options)
        with lock:
            existing = _compat.libraries.find_overload(name.packet, name.overload)
            if existing is None:
                return self.add(spec)
            if on_conflict == "replace":
                return self._replace(spec)
            if on_conflict == "reuse":
                return self._reuse(spec)
            raise self._conflict(spec, "on_conflict='error'", 'on_conflict="replace" or "reuse", or another name')

    def add(self, spec: OpSpec, rules: Rules | None = None) -> CustomOpDef[Any, Any]:
        """Define an op whose name is free."""
        if (stale := self._adopted.get(spec.qualname)) is not None:  # of an op of others that had the name
            self.drop(stale, _spec.replaced_error(spec))
        gone = _compat.registries.torch_library_of(spec.qualname)
        if gone is not None and not _compat.libraries.library_alive(gone):
            _compat.libraries.destroy_library(gone)  # whoever destroyed it: see there what it would do to the new op
        op = _spec.define_op(spec, self, rules)
        self._ops[op._qualname] = op
        self.record(Registration(functools.partial(self.drop, op)))
        return op

    def _replace(self, spec: OpSpec) -> CustomOpDef[Any, Any]:
        """Define an op in the place of another; the other comes back if that fails."""
        qualname = spec.qualname
        old = _compat.registries.torch_op_of(qualname)
        if not isinstance(old, CustomOpDef):
            library = _compat.registries.torch_library_of(qualname)
            if library is None:
                raise self._conflict(
                    spec, "it was not made by custom_op, so it cannot be replaced", "choose another name"
                )
            _spec.check_spec(spec)
            # Made by torch.library.custom_op, whose rule for a same name is to replace, too.
            overload = _compat.libraries.find_overload(spec.name.packet, spec.name.overload)
            _compat.libraries.destroy_library(library)
            if overload is not None:
                _compat.libraries.retire_overload(overload, _spec.replaced_error(spec))
            return self.add(spec)
        _spec.check_spec(spec)
        old._owner.drop(old, _spec.replaced_error(spec))
        try:
            op = _spec.define_op(spec, self)
        except BaseException:
            old._owner.restore(old)
            raise
        self._ops[qualname] = op
        self.record(Registration(functools.partial(self._swap_back, op, old)))
        return op

    def _reuse(self, spec: OpSpec) -> CustomOpDef[Any, Any]:
        """The existing op, if it is the same one."""
        old = _compat.registries.torch_op_of(spec.qualname)
        if not isinstance(old, CustomOpDef):
            raise self._conflict(spec, "it was not made by custom_op, so it cannot be reused", "choose another name")
        known = old._definition
        is_same = old.schema.exact_key == spec.schema.exact_key and set(known.tags) == set(spec.tags)
        if not is_same or known.spec.signature != spec.signature:
            raise self._conflict(
                spec,
                f"on_conflict='reuse' needs the same {'types' if is_same else 'schema and tags'}",
                'on_conflict="replace", or another name',
                expected=f"{old.schema} {sorted(map(str, known.tags)) or ''}",
                got=f"{spec.schema} {sorted(map(str, spec.tags)) or ''}",
            )
        return old

    def _conflict(self, spec: OpSpec, reason: str, fix: str, **fields: str) -> DefinitionError:
        return _spec.conflict_error(spec, self._place(spec.qualname), reason, fix, **fields)

    def define(self, qualname: str, schema: str, *, lib: Library | None = None, tags: Tags = ()) -> None:
        """Define an op by its schema alone; its kernels are registered with `impl`, its rules with ``register_*``.

        Args:
            qualname: ``namespace::name``, or ``namespace::name.overload``.
            schema: without the name, e.g. ``"(Tensor x) -> Tensor"``.
            lib: the op lives as long as this library, whose namespace counts. Else it lives as long as the registry.
            tags: the op has these, and no other.

        Raises:
            DefinitionError: the name, or torch refuses the schema, the tags or a second op of the name.
            SchemaError: `schema` starts with a name.

        Example:
            >>> define("mylib::double", "(Tensor x) -> Tensor")
            >>> impl("mylib::double", "default", lambda x: x * 2)
        """
        if lib is not None and "::" in qualname:
            qualname = f"{lib.ns}::{qualname.partition('::')[2]}"
        name, all_tags = Name.parse(qualname), normalize_tags(tags)
        name.check_new()
        check_nameless(schema, str(name))
        with lock:
            if _compat.libraries.find_overload(name.packet, name.overload) is not None:
                problem = f"tried to register an operator multiple times; it is defined at {self._place(str(name))}"
                raise DefinitionError(problem, op=str(name), got=schema, fix="use another name, or impl for kernels")
            if lib is not None:
                define_in(lib, name, schema, all_tags)
                return
            operator = OperatorHandle.define_from_text(name, schema, all_tags, user_source())
            op: CustomOpDef[Any, Any] = CustomOpDef(self, operator)
            self._ops[op._qualname] = op
            self.record(Registration(functools.partial(self.drop, op)))

    def _place(self, qualname: str) -> str:
        """``file:line`` where an op was defined. What torch knows is a line of ours, for ops of `define`."""
        known = _compat.registries.torch_op_of(qualname) or self._ops.get(qualname) or default._ops.get(qualname)
        return known.source if isinstance(known, CustomOpDef) else _compat.schemas.defined_at(qualname)

    def impl(
        self, qualname: str, types: str | Iterable[str], func: Fn | None = None, *, lib: Library | None = None
    ) -> Any:
        """Put a kernel at dispatch keys as it is: no defaults filled in, nothing checked. See `register_kernel`.

        Args:
            qualname: the op; where it is not defined yet, the kernel waits for it.
            types: a dispatch key ("CPU", "AutogradCUDA"), a device type ("cpu"), "default" (every device), or several.
            func: the kernel, or ``torch.library.fallthrough_kernel``. Without it, a decorator is returned.
            lib: the kernel lives as long as this library. Else it lives as long as the op, or the registry.

        Raises:
            RegistrationError: torch knows no such dispatch key or device type.
        """
        keys = dispatch_keys(types, qualname)
        if func is None:
            return functools.partial(self.impl, qualname, keys, lib=lib)
        name = Name.parse(qualname)
        with lock:
            if _compat.libraries.find_overload(name.packet, name.overload) is not None:
                self.adopt(qualname)._impl(keys, func, lib)
                return func
            library = lib or Library(name.namespace, "FRAGMENT")
            if lib is None:
                self._early.append(Registration(functools.partial(_compat.libraries.destroy_library, library)))
                self.record(self._early[-1])
            for key in keys:
                library.impl(str(name), func, key)  # the full name: torch refuses a library of another namespace
        return func

    # Adopting ---------------------------------------------------------------------------------------------------

    def adopt(self, op: CustomOpDef[Any, Any] | OpOverload | OpOverloadPacket | str) -> CustomOpDef[Any, Any]:
        """The object to register rules on, for any op: one of ours, or one defined in C++ or with torch.library.

        Raises:
            RegistrationError: there is no such op, or a name stands for several overloads.

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
            return adopted

    # Lifetime ---------------------------------------------------------------------------------------------------

    @contextmanager
    def scope(self) -> Iterator[Registry]:
        """Take back on exit what this thread or task does inside the context with this registry and its ops.

        Ops defined inside are removed, ops of customops replaced inside come back, rules registered inside on older
        ops end. An op of `torch.library.custom_op` that was replaced is gone.
        """
        with open_scope(self):
            yield self

    def clear(self) -> None:
        """Remove every op of this registry, and what it registered on the ops of others."""
        with lock:
            for op in reversed([*self._adopted.values(), *self._ops.values()]):
                self.drop(op)
            while self._early:
                self._early.pop().unregister()

    def reduce(self, qualname: str) -> tuple[Any, ...]:
        """How an op is pickled: by its name, whatever the registry; the process that loads it defines it first."""
        return _load, (qualname,)

    def record(self, registration: Registration) -> bool:
        """Something was registered, here or on an op. Will it be unregistered when a scope ends?"""
        return record_in_scope(self, registration)

    def remove(self, op: CustomOpDef[Any, Any]) -> None:
        with lock:
            if not self.drop(op):
                raise UnregisteredError("the op is not registered any more", op=op._qualname)

    def drop(self, op: CustomOpDef[Any, Any], error: UnregisteredError | None = None) -> bool:
        """Remove an op if it is here; was it? Calling it raises `error` from then on."""
        for table in (self._ops, self._adopted):
            if table.get(op._qualname) is op:
                del table[op._qualname]
                op._unbind(error or UnregisteredError("the op was unregistered", op=op._qualname, fix=_spec.AGAIN))
                return True
        return False

    def restore(self, op: CustomOpDef[Any, Any]) -> None:
        """Put a removed op back, with the rules it had."""
        op._rebind()
        self._ops[op._qualname] = op

    def _swap_back(self, new: CustomOpDef[Any, Any], old: CustomOpDef[Any, Any]) -> None:
        self.drop(new)
        if _compat.libraries.find_overload(new._definition.name.packet, new._definition.name.overload) is None:
            old._owner.restore(old)

    def library_destroyed(self, op: CustomOpDef[Any, Any], library: Library) -> None:
        """The library of an op was destroyed outside customops, as by torch.library.custom_op redefining its name."""
        if _compat.libraries.library_alive(library):
            return  # the interpreter exits: nobody will call the op any more
        if op._definition.library is library and self._ops.get(op._qualname) is op:
            del self._ops[op._qualname]
            op._end(
                UnregisteredError(
                    "the library of the op was destroyed (torch.library.custom_op redefining its name does that)",
                    op=op._qualname,
                )
            )


def _load(qualname: str) -> CustomOpDef[Any, Any]:
    return default.adopt(qualname)


#: The registry that `customops.custom_op` and the function forms use.
default = Registry()
