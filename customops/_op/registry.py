"""`Registry`: owns ops and their lifetimes. The default one is the last line."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, ParamSpec, TypeVar, cast, overload

import torch
from typing_extensions import Unpack

from customops import _describe, _torch
from customops._dispatch import names
from customops._dispatch.callbacks import Fn
from customops._dispatch.devices import dispatch_keys
from customops._dispatch.names import Name, find_op, own_name
from customops._dispatch.operator import OperatorHandle, OpSpec, define_in
from customops._dispatch.registrations import Registration, check_library, lock
from customops._dispatch.scopes import in_scope, open_scope, record_in_scope
from customops._op.callback_types import Lib
from customops._op.definitions import SIGNATURE, DefinitionOptions, OnConflict, OpOptions, spec_of
from customops._op.op import AnyOp, CustomOpDef, Ops, check_spec, conflict, destroyed, end, place, replaced
from customops._places import entries, entry, misused, name_of, user_source, where
from customops._schema.model import Names, Schema
from customops._schema.parse import check_nameless, parse
from customops._schema.tags import Tags, normalize_tags
from customops._torch.library import Library, OpOverload, OpOverloadPacket
from customops.errors import CallbackError, DefinitionError, RegistrationError, brief, check_choice

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[[CustomOpDef[Any, Any]], object])

#: What `Registry.impl` does where there is a kernel.
ImplConflict = Literal["replace", "error", "skip"]

log = logging.getLogger("customops")


@entries
class Registry(Ops, _describe.Listed):
    """Owns a set of ops, and removes them.

    Libraries use the default registry through `customops.custom_op`. A test can create its own registry and clear it.
    There is one dispatcher per process, so two registries cannot hold ops of the same name.

    Args:
        direct_in_graphs: the default of the option of `custom_op` of this name.

    Example:
        >>> registry = Registry()
        >>> @registry.custom_op("mylib::double", mutates_args=())
        ... def double(x: Tensor) -> Tensor:
        ...     return x * 2
        >>> registry.clear()
    """

    def __init__(self, *, direct_in_graphs: bool = True) -> None:
        super().__init__()
        if not isinstance(direct_in_graphs, bool):
            raise DefinitionError("direct_in_graphs of a Registry must be True or False", got=brief(direct_in_graphs))
        self.direct_in_graphs = direct_in_graphs
        #: Kernels that were registered before their op.
        self._waiting: list[Registration] = []

    def __iter__(self) -> Iterator[CustomOpDef[Any, Any]]:
        """Iterate over the ops defined in this registry, oldest first."""
        return iter(list(self._ops.values()))

    def _to_check(self) -> list[CustomOpDef[Any, Any]]:
        """The ops defined in this registry, and those of others, or of a schema alone, that have samples."""
        return [*self, *(op for op in list(self._adopted.values()) if op._samples is not None)]

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

    # Defining an op by a function ---------------------------------------------------------------------------------

    @overload
    def custom_op(
        self, name: str, fn: None = None, /, **options: Unpack[DefinitionOptions]
    ) -> Callable[[Callable[P, R]], CustomOpDef[P, R]]: ...
    @overload
    def custom_op(
        self, name: str, fn: Callable[P, R], /, **options: Unpack[DefinitionOptions]
    ) -> CustomOpDef[P, R]: ...
    def custom_op(self, name: str, fn: Callable[..., Any] | None = None, /, **options: Any) -> Any:
        """Turn a typed Python function into a dispatcher operator.

        Args:
            name: ``namespace::name``, or ``namespace::name.overload``.
            fn: the function. Without it, a decorator is returned.
            mutates_args: names of the arguments that the function writes to, or "unknown" if it may write to every
                tensor. None: those annotated with `Mut`, or marked in `schema`.
            device_types: the device types, as "cpu", that the function is the kernel for. None: all.
            schema: e.g. ``"(Tensor x) -> Tensor"``. None: inferred from the type hints.
            tags: members of `torch.Tag`. Ops that return the tensors they write to have ``Tag.inplace`` or ``Tag.out``.
            on_conflict: what to do if an op of this name exists: "replace" it; raise an "error"; "reuse" it if schema
                and tags are equal, and raise if not; or "skip" the definition and return that op, whoever defined it.
            check: when to check that results have the types of the schema and do not alias arguments: "always", the
                default, in the "first" call of each kernel, or "never". Environment variables (``CUSTOMOPS_CHECK``,
                ``CUSTOMOPS_BYPASS``, ...) override this and the next four, when the op is defined.
            bypass: calls of the object skip the dispatcher if no gradient, mode, transform or autocast needs it.
            eager: like `bypass`, with the function as it is: results are not checked, and lists are not copied.
            direct_in_graphs: code generated by inductor calls the kernel directly. None: the registry's setting.
            choose_when_traced: of several kernels for a device, compiled code calls the one that was chosen when it was
                traced. False: it chooses in each call. See `register_kernel`.
            traceable: compilers trace the function. It must call only torch's ops and Triton kernels: see `triton_op`.
            kernel_calls_torch: False if kernels call no torch function but to allocate, view, copy or fill tensors, as
                a raw CUDA, Triton or C launch. A call is faster: the gradient mode and the autocast state are left as
                they are. The first call of each kernel checks it, unless `check` is "never".
            reference: a plain PyTorch function that computes what the op does, from which the fake impl, gradients and
                more follow: see `register_reference`. True: the op's function is one.
            differentiable: False for an op whose results never require grad, or a flag for each return.
            nondiff_args: names of tensors that get no gradient, even if they require grad.
            lib: the op is removed with this library, which must have its namespace. None: with the registry.

        Raises:
            SchemaError: the function's hints, or `schema`, make no schema, or contradict `mutates_args`.
            DefinitionError: the name, the tags, another option, or a conflict.
            CallbackError: the function does not take the arguments of `schema`.

        Example:
            >>> @custom_op("mylib::scale", mutates_args=())
            ... def scale(x: Tensor, by: float = 2.0) -> Tensor:
            ...     return x * by
        """
        unknown = next((option for option in options if option not in OpOptions.__dataclass_fields__), None)
        if unknown is not None:
            problem = f"custom_op() got an unexpected keyword argument {unknown!r}"
            raise TypeError(misused(Registry.custom_op, problem, (self, name), options))
        if options.get("direct_in_graphs") is None:
            options["direct_in_graphs"] = self.direct_in_graphs
        parsed, given = own_name(name), OpOptions.read(options, name)
        if given.lib is not None:
            check_library(given.lib, parsed.namespace, name)
        define = functools.partial(self._define_function, parsed, given)
        return entry(define) if fn is None else define(fn)

    custom_op.__signature__ = SIGNATURE  # type: ignore[attr-defined]

    def _define_function(self, name: Name, given: OpOptions, fn: Fn, /) -> AnyOp:
        qualname, on_conflict = name.qualname, given.on_conflict
        if not callable(fn):
            raise DefinitionError("custom_op decorates a function", op=qualname, got=brief(fn))
        with lock:
            is_there = _torch.library.is_defined(name.packet, name.overload)
            if on_conflict == "skip" and is_there:
                return self.adopt(qualname)
            old = None
            if is_there and given.reference:  # the op that comes back if the reference is refused
                known = _torch.library.torch_op_of(qualname)
                old = known if isinstance(known, CustomOpDef) else None
            spec = spec_of(name, fn, given)
            if not is_there:
                op = self._add(spec)
            elif on_conflict == "replace":
                op = self._replace(spec)
            elif on_conflict == "reuse":
                old, at = _torch.library.torch_op_of(qualname), where(fn)
                if not isinstance(old, CustomOpDef):
                    reason = "it was not made by custom_op, so it cannot be reused"
                    raise conflict(qualname, reason, "choose another name", at)
                fix = 'on_conflict="replace", or another name'
                _check_same(old, spec.schema, spec.tags, fix, at)
                if old._definition.spec.signature != spec.signature:
                    raise conflict(qualname, "on_conflict='reuse' needs the same types", fix, at)
                return old
            else:
                fix = 'on_conflict="replace", "reuse" or "skip", or another name'
                raise conflict(qualname, "on_conflict='error'", fix, where(fn))
            if given.reference is not None:
                try:
                    op.register_reference(cast(Fn, fn if given.reference is True else given.reference))
                except BaseException:
                    end(op, old)
                    raise
            if given.lib is not None:
                Registration(functools.partial(end, op)).end_with(given.lib)
        return op

    def _replace(self, spec: OpSpec) -> AnyOp:
        """Define an op in the place of another; the other comes back if that fails."""
        check_spec(spec)
        old = _torch.library.torch_op_of(spec.qualname)
        if not isinstance(old, CustomOpDef):  # made by torch.library.custom_op, which replaces others of the name, too
            library = _torch.library.torch_library_of(spec.qualname)
            if library is None:
                reason = "it was not made by custom_op, so it cannot be replaced"
                raise conflict(spec.qualname, reason, "choose another name", spec.fn and where(spec.fn))
            overload = _torch.library.find_overload(spec.name.packet, spec.name.overload)
            _torch.library.destroy_library(library)
            if overload is not None:
                _torch.library.retire_overload(overload, replaced(spec.qualname, spec.place, spec.fn))
            return self._add(spec)
        is_new = old.source != spec.source and not in_scope(self)  # else the same code runs again
        dropped = old.describe()._registrations() if is_new else ""
        old._owner._drop(old, replaced(spec.qualname, spec.place, spec.fn))
        try:
            op = self._define_op(spec)
        except BaseException:
            old._owner._restore(old)
            raise
        op._rules.fake.follow(old._rules.fake, spec.source)
        if dropped:
            problem = "%s: defined again at %s, which drops what was registered: %s"
            log.warning(problem, spec.qualname, spec.source, dropped)
        elif is_new and spec.fn is not None and old._init_fn is not None:
            new, before = name_of(spec.fn), name_of(old._init_fn)
            if new != before and "<lambda>" not in (new, before):  # else the same function, changed
                text = "%s: %s (%s) takes the place of %s (%s); two ops need two names"
                log.warning(text, spec.qualname, new, spec.source, before, old.source)
        self._enter(op, functools.partial(end, op, old))
        return op

    # Defining an op by its schema, and kernels without a wrapper --------------------------------------------------

    def define(
        self, qualname: str, schema: str, *, lib: Lib = None, tags: Tags = (), on_conflict: OnConflict = "error"
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
        check_choice("on_conflict", on_conflict, OnConflict, name.qualname, DefinitionError)
        with lock:
            old = None
            found = _torch.library.find_overload(name.packet, name.overload)
            if found is not None:
                if on_conflict == "error":
                    problem = f"tried to register an operator multiple times; it is defined at {place(name.qualname)}"
                    fix = 'use another name, impl for kernels, or on_conflict="reuse" or "skip"'
                    raise DefinitionError(problem, op=name.qualname, got=schema, where=user_source(), fix=fix)
                old = self.adopt(found)
                if on_conflict == "reuse":
                    fix = 'the same schema and tags, on_conflict="skip", or another name'
                    _check_same(old, parse(schema), all_tags, fix, user_source())
                if on_conflict != "replace":
                    return
                if old._definition.library is None:
                    reason = "customops did not define it, so it cannot be replaced"
                    raise conflict(name.qualname, reason, "choose another name", user_source(), got=schema)
                if lib is not None and in_scope(old._owner):
                    raise DefinitionError(
                        "with lib= the op may outlive the scope, and the one that it replaces could not come back then",
                        op=name.qualname,
                        got=schema,
                        where=user_source(),
                        fix="replace it without lib=, or outside the scope",
                    )
            if old is not None:
                old._owner._drop(old, replaced(name.qualname, user_source()))
            try:
                if lib is not None:
                    define_in(lib, name, schema, all_tags)
                else:
                    operator = OperatorHandle.define_from_text(name, schema, all_tags, user_source())
                    op: AnyOp = CustomOpDef(self, name)
                    op._become(operator)
                    self._enter(op, functools.partial(end, op, old))
            except BaseException:
                if old is not None and not names.exists(name):
                    old._owner._restore(old)
                raise

    def impl(
        self, qualname: str, types: Names, func: Fn | None = None, *, lib: Lib = None,
        on_conflict: ImplConflict = "replace",
    ) -> Any:  # fmt: skip
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
        check_choice("on_conflict", on_conflict, ImplConflict, qualname, RegistrationError)
        if func is None:
            return functools.partial(self.impl, qualname, keys, lib=lib, on_conflict=on_conflict)
        if not callable(func):
            raise CallbackError("the kernel must be callable", op=qualname, got=brief(func), where=user_source())
        name = Name.parse(qualname)
        with lock:
            if on_conflict != "replace" and _torch.dispatcher.is_known(name.qualname):
                taken = [key for key in keys if _torch.dispatcher.has_kernel(name.qualname, key)]
                if taken and on_conflict == "error":
                    raise RegistrationError(
                        f"there is a kernel at {', '.join(taken)} already",
                        op=name.qualname,
                        where=user_source(),
                        fix='on_conflict="replace" or "skip"',
                    )
                keys = tuple(key for key in keys if key not in taken)
            if keys and _torch.library.is_defined(name.packet, name.overload):
                op = self.adopt(qualname)
                op._register(lib, op._rules.raw.register, keys, func)
            elif keys:
                library = lib or Library(name.namespace, "FRAGMENT")
                if lib is None:
                    registration = Registration(functools.partial(_torch.library.destroy_library, library))
                    self._waiting.append(registration)
                    record_in_scope(self, registration)
                for key in keys:
                    library.impl(name.qualname, func, key)  # the full name: torch refuses that of another namespace
        return func

    # Ops of others ------------------------------------------------------------------------------------------------

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
            stale = self._adopted.get(qualname)
            for known in (_torch.library.torch_op_of(qualname), self._ops.get(qualname), stale):
                if isinstance(known, CustomOpDef) and known._opoverload is found:
                    return known
            if stale is not None:  # of an op that is gone, redefined by its owner
                self._drop(stale)
            operator = OperatorHandle.attach(found, user_source())
            adopted: AnyOp = CustomOpDef(self, operator.name)
            self._adopted[qualname] = adopted._become(operator)
            library = _torch.library.library_of(qualname)
            if library is not None:
                lost = functools.partial(self._lost, qualname, weakref.ref(library))
                _torch.library.on_library_destroyed(library, lost)
            return adopted

    def _lost(self, qualname: str, library: weakref.ref[Library]) -> None:
        """The library of an op that may have been adopted was destroyed, or collected: calls raise.

        What was registered for the name of the op stays, as torch keeps it.
        """
        found = library()
        if found is None or not _torch.library.library_alive(found):  # else the interpreter exits
            with lock:
                if (op := self._adopted.get(qualname)) is not None:
                    op._definition.removed = error = destroyed(qualname)
                    op._definition.recompile()
                    _torch.library.disconnect_overload(op._opoverload, error)
                    op._compute_entry()

    # Lifetime -----------------------------------------------------------------------------------------------------

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
                self._drop(op)
            while self._waiting:
                self._waiting.pop().unregister()

    def _reduce(self, qualname: str) -> tuple[Any, ...]:
        """How an op is pickled: by its name, whatever the registry; the process that loads it defines it first."""
        return _load, (qualname,)


def _check_same(old: AnyOp, schema: Schema, tags: tuple[torch.Tag, ...], fix: str, at: str | None) -> None:
    """Raise unless an op has this schema and these tags."""
    known = old._definition.tags
    if old.schema.exact_key != schema.exact_key or set(known) != set(tags):
        raise conflict(
            old._qualname,
            "on_conflict='reuse' needs the same schema and tags",
            fix,
            at,
            expected=f"{old.schema} {sorted(map(str, known)) or ''}",
            got=f"{schema} {sorted(map(str, tags)) or ''}",
        )


def _load(qualname: str) -> AnyOp:
    return default.adopt(qualname)


#: The registry that `customops.custom_op` and the function forms use.
default = Registry()
