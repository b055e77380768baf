"""Device types and dispatch keys, as users name them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from customops import _compat
from customops._schema.model import Schema
from customops.errors import DefinitionError, RegistrationError, brief

DeviceTypes = str | Sequence[str] | None

#: Where the kernel for "every other device" goes: it serves all backends, and is below autograd.
_ANY_DEVICE = "CompositeExplicitAutograd"


def check_devices(device_types: DeviceTypes, schema: Schema, op: str) -> tuple[str | None, ...]:
    """Raise unless there can be kernels for these devices; returns them, (None,) for every device.

    Raises:
        RegistrationError: torch does not know a device type.
        DefinitionError: nothing in the op's arguments says which device's kernel to run.
    """
    devices = device_list(device_types, op)
    if devices != (None,) and not schema.takes_tensors and schema.device_argument is None:
        raise DefinitionError(
            "Functions without tensor inputs are required to have a `device: torch.device` argument",
            op=op,
            expected="a device to choose the kernel by",
            got=str(schema),
            fix="add one, or register the kernel for every device with device_types=None",
        )
    return devices


def device_list(device_types: DeviceTypes, op: str) -> tuple[str | None, ...]:
    """The device types as a tuple, checked; (None,) stands for every device, as torch's word "default" does.

    The dispatch key of a device stands for the device, and that of kernels for every device for these.
    """
    devices: tuple[Any, ...] = (device_types,)
    if isinstance(device_types, Iterable) and not isinstance(device_types, str):
        devices = tuple(device_types)
    devices = tuple(dict.fromkeys(_device_type(device) for device in devices))
    if not devices:
        raise DefinitionError("device_types is empty", op=op, fix="device_types=None stands for every device")
    for device_type in devices:
        if device_type is not None:
            _check_device(device_type, op)
    return devices


def _device_type(given: Any) -> Any:
    if given in ("default", _ANY_DEVICE):
        return None
    if isinstance(given, str) and _compat.dispatch.is_dispatch_key(given):
        return _compat.dispatch.device_of_key(given) or given
    return given


def dispatch_keys(types: str | Iterable[str], op: str) -> tuple[str, ...]:
    """The dispatch keys that are meant by keys, device types or "default"."""
    types = tuple(types) if isinstance(types, Iterable) and not isinstance(types, str) else (types,)
    if not types:
        raise RegistrationError("no dispatch key is given", op=op, argument="types", fix='"default" is every device')
    return tuple(dict.fromkeys(_dispatch_key(each, op) for each in types))


def _dispatch_key(type_: Any, op: str) -> str:
    if type_ == "default":
        return _ANY_DEVICE
    if isinstance(type_, str) and _compat.dispatch.is_dispatch_key(type_):
        return type_
    _check_device(type_, op, "types")
    return _compat.dispatch.device_key(type_)


def _check_device(device_type: Any, op: str, argument: str = "device_types") -> None:
    fields: dict[str, str] = {"op": op, "argument": argument, "got": brief(device_type)}
    if not isinstance(device_type, str):
        fix = f'"{device_type.type}"' if isinstance(device_type, torch.device) else None
        raise DefinitionError("a device type must be a string", expected='e.g. "cpu" or "cuda"', fix=fix, **fields)
    try:
        _compat.dispatch.device_key(device_type)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        fix = "customops.impl takes dispatch keys" if _compat.dispatch.is_dispatch_key(device_type) else None
        word = device_type.partition(":")[0].lower()
        if word == "gpu" or _compat.dispatch.is_device_type(word):
            meant = "cuda" if word == "gpu" else word
            fix = f'"{meant}", for all devices of the type' + (f"; {fix}" if fix else "")
        raise RegistrationError(f"unknown device type: {reason}", fix=fix, **fields) from error
