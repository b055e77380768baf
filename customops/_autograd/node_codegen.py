"""Generates the functions of a node, in the order in which they run: `apply`, `forward` and `backward`.

Each is a whole function, of which an op's arguments fill the holes.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, cast

from torch import Tensor

from customops import _torch
from customops._autograd.context import (
    HOLD_NO_TENSORS,
    Guarded,
    NoTensors,
    OnceDifferentiable,
    Outputs,
    SetUp,
    UnpackedOnce,
    links_to,
    materialize_zeros,
    may_be_differentiated,
    record_untracked,
)
from customops._autograd.gradient_checks import LEFT_OUT, GradientCheck, InputGradients
from customops._autograd.inplace import Mutation, Outcome, attach_graph
from customops._autograd.layout import Formula, Layout, NodeInput, flatten, unflatten
from customops._codegen.function import Source, as_tuple, emit_parameters
from customops._dispatch.callbacks import Fn
from customops._dispatch.random_states import RandomStates
from customops._torch.trees import flat_items

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


def apply(layout: Layout, function: Any) -> Fn:
    """``apply(kernel, *args, **kwargs)``: what ``function.apply`` is for a plain node, which takes them as they are."""
    if layout.is_plain:
        return cast(Fn, function.apply)
    source = Source("apply", layout.schema)
    source.objects |= {"function": function.apply, "Outcome": Outcome, "attach_graph": attach_graph}
    source.objects["unflatten"] = unflatten
    positional = layout.inputs[: layout.positional]
    tensors = [each.argument for each in layout.inputs[layout.positional :]]
    always = [each.argument for each in positional[: layout.always]]
    absent = {argument.name: "None" for argument in tensors if argument.has_default}
    pad = []
    if layout.is_padded:
        left_out = [each.variable for each in positional[layout.always :]]
        nones = ", ".join(["None"] * len(left_out))
        pad = [f"$passed = {layout.always} + $len($rest)"]
        pad += [f"{', '.join(left_out)}, = (*$rest, {nones})[:{len(left_out)}]"]
    if not layout.schema.returns:
        result = "None"
    elif not layout.has_outcome:
        result = "$list($result)" if layout.list_outputs == (True,) else "$result"
    else:
        flat = "($result if $isinstance($result, $tuple) else ($result,))"
        result = f"$unflatten({flat}, $outcome.lengths)" + (f"[:{layout.returns}]" if layout.returns_tuple else "[0]")
    source.fill(
        _APPLY,
        parameters=[
            "$kernel",
            *emit_parameters(always, tensors, absent, rest="*$rest" if layout.is_padded else ""),
            *["**$named"] * layout.has_named,
        ],
        pad=pad,
        measure=[f"{each.length} = {_if_given(each, f'$len({each.variable})')}" for each in layout.measured],
        new_outcome=["$outcome = $Outcome()"] if layout.has_outcome else [],
        arguments=[
            *layout.head,
            *[
                each.variable
                if not each.argument.is_tensor_list
                else f"*((None,) if {each.variable} is None else {each.variable})"
                if each.may_be_none
                else f"*{each.variable}"
                for each in layout.in_order
            ],
        ],
        attach_graph=["if $outcome.mutated:", "    $attach_graph($outcome, $result)"] if layout.schema.mutated else [],
        result=result,
    )
    return source.build()


def _if_given(each: NodeInput, expression: str) -> str:
    """An expression of a list, where the list may be None."""
    return f"None if {each.variable} is None else {expression}" if each.may_be_none else expression


# forward: the kernel is called, then setup_context --------------------------------------------------------------------

_FORWARD = """
def forward({parameters}):
    {take}
    {begin}
    {save_random}
    {run}
    {arrange_result}
    {end}
    {keep}
    $ctx._customops_flags = $ctx._customops_raw_flags
    {return_flat}
