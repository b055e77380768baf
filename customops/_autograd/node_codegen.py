"""Generates the forward of a node: a whole function, of which an op's arguments fill the holes."""

from __future__ import annotations

import functools
import operator
from typing import Any, cast

from torch import Tensor

from customops import _torch
from customops._autograd.context import Outputs, SetUp, flat_items, mask, materialize_zeros
from customops._autograd.gradient_checks import LEFT_OUT, GradientCheck, InputGradients
from customops._autograd.inplace import Mutation, Outcome, attach_graph
from customops._autograd.layout import Formula, NodeArguments, flatten, unflatten
from customops._autograd.untracked import (
    HOLD_NO_TENSORS,
    OnceDifferentiable,
    UnpackedOnce,
    guarded,
    links_to,
    may_be_differentiated,
    record_untracked,
)
from customops._codegen.function import Source, as_tuple
from customops._dispatch.callbacks import Fn
from customops._dispatch.random_states import RandomStates

_FORWARD = """
def forward({parameters}):
    {take}
    {save_random}
    $result = $kernel({call})
    {arrange_result}
    {needs}
    $kept = $ctx.__dict__
    {set_up}
    {finish}
    if not $compares.is_on:
        $kept['_customops_expected'] = {expected_unknown}
    elif $type($kernel) is $partial:
        $kept['_customops_expected'] = {expected_of_any}
    else:
        $kept['_customops_expected'] = {expected_of_plain}
    {return_flat}
"""

#: The same for an op that mutates: see `inplace.Mutation`.
_MUTATING_FORWARD = """
def forward({parameters}):
    {take}
    $inputs = {inputs}
    $originals, $dirty = $mutation.begin($inputs, {flat})
    {save_random}
    with $mutation.recorded($dirty):
        $result = $kernel({call})
    {arrange_result}
    $outputs = $mutation.end($ctx, $outcome, $inputs, {outputs}, $dirty)
    {take_changed}
    {needs}
    $kept = $ctx.__dict__
    {set_up}
    {finish}
    if not $compares.is_on:
        $ctx._customops_expected = {expected_unknown}
    else:
        $ctx._customops_expected = {expected_of_any}
    return $mutation.flatten_outputs($ctx, $outcome, $outputs)
"""


def forward(
    arguments: NodeArguments,
    set_up: SetUp,
    finish: Outputs,
    compares: GradientCheck,
    mutation: Mutation,
    *,
    draws_again: bool,
) -> Fn:
    """``forward(ctx, kernel, ..., *flat_inputs)``: call the kernel and setup_context, and note what backward needs.

    If the formula draws the kernel's random numbers again, that includes where the generators are before.
    """
    source = Source("forward", arguments.schema)
    source.objects |= {
        "compares": compares,
        "facts": operator.attrgetter("shape", "dtype", "device"),
        "finish": finish,
        "flatten": flatten,
        "left_out": LEFT_OUT,
        "len": len,
        "list": list,
        "map": map,
        "mask": mask,
        "metadata": _torch.autograd.metadata,
        "mutation": mutation,
        "partial": functools.partial,
        "RandomStates": RandomStates,
        "tuple": tuple,
        "type": type,
        "zip": zip,
    }
    mutates = bool(arguments.schema.mutated)
    values = {i: arguments.given(i) for i in range(len(arguments.inputs))}
    source.fill(
        _MUTATING_FORWARD if mutates else _FORWARD,
        parameters=["$ctx", *arguments.head, *arguments.flat_parameters],
        take=_take_inputs(arguments),
        save_random=[f"$ctx._customops_random = $RandomStates({_all(arguments)})"] if draws_again else [],
        inputs="{" + ", ".join(f"{i}: {value}" for i, value in values.items()) + "}",
        flat=arguments.flat,
        call=_call(arguments, values),
        arrange_result=_emit_arrange_result(arguments),
        outputs=_outputs(arguments),
        take_changed=[f"{arguments.variable(i)} = $inputs[{i}]" for i in arguments.order],
        needs=_emit_needs(source, arguments),
        set_up=_emit_set_up(source, arguments, set_up, values, for_jvp=finish.for_jvp) if set_up.callbacks else [],
        finish=_emit_finish(arguments, finish),
        expected_unknown=_expected(arguments, None),
        expected_of_any=_expected(arguments, "$metadata({0})"),
        expected_of_plain=_expected(arguments, "$facts({0})"),
        return_flat=_emit_return(arguments),
    )
    return source.build()


