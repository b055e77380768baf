"""Lazy ops: an op that is defined when it is first used, with what was registered on it until then."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

from torch.compiler import is_dynamo_compiling

from customops import _torch
from customops._codegen.lowering import Lowering
from customops._dispatch import fingerprint, names
from customops._dispatch.callbacks import Fn
from customops._dispatch.current_kernel import remove_observable
from customops._dispatch.devices import device_list
from customops._dispatch.names import Name
from customops._dispatch.operator import OperatorHandle
from customops._dispatch.registrations import lock, nothing
from customops._dispatch.scopes import Owner, in_scope, outside_scopes
from customops._dispatch.spec import OpSpec
from customops._op import definitions
from customops._op.op import CustomOpDef
from customops._rules import Rules
from customops._rules.fake import Like
from customops.errors import (
    DefinitionError,
    RegistrationError,
    UnregisteredError,
    asked_for_at,
    brief,
    location_of,
    user_source,
)

__tracebackhide__ = True  # pytest leaves the frames out

P = ParamSpec("P")
R = TypeVar("R")

#: The methods that are remembered, and the position of the function that they take; None if they take none.
_REMEMBERED: dict[str, int | None] = {
    "register_kernel": 1,
    "register_fake": 0,
    "register_out": 0,
    "register_autograd": 0,
    "register_jvp": 0,
    "register_autograd_from": 0,
    "register_autocast": None,
    "register_vmap": 0,
    "register_torch_dispatch": 1,
    "register_effect": None,
    "register_samples": 0,
    "register_decomposition": 0,
    "register_lowering": 0,
}


class _Remembered(NamedTuple):
    """A registration on an op that is not defined yet."""

    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    source: str


class _Declaration:
    """What a lazy op knows before it is defined."""

    def __init__(self, name: Name, make_spec: Callable[[], OpSpec]) -> None:
        self.name, self.qualname, self.make_spec = name, str(name), make_spec
        self.source = user_source()
        self.remembered: list[_Remembered] = []
        self.is_defined = False
        #: The thread that is defining the op.
        self.definer: int | None = None
        #: What to raise for an op that was removed before it was defined.
        self.removed: UnregisteredError | None = None
        #: What a call of the op is.
        self.call: Fn = _called_too_early

    @property
    def defined_here(self) -> bool:
        """Is this thread defining the op?"""
        return self.definer == threading.get_ident()


def _called_too_early(op: LazyOp[Any, Any], *args: Any, **kwargs: Any) -> Any:
    raise DefinitionError("the op was called while it was being defined", op=op._qualname)


@_torch.dynamo.while_tracing
def _define(qualname: str) -> int:
    """Define a lazy op, if that was not done; the number is of no meaning."""
    op = names.declared(qualname)
    if op is not None:
        op._define()
    return 0


class LazyOp(CustomOpDef[P, R]):
    """An op that is not defined yet. Any use of it defines it; then its class is `CustomOpDef`, or one made for it."""

    _lazy: _Declaration

    def __init__(self, owner: Owner, name: Name, fn: Fn, make_spec: Callable[[], OpSpec]) -> None:
        self._owner = owner
        self._init_fn = fn
        self._lazy = _Declaration(name, make_spec)
        self.__name__ = name.name
        functools.update_wrapper(cast(Any, self), cast(Any, fn), updated=())
        self._declare()

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if is_dynamo_compiling():
            _define(self._lazy.qualname)
        else:
            self._define()
        return self._lazy.call(self, *args, **kwargs)  # type: ignore[no-any-return]

    _torch.dynamo.outside_dynamo(__call__)

    def __getattr__(self, name: str) -> Any:
        # No attribute of an op is called like this: notebooks, copy and others ask whether it has such methods.
        if name.startswith("__") or name.endswith("_") or self._lazy.defined_here:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        self._define()
        return getattr(self, name)

    def __repr__(self) -> str:
        return f"<CustomOpDef({self._qualname}) not defined yet>"

    @property
    def _qualname(self) -> str:
        return self._lazy.qualname

    @property
    def source(self) -> str:
        return self._lazy.source

    def _places(self) -> list[str]:
        samples = [each.args[0] for each in self._lazy.remembered if each.method == "register_samples"]
        return [self.source, *map(location_of, samples)]

    @property
    def _lowering(self) -> Lowering | None:  # type: ignore[override]
        if self._lazy.defined_here:
            known: Lowering | None = cast(Any, type(self).__mro__[2])._lowering
            return known
        self._define()
        return self._lowering  # of another class by now

    # Before it is defined ---------------------------------------------------------------------------------------

    def _declare(self) -> None:
        self._lazy.removed = None
        self._torch_view = _torch.library.claim(self._lazy.qualname, self)
        names.declare(self._lazy.qualname, self)

    def _remember(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Keep a registration for the definition, after what can be checked without it."""
        with lock:
            if kwargs.get("lib") is not None or in_scope(self._owner):
                self._define()  # what ends earlier than the op is registered now
            if self._lazy.is_defined or self._lazy.defined_here:
                return getattr(CustomOpDef, method)(self, *args, **kwargs)
            if self._lazy.removed is not None:
                raise self._lazy.removed
            position = _REMEMBERED[method]
            if method == "register_kernel" and args:
                device_list(args[0], self._qualname)
            fn = args[position] if position is not None and len(args) > position else kwargs.get("func")
            if position is not None and fn is None:
                return functools.partial(self._remember_fn, method, args[:position], kwargs)
            _signature(method).bind(self, *args, **kwargs)
            if not (fn is None or callable(fn) or isinstance(fn, (str, Like, tuple, list))):
                raise RegistrationError(f"{method} takes a function", op=self._qualname, got=brief(fn))
            self._lazy.remembered.append(_Remembered(method, args, kwargs, user_source()))
        return fn

    def _remember_fn(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], fn: Fn, /) -> Any:
        return getattr(self, method)(*args, fn, **kwargs)

    def _rebind(self) -> None:
        self._declare()

    def _defined_here(self) -> bool:
        return self._lazy.defined_here

    def _taken(self) -> None:
        """torch.library.custom_op is defining an op of the name."""
        self._owner.drop(self, UnregisteredError("torch.library.custom_op redefined the op", op=self._qualname))

    def _unbind(self, error: UnregisteredError) -> None:
        self._lazy.removed = error
        names.retract(self._lazy.qualname)
        del self._torch_view

    # Defining ---------------------------------------------------------------------------------------------------

    def _define(self) -> None:
        """Be defined, with all that was registered. Where that fails, everything is as before."""
        with lock:
            lazy = self._lazy
            if lazy.removed is not None:
                raise lazy.removed
            if lazy.is_defined or lazy.defined_here:
                return
            before = dict(vars(self))
            lazy.definer = threading.get_ident()
            try:
                with outside_scopes(), _torch.library.without_modes():
                    cls = self._define_now()
            except BaseException:
                fingerprint.ops.discard(self)
                remove_observable(self)
                self.__class__ = LazyOp
                vars(self).update(before)
                for added in vars(self).keys() - before.keys():
                    del vars(self)[added]
                self._torch_view = _torch.library.claim(lazy.qualname, self)
                self._owner.enter(self, nothing)
                raise
            finally:
                lazy.definer = None
            names.retract(lazy.qualname)
            self.__class__ = cast(Any, cls)
            self._owner.apply_settings(self)
            lazy.call, lazy.is_defined = type(self).__call__, True
        names.look_up(lazy.name.packet, is_use=False)  # the packet is known now, and not asked for again

    def _define_now(self) -> type[CustomOpDef[Any, Any]]:
        lazy = self._lazy
        with asked_for_at(lazy.source):
            spec = lazy.make_spec()
            if _torch.library.is_defined(lazy.name.packet, lazy.name.overload):
                reason = "it was defined after this one was declared"
                fix, at = "choose another name", definitions.function_of(spec)
                raise definitions.conflict(spec.qualname, self._owner, reason, fix, at)
            self._owner.add(spec, make=self._become)
        cls = type(self).__mro__[2]
        try:
            for each in lazy.remembered:
                with asked_for_at(each.source):
                    getattr(cls, each.method)(self, *each.args, **each.kwargs)
        except BaseException:
            self.__class__ = cast(Any, cls)
            self._owner.drop(self, UnregisteredError("the definition of the op failed", op=lazy.qualname))
            raise
        return cls

    def _become(
        self, cls: type[CustomOpDef[Any, Any]], owner: Owner, operator: OperatorHandle, rules: Rules | None
    ) -> CustomOpDef[Any, Any]:
        """Be an object of `cls`, but for what other threads find here until all is registered: they wait."""
        self.__class__ = type(cls.__name__, (LazyOp, cls), {})
        cls.__init__(self, owner, operator, rules)
        return self


@functools.cache
def _signature(method: str) -> inspect.Signature:
    return inspect.signature(getattr(CustomOpDef, method))


def _remembering(method: str) -> Fn:
    @functools.wraps(getattr(CustomOpDef, method))
    def register(self: LazyOp[Any, Any], /, *args: Any, **kwargs: Any) -> Any:
        return self._remember(method, args, kwargs)

    return register


for _method in _REMEMBERED:
    setattr(LazyOp, _method, _remembering(_method))