"""


def forward(
    layout: Layout, set_up: SetUp, finish: Outputs, compares: GradientCheck, mutation: Mutation, *, draws_again: bool
) -> Fn:
    """``forward(ctx, kernel, ..., *flat_inputs)``: call the kernel and setup_context, and note what backward needs.

    If the backward draws the kernel's random numbers again, that includes where the generators are before. For the
    lines of an op that mutates see `inplace.Mutation`.
    """
    source = Source("forward", layout.schema)
    source.objects |= {
        "compares": compares,
        "facts": operator.attrgetter("shape", "dtype", "device"),
        "finish": finish,
        "flatten": flatten,
        "left_out": LEFT_OUT,
        "metadata": _torch.autograd.metadata,
        "mutation": mutation,
        "NoTensors": NoTensors,
        "partial": functools.partial,
        "RandomStates": RandomStates,
    }
    mutates, returns_tuple = bool(layout.schema.mutated), layout.returns_tuple

    given = [each.given for each in layout.inputs]
    if layout.is_plain:
        rest = layout.inputs[layout.always :]
        has_lists = True in ["[" in each.argument.type for each in rest]
        passed = "*[$list(x) if $type(x) is $list else x for x in $rest]" if has_lists else "*$rest"
        call = [*given[: layout.always], *[passed] * bool(rest)]
    else:
        count = layout.positional
        call = [f"*{as_tuple(given[:count])}[:$passed]"] if layout.is_padded else given[:count]
        call += [f"{each.argument.name}={each.given}" for each in layout.inputs[count:]]
        call += ["**$named"] * layout.has_named
    run = [f"$result = $kernel({', '.join(call)})"]

    # What the node returns, lists as lists.
    if returns_tuple and not layout.new_values:
        outputs = "$result"
    else:
        result = [] if not layout.schema.returns else ["*$result"] if returns_tuple else ["$result"]
        outputs = as_tuple([*result, *[layout.inputs[i].variable for i in layout.new_values]])
    begin, end = [], []
    if mutates:
        run = ["with $mutation.recorded($dirty):", f"    {run[0]}"]
        inputs = ", ".join([f"{i}: {each.given}" for i, each in enumerate(layout.inputs)])
        begin = [f"$inputs = {{{inputs}}}", f"$originals, $dirty = $mutation.begin($inputs, {layout.flat})"]
        end = [f"$outputs = $mutation.end($ctx, $outcome, $inputs, {outputs}, $dirty)"]
        end += [f"{layout.inputs[i].variable} = $inputs[{i}]" for i in layout.order]
        return_flat = ["return $mutation.flatten_outputs($ctx, $outcome, $outputs)"]
        outputs = "$outputs"
    elif layout.has_outcome:
        return_flat = [
            f"$result, $outcome.lengths = $flatten({outputs}, {layout.list_outputs})",
            "$ctx._customops_outputs = $outcome.lengths",
            "return $result",
        ]
    elif not layout.schema.returns:
        return_flat = ["return ()"]
    else:
        return_flat = ["return $tuple($result)" if layout.list_outputs == (True,) else "return $result"]

    everything = f"(*{layout.flat}, *$named.values())" if layout.has_named else layout.flat
    keep = _emit_set_up(source, layout, set_up, for_jvp=finish.for_jvp) if set_up.callbacks else []
    finish_call = f"$finish($ctx, {layout.flat}, {outputs})"
    if not finish.is_idle:
        keep.append(finish_call)
    elif set_up.callbacks:  # setup_context may have said something
        keep += ["if '_customops_materialize' in $kept:", f"    {finish_call}"]
    expect = _emit_expected(source, layout, compares, is_seen=bool(set_up.callbacks))
    source.fill(
        _FORWARD,
        parameters=["$ctx", *layout.head, *layout.flat_parameters],
        take=_emit_take_inputs(layout),
        begin=begin,
        save_random=[f"$ctx._customops_random = $RandomStates({everything})"] if draws_again else [],
        run=run,
        arrange_result=_emit_arrange_result(layout),
        end=end,
        # If a node is not plain, `needs_input_grad` is made of what is expected, also in setup_context.
        keep=[*keep, *expect] if layout.is_plain else [*expect, *keep],
        return_flat=return_flat,
    )
    return source.build()


def _emit_take_inputs(layout: Layout) -> list[str]:
    """Lines that take the inputs out of the flat ones, where there are lists among them."""
    if not layout.has_lists:
        names = [each.variable for each in layout.in_order] if layout.schema.mutated else []
        return [f"$flat = {as_tuple(names)}"] if names else []
    lines: list[str] = []
    for each in layout.in_order:
        is_list, take = each.argument.is_tensor_list, f"$flat[{each.place}]"
        if each in layout.measured:
            start, end = each.place.split(":")
            length = f"(1 if {each.length} is None else {each.length})" if each.may_be_none else each.length
            lines.append(f"{end} = {start} + {length}" if each.may_be_none or start != "0" else f"{end} = {length}")
        if is_list and each.may_be_none:
            take = f"None if {each.length} is None else {take}"
        lines.append(f"{each.variable} = {take}")
    return lines


def _emit_arrange_result(layout: Layout) -> list[str]:
    """Lines for a result that the dispatcher, if it were called, would make a tuple, or one with lists, of."""
    if layout.in_place:
        return [f"$result = {layout.inputs[0].variable}"]
    lists = layout.list_outputs[: layout.returns]
    if not layout.returns_tuple:
        return ["if $type($result) is not $list:", "    $result = $list($result)"] if lists == (True,) else []
    if True in lists:
        items = [f"$list($result[{i}])" if is_list else f"$result[{i}]" for i, is_list in enumerate(lists)]
        return [f"$result = {as_tuple(items)}"]
    return ["if $type($result) is not $tuple:", "    $result = $tuple($result)"]


def _emit_set_up(source: Source, layout: Layout, set_up: SetUp, *, for_jvp: bool) -> list[str]:
    """Lines that call setup_context, and look at what it keeps: in the usual case at little cost."""
    mutates, lines = bool(layout.schema.mutated), ["$kept = $ctx.__dict__"]
    values = [each.given for each in layout.inputs]
    for i in layout.originals:
        values[i] = f"$original_{layout.operands[i].name}"
        lines.append(f"{values[i]} = $originals.get({i}, {layout.inputs[i].variable})")
    positional = layout.flat
    if not layout.is_plain:
        positional = as_tuple(values[: layout.positional]) + "[:$passed]" * layout.is_padded
    tensors = [f"{layout.operands[i].name!r}: {values[i]}" for i in range(layout.positional, len(values))]
    keyword_only = f"{{{', '.join([*['**$named'] * layout.has_named, *tensors])}}}"
    call = f"$set_up($ctx, {positional}, {keyword_only}, $result)"
    source.objects |= {
        "autocast_is_on": _torch.dispatcher.autocast_is_on,
        "callback": set_up.simple,
        "links_to": links_to,
        "no_tensors": HOLD_NO_TENSORS,
        "record_untracked": record_untracked,
        "saved_tensors_hooks": _torch.autograd.saved_tensors_hooks,
        "set_up": set_up,
        "transforms_active": _torch.dispatcher.transforms_active,
    }
    if set_up.simple is None:
        lines.append(call)
    else:
        in_transform = f"{'' if mutates else '$type($kernel) is $partial and '}$transforms_active()"
        named = f"keyword_only_inputs={keyword_only}, " if set_up.has_keywords else ""
        lines += [
            f"if {in_transform} or $autocast_is_on():",
            f"    {call}",
            "else:",
            f"    $callback(ctx=$ctx, inputs={positional}, {named}output=$result)",
        ]

    # Kept tensors without an autograd graph are recorded.
    if mutates:
        lines += [f"$record_untracked($ctx, {layout.flat}, $mutation.known($inputs, $originals, $outputs))"]
    else:
        returns = []  # those that are differentiable
        for i, (flag, is_list) in enumerate(zip(layout.outputs, layout.list_outputs, strict=True)):
            name = f"$result[{i}]" if layout.returns_tuple else "$result"
            returns += [f"*{name}" if is_list else name] * flag
        lines += [
            "$untracked = $ctx.non_differentiable",
            "for $value in $kept.values():",
            "    if $type($value) not in $no_tensors:",
            "        $untracked = True",
        ]
        if layout.has_lists or True in layout.list_outputs:
            lines.append(f"$known = {{*$map($id, {layout.flat}), *$map($id, {as_tuple(returns)})}}")
            is_unknown = "$id($saved) not in $known"
        else:
            names = [each.variable for each in layout.in_order if each.argument.holds_tensors]
            is_unknown = " and ".join([f"$saved is not {name}" for name in [*names, *returns]]) or "True"
        saved = "(*($ctx.to_save or ()), *($ctx.saved_for_forward or ()))" if for_jvp else "$ctx.to_save or ()"
        lines += [
            f"for $saved in {saved}:",
            f"    if {is_unknown}:",
            "        $untracked = True",
            "if $untracked:",
            f"    $record_untracked($ctx, {layout.flat}, (*{layout.flat}, {', '.join(returns)}))",
        ]
    if set_up.once:
        lines.append(f"$ctx._customops_links = $links_to({layout.flat})")
    return [*lines, "if $ctx.to_save and $saved_tensors_hooks(True) is not None:", "    $ctx._customops_hooked = True"]


def _emit_expected(source: Source, layout: Layout, compares: GradientCheck, *, is_seen: bool) -> list[str]:
    """Lines that keep what the gradients of all inputs are to be like, in the node's order; `is_seen`: by `set_up`."""
    keep = f"$ctx._customops_expected = {'$NoTensors({})' if is_seen and not layout.is_plain else '{}'}"
    nothing = [] if compares.when == "always" else [keep.format(_expected(layout, compared=False))]
    if compares.when == "never":
        return [] if layout.is_plain else nothing
    names = ["$_" if each.needs == "False" else each.needs for each in layout.in_order]
    flags = [*["$_"] * len(layout.head), *names, *["*$needs_rest"] * layout.cuts_rest]
    needs = f"$needs = $ctx._customops_raw_flags[{len(layout.head)}:]"
    if not layout.has_lists:
        needs = f"{', '.join(flags)}, = $ctx._customops_raw_flags"
    # A kernel that is called directly gets plain tensors, with shapes that can be compared; else it is a partial.
    like = "$metadata" if layout.schema.mutated else "$metadata if $type($kernel) is $partial else $facts"
    source.objects["has_gradient"] = layout.differentiable[layout.always :]
    lines = [*[needs, f"$like = {like}"] * any(layout.differentiable), keep.format(_expected(layout, compared=True))]
    if nothing:
        lines = ["if $compares.is_on:", *[f"    {line}" for line in lines], "else:", f"    {nothing[0]}"]
    return lines