def _take_inputs(arguments: NodeArguments) -> list[str]:
    """Lines that take the inputs out of the flat ones, where there are lists among them."""
    if not arguments.has_lists:
        names = as_tuple(map(arguments.variable, arguments.order))
        return [f"$flat = {names}"] if arguments.schema.mutated else []
    lines: list[str] = []
    for i in arguments.order:
        place, name = arguments.place(i), arguments.variable(i)
        if i in arguments.measured:
            start, end = place.split(":")
            length = arguments.length(i)
            if arguments.may_be_none(i):
                lines.append(f"{end} = {start} + (1 if {length} is None else {length})")
            else:
                lines.append(f"{end} = {start} + {length}" if start != "0" else f"{end} = {length}")
        if arguments.inputs[i].is_tensor_list and arguments.may_be_none(i):
            lines.append(f"{name} = None if {arguments.length(i)} is None else $flat[{place}]")
        else:
            lines.append(f"{name} = $flat[{place}]")
    return lines


def _all(arguments: NodeArguments) -> str:
    return f"(*{arguments.flat}, *$named.values())" if arguments.has_named else arguments.flat


def _call(arguments: NodeArguments, values: dict[int, str]) -> str:
    if not arguments.is_plain:
        return arguments.call(values)
    names = [values[i] for i in arguments.order]
    rest = arguments.inputs[arguments.always :]
    if any("[" in argument.type for argument in rest):
        return ", ".join([*names, "*[$list(x) if $type(x) is $list else x for x in $rest]"])
    return ", ".join([*names, *(["*$rest"] if rest else [])])


def _emit_arrange_result(arguments: NodeArguments) -> list[str]:
    """Lines for a result that the dispatcher, if it were called, would make a tuple, or one with lists, of."""
    if arguments.layout.in_place:
        return [f"$result = {arguments.variable(0)}"]
    lists = arguments.layout.list_outputs[: len(arguments.layout.outputs) - len(arguments.layout.new_values)]
    if not arguments.returns_tuple:
        return ["if $type($result) is not $list:", "    $result = $list($result)"] if lists == (True,) else []
    if any(lists):
        items = (f"$list($result[{i}])" if is_list else f"$result[{i}]" for i, is_list in enumerate(lists))
        return [f"$result = {as_tuple(items)}"]
    return ["if $type($result) is not $tuple:", "    $result = $tuple($result)"]


def _outputs(arguments: NodeArguments) -> str:
    """What the node returns, lists as lists."""
    if arguments.returns_tuple and not arguments.layout.new_values:
        return "$result"
    result = [] if not arguments.schema.returns else ["*$result"] if arguments.returns_tuple else ["$result"]
    return as_tuple([*result, *map(arguments.variable, arguments.layout.new_values)])


def _emit_return(arguments: NodeArguments) -> list[str]:
    if arguments.has_outcome:
        return [
            f"$result, $outcome.lengths = $flatten({_outputs(arguments)}, {arguments.layout.list_outputs})",
            "$ctx._customops_outputs = $outcome.lengths",
            "return $result",
        ]
    if not arguments.schema.returns:
        return ["return ()"]
    return ["return $tuple($result)" if arguments.layout.list_outputs == (True,) else "return $result"]


# Which inputs need a gradient -----------------------------------------------------------------------------------


def _emit_needs(source: Source, arguments: NodeArguments) -> list[str]:
    """Lines that set ``needs_input_grad`` to what a backward is to see: an entry for each argument, lists as lists.

    That is for each positional argument that was passed; if there are tensors that are keyword-only, for each
    positional argument and each of them, so that each has its place.
    """
    layout, count = arguments.layout, len(arguments.inputs)
    lines = [f"$needs = $ctx.needs_input_grad[{len(arguments.head)}:]"]
    if arguments.is_plain:
        if any(a.holds_tensors and not flag for a, flag in zip(layout.inputs, layout.differentiable, strict=True)):
            source.objects["differentiable"] = layout.differentiable
            lines.append("$needs = $tuple($map($mask, $needs, $differentiable))")
        return [*lines, "$ctx.needs_input_grad = $needs"]
    for i in arguments.order:
        if arguments.inputs[i].is_tensor_list:
            lines.append(f"$needs_{arguments.inputs[i].name} = {_flags_of_list(arguments, i)}")
    flags = as_tuple(_flag(arguments, i) for i in range(count))
    cut = "[:$passed]" if arguments.is_padded and layout.positional == count else ""
    return [*lines, f"$ctx.needs_input_grad = {flags}{cut}"]


def _flags_of_list(arguments: NodeArguments, i: int) -> str:
    name = arguments.variable(i)
    flags = f"$list($needs[{arguments.place(i)}])"
    if not arguments.layout.differentiable[i]:
        flags = f"[False] * $len({name})"
    return f"False if {name} is None else {flags}" if arguments.may_be_none(i) else flags


