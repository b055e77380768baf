"""Generates the backward of a node: a whole function, of which an op's arguments fill the holes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from customops import _compat
from customops._autograd.context import flat_items, materialize_zeros
from customops._autograd.gradient_checks import LEFT_OUT, GradientCheck, InputGradients
from customops._autograd.layout import unflatten
from customops._autograd.node_arguments import NodeArguments
from customops._autograd.options import Formula
from customops._autograd.untracked import OnceDifferentiable, UnpackedOnce, guarded, may_be_differentiated
from customops._codegen.function import Source
from customops._dispatch.callbacks import Fn

_BACKWARD = """
def backward({parameters}):
    {group}
    {materialize}
    $seen = $ctx
    if $ctx._customops_hooked:
        $seen = $unpacked_once($ctx)
    {guard}
    if $autocast_is_on():
        $result = $call_without_autocast($fn, $seen, *$grads)
    else:
        $result = $fn($seen, *$grads)
    $likes = $ctx._customops_expected
    if $type($result) is $tuple and $len($result) == {count}:
        {take}
        if {fits}:
            $was_right()
            return {head}, {flat}
    $none_allowed = $any(grad is None for grad in {grads})
    return {head}, *$check($result, $likes, none_allowed=$none_allowed)
"""


def backward(arguments: NodeArguments, op: str, formula: Formula, compares: GradientCheck) -> Fn:
    """``backward(ctx, *grads)``: call the formula, and compare what it returns with the inputs.

    Gradients that fit are returned as they are; `InputGradients` makes the best of others, or raises.
    """
    layout, inputs = arguments.layout, arguments.inputs
    source = Source("backward", arguments.schema)
    source.objects |= {
        "any": any,
        "autocast_is_on": _compat.kernel_state.autocast_is_on,
        "call_without_autocast": _compat.kernel_state.call_without_autocast,
        "check": InputGradients(arguments, op, formula.fn, compares).flat,
        "fit": functools.partial(_rest_fits, [argument.holds_tensors for argument in inputs[arguments.always :]]),
        "flat_items": flat_items,
        "fn": OnceDifferentiable(formula.fn, op) if formula.once_differentiable else formula.fn,
        "guarded": guarded,
        "isinstance": isinstance,
        "left_out": LEFT_OUT,
        "len": len,
        "list_fits": _list_fits,
        "map": map,
        "materialize_zeros": materialize_zeros,
        "may_be_differentiated": may_be_differentiated,
        "none_for_each": _none_for_each,
        "op": op,
        "Tensor": Tensor,
        "tuple": tuple,
        "type": type,
        "unflatten": unflatten,
        "unpacked_once": UnpackedOnce,
        "was_right": compares.was_right,
    }
    source.fill(
        _BACKWARD,
        parameters=["$ctx", "*$grads"],
        group=_emit_group(arguments),
        materialize=_emit_materialize(arguments),
        guard=[] if formula.once_differentiable else _GUARD,
        count="$len($likes)" if arguments.is_plain else str(len(inputs)),
        take=_emit_take(arguments),
        fits=_all_fit(arguments),
        head=", ".join(["None"] * len(arguments.head)),
        flat=", ".join([*(_flat(arguments, i) for i in arguments.order), *_rest_of(arguments, "*$rest")]),
        grads="$flat_items($grads)" if any(layout.list_outputs) else "$grads",
    )
    return source.build()  # at once: compiled autograd traces it before it was ever called


#: Saved tensors without an autograd graph are guarded where the backward itself may be differentiated.
_GUARD = [
    "if $ctx._customops_untracked is not None and $may_be_differentiated():",
    "    $seen = $guarded($ctx, $op)",
]


def _emit_group(arguments: NodeArguments) -> list[str]:
    """Lines that make lists of the gradients of lists, and leave out those of outputs that are not the op's."""
    if arguments.has_outcome:
        return ["$grads = $unflatten($grads, $ctx._customops_outputs)"]
    return ["$grads = ([*$grads],)"] if arguments.layout.list_outputs == (True,) else []