def _expected(layout: Layout, *, compared: bool) -> str:
    """An expression for that. ``$like(x)`` is what to keep of a tensor."""
    items = []
    for each in layout.in_order:
        name, argument, expected = each.variable, each.argument, "None"
        wanted = compared and each.needs != "False"
        if argument.is_tensor_list:
            some = f"[$like(x) if flag else None for x, flag in $zip({name}, {each.needs})]"
            all_or_some = f"{some} if False in {each.needs} else [*$map($like, {name})]"
            expected = all_or_some if wanted else f"[None] * $len({name})"
            expected = _if_given(each, expected)
        elif wanted:
            expected = f"$like({name}) if {each.needs} else None"
        if each.may_be_left_out:
            is_left_out = f"{name} is None" if argument.kwarg_only else f"$passed <= {layout.inputs.index(each)}"
            expected = f"$left_out if {is_left_out} else {expected}"
        items.append(expected)
    if layout.cuts_rest and compared and True in layout.differentiable[layout.always :]:
        flags = "$zip($rest, $needs_rest, $has_gradient)"
        items.append(f"*($rest and [$like(x) if flag and has else None for x, flag, has in {flags}])")
    elif layout.cuts_rest:
        items.append("*(None,) * $len($rest)")
    return as_tuple(items)


