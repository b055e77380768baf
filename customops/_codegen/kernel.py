"""Writes the functions that the dispatcher calls for an op: Python source, made from its schema when it is defined.

A call is to pay for no loop over the arguments, no tuple packed and unpacked, no default that was not left out. So what
would be a closure over ``*args`` is written out for the op at hand, and compiled. `CustomOpDef.explain_call` prints it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from customops import _compat
from customops._codegen.function import (
    Source,
    always_passed,
    as_tuple,
    compile_on_first_call,
    may_be_none,
    variable_name,
)
from customops._dispatch.callbacks import in_python_form, is_altered
from customops._dispatch.operator import CurrentKernel
from customops._dispatch.results import CheckPolicy, alias_error, inplace_error, out_error, structure_check, tensors_in
from customops._schema.model import Return, Schema


def kernel(
    schema: Schema, tags: tuple[torch.Tag, ...], op: str, cell: CurrentKernel, when: CheckPolicy, *, bump: bool = False
) -> Callable[..., Any]:
    """The function at a device's dispatch key: put defaults in, call what the cell holds, check what it returns.

    With `bump` it also counts the versions of what the op writes, which is else done at a key above.
    """
    for argument in schema.keyword_only:
        variable_name(argument)  # raises now what it would raise in the first call
    return compile_on_first_call("kernel", functools.partial(_kernel, schema, tags, op, cell, when, bump))


def _kernel(
    schema: Schema, tags: tuple[torch.Tag, ...], op: str, cell: CurrentKernel, when: CheckPolicy, bump: bool
) -> Source:
    source = Source("kernel", schema)
    _take_all(source, schema)
    source.objects["cell"] = cell
    emit_kernel_call(source, schema, tags, op, when, bump=bump, direct=False)
    return source


def emit_kernel_call(
    source: Source, schema: Schema, tags: tuple[torch.Tag, ...], op: str, when: CheckPolicy, *, bump: bool, direct: bool
) -> None:
    """Add the lines from the call of what ``$cell`` holds to the return.

    A kernel runs in one state, whoever called the op: autocast is off, nothing is recorded (but what it records itself,
    under ``torch.enable_grad()``), and no key of the dispatcher is left out for its own operations. Keys are left out
    below a mode and in the first call of compiled code, never in a `direct` call.
    """
    if bump:
        _bump_versions(source, schema)
    source.line("$fn = $cell.fn")
    arguments = _all_arguments(schema)
    plain = direct or schema.is_view  # torch's own kernel for views, above, has the keys left out that it must
    strange = "$autocast_is_on()" if plain else "$autocast_is_on() or $is_excluded($conjugate)"
    source.line(f"if {strange}:", autocast_is_on=_compat.kernel_state.autocast_is_on)
    call_plainly = _compat.kernel_state.call_plainly_writing if schema.mutated else _compat.kernel_state.call_plainly
    call_plainly = _compat.kernel_state.call_without_autocast if schema.is_view else call_plainly
    source.line(f"    $result = $call_plainly({', '.join(['$fn', *arguments])})", call_plainly=call_plainly)
    source.line("elif $is_grad_enabled():", is_grad_enabled=torch.is_grad_enabled)
    source.line("    $set_grad_enabled(False)", set_grad_enabled=_compat.kernel_state.set_grad_enabled)
    for line in ("try:", f"    $result = $fn({', '.join(arguments)})", "finally:", "    $set_grad_enabled(True)"):
        source.line(f"    {line}")
    source.line("else:")
    source.line(f"    $result = $fn({', '.join(arguments)})")
    if not plain:
        source.objects |= {
            "is_excluded": _compat.dispatch.is_excluded,
            "conjugate": _compat.dispatch.DispatchKey.Conjugate,
        }
    if when != "never":
        start = len(source.lines)
        _check(source, schema, tags, op)
        if when == "first" and len(source.lines) > start:
            checks = source.lines[start:]
            del source.lines[start:]
            source.line("if $cell.unchecked:")
            source.lines += [f"    {line}" for line in checks]
            source.line("    $cell.unchecked = False")
    if when != "always" and len(schema.returns) > 1:  # as the dispatcher would, and the checks do
        source.line("if $type($result) is not $tuple and $isinstance($result, $sequences):", **_FOR_FITS)
        source.line("    $result = $tuple($result)", sequences=(list, tuple))
    source.line("return $result")


def _take_all(source: Source, schema: Schema) -> None:
    """Parameters for all arguments, with the defaults that callbacks are to see."""
    required = always_passed(schema)
    for i, argument in enumerate((*schema.positional, *schema.keyword_only)):
        name = variable_name(argument)
        if argument.kwarg_only and i == len(schema.positional):
            source.parameters.append("*")
        if not argument.has_default:
            source.parameters.append(name)
            continue
        default = None if argument.default_is_none_in_text else argument.default
        source.objects[f"default_{i}"] = default
        is_optional = argument.kwarg_only or i >= required
        source.parameters.append(f"{name}=$default_{i}" if is_optional else name)
        if is_altered(argument):
            source.line(
                f"{name} = $written_{i}({name})", **{f"written_{i}": functools.partial(in_python_form, argument)}
            )
        elif isinstance(default, tuple):
            source.line(f"if {name} is $default_{i}:")
            source.line(f"    {name} = $list({name})", list=list)  # a new one in each call


def _all_arguments(schema: Schema) -> list[str]:
    """How the arguments are given to a kernel."""
    named = (f"{variable_name(argument)}={variable_name(argument)}" for argument in schema.keyword_only)
    return [*map(variable_name, schema.positional), *named]


def _bump_versions(source: Source, schema: Schema) -> None:
    written = [variable_name(argument) for argument in schema.mutated]
    if [argument.type for argument in schema.mutated] == ["Tensor"]:
        if may_be_none(schema.mutated[0], schema):
            source.line(f"if {written[0]} is not None:")
            source.line(
                f"    $increment_version({as_tuple(written)})", increment_version=_compat.autograd.increment_version
            )
        else:
            source.line(
                f"$increment_version({as_tuple(written)})", increment_version=_compat.autograd.increment_version
            )
        return
    source.line(
        f"$increment_version($tensors_in({as_tuple(written)}))",
        increment_version=_compat.autograd.increment_version,
        tensors_in=tensors_in,
    )


def _check(source: Source, schema: Schema, tags: tuple[torch.Tag, ...], op: str) -> None:
    """Raise unless the result has the schema's types, and aliases nothing but what it says."""
    if torch.Tag.inplace in tags:
        source.line(f"if $result is not {variable_name(schema.positional[0])}:")
        source.line("    raise $wrong($result, $fn)", wrong=functools.partial(inplace_error, schema, op))
        return
    if torch.Tag.out in tags:
        outs = [variable_name(argument) for argument in schema.mutated]
        results = ["$result"] if len(outs) == 1 else [f"$result[{i}]" for i in range(len(outs))]
        wrong = [f"{result} is not {out}" for result, out in zip(results, outs, strict=True)]
        if len(outs) > 1:
            wrong.insert(0, f"not $isinstance($result, $sequences) or $len($result) != {len(outs)}")
        source.line(f"if {' or '.join(wrong)}:", isinstance=isinstance, sequences=(tuple, list), len=len)
        source.line("    raise $wrong($result, $fn)", wrong=functools.partial(out_error, schema, op))
        return
    fits = _fits(schema.returns)
    if fits is not None:
        source.line(f"if not ({fits}):", **_FOR_FITS)
    indent = "" if fits is None else "    "
    source.line(f"{indent}$result = $structure($result, $fn)", structure=structure_check(schema, op, "kernel"))
    if not schema.is_view and any("Tensor" in ret.type for ret in schema.returns):
        _check_aliases(source, schema, op)


