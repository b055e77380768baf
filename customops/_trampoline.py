"""Writes the functions that the dispatcher calls for an op: Python source, made from its schema when it is defined.

A call is to pay for no loop over the arguments, no tuple packed and unpacked, no default that was not left out. So what
would be a closure over ``*args`` is written out for the op at hand, and compiled. `CustomOpDef.explain_call` prints it.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable
from typing import Any, cast, get_args

import torch
from torch import Tensor

from customops import _compat
from customops._call import (
    Fn,
    alias_error,
    as_written,
    inplace_error,
    is_altered,
    out_error,
    structure_check,
    tensors_in,
)
from customops._definition import When
from customops._schema import Argument, Return, Schema
from customops._source import Source, always_passed, as_tuple, local, may_be_none, written_when_called
from customops.errors import DefinitionError, brief


def when_to_check(given: Any, op: str) -> When:
    """What ``check=`` and the environment say together. The environment is for who runs a program, so it decides."""
    value = os.environ.get("CUSTOMOPS_CHECK") or ("always" if given is None else given)
    if value not in get_args(When):
        source = "check=" if value is given else "the environment variable CUSTOMOPS_CHECK"
        raise DefinitionError(
            f"{source} has no such value", op=op, expected='"always", "first" or "never"', got=brief(value)
        )
    return cast(When, value)


class Cell:
    """What a kernel's trampoline calls. Registering again, or switching off, changes `fn`; the trampoline stays."""

    __slots__ = ("direct", "fn", "unchecked")

    def __init__(self, fn: Fn) -> None:
        self.set(fn)
        #: The kernel's trampoline, for a call that skips the keys between autograd and the device.
        self.direct: Fn | None = None

    def set(self, fn: Fn) -> None:
        self.fn = fn
        self.unchecked = True


# Kernels --------------------------------------------------------------------------------------------------------


def kernel(
    schema: Schema, tags: tuple[torch.Tag, ...], op: str, cell: Cell, when: When, *, bump: bool = False
) -> Callable[..., Any]:
    """The function at a device's dispatch key: put defaults in, call what the cell holds, check what it returns.

    With `bump` it also counts the versions of what the op writes, which is else done at a key above.
    """
    for argument in schema.keyword_only:
        local(argument)  # raises now what it would raise in the first call
    return written_when_called("kernel", functools.partial(_kernel, schema, tags, op, cell, when, bump))


def _kernel(schema: Schema, tags: tuple[torch.Tag, ...], op: str, cell: Cell, when: When, bump: bool) -> Source:
    source = Source("kernel", schema)
    _take_all(source, schema)
    source.objects["cell"] = cell
    run(source, schema, tags, op, when, bump=bump, direct=False)
    return source


