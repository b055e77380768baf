"""The function at a device's dispatch key: it calls the user's kernel and checks the result."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from customops import _compat
from customops._codegen.function import (
    Shape,
    Source,
    all_of,
    always_passed,
    as_tuple,
    compile_on_first_call,
    fill,
    may_be_none,
    variable_name,
)
from customops._dispatch.fill_defaults import in_python_form, is_altered
from customops._dispatch.operator import CurrentKernel
from customops._dispatch.results import CheckPolicy, alias_error, inplace_error, out_error, structure_check, tensors_in
from customops._schema.model import Argument, Return, Schema

KERNEL = """\
def kernel({parameters}):
    {defaults}
    {kernel_call}
"""

KERNEL_CALL = """\
{version_bump}
$fn = $current.fn
if {state_differs}:
    $result = $call_plainly($fn, {arguments})
elif $is_grad_enabled():
    $set_grad_enabled(False)
    try:
        $result = $fn({arguments})
    finally:
        $set_grad_enabled(True)
else:
    $result = $fn({arguments})
{checks}
{conversion}
return $result
"""

#: What the templates of this module refer to.
_OBJECTS: dict[str, Any] = {
    "Tensor": Tensor,
    "any_alias": _compat.memory.any_alias,
    "autocast_is_on": _compat.kernel_state.autocast_is_on,
    "conjugate": _compat.dispatch.DispatchKey.Conjugate,
    "increment_version": _compat.autograd.increment_version,
    "is_excluded": _compat.dispatch.is_excluded,
    "is_grad_enabled": torch.is_grad_enabled,
    "is_own": torch.UntypedStorage.resizable,
    "sequences": (list, tuple),
    "set_grad_enabled": _compat.kernel_state.set_grad_enabled,
    "share_memory": _compat.memory.outputs_share_memory,
    "storage": Tensor.untyped_storage,
    "tensor_types": {Tensor, torch.nn.Parameter},
    "tensors_in": tensors_in,
    "uses": _compat.memory.storage_uses,
}


def kernel(
    schema: Schema,
    tags: tuple[torch.Tag, ...],
    op: str,
    current: CurrentKernel,
    when: CheckPolicy,
    *,
    bump: bool = False,
) -> Callable[..., Any]:
    """The function at a device's dispatch key: fill defaults in, call the current kernel, check what it returns.

    With `bump` it also bumps the versions of mutated arguments, which is else done at a key above.
    """
    for argument in schema.keyword_only:
        variable_name(argument)  # raises now what it would raise in the first call
    generate = functools.partial(_generate, schema, tags, op, current, when, bump=bump)
    return compile_on_first_call("kernel", generate)


def _generate(
    schema: Schema, tags: tuple[torch.Tag, ...], op: str, current: CurrentKernel, when: CheckPolicy, *, bump: bool
) -> Any:
    return _source(Shape.of(schema, tags, when), bump=bump).build(op, current=current)


@functools.lru_cache(maxsize=512)
def _source(shape: Shape, *, bump: bool) -> Source:
    source = Source("kernel", shape.schema, shape.tags, shape.when)
    source.template = fill(
        KERNEL,
        parameters=emit_parameters(source),
        defaults=emit_defaults(source),
        kernel_call=emit_kernel_call(source, bump=bump, direct=False),
    )
    return source


def emit_kernel_call(source: Source, *, bump: bool, direct: bool, last: bool = False) -> str:
    """The lines from the call of the ``$current`` kernel to the return.

    A kernel runs in one state, whoever called the op: autocast is off, nothing is recorded (but what it records itself,
    under ``torch.enable_grad()``), and no dispatch key is excluded for its own operations. Keys are excluded below a
    mode and in the first call of compiled code, never in a `direct` call. Where it is the `last`, no
    dispatcher looks at what is returned: its types are checked here, whatever the policy.
    """
    schema = source.schema
    # For views, torch's own kernel, above, excludes keys that have to be.
    keeps_keys = direct or schema.is_view
    positional = [variable_name(argument) for argument in schema.positional]
    named = [f"{variable_name(argument)}={variable_name(argument)}" for argument in schema.keyword_only]
    source.objects |= _OBJECTS | {"call_plainly": _call_plainly(schema)}
    return fill(
        KERNEL_CALL,
        version_bump=_emit_version_bump(schema) if bump else "",
        state_differs="$autocast_is_on()" if keeps_keys else "$autocast_is_on() or $is_excluded($conjugate)",
        arguments=[*positional, *named],
        checks=(_emit_structure_check(source) if last and source.when != "always" else "") + _emit_checks(source),
        # As the dispatcher would; the checks do, too.
        conversion=TO_TUPLE if source.when != "always" and len(schema.returns) > 1 else "",
    )


TO_TUPLE = """\
if $type($result) is not $tuple and $isinstance($result, $sequences):
    $result = $tuple($result)