def _emit_materialize(arguments: NodeArguments) -> list[str]:
    """Lines for zeros in the place of gradients that are None, where torch does not fill them in: see `Outputs`."""
    if len(arguments.layout.outputs) == 1 and not (arguments.has_outcome or any(arguments.layout.list_outputs)):
        return []
    return [
        "if $ctx._customops_zeros is not None:",
        "    $grads = $tuple($map($materialize_zeros, $grads, $ctx._customops_zeros))",
    ]


def _rest_of(arguments: NodeArguments, text: str) -> list[str]:
    return [text] if arguments.is_plain and arguments.has_rest else []


def _grad(arguments: NodeArguments, i: int) -> str:
    return f"$grad_{arguments.inputs[i].name}"


def _like(arguments: NodeArguments, i: int) -> str:
    return f"$like_{arguments.inputs[i].name}"


def _emit_take(arguments: NodeArguments) -> list[str]:
    """Lines for a variable for each gradient, and for what it is to be like."""
    in_schema = arguments.order if arguments.is_plain else range(len(arguments.inputs))
    grads = [*(_grad(arguments, i) for i in in_schema), *_rest_of(arguments, "*$rest")]
    likes = [*(_like(arguments, i) for i in arguments.order), *_rest_of(arguments, "*$rest_likes")]
    lines = [f"{', '.join(grads)}, = $result", f"{', '.join(likes)}, = $likes"] if grads else []
    for i in arguments.order:
        if arguments.inputs[i].is_tensor_list:
            grad = _grad(arguments, i)
            lines += [f"if {grad} is None:", f"    {grad} = $none_for_each({_like(arguments, i)})"]
    return lines


def _all_fit(arguments: NodeArguments) -> str:
    of_rest = _rest_of(arguments, "$fit($rest, $rest_likes)")
    return " and ".join([*(_fits(arguments, i) for i in arguments.order), *of_rest]) or "True"


def _fits(arguments: NodeArguments, i: int) -> str:
    """An expression for: does the gradient of an input fit what is expected?"""
    grad, like = _grad(arguments, i), _like(arguments, i)
    if arguments.inputs[i].is_tensor_list:
        return f"$list_fits({grad}, {like})"
    if not arguments.inputs[i].holds_tensors:
        return f"{grad} is None"
    fits = f"{like} is None or {like} == ({grad}.shape, {grad}.dtype, {grad}.device)"
    fits = f"({fits}) if $isinstance({grad}, $Tensor) else {grad} is {like}"
    return f"({grad} is None if {like} is $left_out else {fits})" if arguments.may_be_left_out(i) else f"({fits})"


def _flat(arguments: NodeArguments, i: int) -> str:
    return f"*{_grad(arguments, i)}" if arguments.inputs[i].is_tensor_list else _grad(arguments, i)


# What the generated function calls ------------------------------------------------------------------------------


def _none_for_each(likes: Any) -> list[None]:
    """What None stands for as the gradient of a list."""
    return [None] * (len(likes) if isinstance(likes, list) else 1)


def _list_fits(gradients: Any, likes: Any) -> bool:
    """Do the gradients of a list fit what is expected?"""
    if not isinstance(likes, list):  # the list is None
        return bool(gradients == [None])
    if not isinstance(gradients, (list, tuple)) or len(gradients) != len(likes):
        return False
    for gradient, like in zip(gradients, likes, strict=True):
        if not isinstance(gradient, Tensor):
            if gradient is not like:  # both None
                return False
        elif like is not None and like != (gradient.shape, gradient.dtype, gradient.device):
            return False
    return True


def _rest_fits(of_tensors: Sequence[bool], gradients: Sequence[Any], likes: Sequence[Any]) -> bool:
    """The same for arguments that a call may leave out."""
    return all(
        gradient is like  # both None
        or (
            is_tensor and isinstance(gradient, Tensor) and (like is None or like == _compat.autograd.metadata(gradient))
        )
        for is_tensor, gradient, like in zip(of_tensors, gradients, likes, strict=False)
    )
