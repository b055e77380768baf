"""``bypass=True`` and ``eager=True``: a call of the op's object runs the kernel without the dispatcher.

With `bypass` that cannot be told apart from a call of the dispatcher. With `eager` the kernel is called as a plain
function: what it returns is not checked, lists are not copied, and gradient mode stays as it is.

The dispatcher's work is to find out that there is nothing to do but to call the kernel. For tensors that are plain, in
a thread where nothing is active, that can be found out at a fraction of the price: by one look at all tensors and the
state of the thread, whether the call is of a kind for which it was found out before. Whatever is not certain goes to
the dispatcher, and so do calls through ``torch.ops``, and those that a profiler is to see.
"""

from __future__ import annotations

import functools
import keyword
import math
from typing import Any

import torch

from customops._codegen.function import Shape, Source, any_of, as_tuple, fill
from customops._codegen.kernel import Emitter, emit_kernel_call, emit_version_bump
from customops._dispatch.results import CheckPolicy
from customops._schema.model import Argument, Schema
from customops._schema.types import ROWS, TypeRow, item_type

CALL = """\
def __call__($self, /, {parameters}):
    if $is_dynamo_compiling():
        return $self._opoverload({arguments})
    if (
        {arrive_as_they_are}
        {nothing_active}
        and not $transforms_active()
        and not ({any_nested})
    ):
        {gather}
        $records = $is_grad_enabled()
        for $looks_same, $count, $needs_grad, $current in $self._definition.fast_path.recent:
            if {looks_same}:
                break
        else:
            $current = $self._definition.find_past_dispatcher({tensors})
        if $current is not None:
            {defaults}
            {conversions}
            {kernel_call}
    {leave_out}
    try:
        return $self._entry({passed})
    except $RuntimeError as $error:
        try:
            $self._definition.explain($error)
            raise
        except $CustomOpsError as $said:
            $cut($said)
            raise
"""

CONVERT = """\
if {condition}:
    {name} = ${type}({name})
"""

#: A kernel has lists to itself.
COPY = """\
{name} = $list({name})
"""

COPY_IF_GIVEN = """\
if {name} is not None:
    {name} = $list({name})
"""

#: Guards of any call without the dispatcher: what is to see the call, and is no part of its tensors, is not active.
NOTHING_ACTIVE = """\
and not $is_torch_function_mode_enabled()
and not $profiler._is_profiler_enabled
and $forward_ad._current_level < 0
"""

#: In the place of what `emit_kernel_call` writes.
PLAIN_CALL = """\
{version_bump}
return $current.fn({arguments})
"""


def obstacle(schema: Schema, *, eager: bool = False) -> str | None:
    """Why no call of an op can do without the dispatcher; None if some can."""
    if schema.is_view:
        return "it returns a view, which torch makes one of its base"
    returns = {ret.type for ret in schema.returns}
    if not eager and returns - {"Tensor"} and [ret.type for ret in schema.returns] != ["Tensor[]"]:
        return f"it returns a {min(returns - {'Tensor'})}, which the dispatcher converts"
    if not schema.takes_tensors:
        return "no argument is a tensor, to tell the device by"
    for argument in schema.arguments:
        if keyword.iskeyword(argument.name):
            return f"the argument {argument.name!r} has the name of a keyword of Python"
        if _row(argument) is None and not argument.type.endswith("?"):
            return f"the argument {argument.name!r} is a {argument.type}, which the dispatcher converts"
    return None


def call(schema: Schema, tags: tuple[torch.Tag, ...], op: str, when: CheckPolicy, *, eager: bool = False) -> Any:
    """The ``__call__`` of an op's object."""
    function: Any = _source(Shape.of(schema, tags, when), eager=eager).build(op)
    function.__qualname__ = op  # for Python's errors about missing arguments, and others that there are not
    return function


@functools.lru_cache(maxsize=512)
def _source(shape: Shape, *, eager: bool) -> Source:
    """The source of the ``__call__`` of an op's object.

    Conditions that rule most calls out come first; what a torch function mode would see comes after it was looked for.
    Dynamo is to see the first condition alone.
    """
    schema = shape.schema
    source = Emitter("__call__", shape)
    gather, tensors, looks_same = _emit_look(schema)
    bump = emit_version_bump(source) if schema.mutated else ""
    source.fill(
        CALL,
        arrive_as_they_are="\nand ".join([_emit_arrives(source, i, a) for i, a in enumerate(schema.call.arguments)]),
        nothing_active=NOTHING_ACTIVE,
        any_nested=" or ".join(map(_emit_nested, schema.tensors)),
        gather=gather,
        looks_same=looks_same,
        tensors=tensors,
        conversions="".join([_emit_conversion(argument, copies=not eager) for argument in schema.arguments]),
        kernel_call=fill(PLAIN_CALL, version_bump=bump, arguments=source.holes["arguments"])
        if eager
        else emit_kernel_call(source, bump=bool(bump), direct=True, alone=True, records="$records"),
    )
    return source


