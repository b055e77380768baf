"""Ops that are defined by their schema alone, and kernels that are registered as they are."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

from customops import _compat, _conflict
from customops._compat.libraries import Library
from customops._dispatch.callbacks import Fn
from customops._dispatch.devices import dispatch_keys
from customops._dispatch.name import Name
from customops._dispatch.operator import OperatorHandle, define_in
from customops._dispatch.registrations import Registration, lock
from customops._lifetime import Owner
from customops._op import CustomOpDef
from customops._schema.parse import check_nameless
from customops._schema.tags import Tags, normalize_tags
from customops.errors import DefinitionError, user_source


class SchemaOnly(Owner):
    """`Registry.define` and `Registry.impl`."""

    def __init__(self) -> None:
        self._early: list[Registration] = []  # of kernels that came before their op

    @abstractmethod
    def adopt(self, op: Any) -> CustomOpDef[Any, Any]:
        """The object to register rules on."""

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
                problem = (
                    f"tried to register an operator multiple times; it is defined at {_conflict.place(str(name), self)}"
                )
                raise DefinitionError(problem, op=str(name), got=schema, fix="use another name, or impl for kernels")
            if lib is not None:
                define_in(lib, name, schema, all_tags)
                return
            operator = OperatorHandle.define_from_text(name, schema, all_tags, user_source())
            op: CustomOpDef[Any, Any] = CustomOpDef(self, operator)
            self.enter(op, functools.partial(self.drop, op))

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