#: What `_fits` refers to.
_FOR_FITS: dict[str, Any] = {
    "Tensor": Tensor,
    "isinstance": isinstance,
    "len": len,
    "list": list,
    "map": map,
    "set": set,
    "tensor_types": {Tensor, torch.nn.Parameter},
    "tuple": tuple,
    "type": type,
}


def _fits(returns: tuple[Return, ...]) -> str | None:
    """An expression for the usual case of a result that fits; what it does not hold for is looked at more closely."""
    if not returns:
        return "$result is None"
    if any(ret.type not in ("Tensor", "Tensor[]") for ret in returns):
        return None
    if len(returns) == 1:
        return _fits_one("$result", returns[0])
    items = [_fits_one(f"$result[{i}]", ret) for i, ret in enumerate(returns)]
    return " and ".join([f"$type($result) is $tuple and $len($result) == {len(returns)}", *items])


def _fits_one(value: str, ret: Return) -> str:
    if ret.type == "Tensor":
        return f"$isinstance({value}, $Tensor)"
    return f"$type({value}) is $list and $set($map($type, {value})) <= $tensor_types"


def _check_aliases(source: Source, schema: Schema, op: str) -> None:
    """Raise if a result is memory of an argument or of another result."""
    tensors = [variable_name(argument) for argument in schema.arguments if argument.holds_tensors]
    if not tensors and [ret.type for ret in schema.returns] == ["Tensor"]:
        return
    all_results = ["$result"] if len(schema.returns) == 1 else [f"$result[{i}]" for i in range(len(schema.returns))]
    types = [(value, ret.type) for value, ret in zip(all_results, schema.returns, strict=True) if "Tensor" in ret.type]
    given, results = as_tuple(tensors), as_tuple(value for value, _ in types)
    source.line("try:", RuntimeError=RuntimeError)
    source.line(f"    $alias = {_may_alias(source, schema, types, given, results)}")
    source.line("except $RuntimeError:")
    source.line("    $alias = True  # perhaps: a layout without a storage of its own")
    source.line(f"if $alias and $share_memory({given}, {results}):", share_memory=_compat.memory.outputs_share_memory)
    positional = as_tuple(map(variable_name, schema.positional))
    named = ", ".join(f"{argument.name!r}: {variable_name(argument)}" for argument in schema.keyword_only)
    source.line(
        f"    raise $alias_error($result, $fn, {positional}, {{{named}}})",
        alias_error=functools.partial(alias_error, schema, op),
    )


