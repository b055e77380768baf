"""From what `custom_op` was given to an `OpSpec`, and from that to an op."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypedDict, get_args

from customops import _compat
from customops._codegen import bypass
from customops._codegen.function import variable_name
from customops._compat.libraries import Library
from customops._dispatch.callbacks import Fn, bind_kernel
from customops._dispatch.devices import DeviceTypes, check_devices
from customops._dispatch.name import Name
from customops._dispatch.operator import OperatorHandle, with_pt2_compliant
from customops._dispatch.removal import remove
from customops._dispatch.results import CheckPolicy, check_policy
from customops._dispatch.spec import OpSpec
from customops._lifetime import Owner
from customops._lowering.lowering import Lowering
from customops._op import CustomOpDef
from customops._rules import Rules
from customops._schema.differentiability import Differentiable, Names
from customops._schema.infer import read
from customops._schema.layout import Layout, with_layout
from customops._schema.model import Schema
from customops._schema.parse import check_nameless, parse
from customops._schema.tags import Tags, check_tags, normalize_tags
from customops.errors import DefinitionError, SchemaError, UnregisteredError, brief, location_of, user_source, where

#: What `custom_op` does where an op of the name exists.
OnConflict = Literal["replace", "error", "reuse", "skip"]


def check_on_conflict(value: Any, op: str) -> None:
    if value not in get_args(OnConflict):
        raise DefinitionError(
            "on_conflict has no such value", op=op, expected='"replace", "error", "reuse" or "skip"', got=brief(value)
        )


def is_lazy(value: Any, op: str) -> bool:
    if not isinstance(value, bool):
        raise DefinitionError("lazy must be True, False or None", op=op, got=brief(value))
    return value


def _direct_in_graphs(given: Any, op: str) -> bool:
    """What an op and the environment say together of ``direct_in_graphs``. The environment decides."""
    value = os.environ.get("CUSTOMOPS_DIRECT_IN_GRAPHS")
    if value not in (None, "", "0", "1"):
        raise DefinitionError(
            "the environment variable CUSTOMOPS_DIRECT_IN_GRAPHS has no such value",
            op=op,
            expected='"0" or "1"',
            got=brief(value),
        )
    if not isinstance(given, bool):
        raise DefinitionError("direct_in_graphs must be True, False or None", op=op, got=brief(given))
    return value == "1" if value else given


class DefinitionOptions(TypedDict, total=False):
    """What `Registry.custom_op` takes by keyword."""

    mutates_args: str | Iterable[str] | None
    device_types: DeviceTypes
    schema: str | None
    tags: Tags
    layout: Layout | None
    on_conflict: OnConflict
    check: CheckPolicy | None
    bypass: bool
    direct_in_graphs: bool | None
    traceable: bool
    differentiable: bool | Sequence[bool]
    nondiff_args: Names
    lib: Library | None
    lazy: bool | None


def spec_of(
    name: Name,
    fn: Fn,
    *,
    mutates_args: str | tuple[str, ...] | None,
    device_types: DeviceTypes,
    schema: str | None,
    tags: Tags,
    layout: Layout | None,
    check: CheckPolicy | None,
    bypass: bool,
    direct_in_graphs: bool,
    traceable: bool,
    differentiable: bool | Sequence[bool],
    nondiff_args: str | tuple[str, ...],
) -> OpSpec:
    """What `Registry.custom_op` was given, as an `OpSpec`."""
    op, all_tags = str(name), with_pt2_compliant(with_layout(normalize_tags(tags), layout, str(name)))
    signature = kernel = None
    if schema is None:
        wanted, all_tags, signature = read(fn, mutates_args, all_tags, op=op)
    else:
        wanted = _manual_schema(schema, mutates_args, op, fn)
        check_tags(wanted, all_tags, op=op, where=location_of(fn))
    if signature is not None:
        lowering = Lowering(signature, wanted, op)
        kernel, nondiff_args = lowering.kernel(fn), lowering.names(nondiff_args, "nondiff_args")
    return OpSpec(
        name,
        wanted,
        all_tags,
        schema,
        fn,
        signature,
        kernel,
        device_types=_devices(device_types),
        check=check_policy(check, op),
        differentiable=Differentiable.of(differentiable, nondiff_args, wanted, op),
        bypass=bypass,
        direct_in_graphs=_direct_in_graphs(direct_in_graphs, op),
        traceable=traceable,
        source=user_source(),
    )


def _devices(device_types: DeviceTypes) -> DeviceTypes:
    """What an iterator gives is read once."""
    if device_types is None or isinstance(device_types, str) or not isinstance(device_types, Iterable):
        return device_types
    return tuple(device_types)


def check_spec(spec: OpSpec) -> None:
    """Raise what can be found wrong without changing anything."""
    if not isinstance(spec.bypass, bool):
        raise DefinitionError("bypass must be True or False", op=spec.qualname, got=brief(spec.bypass))
    for option, value in (("bypass", spec.bypass), ("traceable", spec.traceable)):
        if not isinstance(value, bool):
            raise DefinitionError(f"{option} must be True or False", op=spec.qualname, got=brief(value))
    assert spec.kernel is not None
    bind_kernel(spec.kernel, spec.schema, spec.qualname, "kernel")
    for argument in spec.schema.keyword_only:
        variable_name(argument)  # raises for a keyword of Python
    check_devices(spec.device_types, spec.schema, spec.qualname)
    _check_variant(spec)


def _check_variant(spec: OpSpec) -> None:
    """Raise if another op has the name of the mutation-only variant."""
    if spec.mutation_only is None:
        return
    name = spec.mutation_only.name
    taken = _compat.libraries.find_overload(name.packet, name.overload)
    replaced = _compat.registries.torch_op_of(spec.qualname)
    definition = vars(replaced).get("_definition") if isinstance(replaced, CustomOpDef) else None
    variant = definition.mutation_only if definition is not None else None
    if taken is not None and (variant is None or variant.overload is not taken):
        raise DefinitionError(
            f"an op {name} exists: the variant of this one that returns nothing has that name",
            op=spec.qualname,
            fix="rename one of them",
        )


#: Makes the object of an op, of a class that is made for it.
Make = Callable[[type[CustomOpDef[Any, Any]], Owner, OperatorHandle, Rules | None], CustomOpDef[Any, Any]]


def make(cls: type[CustomOpDef[Any, Any]], *args: Any) -> CustomOpDef[Any, Any]:
    return cls(*args)


def define_op(spec: OpSpec, owner: Owner, rules: Rules | None = None, make: Make = make) -> CustomOpDef[Any, Any]:
    """Define an op, with `rules` that hold nothing yet. The dispatcher is as before if that fails."""
    check_spec(spec)
    known = _compat.namespaces.exists(spec.name.namespace)
    operator = OperatorHandle.define(spec)
    try:
        return make(_class_of(spec), owner, operator, rules)
    except BaseException:
        remove(operator, UnregisteredError("the definition of the op failed", op=spec.qualname))
        if not known:
            _compat.namespaces.forget(spec.name.namespace)
        raise


def _manual_schema(text: str, mutates_args: str | tuple[str, ...] | None, op: str, fn: Fn) -> Schema:
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
    mutated = {argument.name for argument in schema.mutated}
    if mutates_args not in ("unknown", None) and mutated != set(mutates_args):
        raise SchemaError(
            f"the schema and mutates_args disagree: by the schema, the op mutates {mutated or '{}'}",
            op=op,
            expected=f"mutates_args={tuple(sorted(mutated))}",
            got=f"mutates_args={mutates_args!r}, schema={text!r}",
            where=where(fn),
        )
    return schema


def _class_of(spec: OpSpec) -> type[CustomOpDef[Any, Any]]:
    """The class of an op's object; of one op, if its ``__call__`` is generated for it."""
    cls: type[CustomOpDef[Any, Any]] = CustomOpDef
    if spec.bypass and bypass.obstacle(spec.schema) is None:
        call = bypass.call(spec.schema, spec.tags, spec.qualname, spec.check)
        cls = _calling(cls, _compat.dynamo.outside_dynamo(call))
    if spec.signature is not None:
        lowering = Lowering(spec.signature, spec.schema, spec.qualname)
        cls = _calling(cls, lowering.call(cls.__call__ if cls is not CustomOpDef else None), _lowering=lowering)
    return cls


def _calling(cls: type[CustomOpDef[Any, Any]], call: Any, **attributes: Any) -> type[CustomOpDef[Any, Any]]:
    _compat.dynamo.hidden_files.add(call.__code__.co_filename)
    return type(CustomOpDef.__name__, (cls,), {"__call__": call, **attributes})
