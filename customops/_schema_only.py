"""Ops that are defined by their schema alone, and kernels that are registered as they are."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, Literal, get_args

import torch

from customops import _compat, _conflict
from customops._compat.libraries import Library
from customops._dispatch import first_use
from customops._dispatch.callbacks import Fn
from customops._dispatch.devices import dispatch_keys
from customops._dispatch.name import Name
from customops._dispatch.operator import OperatorHandle, define_in
from customops._dispatch.registrations import Registration, lock, nothing
from customops._lifetime import Owner, in_scope
from customops._op import CustomOpDef
from customops._schema.parse import check_nameless, parse
from customops._schema.tags import Tags, normalize_tags
from customops._spec import OnConflict, check_on_conflict
from customops.errors import CallbackError, DefinitionError, RegistrationError, brief, entries, user_source

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
        check_nameless(schema, str(name))
        check_on_conflict(on_conflict, str(name))
        first_use.look_up(name.packet, is_use=False)
        with lock:
            old = self._taken(name, schema, all_tags, on_conflict)
            if old is not None and on_conflict != "replace":
                return
            if old is not None and lib is not None and in_scope(old._owner):
                raise DefinitionError(
                    "with lib= the op may outlive the scope, and the one that it replaces could not come back then",
                    op=str(name),
                    got=schema,
                    where=user_source(),
                    fix="replace it without lib=, or outside the scope",
                )
            undo = _conflict.put_aside(old, str(name), user_source()) if old is not None else nothing
            try:
                self._define_text(name, schema, all_tags, lib, old)
            except BaseException:
                undo()
                raise

    def _taken(
        self, name: Name, schema: str, tags: tuple[torch.Tag, ...], on_conflict: OnConflict
    ) -> CustomOpDef[Any, Any] | None:
        """The op that has the name, if it may stay or be replaced; else an error says why not."""
        found = _compat.libraries.find_overload(name.packet, name.overload)
        if found is None:
            return None
        if on_conflict == "error":
            place = _conflict.place(str(name), self)
            problem = f"tried to register an operator multiple times; it is defined at {place}"
            fix = 'use another name, impl for kernels, or on_conflict="reuse" or "skip"'
            raise DefinitionError(problem, op=str(name), got=schema, where=user_source(), fix=fix)
        old = self.adopt(found)
        if on_conflict == "replace" and old._definition.library is None:
            reason = "customops did not define it, so it cannot be replaced"
            raise _conflict.conflict(str(name), self, reason, "choose another name", user_source(), got=schema)
        if on_conflict == "reuse":
            fix = 'the same schema and tags, on_conflict="skip", or another name'
            _conflict.check_same(old, parse(schema), tags, self, fix, user_source())
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
            first_use.defined(name.packet)
            return
        operator = OperatorHandle.define_from_text(name, schema, tags, user_source())
        op: CustomOpDef[Any, Any] = CustomOpDef(self, operator)
        self.enter(op, functools.partial(_conflict.end, op, old))

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
        first_use.look_up(name.packet, is_use=False)
        with lock:
            if on_conflict != "replace":
                keys = _free_keys(str(name), keys, on_conflict)
            if not keys:
                return func
            if _compat.libraries.is_defined(name.packet, name.overload):
                self.adopt(qualname)._impl(keys, func, lib)
                return func
            library = lib or Library(name.namespace, "FRAGMENT")
            if lib is None:
                self._early.append(Registration(functools.partial(_compat.libraries.destroy_library, library)))
                self.record(self._early[-1])
            for key in keys:
                library.impl(str(name), func, key)  # the full name: torch refuses a library of another namespace
        return func


def _check_impl_conflict(value: Any, op: str) -> None:
    if value not in get_args(ImplConflict):
        expected = '"replace", "error" or "skip"'
        raise RegistrationError("on_conflict has an invalid value", op=op, expected=expected, got=brief(value))


def _free_keys(op: str, keys: tuple[str, ...], on_conflict: ImplConflict) -> tuple[str, ...]:
    """The keys without a kernel; if there are others, that may be an error."""
    taken = [key for key in keys if _compat.dispatch.is_known(op) and _compat.dispatch.has_kernel(op, key)]
    if taken and on_conflict == "error":
        raise RegistrationError(
            f"there is a kernel at {', '.join(taken)} already",
            op=op,
            where=user_source(),
            fix='on_conflict="replace" or "skip"',
        )
    return tuple(key for key in keys if key not in taken)