def _may_alias(source: Source, schema: Schema, types: list[tuple[str, str]], given: str, results: str) -> str:
    """An expression that is False, at little cost, for results in memory of their own.

    Memory that others made, as that of a NumPy array, cannot be resized; it may be that of an argument, under another
    storage. Memory of torch is new if the tensor is the only one of its storage; the second use is the Python object.
    """
    if any(type_ != "Tensor" for _, type_ in types) or any("[" in a.type for a in schema.arguments if a.holds_tensors):
        flat = as_tuple(value if type_ == "Tensor" else f"*({value} or ())" for value, type_ in types)
        source.objects |= {"all": all, "map": map, "any_alias": _compat.memory.any_alias}
        source.objects |= {"storage": Tensor.untyped_storage, "is_own": torch.UntypedStorage.resizable}
        return f"not $all($map($is_own, $map($storage, {flat}))) or $any_alias({given}, {{}}, {results})"
    source.objects["uses"] = _compat.memory.storage_uses
    owned = [f"($s := {v}.untyped_storage()).resizable() and $uses($s._cdata) == 2" for v, _ in types]
    arguments = [variable_name(argument) for argument in schema.arguments if argument.holds_tensors]
    pairs = [*itertools.product([v for v, _ in types], arguments), *itertools.combinations([v for v, _ in types], 2)]
    return f"not ({' and '.join(owned)}) or {' or '.join(f'{one} is {other}' for one, other in pairs)}"
