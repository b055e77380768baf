"""Autocast: the dtype that floating inputs are cast to, for each device type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from customops import _torch
from customops._dispatch.operator import OperatorHandle
from customops._dispatch.registrations import Registration, Undo
from customops._dispatch.rule import Rule
from customops._schema.model import Schema
from customops.errors import DefinitionError, RegistrationError, brief


class AutocastRule(Rule[str, torch.dtype]):
    """device type -> dtype. Registering a device again replaces its dtype."""

    #: The op's out variant, and the devices for which its inputs are cast, too.
    _follower: OperatorHandle | None = None
    _followed: frozenset[str] = frozenset()

    def register(self, device_type: str, cast_inputs: torch.dtype) -> Registration:
        op = self.operator.qualname
        if not isinstance(device_type, str):
            raise DefinitionError(
                "register_autocast expects the device type as a string",
                op=op,
                got=brief(device_type),
                fix='e.g. "cuda"',
            )
        if not isinstance(cast_inputs, torch.dtype) or not cast_inputs.is_floating_point:
            example = getattr(torch, cast_inputs.removeprefix("torch."), 0) if isinstance(cast_inputs, str) else 0
            if not isinstance(example, torch.dtype) or not example.is_floating_point:
                example = torch.bfloat16
            raise DefinitionError(
                "register_autocast expects a torch.dtype to cast to, of floating point",
                op=op,
                argument="cast_inputs",
                got=brief(cast_inputs),
                fix=f'register_autocast("{device_type}", {example})',
            )
        try:
            is_available = torch.amp.is_autocast_available(device_type)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise RegistrationError(f"unknown device type: {reason}", op=op, got=brief(device_type)) from error
        if not is_available:
            raise DefinitionError(
                f"device type {device_type!r} does not support autocast", op=op, argument="device_type"
            )
        return self.set(device_type, cast_inputs)

    def follow(self, variant: OperatorHandle) -> None:
        """Let the inputs of the op's out variant be cast, too, as those of the op are."""
        self._follower, self._followed = variant, frozenset()
        for device_type in self.values:
            self._install_at_follower(device_type)

    def _install(self, device_type: str, own_library: bool) -> Undo:
        self._install_at_follower(device_type)
        return self._impl(self.operator, device_type, own_library)

    def _install_at_follower(self, device_type: str) -> None:
        """It stays there as long as the variant: without a dtype it does nothing."""
        variant = self._follower
        if variant is not None and variant.removed is None and device_type not in self._followed:
            self._impl(variant, device_type, True)
            self._followed |= {device_type}

    def _impl(self, operator: OperatorHandle, device_type: str, own_library: bool) -> Undo:
        key = "Autocast" + _torch.dispatcher.device_key(device_type)
        # Without a dtype it was taken back while a call was on its way.
        fn = casting(operator.overload, operator.schema, device_type, key, lambda: self.values.get(device_type))
        return operator.impl(fn, key, own_library=own_library)


def casting(
    overload: Any, schema: Schema, device_type: str, key: str, dtype_of_call: Callable[[], torch.dtype | None]
) -> Callable[..., Any]:
    """A kernel for an autocast key: cast the inputs, if there is a dtype, then call the op again without that key."""
    own_key = _torch.dispatcher.key_set(key)
    # What is written to stays: the op would write to the cast copy.
    stays = [argument.is_mutated for argument in schema.positional]
    named_stays = {argument.name for argument in schema.keyword_only if argument.is_mutated}

    def autocast(*args: Any, **kwargs: Any) -> Any:
        dtype = dtype_of_call()
        with _torch.dispatcher.exclude_keys(own_key):
            if dtype is None:
                return overload(*args, **kwargs)
            return overload(
                *(x if stay else _cast(x, device_type, dtype) for x, stay in zip(args, stays, strict=False)),
                **{k: x if k in named_stays else _cast(x, device_type, dtype) for k, x in kwargs.items()},
            )

    return _torch.dynamo.outside_dynamo(autocast)


def _cast(value: Any, device_type: str, dtype: torch.dtype) -> Any:
    """Tensors of the device, alone or in a list, are cast; float64 is left alone, as torch's own autocast does."""
    if isinstance(value, Tensor):
        eligible = value.is_floating_point() and value.device.type == device_type and value.dtype != torch.float64
        return value.to(dtype) if eligible else value
    if isinstance(value, (list, tuple)):
        return [_cast(item, device_type, dtype) for item in value]
    return value
