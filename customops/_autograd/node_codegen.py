"""Generates the functions of a node, in the order in which they run: `apply`, `forward` and `backward`.

Each is a whole function, of which an op's arguments fill the holes.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, cast

from torch import Tensor

from customops import _torch
from customops._autograd.context import Outputs, SetUp, flat_items, mask, materialize_zeros
from customops._autograd.gradient_checks import LEFT_OUT, GradientCheck, InputGradients
from customops._autograd.inplace import Mutation, Outcome, attach_graph
from customops._autograd.layout import Formula, NodeArguments, NodeInput, flatten, unflatten
from customops._autograd.untracked import (
    HOLD_NO_TENSORS,
    OnceDifferentiable,
    UnpackedOnce,
    guarded,
    links_to,
    may_be_differentiated,
    record_untracked,
)
from customops._codegen.function import Source, as_tuple, emit_parameters, fill
from customops._dispatch.callbacks import Fn
from customops._dispatch.random_states import RandomStates

# apply: lists are flattened, the node is applied, and lists of results are made again ---------------------------------

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
    source.objects["unflatten"] = unflatten
    positional = arguments.inputs[: arguments.layout.positional]
    tensors = [each.argument for each in arguments.inputs[arguments.layout.positional :]]
    always = [each.argument for each in positional[: arguments.always]]
    nones = {argument.name: "None" for argument in tensors if argument.has_default}
    left_out = [each.variable for each in positional[arguments.always :]]
    source.fill(
        _APPLY,
        parameters=[
            "$kernel",
            *emit_parameters(always, tensors, nones, rest="*$rest" if arguments.is_padded else ""),
            *["**$named"] * arguments.has_named,
        ],
        pad=[
            f"$passed = {arguments.always} + $len($rest)",
            f"{', '.join(left_out)}, = (*$rest, {', '.join(['None'] * len(left_out))})[:{len(left_out)}]",
        ]
        if arguments.is_padded
        else [],
        measure=[f"{each.length} = {_if_given(each, f'$len({each.variable})')}" for each in arguments.measured],
        new_outcome=["$outcome = $Outcome()"] if arguments.has_outcome else [],
        arguments=[*arguments.head, *[_flattened(each) for each in arguments.in_order]],
        attach_graph=["if $outcome.mutated:", "    $attach_graph($outcome, $result)"]
        if arguments.schema.mutated
        else [],
        result=_result_of_apply(arguments),
    )
    return source.build()


def _if_given(each: NodeInput, expression: str) -> str:
    """An expression of a list, where the list may be None."""
    return f"None if {each.variable} is None else {expression}" if each.may_be_none else expression


def _flattened(each: NodeInput) -> str:
    if not each.argument.is_tensor_list:
        return each.variable
    return f"*((None,) if {each.variable} is None else {each.variable})" if each.may_be_none else f"*{each.variable}"


def _result_of_apply(arguments: NodeArguments) -> str:
    """An expression for what the op returns."""
    layout = arguments.layout
    if not arguments.schema.returns:
        return "None"
    if not arguments.has_outcome:
        return "$list($result)" if layout.list_outputs == (True,) else "$result"
    returns = len(layout.outputs) - len(layout.new_values)
    flat = "($result if $isinstance($result, $tuple) else ($result,))"
    outputs = f"$unflatten({flat}, $outcome.lengths)"
    return f"{outputs}[:{returns}]" if arguments.returns_tuple else f"{outputs}[0]"


# forward: the kernel is called, then setup_context --------------------------------------------------------------------

_FORWARD = """
def forward({parameters}):
    {take}
    {begin}
    {save_random}
    {run}
    {arrange_result}
    {end}
    {needs}
    $kept = $ctx.__dict__
    {set_up}
    {finish}
    if not $compares.is_on:
        $kept['_customops_expected'] = {expected_unknown}
    {expected}
    {return_flat}