def _flag(arguments: NodeArguments, i: int) -> str:
    """An expression for the entry of an input in ``needs_input_grad``."""
    if arguments.is_plain:
        return f"$needs[{i}]"
    if not arguments.layout.differentiable[i]:
        return f"$needs_{arguments.inputs[i].name}" if arguments.inputs[i].is_tensor_list else "False"
    return (
        f"$needs_{arguments.inputs[i].name}" if arguments.inputs[i].is_tensor_list else f"$needs[{arguments.place(i)}]"
    )


# What gradients are to be like ----------------------------------------------------------------------------------


def _expected(arguments: NodeArguments, metadata: str | None) -> str:
    """An expression for what the gradients of all inputs are to be like, in the order in which the node has them.

    See `_torch.autograd.metadata`. A kernel that is called directly gets plain tensors, with shapes that can be
    compared; else it is a partial. `metadata` is what to keep of a tensor, None if gradients are not compared.
    """
    if metadata is None and arguments.is_plain:
        return "(None,) * $len($needs)"
    items = [_expected_of(arguments, i, metadata) for i in arguments.order]
    if arguments.is_plain and arguments.has_rest:
        items.append(f"*($metadata(x) if flag else None for x, flag in $zip($rest, $needs[{arguments.always}:]))")
    return as_tuple(items)


def _expected_of(arguments: NodeArguments, i: int, metadata: str | None) -> str:
    argument, name = arguments.inputs[i], arguments.variable(i)
    if argument.is_tensor_list:
        flags = f"$needs_{argument.name}"
        one = f"{metadata.format('x')} if flag else None" if metadata else "None"
        expected = f"[{one} for x, flag in $zip({name}, {flags})]" if metadata else f"[None] * $len({name})"
        expected = f"None if {name} is None else {expected}" if arguments.may_be_none(i) else expected
    elif argument.holds_tensors and metadata and (flag := _flag(arguments, i)) != "False":
        expected = f"{metadata.format(name)} if {flag} else None"
    else:
        expected = "None"
    if not arguments.may_be_left_out(i):
        return expected
    is_left_out = f"{name} is None" if argument.kwarg_only else f"$passed <= {i}"
    return f"$left_out if {is_left_out} else {expected}"


# setup_context --------------------------------------------------------------------------------------------------


def _emit_finish(arguments: NodeArguments, finish: Outputs) -> list[str]:
    outputs = "$outputs" if arguments.schema.mutated else _outputs(arguments)
    call = f"$finish($ctx, {arguments.flat}, {outputs})"
    return ["if '_customops_materialize' in $kept:", f"    {call}"] if finish.is_idle else [call]


def _emit_set_up(
    source: Source, arguments: NodeArguments, set_up: SetUp, values: dict[int, str], *, for_jvp: bool
) -> list[str]:
    """Lines that call setup_context, and look at what it keeps."""
    lines: list[str] = []
    for i in arguments.layout.originals:
        values = {**values, i: f"$original_{arguments.inputs[i].name}"}
        lines.append(f"{values[i]} = $originals.get({i}, {arguments.variable(i)})")
    positional, keyword_only = arguments.positional(values), arguments.keyword_only(values)
    call = f"$set_up($ctx, {positional}, {keyword_only}, $result)"
    source.objects["set_up"] = set_up
    if set_up.simple is None:
        lines.append(call)
    else:
        source.objects |= {
            "autocast_is_on": _torch.thread_state.autocast_is_on,
            "callback": set_up.simple,
            "transforms_active": _torch.dispatcher.transforms_active,
        }
        in_transform = f"{'' if arguments.schema.mutated else '$type($kernel) is $partial and '}$transforms_active()"
        named = f"keyword_only_inputs={keyword_only}, " if set_up.has_keywords else ""
        lines += [
            f"if {in_transform} or $autocast_is_on():",
            f"    {call}",
            "else:",
            f"    $callback(ctx=$ctx, inputs={positional}, {named}output=$result)",
        ]
    lines += _emit_record_untracked(source, arguments, for_jvp=for_jvp)
    if set_up.once:
        source.objects["links_to"] = links_to
        lines.append(f"$ctx._customops_links = $links_to({arguments.flat})")
    source.objects["saved_tensors_hooks"] = _torch.autograd.saved_tensors_hooks
    return [*lines, "if $saved_tensors_hooks(True) is not None:", "    $ctx._customops_hooked = True"]


