"""`Plan`: all that is needed to define an op, and what can be found wrong with it before anything is changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from customops import _bypass
from customops._call import Fn, bind_kernel
from customops._definition import Definition, Name, When
from customops._op import CustomOpDef
from customops._rules.autograd import keyword_only_tensors_error
from customops._rules.kernel import DeviceTypes, check_devices
from customops._schema import Schema
from customops.errors import DefinitionError, UnregisteredError

if TYPE_CHECKING:
    from customops._registry import Registry


@dataclass(frozen=True)
class Plan:
    """All that is needed to define an op; nothing is changed before `define` is called."""

    name: Name
    fn: Fn
    schema: Schema
    tags: tuple[torch.Tag, ...]
    device_types: DeviceTypes
    text: str | None
    when: When
    bypass: bool

    def check(self) -> tuple[str | None, ...]:
        """Raise what can be found wrong without changing anything; returns the device types."""
        op = str(self.name)
        if self.schema.keyword_only_tensors and torch.Tag.out not in self.tags:
            raise keyword_only_tensors_error("custom_op", op, self.schema.keyword_only_tensors)
        if not isinstance(self.bypass, bool):
            raise DefinitionError("bypass must be True or False", op=op, got=repr(self.bypass))
        if self.bypass:
            _bypass.refuse(self.schema, op)
        if self.text is not None:  # else the schema was read off the function
            bind_kernel(self.fn, self.schema, op, "kernel")
        return check_devices(self.device_types, self.schema, op)

    def define(self, registry: Registry) -> CustomOpDef[Any, Any]:
        """Define the op. The dispatcher is as before if that fails."""
        devices = self.check()
        definition = Definition.define(self.name, self.schema, self.tags, self.text)
        try:
            cls: Any = _bypassing(self) if self.bypass else CustomOpDef
            op: CustomOpDef[Any, Any] = cls(registry, definition, self.fn, self.text, self.when)
            op._install(devices)
        except BaseException:
            definition.remove(UnregisteredError("the definition of the op failed", op=str(self.name)))
            raise
        return op


def _bypassing(plan: Plan) -> type[CustomOpDef[Any, Any]]:
    """A class for one op, whose ``__call__`` is written for it."""
    source = _bypass.source(plan.schema, plan.tags, str(plan.name), plan.when)
    return type(CustomOpDef.__name__, (CustomOpDef,), {"__call__": source.build()})
