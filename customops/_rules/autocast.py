"""Autocast: the dtype that floating inputs are cast to, for each device type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from customops import _compat
from customops._definition import Definition, Undo, put_back
from customops.errors import DefinitionError, RegistrationError


class AutocastRule:
    """device type -> dtype. Registering a device again replaces its dtype."""

    def __init__(self, definition: Definition) -> None:
        self.definition = definition
        self.dtypes: dict[str, torch.dtype] = {}
        self._installed: set[str] = set()

    def install(self, definition: Definition) -> None:
        self.definition, self._installed = definition, set()
        for device_type in self.dtypes:
            self._refresh(device_type, apart=False)

    def register(self, device_type: str, cast_inputs: torch.dtype) -> Undo:
        op = str(self.definition.name)
        if not isinstance(device_type, str):
            raise DefinitionError(
                "register_autocast expects the device type as a string", op=op, got=repr(device_type), fix='e.g. "cuda"'
            )
        if not isinstance(cast_inputs, torch.dtype):
            raise DefinitionError(
                "register_autocast expects a torch.dtype to cast to",
                op=op,
                argument="cast_inputs",
                got=repr(cast_inputs),
                fix="e.g. torch.float16",
            )
        if not _has_autocast(device_type, op):
            raise DefinitionError(f"device type {device_type!r} does not support autocast", op=op)
        before = self.dtypes.get(device_type)
        self.dtypes[device_type] = cast_inputs
        undo = self._refresh(device_type, apart=True)
        return lambda: self._restore(before, device_type, undo)

    def _refresh(self, device_type: str, *, apart: bool) -> Undo | None:
        if device_type in self._installed:
            return None
        self._installed.add(device_type)
        key = "Autocast" + _compat.device_key(device_type)
        return self.definition.impl(_trampoline(self, device_type, key), key, apart=apart)

    def _restore(self, before: torch.dtype | None, device_type: str, undo: Undo | None) -> None:
        if undo is not None:
            undo()
            self._installed.discard(device_type)
        put_back(self.dtypes, device_type, before)


def _has_autocast(device_type: str, op: str) -> bool:
    try:
        return torch.amp.is_autocast_available(device_type)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise RegistrationError(f"unknown device type: {reason}", op=op, got=repr(device_type)) from error


def _trampoline(rule: AutocastRule, device_type: str, key: str) -> Callable[..., Any]:
    """The function at a device's autocast key: cast, then call the op again without that key."""
    overload, own_key = rule.definition.overload, _compat.key_set(key)
    arguments = rule.definition.schema.positional
    # What is written to stays: the op would write to the cast copy.
    written = {argument.name for argument in rule.definition.schema.mutated}

    def autocast(*args: Any, **kwargs: Any) -> Any:
        dtype = rule.dtypes[device_type]
        named = [(argument.name, value) for argument, value in zip(arguments, args, strict=False)]
        with _compat.exclude_keys(own_key):
            return overload(
                *(value if name in written else _cast(value, device_type, dtype) for name, value in named),
                **{k: value if k in written else _cast(value, device_type, dtype) for k, value in kwargs.items()},
            )

    return _compat.outside_dynamo(autocast)


def _cast(value: Any, device_type: str, dtype: torch.dtype) -> Any:
    """Tensors of the device, alone or in a list, are cast; float64 is left alone, as torch's own autocast does."""
    if isinstance(value, Tensor):
        eligible = value.is_floating_point() and value.device.type == device_type and value.dtype != torch.float64
        return value.to(dtype) if eligible else value
    if isinstance(value, (list, tuple)):
        return [_cast(item, device_type, dtype) for item in value]
    return value
