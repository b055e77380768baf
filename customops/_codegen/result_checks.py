"""The lines that check what a kernel returns."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from customops import _compat
from customops._codegen.function import Source, all_of, as_tuple, fill, variable_name
from customops._compat.tags import Tag
from customops._dispatch.results import alias_error, inplace_error, out_error, structure_check
from customops._schema.model import Return

#: What the templates of this module refer to.
_OBJECTS: dict[str, Any] = {
    "Tensor": Tensor,
    "any_alias": _compat.memory.any_alias,
    "is_own": torch.UntypedStorage.resizable,
    "sequences": (list, tuple),
    "share_memory": _compat.memory.outputs_share_memory,
    "storage": Tensor.untyped_storage,
    "tensor_types": {Tensor, torch.nn.Parameter},
    "uses": _compat.memory.storage_uses,
}


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


def emit_checks(source: Source) -> str:
    """The lines that raise unless the result has the types of the schema, and aliases only what the schema says."""
    if source.when == "never":
        return ""
    source.objects |= _OBJECTS
    if Tag.inplace in source.tags or Tag.out in source.tags:
        checks = _emit_identity_check(source)
    else:
        checks = emit_structure_check(source) + _emit_alias_check(source)
    return fill(FIRST_CALL_ONLY, checks=checks) if source.when == "first" else checks


def _emit_identity_check(source: Source) -> str:
    """The lines that raise unless an in-place or out op returns its mutated arguments."""
    schema = source.schema
    if Tag.inplace in source.tags:
        source.objects_of_op["result_error"] = functools.partial(functools.partial, inplace_error, schema)
        return fill(CHECK_IDENTITY, is_another=f"$result is not {variable_name(schema.positional[0])}")
    source.objects_of_op["result_error"] = functools.partial(functools.partial, out_error, schema)
    outs = [variable_name(argument) for argument in schema.mutated]
    is_another = [f"{result} is not {out}" for result, out in zip(_items("$result", outs), outs, strict=True)]
    if len(outs) > 1:
        is_another.insert(0, f"not $isinstance($result, $sequences) or $len($result) != {len(outs)}")
    return fill(CHECK_IDENTITY, is_another=" or ".join(is_another))


def emit_structure_check(source: Source) -> str:
    """The lines that look closer at a result which is no plain tensor, or list of these, where the schema has one."""
    source.objects |= _OBJECTS
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