"""


def _call_plainly(schema: Schema) -> Callable[..., Any]:
    """What calls a kernel where the state is another one."""
    if schema.is_view:
        return _compat.kernel_state.call_without_autocast
    return _compat.kernel_state.call_plainly_writing if schema.mutated else _compat.kernel_state.call_plainly


# Parameters -----------------------------------------------------------------------------------------------------


def _in_order(schema: Schema) -> tuple[Argument, ...]:
    return (*schema.positional, *schema.keyword_only)


def emit_parameters(source: Source) -> list[str]:
    """Parameters for all arguments, with the defaults that a call may leave out."""
    schema, parameters = source.schema, []
    required = always_passed(schema)
    for i, argument in enumerate(_in_order(schema)):
        if argument.kwarg_only and i == len(schema.positional):
            parameters.append("*")
        parameter = variable_name(argument)
        if argument.has_default:
            source.objects[f"default_{i}"] = None if argument.default_is_none_in_text else argument.default
            parameter += f"=$default_{i}" if argument.kwarg_only or i >= required else ""
        parameters.append(parameter)
    return parameters


PYTHON_FORM = """\
{name} = $in_python_form_{i}({name})
"""

#: A default that is a list is another list in each call.
NEW_LIST = """\
if {name} is $default_{i}:
    {name} = $list({name})
"""


def emit_defaults(source: Source) -> str:
    """The lines that give arguments the form that callbacks are to see."""
    lines = ""
    for i, argument in enumerate(_in_order(source.schema)):
        if not argument.has_default:
            continue
        if is_altered(argument):
            source.objects[f"in_python_form_{i}"] = functools.partial(in_python_form, argument)
            lines += fill(PYTHON_FORM, name=variable_name(argument), i=str(i))
        elif isinstance(argument.default, tuple):
            lines += fill(NEW_LIST, name=variable_name(argument), i=str(i))
    return lines


# Versions -------------------------------------------------------------------------------------------------------

BUMP_IF_GIVEN = """\
if {mutated} is not None:
    $increment_version(({mutated},))
"""


def _emit_version_bump(schema: Schema) -> str:
    mutated = as_tuple(map(variable_name, schema.mutated))
    if [argument.type for argument in schema.mutated] != ["Tensor"]:
        return f"$increment_version($tensors_in({mutated}))\n"
    if may_be_none(schema.mutated[0], schema):
        return fill(BUMP_IF_GIVEN, mutated=variable_name(schema.mutated[0]))
    return f"$increment_version({mutated})\n"


# Checks ---------------------------------------------------------------------------------------------------------

FIRST_CALL_ONLY = """\
if $current.unchecked:
    {checks}
    $current.unchecked = False
"""

CHECK_IDENTITY = """\
if {is_another}:
    raise $result_error($result, $fn)
"""

CHECK_STRUCTURE = """\
if {mismatch}:
    $result = $structure($result, $fn)
"""

CHECK_ALIASES = """\
try:
    $alias = (
        {may_alias}
    )
except $RuntimeError:
    $alias = True  # perhaps: a layout without a storage of its own
if $alias and $share_memory({tensors}, {results}):
    raise $alias_error($result, $fn, {positional}, {keyword_only})
