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
from collections.abc import Callable
from typing import Any

from customops import _torch
from customops._codegen.function import ENTER, Source, as_tuple, fill, joined
from customops._codegen.kernel import Emitter, Shape, any_requires_grad, emit_kernel_call, emit_version_bump
from customops._dispatch.operator import OperatorHandle, OpSpec
from customops._dispatch.options import CheckPolicy
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
    {enter}
"""

#: Guards of any call without the dispatcher: what is to see the call, and is no part of its tensors, is not active.
NOTHING_ACTIVE = f"""\
and not $is_torch_function_mode_enabled()
and {_torch.dispatcher.NO_PROFILER}
and {_torch.autograd.NO_FORWARD_AD}
"""


def obstacle(schema: Schema, *, eager: bool = False) -> str | None:
    """Why no call of an op can do without the dispatcher; None if some can."""
    if schema.is_view:
        return "it returns a view, which torch makes one of its base"
    returns = {ret.type for ret in schema.returns}
    if not eager and returns - {"Tensor"} and [ret.type for ret in schema.returns] != ["Tensor[]"]:
        return f"it returns a {min(returns - {'Tensor'})}, which the dispatcher converts"
    if not schema.tensors:
        return "no argument is a tensor, to tell the device by"
    for argument in schema.arguments:
        if keyword.iskeyword(argument.name):
            return f"the argument {argument.name!r} has the name of a keyword of Python"
        if not argument.is_optional and _row(argument) is None:
            return f"the argument {argument.name!r} is a {argument.type}, which the dispatcher converts"
    return None


def call(spec: OpSpec, when: CheckPolicy, *, eager: bool = False) -> Any:
    """The ``__call__`` of an op's object."""
    function: Any = _source(Shape.of(spec, when), eager=eager).build(spec.qualname)
    function.__qualname__ = spec.qualname  # for Python's errors about missing arguments, and others that there are not
    return function


@functools.lru_cache(maxsize=512)
def _source(shape: Shape, *, eager: bool) -> Source:
    """The source of the ``__call__`` of an op's object.

    Conditions that rule most calls out come first; what a torch function mode would see comes after it was looked for.
    Dynamo is to see the first condition alone.
    """
    schema = shape.schema
    source, arguments, names = Emitter("__call__", shape), schema.call.arguments, schema.call.tensors
    items, nested = [], []  # of a tuple of all tensors; tests for a nested one, which cannot be looked at
    for argument in schema.tensors:
        name = argument.variable
        item, test = name, f"{name}.is_nested"
        if argument.is_list:
            item, test = f"*{name}", f"True in $map($is_nested, {name})"
        if argument.is_optional:
            item = f"*({name} or ())" if argument.is_list else f"*(() if {name} is None else ({name},))"
            test = f"({name} is not None and {test})"
        items.append(item)
        nested.append(test)
    gather, tensors, looked_at = "", as_tuple(names), ", ".join(names)
    count = f"{len(names)}"
    if not all([argument.type == "Tensor" for argument in schema.tensors]):
        gather = f"$all_tensors = {as_tuple(items)}\n"
        tensors, looked_at, count = "$all_tensors", "*$all_tensors", "$len($all_tensors)"
    arrives, conversions = [], list[str]()  # the latter: what the dispatcher would do to values
    for i, (argument, row) in enumerate(zip(arguments, map(_row, arguments), strict=True)):
        arrives.append(_emit_arrives(source, i, argument, row))
        name = argument.variable
        if row is not None and argument.is_list and not eager:  # a kernel gets lists to itself
            conversions += [f"if {name} is not None:"] if argument.is_optional else []
            conversions.append(f"{'    ' * argument.is_optional}{name} = $list({name})")
        elif row is not None and row.converted is not None and not argument.is_list:
            test = row.converted_if.replace("{}", name)
            conversions += [f"if {test}:", f"    {name} = ${row.converted.__name__}({name})"]
    if eager:
        bump = emit_version_bump(source) if schema.mutated else ""
        kernel_call = f"{bump}return $current.fn({', '.join(source.holes['arguments'])})\n"
    else:
        kernel_call = emit_kernel_call(source, bump=bool(schema.mutated), direct=True, alone=True, records="$records")
    source.fill(
        CALL,
        arrive_as_they_are="\nand ".join(arrives),
        nothing_active=NOTHING_ACTIVE,
        any_nested=" or ".join(nested),
        gather=gather,
        looks_same=f"$count == {count} and not ($needs_grad and $records) and $looks_same({looked_at})",
        tensors=tensors,
        conversions=conversions,
        enter=fill(ENTER, take="return", passed=source.holes["passed"]),
        kernel_call=kernel_call,
    )
    return source


def _row(argument: Argument) -> TypeRow | None:
    """The row of an argument, or of its items, of which some values reach a kernel as they are, or as we make them."""
    type_ = argument.type.removesuffix("?")
    row = ROWS.get((item_type(type_) or type_).removesuffix("?"))
    if row is None:  # a list of lists
        return None
    return row if row.unchanged and not (argument.is_list and row.list_unchanged_if is None) else None


