"""The function that chooses among the kernels of a device: it is called in the place of a kernel.

What was chosen is kept by a key, see `_rules.choice`. The key is compared with those of the last few calls, of which
the tensors are compared by torch's own guards; else it is looked up, first by a shape and such a guard.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any, Literal

from customops._codegen.function import Source, as_tuple, emit_parameters
from customops._codegen.kernel import Emitter, Shape
from customops._dispatch.callbacks import Fn, bind_kernel
from customops._dispatch.operator import OpSpec
from customops._dispatch.preference import here
from customops._places import where
from customops._schema.model import Argument, Schema
from customops._schema.types import item_type
from customops.errors import CallbackError, did_you_mean

#: How long a choice holds: for arguments that look the same, for equal keys, or for the call.
Holds = Literal["alike", "keyed", "once"]

TEMPLATES: dict[Holds, str] = {
    "alike": """\
def choice({parameters}):
    $values = {values}
    for $looks_same, $seen, $kernel in $chooser.recent:
        if $seen == $values and $looks_same({tensors}):
            return $kernel.{fn}({arguments})
    return $chooser.find($values, {all_tensors}, {arguments}).{fn}({arguments})
""",
    "keyed": """\
def choice({parameters}):
    $values = {values}
    try:
        $kernel = $chooser.known[$values]
    except ($KeyError, $TypeError):
        $kernel = $chooser.find($values, (), {arguments})
    return $kernel.{fn}({arguments})
""",
    "once": """\
def choice({parameters}):
    return $chooser.find(None, (), {arguments}).{fn}({arguments})
""",
}


def choice(spec: OpSpec, holds: Holds, chooser: Any, keys: Sequence[Fn], *, fn: str = "fn") -> Fn:
    """The function that is called with all arguments of an op, as a kernel is.

    Args:
        chooser: has ``recent``, ``known`` and ``find(values, tensors, *args, **kwargs)``, for the `CurrentKernel`.
        keys: functions of the arguments whose results belong to the key.
        fn: what is called of the `CurrentKernel`: "fn", "fn_if_allocated" or "named()".
    """
    source = _source(Shape.of(spec, "never"), holds, len(keys), fn)
    objects = {f"key_{i}": key for i, key in enumerate(keys)}
    return source.build(spec.qualname, chooser=chooser, **objects)


@functools.lru_cache(maxsize=512)
def _source(shape: Shape, holds: Holds, keys: int, fn: str) -> Source:
    source, schema = Emitter("choice", shape), shape.schema
    source.objects["here"] = here
    arguments = ", ".join(source.holes["arguments"])
    values = ["$here()"]
    if holds == "alike":
        values += filter(None, map(_value, schema.call.arguments))
    values += [f"$key_{i}({arguments})" for i in range(keys)]
    source.fill(
        TEMPLATES[holds],
        values=as_tuple(values),
        tensors=schema.call.tensors,
        all_tensors=as_tuple(schema.call.tensors),
        fn=fn,
    )
    return source


def _value(argument: Argument) -> str:
    """What a key has of an argument, next to what guards see of tensors; "" if that is all."""
    name, type_ = argument.variable, argument.type.removesuffix("?")
    item = item_type(type_)
    if type_ == "Tensor":
        return f"{name} is None" if argument.is_optional else ""  # of others guards say so
    if argument.holds_tensors:
        return f"None if {name} is None else $tuple([each is None for each in {name}])"
    number = f"({name} if {name} and {name} == {name} else $str({name}))"  # there are two zeros, and NaN equals nothing
    if type_ == "float":
        return number
    if type_ == "Scalar":
        return f"($type({name}), {number})"
    return name if item is None else f"$str({name})"


def taking(fn: Fn, schema: Schema, op: str, role: str) -> Fn:
    """`fn`, to be called with all arguments, as a kernel is. It may take some of them, by their names, in any order.

    Parameters of its own have defaults. One that names none of the op's, and has as many, takes them by position.

    Raises:
        CallbackError: it takes others.
    """
    arguments = {argument.name: argument for argument in schema.arguments}
    try:
        parameters = inspect.signature(fn, follow_wrapped=False).parameters  # its own
    except (TypeError, ValueError):  # of some that are built in nothing is known
        return bind_kernel(fn, schema, op, role)
    kinds = {parameter.kind for parameter in parameters.values()}
    of_names = kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
    unknown = [each.name for each in parameters.values() if each.name not in arguments and each.default is each.empty]
    if not of_names or [*parameters] == [*arguments] or (unknown and len(parameters) >= len(arguments)):
        return bind_kernel(fn, schema, op, role)
    if unknown:
        problem, expected = f"the {role} takes an argument that the op has not", f"some of {', '.join(arguments)}"
        fix = did_you_mean(unknown[0], arguments) or "name its parameters as the op does"
        raise CallbackError(problem, op=op, expected=expected, got=", ".join(unknown), where=where(fn), fix=fix)
    source = Source("by_name", schema)
    source.fill(
        "def by_name({parameters}):\n    return $fn({taken})\n",
        parameters=emit_parameters(schema.positional, schema.keyword_only, {}),
        taken=[f"{name}={arguments[name].variable}" for name in parameters if name in arguments],
    )
    return functools.update_wrapper(source.build(op, fn=fn), fn, updated=())