# The look -------------------------------------------------------------------------------------------------------


def _emit_look(schema: Schema) -> tuple[str, str, str]:
    """Lines that gather the tensors of a call, an expression for them, and one for: is it of this kind?"""
    names = schema.call.tensors
    if all([argument.type == "Tensor" for argument in schema.tensors]):
        return (
            "",
            as_tuple(names),
            f"$count == {len(names)} and not ($needs_grad and $records) and $looks_same({', '.join(names)})",
        )
    gather = f"$all_tensors = {as_tuple(map(_emit_items, schema.tensors))}\n"
    is_like = "$count == $len($all_tensors) and not ($needs_grad and $records) and $looks_same(*$all_tensors)"
    return gather, "$all_tensors", is_like


def _emit_items(argument: Argument) -> str:
    name = argument.variable
    if argument.is_tensor_list:
        return f"*({name} or ())" if argument.type.endswith("?") else f"*{name}"
    return f"*(() if {name} is None else ({name},))" if argument.type.endswith("?") else name


def _emit_nested(argument: Argument) -> str:
    """The expression for: is a tensor nested? Those cannot be looked at."""
    name = argument.variable
    nested = f"True in $map($is_nested, {name})" if argument.is_tensor_list else f"{name}.is_nested"
    return f"({name} is not None and {nested})" if argument.type.endswith("?") else nested


# Values ---------------------------------------------------------------------------------------------------------


def _row(argument: Argument) -> TypeRow | None:
    """The row of an argument, or of its items, of which some values reach a kernel as they are, or as we make them."""
    type_ = argument.type.removesuffix("?")
    item = item_type(type_)
    row = ROWS.get(type_ if item is None else item.removesuffix("?"))
    usable = row is not None and row.unchanged and (item is None or row.list_unchanged_if is not None)
    return row if usable else None


def _emit_arrives(source: Source, i: int, argument: Argument) -> str:
    """The condition under which we know what a kernel is to get of a value."""
    name, row = argument.variable, _row(argument)
    ways = [f"{name} is None"] if argument.type.endswith("?") else []
    if argument.has_default:
        ways.insert(0, f"{name} is $default_{i}")
    if row is not None:
        is_list = item_type(argument.type.removesuffix("?")) is not None
        ways.append(_emit_list_test(source, name, row) if is_list else _emit_test(source, name, row, argument))
    return ways[0] if len(ways) == 1 else f"({' or '.join(ways)})"


def _emit_test(source: Source, name: str, row: TypeRow, argument: Argument) -> str:
    tests = [_emit_types(source, row, f"$type({name})")]
    if row.unchanged_if:
        tests.append(row.unchanged_if.replace("{}", name))
    if row.converted_if:
        as_it_is = " and ".join(tests)
        tests = [f"({as_it_is} or {row.converted_if.replace('{}', name)})"]
    if type(argument.default) is float and argument.default == 0:  # it takes the place of a zero of the other sign
        tests.append(f"({name} != 0 or $sign(1, {name}) == {math.copysign(1, argument.default)})")
    return " and ".join(tests)


def _emit_types(source: Source, row: TypeRow, type_: str) -> str:
    if len(row.unchanged) > 2:
        source.objects[f"{row.schema.lower()}s"] = frozenset(row.unchanged)
        return f"{type_} in ${row.schema.lower()}s"
    source.objects |= {each.__name__: each for each in row.unchanged}
    return any_of(f"{type_} is ${each.__name__}" for each in row.unchanged)


def _emit_list_test(source: Source, name: str, row: TypeRow) -> str:
    types = f"{row.schema.lower()}s"
    source.objects[types] = frozenset(row.unchanged)
    test = f"$type({name}) in $lists and $set($map($type, {name})) <= ${types}"
    return f"{test} and {row.list_unchanged_if.replace('{}', name)}" if row.list_unchanged_if else test


def _emit_conversion(argument: Argument, *, copies: bool) -> str:
    """The lines that make of a value what the dispatcher would. `copies`: of lists, too."""
    name, row = argument.variable, _row(argument)
    if row is None:
        return ""
    if item_type(argument.type.removesuffix("?")) is not None:
        if not copies:
            return ""
        return fill(COPY_IF_GIVEN if argument.type.endswith("?") else COPY, name=name)
    if row.converted is None:
        return ""
    return fill(CONVERT, condition=row.converted_if.replace("{}", name), name=name, type=row.converted.__name__)
