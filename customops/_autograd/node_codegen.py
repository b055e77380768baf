"""The forward and backward of a node that takes and returns what the op does. Every step in them counts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor

from customops import _compat
from customops._autograd.context import Outputs, SetUp, mask, materialize_zeros
from customops._autograd.gradient_checks import GradientCheck, InputGradients
from customops._autograd.layout import Layout
from customops._autograd.options import Formula
from customops._autograd.untracked import (
    HOLD_NO_TENSORS,
    OnceDifferentiable,
    UnpackedOnce,
    guarded,
    links_to,
    may_be_differentiated,
    record_untracked,
)
from customops._codegen.function import Source, always_passed, as_tuple, compile_on_first_call, variable_name
from customops._dispatch.callbacks import Fn
from customops._dispatch.operator import OperatorHandle
from customops._schema.model import Schema


def forward(schema: Schema, layout: Layout, set_up: SetUp, finish: Outputs, compares: GradientCheck) -> Fn:
    """``forward(ctx, kernel, *args)``, written for the op."""
    return compile_on_first_call("forward", lambda: _forward(schema, layout, set_up, finish, compares).build())


def _forward(schema: Schema, layout: Layout, set_up: SetUp, finish: Outputs, compares: GradientCheck) -> Source:
    source = Source("forward", schema)
    always = schema.positional[: always_passed(schema)]
    rest = ["*$rest"] if len(always) < len(schema.positional) else []
    names = [*map(variable_name, always), *rest]
    args, outputs = as_tuple(names), "$result" if len(schema.returns) > 1 else "($result,)"
    source.parameters = ["$ctx", "$kernel", *names]
    source.line(f"$result = $kernel({', '.join(names)})")
    if len(schema.returns) > 1:
        source.line("if $type($result) is not $tuple:", type=type, tuple=tuple)
        source.line("    $result = $tuple($result)")
    source.line("$needs = $ctx.needs_input_grad[1:]")
    if any(a.holds_tensors and not flag for a, flag in zip(layout.inputs, layout.differentiable, strict=True)):
        source.line(
            "$needs = $tuple($map($mask, $needs, $differentiable))",
            tuple=tuple,
            map=map,
            mask=mask,
            differentiable=layout.differentiable,
        )
    source.line("$ctx.needs_input_grad = $needs")
    if set_up.callbacks:
        _set_up(source, schema, layout, set_up, args, for_jvp=finish.for_jvp)
    idle = "'_customops_materialize' in $ctx.__dict__" if finish.is_idle else "True"
    source.line(f"if {idle}:")
    source.line(f"    $finish($ctx, {args}, {outputs})", finish=finish)
    _expect(source, schema, compares)
    source.line("return $result")
    return source


def _set_up(source: Source, schema: Schema, layout: Layout, set_up: SetUp, args: str, *, for_jvp: bool) -> None:
    """Add the lines that call setup_context, and look at what it keeps: see `remember_lost`."""
    if set_up.simple is None:
        source.line(f"$set_up($ctx, {args}, {{}}, $result)", set_up=set_up)
    else:
        source.line("if $transforms_active():", transforms_active=_compat.dispatch.transforms_active)
        source.line(f"    $set_up($ctx, {args}, {{}}, $result)", set_up=set_up)
        source.line("else:")
        source.line(f"    $callback(ctx=$ctx, inputs={args}, output=$result)", callback=set_up.simple)
    known = [variable_name(a) for a in schema.positional[: always_passed(schema)] if a.holds_tensors]
    returns = ["$result"] if len(schema.returns) == 1 else [f"$result[{i}]" for i in range(len(schema.returns))]
    returns = [name for name, flag in zip(returns, layout.outputs, strict=True) if flag]
    known += returns
    source.line("$kept = $ctx.__dict__")
    source.line(
        "$lost = $ctx.non_differentiable or ($kept and not $no_tensors.issuperset($map($type, $kept.values())))",
        map=map,
        type=type,
    )
    for_forward = "*($ctx.saved_for_forward or ())"
    saved = f"(*($ctx.to_save or ()), {for_forward})" if for_jvp else "$ctx.to_save or ()"
    source.line(f"for $saved in {saved}:", no_tensors=HOLD_NO_TENSORS)
    source.line(f"    if {' and '.join(f'$saved is not {name}' for name in known)}:")
    source.line("        $lost = True")
    source.line("if $lost:")
    everything = f"(*{args}, {', '.join(returns)})"
    source.line(f"    $remember_lost($ctx, {args}, {everything})", remember_lost=record_untracked)
    if set_up.once:
        source.line(f"$ctx._customops_links = $links_to({args})", links_to=links_to)
    source.line("if $saved_tensors_hooks(True) is not None:", saved_tensors_hooks=_compat.autograd.saved_tensors_hooks)
    source.line("    $ctx._customops_hooked = True")


def _expect(source: Source, schema: Schema, compares: GradientCheck) -> None:
    """Add the lines that keep what the gradients are to be like. See `_compat.metadata`.

    A kernel that is called directly gets plain tensors, with shapes that can be compared; else it is a partial.
    """
    always = schema.positional[: always_passed(schema)]
    direct, other = (
        [
            f"{text.format(variable_name(argument))} if $needs[{i}] else None" if argument.holds_tensors else "None"
            for i, argument in enumerate(always)
        ]
        for text in ("({0}.shape, {0}.dtype, {0}.device)", "$metadata({0})")
    )
    if len(always) < len(schema.positional):
        rest = f"*($metadata(x) if flag else None for x, flag in $zip($rest, $needs[{len(always)}:]))"
        direct, other = [*direct, rest], [*other, rest]
    source.line("if not $compares.is_on:", compares=compares, metadata=_compat.autograd.metadata, zip=zip)
    source.line("    $ctx._customops_expected = (None,) * $len($needs)", len=len)
    source.line("elif $type($kernel) is $partial:", type=type, partial=functools.partial)
    source.line(f"    $ctx._customops_expected = {as_tuple(other)}")
    source.line("else:")
    source.line(f"    $ctx._customops_expected = {as_tuple(direct)}")


def backward(definition: OperatorHandle, layout: Layout, formula: Formula, compares: GradientCheck) -> Fn:
    """``backward(ctx, *grads)``, written for the op, with what the formula returns compared."""
    schema, op = definition.schema, str(definition.name)
    source = Source("backward", schema)
    source.parameters = ["$ctx", "*$grads"]
    if len(layout.outputs) > 1:
        source.line("if '_customops_zeros' in $ctx.__dict__:", or_zeros=materialize_zeros)
        source.line("    $grads = $tuple($map($or_zeros, $grads, $ctx._customops_zeros))", tuple=tuple, map=map)
    source.line("$seen = $ctx")
    source.line("if '_customops_hooked' in $ctx.__dict__:", unpacked_once=UnpackedOnce)
    source.line("    $seen = $unpacked_once($ctx)")
    if formula.once_differentiable:
        source.objects["fn"] = OnceDifferentiable(formula.fn, op)
    else:
        source.line("if '_customops_lost' in $ctx.__dict__ and $may_be_differentiated():", op=op)
        source.line("    $seen = $watched($ctx, $op)", may_be_differentiated=may_be_differentiated, watched=guarded)
        source.objects["fn"] = formula.fn
    source.line("$result = $fn($seen, *$grads)")
    source.line("$likes = $ctx._customops_expected")
    source.line("if $type($result) is $tuple and $len($result) == $len($likes):", type=type, tuple=tuple, len=len)
    always = range(always_passed(schema))
    rest = "*$rest" if len(always) < len(schema.positional) else ""
    values = [*(f"${i}" for i in always), *([rest] if rest else [])]
    source.line(f"    {', '.join(values)}, = $result")
    source.line(f"    {', '.join(value.replace('$', '$like_') for value in values)}, = $likes")
    fits = [_FITS[layout.inputs[i].holds_tensors].format(f"${i}", f"$like_{i}") for i in always]
    if rest:
        fits.append("$fit($rest, $like_rest)")
        of_tensors = [argument.holds_tensors for argument in layout.inputs[len(always) :]]
        source.objects["fit"] = functools.partial(_fit, of_tensors)
    source.line(f"    if {' and '.join(fits)}:", Tensor=Tensor, isinstance=isinstance)
    source.line("        $was_right()", was_right=compares.was_right)
    source.line(f"        return None, {', '.join(values)}")
    source.line("$none_allowed = $any(grad is None for grad in $grads)", any=any)
    check = InputGradients(layout, op, formula.fn, compares).flat
    call = "$check($result, $range($len($likes)), $likes, none_allowed=$none_allowed)"
    source.line(f"return None, *{call}", check=check, range=range)
    return cast(Fn, source.build())  # at once: compiled autograd traces it before it was ever called


#: Does the gradient {0} fit what is expected, {1}? By whether the input is a tensor.
_FITS = {
    True: "(({1} is None or {1} == ({0}.shape, {0}.dtype, {0}.device)) if $isinstance({0}, $Tensor) else {0} is {1})",
    False: "{0} is None",
}


def _fit(of_tensors: Sequence[bool], gradients: Sequence[Any], likes: Sequence[Any]) -> bool:
    """The same, for arguments that a call may leave out."""
    return all(
        gradient is like  # both None
        or (
            is_tensor and isinstance(gradient, Tensor) and (like is None or like == _compat.autograd.metadata(gradient))
        )
        for is_tensor, gradient, like in zip(of_tensors, gradients, likes, strict=False)
    )
