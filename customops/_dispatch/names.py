"""Qualified names of ops."""

from __future__ import annotations

import importlib.metadata
import keyword
import logging
import re
import threading
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch

from customops import _torch
from customops._dispatch.registrations import lock
from customops._torch.library import OpOverload, OpOverloadPacket
from customops.errors import DefinitionError, RegistrationError, brief, did_you_mean, name_of

__tracebackhide__ = True  # pytest leaves the frames out


_IDENTIFIER = re.compile(r"[A-Za-z_]\w*", re.ASCII)

#: Namespaces that are torch's own.
RESERVED_NAMESPACES = frozenset({"aten", "at", "prim", "prims", "pytorch", "torch"})


class _Parts(NamedTuple):
    namespace: str
    name: str
    overload: str = ""


class Name(_Parts):
    """``namespace::name`` or ``namespace::name.overload``."""

    @classmethod
    def parse(cls, text: str) -> Name:
        """Split a qualified name.

        Raises:
            DefinitionError: it is not of the form ``namespace::name`` or ``namespace::name.overload``.
        """
        example = 'a name looks like "mylib::scale"'
        if callable(text):
            example = f'@custom_op("mylib::{name_of(text)}", mutates_args=())'
        if not isinstance(text, str):
            raise DefinitionError("the name of an op must be a string", got=brief(text), fix=example)
        words = _IDENTIFIER.findall(text)
        if 1 <= len(words) <= 2 and len(text) < 100:
            example = f'"{"::".join(["mylib", *words][-2:])}"'
        namespace, separator, rest = text.partition("::")
        name, dot, overload = rest.partition(".")
        parts = [namespace, name, overload] if dot else [namespace, name]
        if not separator:
            raise DefinitionError(
                "the name of an op needs a namespace", expected='"namespace::name"', got=brief(text), fix=example
            )
        for part in parts:
            if not _IDENTIFIER.fullmatch(part):
                raise DefinitionError(
                    f"{brief(part)} is not a valid part of an op name",
                    expected="namespace::name or namespace::name.overload, of letters, digits and _",
                    got=brief(text),
                    fix=example,
                )
        if overload == "default":
            raise DefinitionError(
                'the overload name "default" is taken: it stands for the overload without a name',
                got=brief(text),
                fix=f'"{namespace}::{name}"',
            )
        return cls(namespace, name, overload)

    def check_new(self) -> None:
        """Raise DefinitionError if no op can be defined by this name, or none that could be found by it.

        Graphs are Python source, with the names in it. And an op is an attribute in ``torch.ops``, beside others.
        """
        problem = None
        for part in self:
            if keyword.iskeyword(part) or not _torch.schema.is_word_of_schema(part):
                problem = f"{part!r} is a keyword of Python or of schemas"
        if _torch.schema.taken_by_torch(self):
            problem = f"{_torch.schema.taken_by_torch(self)} is something else"
        if problem is not None:
            problem = f"an op cannot have this name: {problem}"
            raise DefinitionError(problem, op=self.qualname, fix="choose another name")

    @cached_property
    def packet(self) -> str:
        """The name all overloads share."""
        return f"{self.namespace}::{self.name}"

    @cached_property
    def local(self) -> str:
        """The name inside the namespace."""
        return f"{self.name}.{self.overload}" if self.overload else self.name

    @cached_property
    def qualname(self) -> str:
        return f"{self.namespace}::{self.local}"

    def __str__(self) -> str:
        return self.qualname


def own_name(text: str) -> Name:
    """The name for an op to be defined."""
    name = Name.parse(text)
    if name.namespace in RESERVED_NAMESPACES:
        raise DefinitionError(
            f"{name.namespace!r} is a reserved namespace of torch itself",
            got=brief(text),
            fix=f'use one of your own, e.g. "mylib::{name.name}"',
        )
    name.check_new()
    return name


# ----------------------------------------------------------------------------------------------------------------------
# What waits for the first use of an op or a namespace: lazy ops, callbacks of `when_defined`, entry points
# All three come to `look_up`: `torch.ops` calls it before it looks for an op (see `_torch.library`), and so does
# `find_op`. What is found once is an attribute of the namespace, so later calls do not come here.


log = logging.getLogger("customops")

