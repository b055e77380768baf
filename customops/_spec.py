"""`Plan`: all that is needed to define an op, and what can be found wrong with it before anything is changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from customops import _compat
from customops._codegen import bypass
from customops._dispatch.callbacks import Fn, bind_kernel
from customops._dispatch.devices import DeviceTypes, check_devices
from customops._dispatch.name import Name
from customops._dispatch.operator import Definition, with_pt2_compliant
from customops._dispatch.results import CheckPolicy, check_policy
from customops._lifetime import Owner
from customops._op import CustomOpDef
from customops._schema.differentiability import ALL, Differentiable
from customops._schema.infer import schema_of
from customops._schema.model import Schema
from customops._schema.parse import check_nameless, parse
from customops._schema.tags import Tags, check_tags, normalize_tags
from customops.errors import DefinitionError, SchemaError, UnregisteredError, brief, location_of, where


@dataclass(frozen=True)
class OpSpec:
    """All that is needed to define an op; nothing is changed before `define` is called."""

    name: Name
    fn: Fn
    schema: Schema
    tags: tuple[torch.Tag, ...]
    device_types: DeviceTypes
    text: str | None
    when: CheckPolicy
    bypass: bool
    differentiable: Differentiable = ALL

    @classmethod
    def of(
        cls,
        name: Name,
        fn: Fn,
        *,
        mutates_args: str | tuple[str, ...],
        device_types: DeviceTypes,
        schema: str | None,
        tags: Tags,
        check: CheckPolicy | None,
        bypass: bool,
        differentiable: bool | Sequence[bool],
        nondiff_args: str | tuple[str, ...],
    ) -> OpSpec:
        """The plan for what `Registry.custom_op` was given."""
        op, all_tags = str(name), with_pt2_compliant(normalize_tags(tags))
        if schema is None:
            wanted = schema_of(fn, mutates_args, all_tags, op=op)
        else:
            wanted = _manual_schema(schema, mutates_args, op, fn)
            check_tags(wanted, all_tags, op=op, where=location_of(fn))
        gradients = Differentiable.of(differentiable, nondiff_args, wanted, op)
        when = check_policy(check, op)
        return cls(name, fn, wanted, all_tags, device_types, schema, when, bypass, gradients)

    def check(self) -> tuple[str | None, ...]:
        """Raise what can be found wrong without changing anything; returns the device types."""
        op = str(self.name)
        if not isinstance(self.bypass, bool):
            raise DefinitionError("bypass must be True or False", op=op, got=brief(self.bypass))
        if self.bypass:
            bypass.refuse(self.schema, op)
        bind_kernel(self.fn, self.schema, op, "kernel")
        return check_devices(self.device_types, self.schema, op)

    def define(self, owner: Owner) -> CustomOpDef[Any, Any]:
        """Define the op. The dispatcher is as before if that fails."""
        devices = self.check()
        bind_kernel(self.fn, self.schema, str(self.name), "kernel", warn=True)
        definition = Definition.define(self.name, self.schema, self.tags, self.text)
        try:
            cls: Any = _bypassing(self) if self.bypass else CustomOpDef
            op: CustomOpDef[Any, Any] = cls(owner, definition, self.fn, self.text, self.when, self.differentiable)
            op._install(devices)
        except BaseException:
            definition.remove(UnregisteredError("the definition of the op failed", op=str(self.name)))
            raise
        return op


def _manual_schema(text: str, mutates_args: str | tuple[str, ...], op: str, fn: Fn) -> Schema:
    """Parse ``schema=``, which must agree with `mutates_args`."""
    check_nameless(text, op)
    schema = parse(text)
    for argument in schema.arguments:
        if "(" in argument.type:  # what is left of an alias annotation
            raise SchemaError(
                "only tensors can be written, or returned as views: torch has alias annotations for no other type",
                op=op,
                argument=argument.name,
                got=argument.type,
                where=where(fn),
                fix=f"make {argument.name} a Tensor (of no dimensions, for a number), or drop the annotation",
            )
    written = {argument.name for argument in schema.mutated}
    if mutates_args != "unknown" and written != set(mutates_args):
        raise SchemaError(
            f"the schema and mutates_args disagree: by the schema, the op mutates {written or '{}'}",
            op=op,
            expected=f"mutates_args={tuple(sorted(written))}",
            got=f"mutates_args={mutates_args!r}, schema={text!r}",
            where=where(fn),
        )
    return schema


def _bypassing(plan: OpSpec) -> type[CustomOpDef[Any, Any]]:
    """A class for one op, whose ``__call__`` is written for it."""
    source = bypass.source(plan.schema, plan.tags, str(plan.name), plan.when)
    call: Any = _compat.dynamo.outside_dynamo(source.build())
    _compat.dynamo.hidden_files.add(call.__code__.co_filename)
    return type(CustomOpDef.__name__, (CustomOpDef,), {"__call__": call})
