"""From what `custom_op` was given to an `OpSpec`, and from that to an op."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

from typing_extensions import Required, TypedDict

from customops import _compat
from customops._calls import computed
from customops._calls.classes import class_of
from customops._codegen.function import variable_name
from customops._compat.libraries import Library
from customops._dispatch.callbacks import Fn, bind_kernel
from customops._dispatch.devices import DeviceTypes, check_devices
from customops._dispatch.environment import of_environment
from customops._dispatch.name import Name
from customops._dispatch.operator import OperatorHandle
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
from customops._schema.tags import Tags, check_tags, normalize_tags, with_pt2_compliant
from customops.errors import DefinitionError, SchemaError, UnregisteredError, brief, location_of, user_source, where

#: What `custom_op` does where an op of the name exists.
OnConflict = Literal["replace", "error", "reuse", "skip"]


def check_on_conflict(value: Any, op: str) -> None:
    if value not in get_args(OnConflict):
        raise DefinitionError(
            "on_conflict has an invalid value",
            op=op,
            expected='"replace", "error", "reuse" or "skip"',
            got=brief(value),
        )


def is_lazy(value: Any, op: str) -> bool:
    if not isinstance(value, bool):
        raise DefinitionError("lazy must be True, False or None", op=op, got=brief(value))
    return value


def _switch(option: str, given: Any, op: str) -> bool:
    """What an op and the environment say together of an option."""
    if not isinstance(given, bool):
        raise DefinitionError(f"{option} must be True or False", op=op, got=brief(given))
    value: bool | None = of_environment(option, op)
    return given if value is None else value


#: Arguments that calls leave out -> what computes them of the others.
ComputedArgs = Mapping[str, Callable[..., Any]] | None

#: Is the op to be defined?
When = bool | Callable[[], bool]


class _Options(TypedDict, total=False):
    mutates_args: str | Iterable[str] | None
    device_types: DeviceTypes
    schema: str | None
    tags: Tags
    layout: Layout | None
    on_conflict: OnConflict
    check: CheckPolicy | None
    bypass: bool
    eager: bool
    direct_in_graphs: bool | None
    traceable: bool
    when: When
    differentiable: bool | Sequence[bool]
    nondiff_args: Names
    lib: Library | None
    lazy: bool | None


class DefinitionOptions(_Options, total=False):
    """What `Registry.custom_op` takes by keyword."""

    computed_args: ComputedArgs


class PlainOptions(_Options, total=False):
    """The same for an op that is called as its function is."""

    computed_args: None


class ComputingOptions(_Options, total=False):
    """The same for an op that is called with fewer arguments than its function."""

    computed_args: Required[Mapping[str, Fn]]


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
    eager: bool,
    direct_in_graphs: bool,
    traceable: bool,
    computed_args: ComputedArgs,
    differentiable: bool | Sequence[bool],
    nondiff_args: str | tuple[str, ...],
) -> OpSpec:
    """What `Registry.custom_op` was given, as an `OpSpec`."""
    op, all_tags = str(name), with_pt2_compliant(with_layout(normalize_tags(tags), layout, str(name)))
    signature = kernel = None
    starred = False
    if schema is None:
        wanted, all_tags, signature = read(fn, mutates_args, all_tags, op=op)
    else:
        wanted = _manual_schema(schema, mutates_args, op, fn)
        check_tags(wanted, all_tags, op=op, where=location_of(fn))
    if signature is not None:
        lowering = Lowering(signature, wanted, op)
        kernel, nondiff_args = lowering.kernel(fn), lowering.names(nondiff_args, "nondiff_args")
        starred = any(each.stars for each in signature.parameters)
    parameters = wanted if signature is None else lowering.parameters
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
        bypass=_switch("bypass", bypass, op),
        eager=_switch("eager", eager, op),
        direct_in_graphs=_switch("direct_in_graphs", direct_in_graphs, op),
        traceable=traceable,
        computed_args=computed.read(computed_args, [each.name for each in parameters.arguments], op, starred=starred),
        source=user_source(),
    )


def _devices(device_types: DeviceTypes) -> DeviceTypes:
    """What an iterator gives is read once."""
    if device_types is None or isinstance(device_types, str) or not isinstance(device_types, Iterable):
        return device_types
    return tuple(device_types)


def check_spec(spec: OpSpec) -> None:
    """Raise what can be found wrong without changing anything."""
    if not isinstance(spec.traceable, bool):
        raise DefinitionError("traceable must be True or False", op=spec.qualname, got=brief(spec.traceable))
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
        return make(class_of(spec, spec.options), owner, operator, rules)
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
                "a schema only supports Tensor arguments that are written, or returned as views: torch has "
                "alias annotations for no other type",
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
            fix="leave mutates_args out: the schema says it",
        )
    return schema