"""

#: What gradients are to be like. A kernel that is called directly gets plain tensors, with shapes that can be compared;
#: else it is a partial.
_EXPECTED = """
elif $type($kernel) is $partial:
    $kept['_customops_expected'] = {of_any}
else:
    $kept['_customops_expected'] = {of_plain}
"""

#: The same for an op that mutates.
_EXPECTED_OF_MUTATING = """
else:
    $kept['_customops_expected'] = {of_any}
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

    If the backward draws the kernel's random numbers again, that includes where the generators are before. For the
    lines of an op that mutates see `inplace.Mutation`.
    """
    source = Source("forward", arguments.schema)
    source.objects |= {
        "compares": compares,
        "facts": operator.attrgetter("shape", "dtype", "device"),
        "finish": finish,
        "flatten": flatten,
        "left_out": LEFT_OUT,
        "mask": mask,
        "metadata": _torch.autograd.metadata,
        "mutation": mutation,
        "partial": functools.partial,
        "RandomStates": RandomStates,
    }
    mutates = bool(arguments.schema.mutated)
    run = f"$result = $kernel({_call(arguments)})"
    outputs = _outputs(arguments)
    everything = f"(*{arguments.flat}, *$named.values())" if arguments.has_named else arguments.flat
    begin, end = [], []
    if mutates:
        inputs = ", ".join([f"{i}: {each.given}" for i, each in enumerate(arguments.inputs)])
        begin = [f"$inputs = {{{inputs}}}", f"$originals, $dirty = $mutation.begin($inputs, {arguments.flat})"]
        end = [f"$outputs = $mutation.end($ctx, $outcome, $inputs, {outputs}, $dirty)"]
        end += [f"{arguments.inputs[i].variable} = $inputs[{i}]" for i in arguments.order]
        outputs = "$outputs"
    finish_call = f"$finish($ctx, {arguments.flat}, {outputs})"
    expected = {"of_any": _expected(arguments, "$metadata({0})"), "of_plain": _expected(arguments, "$facts({0})")}
    source.fill(
        _FORWARD,
        parameters=["$ctx", *arguments.head, *arguments.flat_parameters],
        take=_emit_take_inputs(arguments),
        begin=begin,
        save_random=[f"$ctx._customops_random = $RandomStates({everything})"] if draws_again else [],
        run=["with $mutation.recorded($dirty):", f"    {run}"] if mutates else [run],
        arrange_result=_emit_arrange_result(arguments),
        end=end,
        needs=_emit_needs(source, arguments),
        set_up=_emit_set_up(source, arguments, set_up, for_jvp=finish.for_jvp) if set_up.callbacks else [],
        finish=["if '_customops_materialize' in $kept:", f"    {finish_call}"] if finish.is_idle else [finish_call],
        expected_unknown=_expected(arguments, None),
        expected=fill((_EXPECTED_OF_MUTATING if mutates else _EXPECTED).lstrip(), **expected),
        return_flat=_emit_return(arguments),
    )
    return source.build()


def _emit_take_inputs(arguments: NodeArguments) -> list[str]:
    """Lines that take the inputs out of the flat ones, where there are lists among them."""
    if not arguments.has_lists:
        names = as_tuple([each.variable for each in arguments.in_order])
        return [f"$flat = {names}"] if arguments.schema.mutated else []
    lines: list[str] = []
    for each in arguments.in_order:
        is_list, take = each.argument.is_tensor_list, f"$flat[{each.place}]"
        if each in arguments.measured:
            start, end = each.place.split(":")
            length = f"(1 if {each.length} is None else {each.length})" if each.may_be_none else each.length
            lines.append(f"{end} = {start} + {length}" if each.may_be_none or start != "0" else f"{end} = {length}")
        if is_list and each.may_be_none:
            take = f"None if {each.length} is None else {take}"
        lines.append(f"{each.variable} = {take}")
    return lines


def _call(arguments: NodeArguments) -> str:
    """The arguments in the call of the kernel."""
    given = [each.given for each in arguments.inputs]
    if arguments.is_plain:
        rest = arguments.inputs[arguments.always :]
        passed = "*$rest"
        if True in ["[" in each.argument.type for each in rest]:
            passed = "*[$list(x) if $type(x) is $list else x for x in $rest]"
        return ", ".join([*given[: arguments.always], *[passed] * bool(rest)])
    count = arguments.layout.positional
    positional = [f"*{as_tuple(given[:count])}[:$passed]"] if arguments.is_padded else given[:count]
    named = [f"{each.argument.name}={each.given}" for each in arguments.inputs[count:]]
    return ", ".join([*positional, *named, *["**$named"] * arguments.has_named])


def _emit_arrange_result(arguments: NodeArguments) -> list[str]:
    """Lines for a result that the dispatcher, if it were called, would make a tuple, or one with lists, of."""
    layout = arguments.layout
    if layout.in_place:
        return [f"$result = {arguments.inputs[0].variable}"]
    lists = layout.list_outputs[: len(layout.outputs) - len(layout.new_values)]
    if not arguments.returns_tuple:
        return ["if $type($result) is not $list:", "    $result = $list($result)"] if lists == (True,) else []
    if True in lists:
        items = [f"$list($result[{i}])" if is_list else f"$result[{i}]" for i, is_list in enumerate(lists)]
        return [f"$result = {as_tuple(items)}"]
    return ["if $type($result) is not $tuple:", "    $result = $tuple($result)"]


def _outputs(arguments: NodeArguments) -> str:
    """What the node returns, lists as lists."""
    if arguments.returns_tuple and not arguments.layout.new_values:
        return "$result"
    result = [] if not arguments.schema.returns else ["*$result"] if arguments.returns_tuple else ["$result"]
    return as_tuple([*result, *[arguments.inputs[i].variable for i in arguments.layout.new_values]])


def _emit_return(arguments: NodeArguments) -> list[str]:
    if arguments.schema.mutated:
        return ["return $mutation.flatten_outputs($ctx, $outcome, $outputs)"]
    if arguments.has_outcome:
        return [
            f"$result, $outcome.lengths = $flatten({_outputs(arguments)}, {arguments.layout.list_outputs})",
            "$ctx._customops_outputs = $outcome.lengths",
            "return $result",
        ]
    if not arguments.schema.returns:
        return ["return ()"]
    return ["return $tuple($result)" if arguments.layout.list_outputs == (True,) else "return $result"]


def _emit_needs(source: Source, arguments: NodeArguments) -> list[str]:
    """Lines that set ``needs_input_grad`` to what a backward is to see: an entry for each argument, lists as lists.

    That is for each positional argument that was passed; if there are tensors that are keyword-only, for each
    positional argument and each of them, so that each has its place.
    """
    layout = arguments.layout
    lines = [f"$needs = $ctx.needs_input_grad[{len(arguments.head)}:]"]
    if arguments.is_plain:
        if layout.differentiable != tuple([argument.holds_tensors for argument in layout.inputs]):
            source.objects["differentiable"] = layout.differentiable
            lines.append("$needs = $tuple($map($mask, $needs, $differentiable))")
        return [*lines, "$ctx.needs_input_grad = $needs"]
    for i in arguments.order:
        each = arguments.inputs[i]
        if each.argument.is_tensor_list:
            flags = f"$list($needs[{each.place}])" if layout.differentiable[i] else f"[False] * $len({each.variable})"
            is_none = f"False if {each.variable} is None else " if each.may_be_none else ""
            lines.append(f"{each.needs} = {is_none}{flags}")
    cut = "[:$passed]" if arguments.is_padded and layout.positional == len(arguments.inputs) else ""
    return [*lines, f"$ctx.needs_input_grad = {as_tuple([each.needs for each in arguments.inputs])}{cut}"]


def _expected(arguments: NodeArguments, metadata: str | None) -> str:
    """An expression for what the gradients of all inputs are to be like, in the order in which the node has them.

    See `_torch.autograd.metadata`: it is what to keep of a tensor, None if gradients are not compared.
    """
    if metadata is None and arguments.is_plain:
        return "(None,) * $len($needs)"
    items = []
    for each in arguments.in_order:
        name, argument, expected = each.variable, each.argument, "None"
        if argument.is_tensor_list:
            one = f"{metadata.format('x')} if flag else None" if metadata else ""
            expected = f"[{one} for x, flag in $zip({name}, {each.needs})]" if metadata else f"[None] * $len({name})"
            expected = _if_given(each, expected)
        elif argument.holds_tensors and metadata and each.needs != "False":
            expected = f"{metadata.format(name)} if {each.needs} else None"
        if each.may_be_left_out:
            is_left_out = f"{name} is None" if argument.kwarg_only else f"$passed <= {arguments.inputs.index(each)}"
            expected = f"$left_out if {is_left_out} else {expected}"
        items.append(expected)
    if arguments.cuts_rest:
        items.append(f"*($metadata(x) if flag else None for x, flag in $zip($rest, $needs[{arguments.always}:]))")
    return as_tuple(items)


def _emit_set_up(source: Source, arguments: NodeArguments, set_up: SetUp, *, for_jvp: bool) -> list[str]:
    """Lines that call setup_context, and look at what it keeps."""
    layout, lines = arguments.layout, list[str]()
    values = [each.given for each in arguments.inputs]
    for i in layout.originals:
        values[i] = f"$original_{layout.inputs[i].name}"
        lines.append(f"{values[i]} = $originals.get({i}, {arguments.inputs[i].variable})")
    positional = as_tuple(values[: layout.positional]) + "[:$passed]" * arguments.is_padded
    if arguments.is_plain:
        positional = arguments.flat
    tensors = [f"{layout.inputs[i].name!r}: {values[i]}" for i in range(layout.positional, len(values))]
    keyword_only = f"{{{', '.join([*['**$named'] * arguments.has_named, *tensors])}}}"
    call = f"$set_up($ctx, {positional}, {keyword_only}, $result)"
    source.objects |= {"set_up": set_up, "saved_tensors_hooks": _torch.autograd.saved_tensors_hooks}
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
    return [*lines, "if $saved_tensors_hooks(True) is not None:", "    $ctx._customops_hooked = True"]


def _emit_record_untracked(source: Source, arguments: NodeArguments, *, for_jvp: bool) -> list[str]:
    """Lines that look for kept tensors without an autograd graph, in the usual case at little cost."""
    source.objects |= {"record_untracked": record_untracked, "no_tensors": HOLD_NO_TENSORS}
    record = f"$record_untracked($ctx, {arguments.flat}, {{}})"
    if arguments.schema.mutated:
        return [record.format("$mutation.known($inputs, $originals, $outputs)")]
    layout, returns = arguments.layout, []  # those that are differentiable
    for i, (flag, is_list) in enumerate(zip(layout.outputs, layout.list_outputs, strict=True)):
        name = f"$result[{i}]" if arguments.returns_tuple else "$result"
        returns += [f"*{name}" if is_list else name] * flag
    saved = "(*($ctx.to_save or ()), *($ctx.saved_for_forward or ()))" if for_jvp else "$ctx.to_save or ()"
    lines = [
        "$untracked = $ctx.non_differentiable",
        "for $value in $kept.values():",
        "    if $type($value) not in $no_tensors:",
        "        $untracked = True",
    ]
    if arguments.has_lists or True in layout.list_outputs:
        known = f"$known = {{*$map($id, {arguments.flat}), *$map($id, {as_tuple(returns)})}}"
        lines += [known, f"for $saved in {saved}:", "    if $id($saved) not in $known:"]
    else:
        names = [each.variable for each in arguments.in_order if each.argument.holds_tensors]
        is_unknown = " and ".join([f"$saved is not {name}" for name in [*names, *returns]]) or "True"
        lines += [f"for $saved in {saved}:", f"    if {is_unknown}:"]
    everything = f"(*{arguments.flat}, {', '.join(returns)})"
    return [*lines, "        $untracked = True", "if $untracked:", f"    {record.format(everything)}"]


# backward: the user's backward is called, and what it returns is compared with the inputs -----------------------------

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
    source = Source("backward", arguments.schema)
    source.objects |= {
        "autocast_is_on": _torch.thread_state.autocast_is_on,
        "call_without_autocast": _torch.thread_state.call_without_autocast,
        "check": InputGradients(arguments, op, formula.fn, compares).flat,
        "flat_items": flat_items,
        "fn": OnceDifferentiable(formula.fn, op) if formula.once_differentiable else formula.fn,
        "guarded": guarded,
        "left_out": LEFT_OUT,
        "list_fits": _list_fits,
        "materialize_zeros": materialize_zeros,
        "may_be_differentiated": may_be_differentiated,
        "none_for_each": _none_for_each,
        "op": op,
        "Tensor": Tensor,
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
        count=f"in ($len($likes), {len(arguments.inputs)})" if arguments.cuts_rest else f"== {len(arguments.inputs)}",
        take=_take_gradients(arguments),
        fits=_all_fit(arguments),
        head=", ".join(["None"] * len(arguments.head)),
        flat=_flat(arguments),
        grads="$flat_items($grads)" if True in arguments.layout.list_outputs else "$grads",
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
    if len(arguments.layout.outputs) == 1 and not (arguments.has_outcome or True in arguments.layout.list_outputs):
        return []
    return [
        "if $ctx._customops_zeros is not None:",
        "    $grads = $tuple($map($materialize_zeros, $grads, $ctx._customops_zeros))",
    ]


def _take_gradients(arguments: NodeArguments) -> list[str]:
    """Lines for a variable for each gradient, and for what it is to be like."""
    count = len(arguments.inputs)
    grads = "".join([f"{each.grad}, " for each in arguments.inputs])
    if arguments.cuts_rest:
        likes = "".join([f"{each.like}, " for each in arguments.inputs])
        nones, left_out = (", ".join([name] * (count - arguments.always)) for name in ("None", "$left_out"))
        return [f"{grads}= (*$result, {nones})[:{count}]", f"{likes}= (*$likes, {left_out})[:{count}]"]
    likes = "".join([f"{each.like}, " for each in arguments.in_order])
    lines = [f"{grads}= $result", f"{likes}= $likes"] if grads else []
    for each in arguments.in_order:
        if each.argument.is_tensor_list:
            lines += [f"if {each.grad} is None:", f"    {each.grad} = $none_for_each({each.like})"]
    return lines


def _all_fit(arguments: NodeArguments) -> str:
    """An expression for: do the gradients fit what is expected?"""
    conditions = []
    for each in arguments.inputs if arguments.cuts_rest else arguments.in_order:
        grad, like = each.grad, each.like
        if each.argument.is_tensor_list:
            conditions.append(f"$list_fits({grad}, {like})")
        elif not each.argument.holds_tensors:
            conditions.append(f"{grad} is None")
        else:
            fits = f"{like} is None or {like} == ({grad}.shape, {grad}.dtype, {grad}.device)"
            fits = f"({fits}) if $isinstance({grad}, $Tensor) else {grad} is {like}"
            conditions.append(
                f"({grad} is None if {like} is $left_out else {fits})" if each.may_be_left_out else f"({fits})"
            )
    return " and ".join(conditions) or "True"


def _flat(arguments: NodeArguments) -> str:
    """The gradients of the node's inputs: as many as it was given."""
    if arguments.cuts_rest:
        return f"*{as_tuple([each.grad for each in arguments.inputs])}[:$len($likes)]"
    return ", ".join(["*" * each.argument.is_tensor_list + each.grad for each in arguments.in_order])


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