# backward: the user's backward is called, and what it returns is compared with the inputs -----------------------------

_BACKWARD = """
def backward({parameters}):
    {group}
    {materialize}
    $seen = $ctx
    if $ctx._customops_hooked:
        $seen = $unpacked_once($ctx)
    {guard}
    try:
        if $autocast_is_on():
            $result = $call_without_autocast($fn, $seen, *$grads)
        else:
            $result = $fn($seen, *$grads)
    except $AttributeError as $error:
        $ctx._customops_missing($error)
        raise
    $likes = {expected}
    if $type($result) is $tuple and $len($result) {count}:
        {take}
        if {fits}:
            {was_right}
            return {head}, {flat}
    $none_allowed = $any(grad is None for grad in {grads})
    return {head}, *$check($result, $likes, none_allowed=$none_allowed)
"""

#: Saved tensors without an autograd graph are guarded where the backward itself may be differentiated.
_GUARD = ["if $ctx._customops_untracked is not None and $may_be_differentiated():", "    $seen = $guarded($ctx, $op)"]

#: Zeros in the place of gradients that are None, where torch does not fill them in: see `Outputs`.
_MATERIALIZE = [
    "if $ctx._customops_zeros is not None:",
    "    $grads = $tuple($map($materialize_zeros, $grads, $ctx._customops_zeros))",
]


