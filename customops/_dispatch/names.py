"""Names that users give: of ops, with what waits for the first use of one, and of device types and dispatch keys."""

from __future__ import annotations

import importlib.metadata
import logging
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from customops import _torch
from customops._dispatch.registrations import lock
from customops._schema.model import Schema
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

    packet: str  #: the name all overloads share
    local: str  #: the name inside the namespace
    qualname: str

    def __new__(cls, namespace: str, name: str, overload: str = "") -> Name:
        self = super().__new__(cls, namespace, name, overload)
        self.packet = f"{namespace}::{name}"
        self.local = f"{name}.{overload}" if overload else name
        self.qualname = f"{namespace}::{self.local}"
        return self

    @classmethod
    def parse(cls, text: str) -> Name:
        """Split a qualified name, ``namespace::name`` or ``namespace::name.overload``."""
        example = 'a name looks like "mylib::scale"'
        if callable(text):
            example = f'@custom_op("mylib::{name_of(text)}", mutates_args=())'
        if not isinstance(text, str):
            raise DefinitionError("the name of an op must be a string", got=brief(text), fix=example)
        namespace, separator, rest = text.partition("::")
        name, dot, overload = rest.partition(".")
        parts = [namespace, name, overload] if dot else [namespace, name]
        if not separator or not all(map(_IDENTIFIER.fullmatch, parts)):
            words = _IDENTIFIER.findall(text)
            if 1 <= len(words) <= 2 and len(text) < 100:
                example = f'"{"::".join(["mylib", *words][-2:])}"'
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
        """Raise DefinitionError if no op can be defined by this name, or none that could be found by it."""
        problem = _torch.schema.name_problem(self)
        if problem is not None:
            problem = f"an op cannot have this name: {problem}"
            raise DefinitionError(problem, op=self.qualname, fix="choose another name")

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
_lazy: dict[str, dict[str, Any]] = {}
_callbacks: dict[str, list[Callback]] = {}
#: Ops that torch.library.custom_op is defining: callbacks come when it is done.
being_defined: set[str] = set()


def declare(qualname: str, op: Any) -> None:
    """From now on a use of the op, an object of `_op`, defines it."""
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

    An entry point or a lazy op that raises does so each time. `is_use` is False where the op is about to be defined.
    """
    use(packet.partition("::")[0], is_use)
    if not any(op._defined_here() for op in _lazy.get(packet, {}).values()):
        for qualname in list(_lazy.get(packet, ())):
            op = declared(qualname)  # what came before may have defined it
            if op is not None:
                (op._taken if packet in being_defined else op._define)()
    defined(packet)


def defined(packet: str | None) -> None:
    """Call back who waits for an op that may be there now; None stands for all ops."""
    if not _callbacks:
        return
    for each in [packet] if packet is not None else list(_callbacks):
        if each not in _callbacks or each in being_defined:
            continue
        with lock:
            ready = [callback for callback in _callbacks[each] if is_defined(callback.qualname)]
            _callbacks[each] = [callback for callback in _callbacks[each] if callback not in ready]
            if not _callbacks[each]:
                del _callbacks[each]
        for callback in ready:  # none is in the table any more: a callback that raises is not called again
            callback()


def torch_defined(packet: str) -> None:
    being_defined.discard(packet)
    defined(packet)


# Entry points ---------------------------------------------------------------------------------------------------------


#: The threads that load entry points, each with the namespace that these are of.
_loading: set[tuple[int, str]] = set()
#: Namespace -> entry points that are to be loaded before its first use.
_entry_points: dict[str, list[importlib.metadata.EntryPoint]] | None = None


def waits(namespace: str) -> bool:
    """Are there entry points of a namespace that are not loaded yet? They are looked for once, with the first op."""
    return namespace in _find()


def _find() -> dict[str, list[importlib.metadata.EntryPoint]]:
    """The entry points of the installed packages."""
    global _entry_points
    if _entry_points is not None:
        return _entry_points
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


def use(namespace: str, is_use: bool = True) -> None:
    """Load the entry points of a namespace, unless that was done, or is being done by this thread.

    Without the lock: threads that import modules wait for each other already, and two locks could wait crosswise.
    """
    waiting = _find().get(namespace)
    if not is_use or waiting is None:
        return
    here = (threading.get_ident(), namespace)
    if here in _loading:
        return
    _loading.add(here)
    try:
        with _torch.tensors.without_modes():
            for entry_point in list(waiting):
                _load(entry_point, waiting)
    finally:
        _loading.discard(here)
    _find().pop(namespace, None)
    _torch.library.release(namespace)


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


# The overload that a user means ---------------------------------------------------------------------------------------


def find_op(op: Any) -> OpOverload:
    """The overload that a user means by an OpOverload, a packet, a name, or torch's own CustomOpDef."""
    overload = getattr(op, "_opoverload", op)
    if isinstance(overload, OpOverload):
        return overload
    if isinstance(op, OpOverloadPacket):
        overloads = op.overloads()
        if len(overloads) != 1:
            raise RegistrationError(
                f"{op} has several overloads", got=", ".join(overloads), fix=f"e.g. {op}.{overloads[0]}"
            )
        return find_op(getattr(op, overloads[0]))
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


