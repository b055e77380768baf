"""Generates what applies a node to the arguments of an op: lists are flattened, and lists of results are made again."""

from __future__ import annotations

from typing import Any, cast

from customops._autograd.inplace import Outcome, attach_graph
from customops._autograd.layout import unflatten
from customops._autograd.node_arguments import NodeArguments
from customops._codegen.function import Source
from customops._dispatch.callbacks import Fn

_APPLY = """
def apply({parameters}):
    {pad}
    {measure}
    {new_outcome}
    $result = $function({arguments})
    {attach_graph}
    return {result}
"""


def apply(arguments: NodeArguments, function: Any) -> Fn:
    """``apply(kernel, *args, **kwargs)``: what ``function.apply`` is for a plain node, which takes them as they are."""
    if arguments.is_plain:
        return cast(Fn, function.apply)
    source = Source("apply", arguments.schema)
    source.objects |= {"function": function.apply, "Outcome": Outcome, "attach_graph": attach_graph}
    source.objects |= {"unflatten": unflatten, "len": len, "list": list, "isinstance": isinstance, "tuple": tuple}
    writes = bool(arguments.schema.mutated)
    source.fill(
        _APPLY,
        parameters=_parameters_of_apply(arguments),
        pad=_emit_pad(arguments),
        measure=[f"{arguments.length(i)} = {_length(arguments, i)}" for i in arguments.measured],
        new_outcome=["$outcome = $Outcome()"] if arguments.has_outcome else [],
        arguments=", ".join([*arguments.head, *(_flattened(arguments, i) for i in arguments.order)]),
        attach_graph=["if $outcome.mutated:", "    $attach_graph($outcome, $result)"] if writes else [],
        result=_result_of_apply(arguments),
    )
    return source.build()


def _parameters_of_apply(arguments: NodeArguments) -> list[str]:
    positional = [arguments.variable(i) for i in range(arguments.layout.positional)]
    tensors = [
        f"{argument.name}=None" if argument.has_default else argument.name
        for argument in arguments.inputs[arguments.layout.positional :]
    ]
    star = ["*$rest"] if arguments.has_rest else ["*"] if tensors else []
    return ["$kernel", *positional[: arguments.always], *star, *tensors, *(["**$named"] if arguments.has_named else [])]


def _emit_pad(arguments: NodeArguments) -> list[str]:
    """Lines that give the variables of positional arguments that may be left out their values."""
    if not arguments.is_padded:
        return []
    names = [arguments.variable(i) for i in range(arguments.always, arguments.layout.positional)]
    nones = ", ".join(["None"] * len(names))
    return [
        f"$passed = {arguments.always} + $len($rest)",
        f"{', '.join(names)}, = (*$rest, {nones})[:{len(names)}]",
    ]


def _length(arguments: NodeArguments, i: int) -> str:
    name = arguments.variable(i)
    return f"None if {name} is None else $len({name})" if arguments.may_be_none(i) else f"$len({name})"


def _flattened(arguments: NodeArguments, i: int) -> str:
    name = arguments.variable(i)
    if not arguments.inputs[i].is_tensor_list:
        return name
    return f"*((None,) if {name} is None else {name})" if arguments.may_be_none(i) else f"*{name}"


def _result_of_apply(arguments: NodeArguments) -> str:
    """An expression for what the op returns."""
    schema, layout = arguments.schema, arguments.layout
    if not schema.returns:
        return "None"
    if not arguments.has_outcome:
        return "$list($result)" if layout.list_outputs == (True,) else "$result"
    returns = len(layout.outputs) - len(layout.new_values)
    flat = "($result if $isinstance($result, $tuple) else ($result,))"
    outputs = f"$unflatten({flat}, $outcome.lengths)"
    return f"{outputs}[:{returns}]" if arguments.returns_tuple else f"{outputs}[0]"
