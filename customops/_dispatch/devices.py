"""Device types and dispatch keys, as users name them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from customops import _torch
from customops._places import name_of
from customops._schema.model import Schema
from customops.errors import DefinitionError, RegistrationError, brief, did_you_mean

DeviceTypes = str | Sequence[str] | None
#: The dispatch key of the kernel for "every other device": it serves all backends, and is below autograd.
ANY_DEVICE = "CompositeExplicitAutograd"
#: The device types that messages name.
_KNOWN = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla", "meta")


def check_devices(device_types: DeviceTypes, schema: Schema, op: str) -> tuple[str | None, ...]:
    """Return `device_list`; raise if no argument of the op determines the device."""
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
    """Return device types, or their dispatch keys, as a checked tuple; (None,) is every device, as "default" is."""
    if device_types is None:
        return (None,)
    given: tuple[Any, ...] = (device_types,)
    if isinstance(device_types, Iterable) and not isinstance(device_types, str):
        given = tuple(device_types)
    devices: dict[str | None, None] = {}
    for device in given:
        if device in ("default", ANY_DEVICE):
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
    """Return the dispatch keys for keys, device types or "default"."""
    types = tuple(types) if isinstance(types, Iterable) and not isinstance(types, str) else (types,)
    if not types:
        raise RegistrationError("no dispatch key is given", op=op, argument="types", fix='"default" is every device')
    keys: dict[str, None] = {}
    for each in types:
        if each == "default":
            each = ANY_DEVICE
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