# Device types and dispatch keys ---------------------------------------------------------------------------------------

DeviceTypes = str | Sequence[str] | None
#: Where the kernel for "every other device" goes: it serves all backends, and is below autograd.
_ANY_DEVICE = "CompositeExplicitAutograd"
#: Device types that are named in messages.
_KNOWN = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla", "meta")


def check_devices(device_types: DeviceTypes, schema: Schema, op: str) -> tuple[str | None, ...]:
    """`device_list`; raise also where nothing in the op's arguments says which device's kernel to run."""
    devices = device_list(device_types, op)
    if devices != (None,) and not schema.tensors and schema.device_argument is None:
        raise DefinitionError(
            "Functions without tensor inputs are required to have a `device: torch.device` argument",
            op=op,
            expected="a device to choose the kernel by",
            got=str(schema),
            fix="add one, or register the kernel for every device with device_types=None",
        )
    return devices


def device_list(device_types: DeviceTypes, op: str) -> tuple[str | None, ...]:
    """The device types, or their dispatch keys, as a checked tuple; (None,) is every device, as torch's "default"."""
    if device_types is None:
        return (None,)
    given: tuple[Any, ...] = (device_types,)
    if isinstance(device_types, Iterable) and not isinstance(device_types, str):
        given = tuple(device_types)
    devices: dict[str | None, None] = {}
    for device in given:
        if device in ("default", _ANY_DEVICE):
            device = None
        elif isinstance(device, str) and _torch.dispatcher.is_dispatch_key(device):
            device = _torch.dispatcher.device_of_key(device) or device
        if device is not None:
            _check_device(device, op)
        devices[device] = None
    if not devices:
        raise DefinitionError("device_types is empty", op=op, fix="device_types=None stands for every device")
    return tuple(devices)


def dispatch_keys(types: str | Iterable[str], op: str) -> tuple[str, ...]:
    """The dispatch keys that are meant by keys, device types or "default"."""
    types = tuple(types) if isinstance(types, Iterable) and not isinstance(types, str) else (types,)
    if not types:
        raise RegistrationError("no dispatch key is given", op=op, argument="types", fix='"default" is every device')
    keys: dict[str, None] = {}
    for each in types:
        if each == "default":
            each = _ANY_DEVICE
        elif not (isinstance(each, str) and _torch.dispatcher.is_dispatch_key(each)):
            _check_device(each, op, "types")
            each = _torch.dispatcher.device_key(each)
        keys[each] = None
    return tuple(keys)


def _check_device(device_type: Any, op: str, argument: str = "device_types") -> None:
    fields: dict[str, str] = {"op": op, "argument": argument, "got": brief(device_type)}
    if not isinstance(device_type, str):
        right = f'"{device_type.type}"' if isinstance(device_type, torch.device) else "None, for all devices"
        if callable(device_type):
            right = f'@register_kernel("cpu"), with the device type, above {name_of(device_type)}'
        raise DefinitionError("a device type must be a string", expected='e.g. "cpu" or "cuda"', fix=right, **fields)
    try:
        _torch.dispatcher.device_key(device_type)
    except RuntimeError as error:
        known = [each for each in _KNOWN if _torch.dispatcher.is_device_type(each)]
        word = device_type.partition(":")[0].lower()
        meant = "cuda" if word == "gpu" else word if _torch.dispatcher.is_device_type(word) else None
        fix = f'"{meant}", for all devices of the type' if meant else did_you_mean(word, known)
        if _torch.dispatcher.is_dispatch_key(device_type):
            fix = "; ".join(filter(None, [fix, "customops.impl takes dispatch keys"]))
        raise RegistrationError(
            f"unknown device type: Expected one of {', '.join(known)}, ...", fix=fix, **fields
        ) from error