def _emit_arrives(source: Source, i: int, argument: Argument, row: TypeRow | None) -> str:
    """The condition under which we know what a kernel is to get of a value."""
    name = argument.variable
    ways = [f"{name} is $default_{i}"] if argument.has_default else []
    ways += [f"{name} is None"] if argument.is_optional else []
    if row is None:
        return joined("or", ways)
    types, tests = f"{row.schema.lower()}s", []
    if argument.is_list:
        source.objects[types] = frozenset(row.unchanged)
        tests.append(f"$type({name}) in $lists and $set($map($type, {name})) <= ${types}")
        tests += [row.list_unchanged_if.replace("{}", name)] if row.list_unchanged_if else []
    elif len(row.unchanged) > 2:
        source.objects[types] = frozenset(row.unchanged)
        tests.append(f"$type({name}) in ${types}")
    else:
        source.objects |= {each.__name__: each for each in row.unchanged}
        tests.append(joined("or", [f"$type({name}) is ${each.__name__}" for each in row.unchanged]))
    if not argument.is_list:
        tests += [row.unchanged_if.replace("{}", name)] if row.unchanged_if else []
        if row.converted_if:
            tests = [f"({' and '.join(tests)} or {row.converted_if.replace('{}', name)})"]
        if type(argument.default) is float and argument.default == 0:  # it takes the place of a zero of the other sign
            tests.append(f"({name} != 0 or $sign(1, {name}) == {math.copysign(1, argument.default)})")
    return joined("or", [*ways, " and ".join(tests)])


# A call in the code of inductor: it runs the kernel without the dispatcher, where that cannot be told apart -----------
#
# What the tensors are was known when the graph was compiled, and guards see to it that it stays so: dense, of one
# device, and not conjugate. What is left to find out is what is active in the thread when the graph runs, and whether a
# tensor is a negative view, or zeros without memory: there are no guards on the gradients of a compiled backward.

GRAPH_CALL = """\
def graph_call({parameters}):
    $current = $operator.fast_path.in_graphs.get($device)
    if $current is None:
        $current = $operator.find_fast_path_in_graphs($device)
    if (
        $current is not None
        and not $mode_count()
        and $transform() is None
        {nothing_active}
        and not $is_excluded($conjugate)
        {counts_versions}
        {are_plain}
        {nothing_to_differentiate}
    ):
        {defaults}
        {kernel_call}
    return $dispatched({arguments})
"""


def graph_call(
    operator: OperatorHandle, device: str | tuple[str, str], dispatched: Callable[..., Any], *, allocated: bool = False
) -> Callable[..., Any]:
    """The function for calls of an op on tensors of a device, given by its dispatch key.

    Args:
        operator: the handle of the op; `in_graphs` of its fast path has the kernel.
        device: the key; with the name of a kernel, if it is to be one of several.
        dispatched: does the same by the dispatcher, at any time.
        allocated: it is an out variant, and the graph has just allocated what it writes to.
    """
    source = _graph_source(Shape.of(operator.spec, operator.options.check), allocated=allocated)
    function = source.build(operator.qualname, operator=operator, device=device, dispatched=dispatched)
    return _torch.dynamo.outside_dynamo(function)


@functools.lru_cache(maxsize=512)
def _graph_source(shape: Shape, *, allocated: bool) -> Source:
    schema = shape.schema
    source = Emitter("graph_call", shape)
    source.objects |= {"any_requires_grad": any_requires_grad(schema), "is_lazy": _torch.memory.is_lazy}
    are_plain = []  # the conditions under which there are no subclasses of tensors
    for argument in schema.tensors:
        name = argument.variable
        if argument.is_list:
            test = f"$types_in_lists.issuperset($map($type, {name})) and not $any($map($is_lazy, {name}))"
            are_plain.append(f"and ({name} is None or {test})" if argument.is_optional else f"and {test}")
        else:
            test = f"$type({name}) in $tensor_types and not {_torch.memory.IS_LAZY.format(name)}"
            may_be_none = argument.name in schema.call.may_be_none
            are_plain.append(f"and ({test} or {name} is None)" if may_be_none else f"and {test}")
    records = f"$is_grad_enabled() and $any_requires_grad({', '.join(schema.call.tensors)})"
    source.fill(
        GRAPH_CALL,
        nothing_active=NOTHING_ACTIVE,
        counts_versions="and not $is_excluded($ad_inplace_or_view)" if schema.mutated else "",
        are_plain=are_plain,
        nothing_to_differentiate=f"and not ({records})",
        kernel_call=emit_kernel_call(
            source, bump=bool(schema.mutated), direct=True, last=True, fn="fn_if_allocated" if allocated else "fn"
        ),
    )
    return source