def run(
    source: Source, schema: Schema, tags: tuple[torch.Tag, ...], op: str, when: When, *, bump: bool, direct: bool
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
    source.line(f"if {strange}:", autocast_is_on=_compat.autocast_is_on)
    call_plainly = _compat.call_plainly_writing if schema.mutated else _compat.call_plainly
    call_plainly = _compat.call_without_autocast if schema.is_view else call_plainly
    source.line(f"    $result = $call_plainly({', '.join(['$fn', *arguments])})", call_plainly=call_plainly)
    source.line("elif $is_grad_enabled():", is_grad_enabled=torch.is_grad_enabled)
    source.line("    $set_grad_enabled(False)", set_grad_enabled=_compat.set_grad_enabled)
    for line in ("try:", f"    $result = $fn({', '.join(arguments)})", "finally:", "    $set_grad_enabled(True)"):
        source.line(f"    {line}")
    source.line("else:")
    source.line(f"    $result = $fn({', '.join(arguments)})")
    if not plain:
        source.objects |= {"is_excluded": _compat.is_excluded, "conjugate": _compat.DispatchKey.Conjugate}
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
        name = local(argument)
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
            source.line(f"{name} = $written_{i}({name})", **{f"written_{i}": functools.partial(as_written, argument)})
        elif isinstance(default, tuple):
            source.line(f"if {name} is $default_{i}:")
            source.line(f"    {name} = $list({name})", list=list)  # a new one in each call


def _all_arguments(schema: Schema) -> list[str]:
    """How the arguments are given to a kernel."""
    named = (f"{local(argument)}={local(argument)}" for argument in schema.keyword_only)
    return [*map(local, schema.positional), *named]


def _bump_versions(source: Source, schema: Schema) -> None:
    written = [local(argument) for argument in schema.mutated]
    if [argument.type for argument in schema.mutated] == ["Tensor"]:
        if may_be_none(schema.mutated[0], schema):
            source.line(f"if {written[0]} is not None:")
            source.line(f"    $increment_version({as_tuple(written)})", increment_version=_compat.increment_version)
        else:
            source.line(f"$increment_version({as_tuple(written)})", increment_version=_compat.increment_version)
        return
    source.line(
        f"$increment_version($tensors_in({as_tuple(written)}))",
        increment_version=_compat.increment_version,
        tensors_in=tensors_in,
    )


def _check(source: Source, schema: Schema, tags: tuple[torch.Tag, ...], op: str) -> None:
    """Raise unless the result has the schema's types, and aliases nothing but what it says."""
    if torch.Tag.inplace in tags:
        source.line(f"if $result is not {local(schema.positional[0])}:")
        source.line("    raise $wrong($result, $fn)", wrong=functools.partial(inplace_error, schema, op))
        return
    if torch.Tag.out in tags:
        outs = [local(argument) for argument in schema.mutated]
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
    tensors = [local(argument) for argument in schema.arguments if argument.holds_tensors]
    if not tensors and [ret.type for ret in schema.returns] == ["Tensor"]:
        return
    all_results = ["$result"] if len(schema.returns) == 1 else [f"$result[{i}]" for i in range(len(schema.returns))]
    types = [(value, ret.type) for value, ret in zip(all_results, schema.returns, strict=True) if "Tensor" in ret.type]
    given, results = as_tuple(tensors), as_tuple(value for value, _ in types)
    source.line("try:", RuntimeError=RuntimeError)
    source.line(f"    $alias = {_may_alias(source, schema, types, given, results)}")
    source.line("except $RuntimeError:")
    source.line("    $alias = True  # perhaps: a layout without a storage of its own")
    source.line(f"if $alias and $share_memory({given}, {results}):", share_memory=_compat.outputs_share_memory)
    positional = as_tuple(map(local, schema.positional))
    named = ", ".join(f"{argument.name!r}: {local(argument)}" for argument in schema.keyword_only)
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
        source.objects |= {"all": all, "map": map, "any_alias": _compat.any_alias}
        source.objects |= {"storage": Tensor.untyped_storage, "is_own": torch.UntypedStorage.resizable}
        return f"not $all($map($is_own, $map($storage, {flat}))) or $any_alias({given}, {{}}, {results})"
    source.objects["uses"] = _compat.storage_uses
    owned = [f"($s := {v}.untyped_storage()).resizable() and $uses($s._cdata) == 2" for v, _ in types]
    arguments = [local(argument) for argument in schema.arguments if argument.holds_tensors]
    pairs = [*itertools.product([v for v, _ in types], arguments), *itertools.combinations([v for v, _ in types], 2)]
    return f"not ({' and '.join(owned)}) or {' or '.join(f'{one} is {other}' for one, other in pairs)}"


# Autograd -------------------------------------------------------------------------------------------------------


#: Makes what an autograd trampoline calls: ``general(keyset, cell, args, kwargs)``, and the holder of a node or None.
Make = Callable[[], tuple[Fn, Any]]


def autograd(
    schema: Schema,
    tags: tuple[torch.Tag, ...],
    op: str,
    when: When,
    watched: tuple[Argument, ...],
    direct: dict[int, Cell | None],
    make: Make,
) -> Callable[..., Any]:
    """The function at the Autograd key: do what the device's kernel does, where that is all there is to do.

    The key set that a kernel at Autograd receives holds whatever else is to come: modes, functorch, subclasses, views
    that are conjugate, ... `direct` has the cell of the kernel for the key sets that hold nothing but a device, so
    where it has one and nothing is to be differentiated, what the dispatcher would do is to call that kernel. Where
    something is, ``node.apply(kernel, *args)`` does it, if the op has a node that takes its arguments as they are. All
    else is done by `general`.
    """
    return written_when_called("autograd", functools.partial(_autograd, schema, tags, op, when, watched, direct, make))


def _autograd(
    schema: Schema,
    tags: tuple[torch.Tag, ...],
    op: str,
    when: When,
    watched: tuple[Argument, ...],
    direct: dict[int, Cell | None],
    make: Make,
) -> Source:
    general, node = make()
    source = Source("autograd", schema)
    always = [local(argument) for argument in schema.positional[: always_passed(schema)]]
    rest = ["*$rest"] if len(always) < len(schema.positional) else []
    named = ["**$named"] if schema.keyword_only else []
    passed = ", ".join([*always, *rest, *named])
    source.parameters = ["$keyset", "/", *always, *rest, *named]
    source.line("$cell = $direct.get($keyset.raw_repr())", direct=direct)
    source.line("if $cell is not None and $forward_ad._current_level < 0:", forward_ad=_compat.forward_ad)
    source.line(f"    if not ({_requires_grad(source, schema, watched)}):")
    source.indent = "        "
    if rest or named:  # the kernel's trampoline knows the defaults
        source.line(f"return $cell.direct({passed})")
    else:
        run(source, schema, tags, op, when, bump=bool(schema.mutated), direct=True)
    source.indent = ""
    if node is not None:
        source.line("    $apply = $node.apply", node=node)
        source.line("    if $apply is not None:")
        source.line("        try:")
        source.line(f"            return $apply($cell.direct, {passed})")
        source.line("        except $errors as $error:", errors=(TypeError, RuntimeError))
        source.line("            $node.explain($error)")
        source.line("            raise")
    source.line(
        f"return $general($keyset, $cell, {as_tuple([*always, *rest])}, {'$named' if named else '{}'})", general=general
    )
    return source


def _requires_grad(source: Source, schema: Schema, watched: tuple[Argument, ...]) -> str:
    """An expression for: is anything to be differentiated?"""
    source.objects["is_grad_enabled"] = torch.is_grad_enabled
    tensors = [argument for argument in schema.positional[: always_passed(schema)] if argument in watched]
    others = [argument for argument in watched if argument not in tensors]
    if not others and len(tensors) <= 3 and all(argument.is_tensor for argument in tensors):
        each = [
            f"({local(a)} is not None and {local(a)}.requires_grad)"
            if may_be_none(a, schema)
            else f"{local(a)}.requires_grad"
            for a in tensors
        ]
        return f"({' or '.join(each)}) and $is_grad_enabled()" if each else "False"
    items = [local(a) for a in tensors]
    items += ["*$rest"] if any(not a.kwarg_only for a in others) else []
    items += ["**$named"] if any(a.kwarg_only for a in others) else []
    source.objects["any_requires_grad"] = any_requires_grad(schema)
    return f"$any_requires_grad({', '.join(items)}) and $is_grad_enabled()"


def any_requires_grad(schema: Schema) -> Callable[..., bool]:
    """``f(*args, **kwargs)``: does a tensor, or one in a list, require grad?"""
    has_gaps = any(argument.type.startswith("Tensor?[") for argument in schema.arguments)
    return _look_for_grad if has_gaps else _compat.any_requires_grad


def _look_for_grad(*args: Any, **kwargs: Any) -> bool:
    """torch's own function passes lists over that hold a None."""
    return any(tensor.requires_grad for tensor in tensors_in((*args, *kwargs.values())))
