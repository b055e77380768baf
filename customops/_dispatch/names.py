"""Names of ops, device types and dispatch keys."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from customops import _torch
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


def exists(name: Name) -> bool:
    """Return whether an op of this name is defined."""
    return _torch.library.is_defined(name.packet, name.overload)


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