#: The group of entry points: the name is a namespace, the value a module, or a function to be called.
GROUP = "customops.ops"


class Lazy(Protocol):
    """An op that is defined on first use."""

    def _define(self) -> None:
        """Define it. A second time, and where this thread is just doing so, nothing happens."""

    def _defined_here(self) -> bool:
        """Is this thread defining it?"""

    def _taken(self) -> None:
        """torch.library.custom_op takes the name."""


class Callback:
    """What `when_defined` was given."""

    def __init__(self, qualname: str, run: Callable[[], object], source: str) -> None:
        self.qualname, self.run, self.source = qualname, run, source

    def __call__(self) -> None:
        try:
            self.run()
        except Exception as error:
            raise RegistrationError(
                f"the callback of when_defined raised {type(error).__name__}: {first_line(error)}",
                op=self.qualname,
                where=self.source,
            ) from error


def first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")


def packet_of(qualname: str) -> str:
    """The name that all overloads share."""
    return qualname.partition(".")[0]


#: Name of all overloads -> the lazy ops that are not defined yet, and the callbacks, by qualified name.
_lazy: dict[str, dict[str, Lazy]] = {}
_callbacks: dict[str, list[Callback]] = {}
#: Ops that torch.library.custom_op is defining: callbacks come when it is done.
_being_defined: set[str] = set()


def declare(qualname: str, op: Lazy) -> None:
    """From now on a use of the op defines it."""
    packet = packet_of(qualname)
    _torch.library.watch(packet.partition("::")[0])
    _lazy.setdefault(packet, {})[qualname] = op


def retract(qualname: str) -> None:
    """A lazy op is defined now, or removed."""
    waiting = _lazy.get(packet_of(qualname), {})
    waiting.pop(qualname, None)
    if not waiting:
        _lazy.pop(packet_of(qualname), None)


def declared(qualname: str) -> Any | None:
    """The lazy op of a name, if it is not defined yet."""
    return _lazy.get(packet_of(qualname), {}).get(qualname) if _lazy else None


def exists(name: Name) -> bool:
    """Is an op of this name defined, or declared?"""
    return _torch.library.is_defined(name.packet, name.overload) or declared(name.qualname) is not None


def call_when_defined(callback: Callback) -> None:
    """Call it as soon as the op is there."""
    packet = packet_of(callback.qualname)
    _torch.library.watch(packet.partition("::")[0])
    with lock:
        _callbacks.setdefault(packet, []).append(callback)


def cancel(callback: Callback) -> None:
    with lock:
        waiting = _callbacks.get(packet_of(callback.qualname), [])
        if callback in waiting:
            waiting.remove(callback)


def is_waiting(callback: Callback) -> bool:
    return callback in _callbacks.get(packet_of(callback.qualname), ())


def is_defined(qualname: str) -> bool:
    packet, _, overload = qualname.partition(".")
    return _torch.library.is_defined(packet, overload)


def look_up(packet: str, is_use: bool = True) -> None:
    """Before an op is looked for: load what may define it, define it if it is lazy, then call back who waits for it.

    An entry point or a lazy op that raises does so each time. A callback that raised is not called again.

    Args:
        packet: the name that all its overloads share.
        is_use: False where the op is about to be defined.
    """
    if is_use:
        use(packet.partition("::")[0])
    if not any(op._defined_here() for op in _lazy.get(packet, {}).values()):
        for qualname in list(_lazy.get(packet, ())):
            op = declared(qualname)  # what came before may have defined it
            if op is not None:
                (op._taken if packet in _being_defined else op._define)()
    defined(packet)


def defined(packet: str | None) -> None:
    """Call back who waits for an op that may be there now; None stands for all ops."""
    if not _callbacks:
        return
    for each in [packet] if packet is not None else list(_callbacks):
        if each not in _callbacks or each in _being_defined:
            continue
        with lock:
            ready = [callback for callback in _callbacks[each] if is_defined(callback.qualname)]
            _callbacks[each] = [callback for callback in _callbacks[each] if callback not in ready]
            if not _callbacks[each]:
                del _callbacks[each]
        for callback in ready:  # none is in the table any more: a callback that raises is not called again
            callback()


def _torch_defined(packet: str) -> None:
    _being_defined.discard(packet)
    defined(packet)


# Entry points ---------------------------------------------------------------------------------------------------------

