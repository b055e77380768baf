"""The options of `custom_op`, and the `OpSpec` that they give."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict

from customops._codegen.lowering import Lowering
from customops._dispatch.callbacks import Fn, bind_kernel
from customops._dispatch.devices import DeviceTypes
from customops._dispatch.names import Name
from customops._dispatch.operator import OpSpec
from customops._dispatch.options import CheckPolicy, Options, check_policy, of_environment
from customops._places import location_of, user_source, where
from customops._schema.infer import mutates_args_names, read
from customops._schema.model import Differentiable, Names, Schema, names_in
from customops._schema.parse import check_nameless, parse
from customops._schema.tags import Tags, check_tags, tags_of
from customops._torch.library import Library
from customops.errors import DefinitionError, SchemaError, brief, check_choice

#: The policy of `custom_op` for a name that has an op.
OnConflict = Literal["replace", "error", "reuse", "skip"]


@dataclasses.dataclass(frozen=True)
class OpOptions:
    """The options of `custom_op`, with their defaults: its signature, and what all else that needs them reads."""

    mutates_args: str | Iterable[str] | None = None
    device_types: DeviceTypes = None
    schema: str | None = None
    tags: Tags = None
    on_conflict: OnConflict = "replace"
    check: CheckPolicy | None = None
    bypass: bool = False
    eager: bool = False
    direct_in_graphs: bool | None = None
    choose_when_traced: bool = True
    traceable: bool = False
    kernel_calls_torch: bool = True
    reference: Callable[..., Any] | bool | None = None
    differentiable: bool | Sequence[bool] = True
    nondiff_args: Names = ()
    lib: Library | None = None

    @classmethod
    def read(cls, given: Mapping[str, Any], op: str) -> OpOptions:
        """Return the given options, with names of arguments as tuples.

        What needs the function is validated by `spec_of`, and by `check_spec` right before the definition.
        """
        values = dict(given)
        if values.get("mutates_args") is not None:
            values["mutates_args"] = mutates_args_names(values["mutates_args"], op)
        values["nondiff_args"] = names_in(values.get("nondiff_args", ()), "nondiff_args", op)
        options = cls(**values)
        check_choice("on_conflict", options.on_conflict, OnConflict, op, DefinitionError)
        return options


_Parameter = inspect.Parameter
#: The signature of `Registry.custom_op`, which takes the options as ``**options``.
SIGNATURE = inspect.Signature(
    [
        *(_Parameter(name, _Parameter.POSITIONAL_ONLY) for name in ("self", "name")),
        _Parameter("fn", _Parameter.POSITIONAL_ONLY, default=None),
        *(
            _Parameter(option.name, _Parameter.KEYWORD_ONLY, default=option.default, annotation=option.type)
            for option in dataclasses.fields(OpOptions)
        ),
    ]
)


class DefinitionOptions(TypedDict, total=False):
    """`OpOptions` for type checkers, which need a `TypedDict` for the names of keywords. A test compares the two."""

    mutates_args: str | Iterable[str] | None
    device_types: DeviceTypes
    schema: str | None
    tags: Tags
    on_conflict: OnConflict
    check: CheckPolicy | None
    bypass: bool
    eager: bool
    direct_in_graphs: bool | None
    choose_when_traced: bool
    traceable: bool
    kernel_calls_torch: bool
    reference: Callable[..., Any] | bool | None
    differentiable: bool | Sequence[bool]
    nondiff_args: Names
    lib: Library | None


def spec_of(name: Name, fn: Fn, given: OpOptions) -> OpSpec:
    """Return the definition of an op from a function and options."""
    op = name.qualname
    mutates_args: Any = given.mutates_args
    nondiff_args: Any = given.nondiff_args
    device_types = given.device_types
    if isinstance(device_types, Iterable) and not isinstance(device_types, str):
        device_types = tuple(device_types)  # it may be an iterator, which is read once
    tags = tags_of(given.tags)
    signature = kernel = None
    if given.schema is None:
        schema, tags, signature = read(fn, mutates_args, tags, op=op)
    else:
        schema = _manual_schema(given.schema, mutates_args, op, fn)
        check_tags(schema, tags, op=op, where=location_of(fn))
    parameters = schema
    if signature is not None:
        lowering = Lowering(signature, schema, op)
        kernel, nondiff_args = lowering.kernel(fn), lowering.names(nondiff_args, "nondiff_args")
        parameters = lowering.parameters
    if given.reference is not None:
        if not (callable(given.reference) or given.reference is True):
            problem, fix = "reference must be a function, or True if the op's function is one", "leave it out"
            raise DefinitionError(problem, op=op, got=brief(given.reference), fix=fix)
        if given.reference is not True and not any(argument.is_mutated for argument in schema.arguments):
            bind_kernel(given.reference, parameters, op, "reference")
    switches = {}
    for option in ("bypass", "eager", "direct_in_graphs", "choose_when_traced", "traceable", "kernel_calls_torch"):
        value = getattr(given, option)
        if not isinstance(value, bool):
            raise DefinitionError(f"{option} must be True or False", op=op, got=brief(value))
        if option in Options._fields:
            from_environment = of_environment(option, op)
            switches[option] = value if from_environment is None else from_environment
    if given.traceable and not given.kernel_calls_torch:
        raise DefinitionError(
            "compilers trace the torch operations of a traceable op; by kernel_calls_torch=False there are none",
            op=op,
            fix="leave one of the two out",
        )
    if schema.is_view and not given.kernel_calls_torch:
        raise DefinitionError(
            "a view is made by an operation of torch", op=op, got=str(schema), fix="leave kernel_calls_torch out"
        )
    return OpSpec(
        name,
        schema,
        tags,
        given.schema,
        fn,
        signature,
        kernel,
        device_types=device_types,
        options=Options(check_policy(given.check, op), **switches),
        differentiable=Differentiable.of(given.differentiable, nondiff_args, schema, op),
        traceable=given.traceable,
        kernel_calls_torch=given.kernel_calls_torch,
        source=user_source(),
    )


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