def _emit_record_untracked(source: Source, arguments: NodeArguments, *, for_jvp: bool) -> list[str]:
    """Lines that look for kept tensors without an autograd graph, in the usual case at little cost."""
    source.objects |= {"record_untracked": record_untracked, "no_tensors": HOLD_NO_TENSORS, "id": id}
    record = f"$record_untracked($ctx, {arguments.flat}, {{}})"
    if arguments.schema.mutated:
        return [record.format("$mutation.known($inputs, $originals, $outputs)")]
    returns = _differentiable_returns(arguments)
    saved = "(*($ctx.to_save or ()), *($ctx.saved_for_forward or ()))" if for_jvp else "$ctx.to_save or ()"
    lines = [
        "$untracked = $ctx.non_differentiable",
        "for $value in $kept.values():",
        "    if $type($value) not in $no_tensors:",
        "        $untracked = True",
    ]
    if arguments.has_lists or any(name.startswith("*") for name in returns):
        known = f"$known = {{*$map($id, {arguments.flat}), *$map($id, {as_tuple(returns)})}}"
        lines += [known, f"for $saved in {saved}:", "    if $id($saved) not in $known:"]
    else:
        names = [arguments.inputs[i].variable for i in arguments.order if arguments.inputs[i].holds_tensors]
        is_unknown = " and ".join(f"$saved is not {name}" for name in [*names, *returns]) or "True"
        lines += [f"for $saved in {saved}:", f"    if {is_unknown}:"]
    everything = f"(*{arguments.flat}, {', '.join(returns)})"
    return [*lines, "        $untracked = True", "if $untracked:", f"    {record.format(everything)}"]


def _differentiable_returns(arguments: NodeArguments) -> list[str]:
    layout = arguments.layout
    names = [f"$result[{i}]" for i in range(len(layout.outputs))] if arguments.returns_tuple else ["$result"]
    starred = [f"*{name}" if is_list else name for name, is_list in zip(names, layout.list_outputs, strict=True)]
    return [name for name, flag in zip(starred, layout.outputs, strict=True) if flag]


# Generates the backward of a node: a whole function, of which an op's arguments fill the holes ------------------------

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
    if $type($result) is $tuple and $len($result) {count}:
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
        "autocast_is_on": _torch.thread_state.autocast_is_on,
        "call_without_autocast": _torch.thread_state.call_without_autocast,
        "check": InputGradients(arguments, op, formula.fn, compares).flat,
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
        count=f"in ($len($likes), {len(inputs)})" if arguments.cuts_rest else f"== {len(inputs)}",
        take=_take_gradients(arguments),
        fits=_all_fit(arguments),
        head=", ".join(["None"] * len(arguments.head)),
        flat=_flat(arguments),
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


def _grad(arguments: NodeArguments, i: int) -> str:
    return f"$grad_{arguments.inputs[i].name}"


def _like(arguments: NodeArguments, i: int) -> str:
    return f"$like_{arguments.inputs[i].name}"


def _take_gradients(arguments: NodeArguments) -> list[str]:
    """Lines for a variable for each gradient, and for what it is to be like."""
    count = len(arguments.inputs)
    grads = [f"{_grad(arguments, i)}, " for i in range(count)]
    if arguments.cuts_rest:
        nones, left_out = (", ".join([name] * (count - arguments.always)) for name in ("None", "$left_out"))
        likes = [f"{_like(arguments, i)}, " for i in range(count)]
        return [
            f"{''.join(grads)}= (*$result, {nones})[:{count}]",
            f"{''.join(likes)}= (*$likes, {left_out})[:{count}]",
        ]
    likes = [f"{_like(arguments, i)}, " for i in arguments.order]
    lines = [f"{''.join(grads)}= $result", f"{''.join(likes)}= $likes"] if grads else []
    for i in arguments.order:
        if arguments.inputs[i].is_tensor_list:
            grad = _grad(arguments, i)
            lines += [f"if {grad} is None:", f"    {grad} = $none_for_each({_like(arguments, i)})"]
    return lines


def _all_fit(arguments: NodeArguments) -> str:
    order = range(len(arguments.inputs)) if arguments.cuts_rest else arguments.order
    return " and ".join(_fits(arguments, i) for i in order) or "True"


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


def _flat(arguments: NodeArguments) -> str:
    """The gradients of the node's inputs: as many as it was given."""
    if arguments.cuts_rest:
        return f"*{as_tuple(_grad(arguments, i) for i in range(len(arguments.inputs)))}[:$len($likes)]"
    return ", ".join(
        f"*{_grad(arguments, i)}" if arguments.inputs[i].is_tensor_list else _grad(arguments, i)
        for i in arguments.order
    )


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


# ----------------------------------------------------------------------------------------------------------------------
# Generates what applies a node to the arguments of an op: lists are flattened, and lists of results are made again

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
