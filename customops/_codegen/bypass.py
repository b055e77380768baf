"""``bypass=True``: a call of the op's object runs the kernel without the dispatcher, where that cannot be told apart.

The dispatcher's work is to find out that there is nothing to do but to call the kernel. For tensors that are plain, in
a thread where nothing is active, that can be found out at a fraction of the price. What is given up is the profiler's
entry for the op. Whatever is not certain goes to the dispatcher, and so do calls through ``torch.ops``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from customops import _compat
from customops._codegen.function import Source, variable_name
from customops._codegen.kernel import emit_kernel_call
from customops._dispatch.results import CheckPolicy
from customops._schema.model import Argument, Schema
from customops.errors import UnsupportedError

#: For each type of argument, when its value reaches a kernel as it is. ``{}`` stands for the variable.
_ARRIVES_AS_IT_IS = {
    "Tensor": "$type({}) in $tensors",
    "SymInt": "$type({}) is $int and -0x8000000000000000 <= {} <= 0x7FFFFFFFFFFFFFFF",
    "int": "$type({}) is $int and -0x8000000000000000 <= {} <= 0x7FFFFFFFFFFFFFFF",
    "float": "$type({}) is $float",
    "Scalar": "$type({}) is $float",
    "bool": "$type({}) is $bool",
    "str": "$type({}) is $str and {}.isascii()",
    "ScalarType": "$type({}) is $dtype",
    "Device": "$type({}) is $device",
}
_OBJECTS: dict[str, Any] = {
    "bool": bool,
    "device": torch.device,
    "dtype": torch.dtype,
    "float": float,
    "int": int,
    "len": len,
    "str": str,
    "tensors": frozenset({Tensor, torch.nn.Parameter}),
    "type": type,
}


def refuse(schema: Schema, op: str) -> None:
    """Raise for an op that cannot be called without the dispatcher."""
    problem = None
    if schema.is_view or any(ret.type != "Tensor" for ret in schema.returns):
        problem = "it returns something else than new tensors or what it writes to"
    if not any(argument.type == "Tensor" for argument in schema.positional):
        problem = "no argument is always a Tensor, to tell the device by"
    for argument in schema.arguments:
        if argument.type.removesuffix("?") not in _ARRIVES_AS_IT_IS:
            problem = f"the argument {argument.name!r} is a {argument.type}, which the dispatcher converts"
        elif argument.kwarg_only and (argument.holds_tensors or not argument.has_default):
            problem = f"the argument {argument.name!r} is always passed by keyword"
    if problem is not None:
        raise UnsupportedError(
            f"the op cannot bypass the dispatcher: {problem}", op=op, got=str(schema), fix="leave bypass=True out"
        )


def source(schema: Schema, tags: tuple[torch.Tag, ...], op: str, when: CheckPolicy) -> Source:
    """The ``__call__`` of an op's object.

    Conditions that rule most calls out come first. Dynamo is to see the first one alone.
    """
    text = Source("__call__", schema)
    names = [variable_name(argument) for argument in schema.positional]
    text.objects |= _OBJECTS
    text.parameters = ["$self", "/", "*$args", "**$kwargs"]
    text.line("if $is_dynamo_compiling():", is_dynamo_compiling=is_dynamo_compiling)
    text.line("    return $self._opoverload(*$args, **$kwargs)")
    text.line("$op = $self._definition")
    text.line(f"if not $kwargs and $len($args) == {len(names)}:")
    text.line(f"    {', '.join(names)}, = $args")
    tensors = sorted((a for a in schema.positional if a.holds_tensors), key=lambda argument: argument.type != "Tensor")
    conditions = [
        *map(_arrives, schema.positional),
        "not $is_torch_function_mode_enabled()",  # before anything that such a mode would see
        f"not (({' or '.join(map(_requires_grad, tensors))}) and $is_grad_enabled())",
        "$forward_ad._current_level < 0",
    ]
    if schema.mutated:  # inside __torch_dispatch__ versions are not counted
        conditions.append("not $is_excluded($counting)")
        text.objects |= {
            "is_excluded": _compat.dispatch.is_excluded,
            "counting": _compat.dispatch.DispatchKey.ADInplaceOrView,
        }
    text.line(
        f"    if {' and '.join(conditions)}:",
        is_grad_enabled=torch.is_grad_enabled,
        is_torch_function_mode_enabled=_compat.dispatch.is_torch_function_mode_enabled,
        forward_ad=_compat.autograd.forward_ad,
        included_keys=_compat.dispatch.included_keys,
    )
    first, *others = tensors  # the first one is there in each call
    text.line(f"        $keys = $keys_of({variable_name(first)})", keys_of=_compat.dispatch.keys_of)
    text.line("        $where = $keys.raw_repr(), $included_keys().raw_repr()")
    text.line("        $cell = $op.direct.of_tensors.get($where)")
    same = [f"$keys_of({variable_name(each)}) == $keys" for each in others]
    same = [
        f"({variable_name(each)} is None or {test})" if each.type.endswith("?") else test
        for each, test in zip(others, same, strict=True)
    ]
    text.line(f"        if {' and '.join(['$cell is not None', *same])}:")
    text.indent = "            "
    if schema.keyword_only:  # left out: the kernel's trampoline knows the defaults
        text.line(f"return $cell.direct({', '.join(names)})")
    else:
        emit_kernel_call(text, schema, tags, op, when, bump=bool(schema.mutated), direct=True)
    text.indent = ""
    text.line("        if $cell is None and $where not in $op.direct.of_tensors:")
    text.line("            $op.find_direct_of($keys, $included_keys())  # for the next call")
    text.line("try:")
    text.line("    return $self._entry(*$args, **$kwargs)")
    text.line("except $RuntimeError as $error:", RuntimeError=RuntimeError)
    text.line("    $op.explain($error)")
    text.line("    raise")
    return text


def _arrives(argument: Argument) -> str:
    test = _ARRIVES_AS_IT_IS[argument.type.removesuffix("?")].format(*[variable_name(argument)] * 3)
    return f"({variable_name(argument)} is None or {test})" if argument.type.endswith("?") else test


def _requires_grad(argument: Argument) -> str:
    test = f"{variable_name(argument)}.requires_grad"
    return f"({variable_name(argument)} is not None and {test})" if argument.type.endswith("?") else test