"""


def _emit_checks(source: Source) -> str:
    """The lines that raise unless the result has the types of the schema, and aliases only what the schema says."""
    if source.when == "never":
        return ""
    if torch.Tag.inplace in source.tags or torch.Tag.out in source.tags:
        checks = _emit_identity_check(source)
    else:
        checks = _emit_structure_check(source) + _emit_alias_check(source)
    return fill(FIRST_CALL_ONLY, checks=checks) if source.when == "first" else checks


def _emit_identity_check(source: Source) -> str:
    """The lines that raise unless an in-place or out op returns its mutated arguments."""
    schema = source.schema
    if torch.Tag.inplace in source.tags:
        source.objects_of_op["result_error"] = functools.partial(functools.partial, inplace_error, schema)
        return fill(CHECK_IDENTITY, is_another=f"$result is not {variable_name(schema.positional[0])}")
    source.objects_of_op["result_error"] = functools.partial(functools.partial, out_error, schema)
    outs = [variable_name(argument) for argument in schema.mutated]
    is_another = [f"{result} is not {out}" for result, out in zip(_items("$result", outs), outs, strict=True)]
    if len(outs) > 1:
        is_another.insert(0, f"not $isinstance($result, $sequences) or $len($result) != {len(outs)}")
    return fill(CHECK_IDENTITY, is_another=" or ".join(is_another))


def _emit_structure_check(source: Source) -> str:
    """The lines that look closer at a result which is no plain tensor, or list of these, where the schema has one."""
    source.objects_of_op["structure"] = functools.partial(structure_check, source.schema, role="kernel")
    returns = source.schema.returns
    if any(ret.type not in ("Tensor", "Tensor[]") for ret in returns):
        return "$result = $structure($result, $fn)\n"
    matches = [_emit_match(item, ret) for item, ret in zip(_items("$result", returns), returns, strict=True)]
    if len(returns) > 1:
        matches.insert(0, f"$type($result) is $tuple and $len($result) == {len(returns)}")
    mismatch = f"not {all_of(matches)}" if returns else "$result is not None"
    return fill(CHECK_STRUCTURE, mismatch=mismatch)


def _emit_match(value: str, ret: Return) -> str:
    """An expression that is True for the usual values of a return."""
    if ret.type == "Tensor":
        return f"$isinstance({value}, $Tensor)"
    return f"($type({value}) is $list and $set($map($type, {value})) <= $tensor_types)"


def _items(value: str, returns: Sequence[Any]) -> list[str]:
    """Expressions for what an op returns: the only one is not in a tuple."""
    return [value] if len(returns) == 1 else [f"{value}[{i}]" for i in range(len(returns))]


def _emit_alias_check(source: Source) -> str:
    """The lines that raise if a result is memory of an argument or of another result."""
    schema = source.schema
    results = {
        item: ret.type
        for item, ret in zip(_items("$result", schema.returns), schema.returns, strict=True)
        if "Tensor" in ret.type
    }
    has_one_tensor = not schema.takes_tensors and list(results.values()) == ["Tensor"]
    if schema.is_view or not results or has_one_tensor:
        return ""
    source.objects_of_op["alias_error"] = functools.partial(functools.partial, alias_error, schema)
    tensors = [variable_name(argument) for argument in schema.arguments if argument.holds_tensors]
    has_lists = any(argument.is_tensor_list for argument in schema.arguments) or set(results.values()) != {"Tensor"}
    named = ", ".join(f"{argument.name!r}: {variable_name(argument)}" for argument in schema.keyword_only)
    return fill(
        CHECK_ALIASES,
        may_alias=_emit_lists_may_alias(tensors, results) if has_lists else _emit_may_alias(tensors, list(results)),
        tensors=as_tuple(tensors),
        results=as_tuple(results),
        positional=as_tuple(map(variable_name, schema.positional)),
        keyword_only=f"{{{named}}}",
    )


#: Is False, at little cost, for results in memory of their own.
#:
#: Memory that others made, as that of a NumPy array, cannot be resized; it may be that of an argument, under another
#: storage. Memory of torch is new if the tensor is the only one of its storage; the second use is the Python object.
MAY_ALIAS = """\
not (
    {each_is_own}
)
{any_is_another}
"""

#: The same where there are lists of tensors.
LISTS_MAY_ALIAS = """\
not $all($map($is_own, $map($storage, {flat})))
or $any_alias({tensors}, {}, {results})
"""


def _emit_may_alias(tensors: list[str], results: list[str]) -> str:
    each_is_own = [f"($s := {result}.untyped_storage()).resizable() and $uses($s._cdata) == 2" for result in results]
    pairs = [*itertools.product(results, tensors), *itertools.combinations(results, 2)]
    return fill(
        MAY_ALIAS,
        each_is_own="\nand ".join(each_is_own),
        any_is_another=[f"or {one} is {other}" for one, other in pairs],
    )


def _emit_lists_may_alias(tensors: list[str], results: dict[str, str]) -> str:
    flat = [value if type_ == "Tensor" else f"*({value} or ())" for value, type_ in results.items()]
    return fill(LISTS_MAY_ALIAS, flat=as_tuple(flat), tensors=as_tuple(tensors), results=as_tuple(results))
