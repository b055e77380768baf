"""From what `custom_op` was given to an `OpSpec`, and from that to an op."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from typing_extensions import Required, TypedDict

from customops import _torch
from customops._codegen import computed
from customops._codegen.lowering import Lowering
from customops._describe.render import shorter_place
from customops._dispatch import names
from customops._dispatch.callbacks import Fn, bind_kernel
from customops._dispatch.devices import DeviceTypes, check_devices
from customops._dispatch.names import Name
from customops._dispatch.operator import OperatorHandle, remove
from customops._dispatch.registrations import Undo
from customops._dispatch.results import CheckPolicy, check_policy, of_environment
from customops._dispatch.scopes import Owner, in_scope
from customops._dispatch.spec import OpSpec
from customops._op.classes import class_of
from customops._op.op import CustomOpDef
from customops._rules import Rules
from customops._schema.infer import read
from customops._schema.model import Differentiable, Names, Schema
from customops._schema.parse import check_nameless, parse
from customops._schema.tags import Layout, Tags, check_tags, tags_of
from customops._torch.library import Library
from customops.errors import (
    DefinitionError,
    SchemaError,
    UnregisteredError,
    brief,
    location_of,
    name_of,
    user_source,
    where,
)

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
    op = name.qualname
    if isinstance(device_types, Iterable) and not isinstance(device_types, str):
        device_types = tuple(device_types)  # it may be an iterator, which is read once
    all_tags = tags_of(tags, layout, op)
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
        device_types=device_types,
        check=check_policy(check, op),
        differentiable=Differentiable.of(differentiable, nondiff_args, wanted, op),
        bypass=_switch("bypass", bypass, op),
        eager=_switch("eager", eager, op),
        direct_in_graphs=_switch("direct_in_graphs", direct_in_graphs, op),
        traceable=traceable,
        computed_args=()
        if computed_args is None
        else computed.read(computed_args, [each.name for each in parameters.arguments], op, starred=starred),
        source=user_source(),
    )


def check_spec(spec: OpSpec) -> None:
    """Raise what can be found wrong without changing anything."""
    if not isinstance(spec.traceable, bool):
        raise DefinitionError("traceable must be True or False", op=spec.qualname, got=brief(spec.traceable))
    assert spec.kernel is not None
    bind_kernel(spec.kernel, spec.schema, spec.qualname, "kernel")
    if spec.schema.keyword_only:
        _ = spec.schema.call  # raises for a keyword of Python
    check_devices(spec.device_types, spec.schema, spec.qualname)
    _check_variant(spec)


def _check_variant(spec: OpSpec) -> None:
    """Raise if another op has the name of the mutation-only variant."""
    if spec.mutation_only is None:
        return
    name = spec.mutation_only.name
    taken = _torch.library.find_overload(name.packet, name.overload)
    replaced = _torch.library.torch_op_of(spec.qualname)
    operator = vars(replaced).get("_definition") if isinstance(replaced, CustomOpDef) else None
    variant = operator.mutation_only if operator is not None else None
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
    known = _torch.library.exists(spec.name.namespace)
    operator = OperatorHandle.define(spec)
    try:
        return make(class_of(spec, spec.options), owner, operator, rules)
    except BaseException:
        remove(operator, UnregisteredError("the definition of the op failed", op=spec.qualname))
        if not known:
            _torch.library.forget(spec.name.namespace)
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


# ----------------------------------------------------------------------------------------------------------------------
# An op is defined by a name that another has: it is replaced or reused, or the error says where it was defined

log = logging.getLogger("customops")

AGAIN = "define it again, or use the new object"


def place(qualname: str, owner: Owner) -> str:
    """``file:line`` where an op was defined. What torch knows is a line of ours, for ops of `Registry.define`."""
    known = _torch.library.torch_op_of(qualname) or owner.find(qualname)
    return known.source if isinstance(known, CustomOpDef) else _torch.schema.defined_at(qualname)


def conflict(qualname: str, owner: Owner, reason: str, fix: str, at: str | None, **fields: str) -> DefinitionError:
    """The error for an op that exists; `at` is where the other one is defined."""
    problem = f"an op of this name exists, defined at {place(qualname, owner)}: {reason}"
    return DefinitionError(problem, op=qualname, where=at, fix=fix, **fields)


def check_same(
    old: CustomOpDef[Any, Any], schema: Schema, tags: tuple[torch.Tag, ...], owner: Owner, fix: str, at: str | None
) -> None:
    """Raise unless an op has this schema and these tags."""
    known = old._definition.tags
    if old.schema.exact_key != schema.exact_key or set(known) != set(tags):
        raise conflict(
            old._qualname,
            owner,
            "on_conflict='reuse' needs the same schema and tags",
            fix,
            at,
            expected=f"{old.schema} {sorted(map(str, known)) or ''}",
            got=f"{schema} {sorted(map(str, tags)) or ''}",
        )


def replaced(qualname: str, place: str, fn: Any = None) -> UnregisteredError:
    """What calls of an op raise once the one of this place, and this function, has its name."""
    by = "" if fn is None else f" ({name_of(fn)})"
    return UnregisteredError(f"the op was replaced by the definition at {place}{by}", op=qualname, fix=AGAIN)


def destroyed(qualname: str) -> UnregisteredError:
    """What calls of an op raise whose library others destroyed."""
    problem = "the library of the op was destroyed (torch.library.custom_op redefining its name does that)"
    return UnregisteredError(problem, op=qualname)


def replace(spec: OpSpec, owner: Owner) -> CustomOpDef[Any, Any]:
    """Define an op in the place of another; the other comes back if that fails."""
    old = _torch.library.torch_op_of(spec.qualname)
    if not isinstance(old, CustomOpDef):
        return _replace_torchs(spec, owner)
    check_spec(spec)
    is_new = old.source != spec.source and not in_scope(owner)  # else the same code runs again
    dropped = _dropped(old) if is_new else ""
    undo = put_aside(old, spec.qualname, spec.place, spec.fn)
    try:
        op = define_op(spec, owner)
    except BaseException:
        undo()
        raise
    op._rules.fake.follow(old._rules.fake, spec.source)
    if dropped:
        log.warning("%s: defined again at %s, which drops what was registered: %s", spec.qualname, spec.source, dropped)
    elif is_new and spec.fn is not None and old._init_fn is not None:
        new, before = name_of(spec.fn), name_of(old._init_fn)
        if new != before and "<lambda>" not in (new, before):  # else the same function, changed
            said = (spec.qualname, new, spec.source, before, old.source)
            log.warning("%s: %s (%s) takes the place of %s (%s); two ops need two names", *said)
    owner.enter(op, functools.partial(end, op, old))
    return op


def _dropped(old: CustomOpDef[Any, Any]) -> str:
    """What was registered on an op, and where."""
    rules = [rule for rule in old.describe().rules if rule.origin == "registered"]
    return ", ".join(f"{rule.kind} ({shorter_place(rule.registered or rule.where)})" for rule in rules)


def put_aside(old: CustomOpDef[Any, Any], qualname: str, place: str, fn: Any = None) -> Undo:
    """Remove an op, for one that is defined at a place; what is returned brings it back."""
    owner = old._owner
    owner.drop(old, replaced(qualname, place, fn))
    return functools.partial(owner.restore, old)


def _replace_torchs(spec: OpSpec, owner: Owner) -> CustomOpDef[Any, Any]:
    """Define an op in the place of one made by torch.library.custom_op, whose rule for a same name is this, too."""
    library = _torch.library.torch_library_of(spec.qualname)
    if library is None:
        reason = "it was not made by custom_op, so it cannot be replaced"
        raise conflict(spec.qualname, owner, reason, "choose another name", function_of(spec))
    check_spec(spec)
    overload = _torch.library.find_overload(spec.name.packet, spec.name.overload)
    _torch.library.destroy_library(library)
    if overload is not None:
        _torch.library.retire_overload(overload, replaced(spec.qualname, spec.place, spec.fn))
    op: CustomOpDef[Any, Any] = owner.add(spec)
    return op


def end(op: CustomOpDef[Any, Any], old: CustomOpDef[Any, Any] | None = None) -> None:
    """Remove an op for good: its scope or library has ended. `old`, which it replaced, comes back.

    If another op has taken the name in the meantime, `old` waits until that one ends, in its own scope.
    """
    op._instead = (old,)
    op._owner.drop(op)
    while old is not None and old._instead:
        (old,) = old._instead
    if old is not None and not names.exists(Name.parse(old._qualname)):
        old._owner.restore(old)


def reuse(spec: OpSpec, owner: Owner) -> CustomOpDef[Any, Any]:
    """The existing op, if it is the same one."""
    old = _torch.library.torch_op_of(spec.qualname)
    if not isinstance(old, CustomOpDef):
        reason = "it was not made by custom_op, so it cannot be reused"
        raise conflict(spec.qualname, owner, reason, "choose another name", function_of(spec))
    fix = 'on_conflict="replace", or another name'
    check_same(old, spec.schema, spec.tags, owner, fix, function_of(spec))
    if old._definition.spec.signature != spec.signature:
        raise conflict(spec.qualname, owner, "on_conflict='reuse' needs the same types", fix, function_of(spec))
    return old


def function_of(spec: OpSpec) -> str | None:
    return where(spec.fn) if spec.fn is not None else None