#: Namespace -> entry points that are to be loaded before its first use.
_entry_points: dict[str, list[importlib.metadata.EntryPoint]] | None = None
_loading = threading.local()


def waits(namespace: str) -> bool:
    """Are there entry points of a namespace that are not loaded yet? They are looked for once, with the first op."""
    return namespace in (_find() if _entry_points is None else _entry_points)


def _find() -> dict[str, list[importlib.metadata.EntryPoint]]:
    """The entry points of the installed packages."""
    global _entry_points
    with lock:
        if _entry_points is None:
            found: dict[str, list[importlib.metadata.EntryPoint]] = {}
            for each in importlib.metadata.entry_points(group=GROUP):
                if each.name in RESERVED_NAMESPACES:
                    log.warning("an entry point %s of %s is for a namespace of torch: ignored", each.value, GROUP)
                else:
                    found.setdefault(each.name, []).append(each)
            for namespace in found:
                _torch.library.hold(namespace)
            _entry_points = found
    return _entry_points


def use(namespace: str) -> None:
    """Load the entry points of a namespace, unless that was done, or is being done by this thread.

    Without the lock: threads that import modules wait for each other already, and two locks could wait crosswise.
    """
    waiting = (_find() if _entry_points is None else _entry_points).get(namespace)
    if waiting is None or namespace in _loading_here():
        return
    _loading_here().add(namespace)
    try:
        with _torch.library.without_modes():
            for entry_point in list(waiting):
                _load(entry_point, waiting)
    finally:
        _loading_here().discard(namespace)
    _find().pop(namespace, None)
    _torch.library.release(namespace)


def _loading_here() -> set[str]:
    """The namespaces whose entry points this thread is loading."""
    if not hasattr(_loading, "namespaces"):
        _loading.namespaces = set()
    namespaces: set[str] = _loading.namespaces
    return namespaces


def _load(entry_point: importlib.metadata.EntryPoint, waiting: list[importlib.metadata.EntryPoint]) -> None:
    try:
        loaded = entry_point.load()
        if entry_point.attr and entry_point in waiting:
            loaded()
    except Exception as error:
        package = entry_point.dist.name if entry_point.dist is not None else "an unknown package"
        raise RegistrationError(
            f"an entry point of {package} for the ops of {entry_point.name} raised "
            f"{type(error).__name__}: {first_line(error)}",
            got=f"{GROUP}: {entry_point.name} = {entry_point.value}",
            fix=f"repair or uninstall {package}",
        ) from error
    if entry_point in waiting:
        waiting.remove(entry_point)


def _before_use(namespace: str, is_use: bool) -> None:
    (use if is_use else waits)(namespace)


_torch.library.follow(_before_use, look_up)
_torch.library.watch_definitions(_being_defined.add, _torch_defined)
_torch.library.watch_loading(lambda: defined(None))


# The overload that a user means ---------------------------------------------------------------------------------------


def find_op(op: Any) -> OpOverload:
    """The overload that a user means by an OpOverload, a packet, a name, or torch's own CustomOpDef."""
    overload = getattr(op, "_opoverload", op)
    if isinstance(overload, OpOverload):
        return overload
    if isinstance(op, OpOverloadPacket):
        return only_overload(op)
    if not isinstance(op, str):
        raise DefinitionError(
            "expected an operator", expected='a CustomOpDef, an OpOverload or "ns::name"', got=brief(op)
        )
    name = Name.parse(op.removesuffix(".default"))
    found = _torch.library.find_overload(name.packet, name.overload)
    if found is None:
        look_up(name.packet)
        found = _torch.library.find_overload(name.packet, name.overload)
    if found is None:
        raise RegistrationError(
            "there is no such operator",
            op=op,
            fix=did_you_mean(op, (f"{name.namespace}::{each}" for each in vars(torch.ops).get(name.namespace, ())))
            or "define it first, or import the library that does; overloads are named ns::name.overload",
        )
    return found


def only_overload(packet: OpOverloadPacket) -> OpOverload:
    names = packet.overloads()
    if len(names) != 1:
        raise RegistrationError(
            f"{packet} has several overloads", got=", ".join(names), fix=f"e.g. {packet}.{names[0]}"
        )
    overload: OpOverload = getattr(packet, names[0])
    return overload