def backward(layout: Layout, op: str, formula: Formula, compares: GradientCheck) -> Fn:
    """``backward(ctx, *grads)``: call the formula, and compare what it returns with the inputs.

    Gradients that fit are returned as they are; `InputGradients` makes the best of others, or raises.
    """
    source = Source("backward", layout.schema)
    source.objects |= {
        "autocast_is_on": _torch.dispatcher.autocast_is_on,
        "call_without_autocast": _torch.dispatcher.call_without_autocast,
        "check": InputGradients(layout, op, formula.fn, compares).flat,
        "flat_items": flat_items,
        "fn": OnceDifferentiable(formula.fn, op) if formula.once_differentiable else formula.fn,
        "guarded": Guarded,
        "left_out": LEFT_OUT,
        "list_fits": _list_fits,
        "materialize_zeros": materialize_zeros,
        "may_be_differentiated": may_be_differentiated,
        "none_for_each": _none_for_each,
        "op": op,
        "Tensor": Tensor,
        "unflatten": unflatten,
        "unpacked_once": UnpackedOnce,
        "compares": compares,
    }
    returns_list, count = True in layout.list_outputs, len(layout.inputs)
    group = []  # lists of the gradients of lists, without those of outputs that are not the op's
    if layout.has_outcome:
        group = ["$grads = $unflatten($grads, $ctx._customops_outputs)"]
    elif layout.list_outputs == (True,):
        group = ["$grads = ([*$grads],)"]

    # A variable for each gradient, and for what it is to be like.
    grads = "".join([f"{each.grad}, " for each in layout.inputs])
    if layout.cuts_rest:
        in_order = layout.inputs
        rest = count - layout.always
        nones, left_out = ", ".join(["None"] * rest), ", ".join(["$left_out"] * rest)
        likes = "".join([f"{each.like}, " for each in in_order])
        take = [f"{grads}= (*$result, {nones})[:{count}]", f"{likes}= (*$likes, {left_out})[:{count}]"]
        flat = f"*{as_tuple([each.grad for each in in_order])}[:$len($likes)]"
    else:
        in_order = tuple(layout.in_order)
        likes = "".join([f"{each.like}, " for each in in_order])
        take = [f"{grads}= $result", f"{likes}= $likes"] if grads else []
        flat = ", ".join(["*" * each.argument.is_tensor_list + each.grad for each in in_order])
    expected = "$ctx._customops_expected"
    if compares.when == "never" and layout.is_plain:  # nothing was kept
        length = f"($len($ctx._customops_flags) - {len(layout.head)})" if layout.cuts_rest else count
        expected = f"(None,) * {length}"
    fits = []
    for each in in_order:
        grad, like = each.grad, each.like
        if each.argument.is_tensor_list:
            take += [f"if {grad} is None:", f"    {grad} = $none_for_each({like})"]
            fits.append(f"$list_fits({grad}, {like})")
        elif not each.argument.holds_tensors:
            fits.append(f"{grad} is None")
        else:
            of_tensor = f"{like} is None or {like} == ({grad}.shape, {grad}.dtype, {grad}.device)"
            fit = f"({of_tensor}) if $isinstance({grad}, $Tensor) else {grad} is {like}"
            if compares.when == "never":
                fit = f"$isinstance({grad}, $Tensor) or {grad} is None"
            fits.append(f"({grad} is None if {like} is $left_out else {fit})" if each.may_be_left_out else f"({fit})")
    source.fill(
        _BACKWARD,
        parameters=["$ctx", "*$grads"],
        group=group,
        materialize=_MATERIALIZE if len(layout.outputs) != 1 or layout.has_outcome or returns_list else [],
        guard=[] if formula.once_differentiable else _GUARD,
        expected=expected,
        was_right="$compares.is_on = False" if compares.when == "first" else [],
        count=f"in ($len($likes), {count})" if layout.cuts_rest else f"== {count}",
        take=take,
        fits=" and ".join(fits) or "True",
        head=", ".join(["None"] * len(layout.head)),
        flat=flat,
        grads="$flat_items($grads)" if returns_list else "$grads",
    )
    return source.build()  # at once: compiled autograd traces it before it was ever called


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
