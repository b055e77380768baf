"""The graph node of an op: an autograd.Function made for its formula.

It derives from the class that functorch itself uses for one level of differentiation, so that ``torch.func.grad``,
``vjp``, ``jvp`` and their compositions see the op as they see an aten op.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from customops import _compat
from customops._autograd import node_codegen
from customops._autograd.context import Outputs, SetUp, flat_items, mask, materialize_zeros, set_materialize_grads
from customops._autograd.gradient_checks import GradientCheck, InputGradients, OutputTangents, expected_of
from customops._autograd.inplace import check_writes, copies_of_originals, tensors_to_mark_dirty, written_tangent
from customops._autograd.layout import FlattenedCall, Layout, flatten, unflatten
from customops._autograd.options import Formula
from customops._autograd.untracked import (
    OnceDifferentiable,
    UnpackedOnce,
    guarded,
    guarded_in_jvp,
    links_to,
    may_be_differentiated,
    record_untracked,
)
from customops._dispatch.callbacks import Fn
from customops._dispatch.operator import OperatorHandle
from customops._schema.model import Schema
from customops.errors import AutogradError, ContextError, UnsupportedError, where

__tracebackhide__ = True  # pytest leaves the frames out


def converts_nothing(schema: Schema) -> bool:
    """Does a kernel get and return the same objects, whether the dispatcher is between or not? (lists are new ones)"""
    return all("[" not in argument.type for argument in schema.arguments) and all(
        ret.type == "Tensor" for ret in schema.returns
    )


def is_flat(schema: Schema) -> bool:
    """Does a node for the op take and return what the op does? Then it needs no `Call` around the kernel."""
    return converts_nothing(schema) and bool(schema.returns) and not (schema.mutated or schema.keyword_only)


def make_node_class(definition: OperatorHandle, layout: Layout, backward: Formula | None, jvp: Formula | None) -> Any:
    """The autograd.Function of an op and its formulas. Its first argument reaches the op.

    That is a `Call`; for an op that `is_flat`, what the arguments are given to.
    """
    formulas = [formula for formula in (backward, jvp) if formula is not None]
    set_up = SetUp(definition.schema, formulas)
    finish = Outputs(layout, for_jvp=jvp is not None, materializes=all(f.materialize_grads for f in formulas))
    compares = GradientCheck(definition.when)
    if is_flat(definition.schema):
        forward = node_codegen.forward(definition.schema, layout, set_up, finish, compares)
    else:
        forward = _forward(definition, layout, set_up, finish, compares, has_formula=bool(formulas))
    make_backward = node_codegen.backward if is_flat(definition.schema) else _backward
    statics = {
        "forward": forward,
        "backward": _missing(definition) if backward is None else make_backward(definition, layout, backward, compares),
        "jvp": _missing_jvp(definition) if jvp is None else _jvp(definition, layout, jvp),
    }
    name = "_".join(part for part in definition.name if part)  # torch puts "Backward" after it
    marked = {key: staticmethod(_compat.dynamo.outside_dynamo(member)) for key, member in statics.items()}
    function = type(name, (_compat.autograd.SingleLevelFunction,), marked)
    _compat.autograd.context_class(function).set_materialize_grads = set_materialize_grads
    _compat.autograd.context_class(function).__getattr__ = _missing_attribute(definition, set_up, formulas)
    return function


def _missing_attribute(definition: OperatorHandle, set_up: SetUp, formulas: list[Formula]) -> Fn:
    """What Python calls where `ctx` has no attribute of a name."""

    def missing(ctx: Any, name: str) -> Any:
        there = [each for each in vars(ctx) if not each.startswith("_customops_")]
        raise ContextError(
            f"ctx has no attribute {name!r}" + ("" if set_up.callbacks else ": no setup_context is registered"),
            op=str(definition.name),
            expected=f"one that setup_context put there: {', '.join(there)}" if there else None,
            where=where(formulas[0].fn) if formulas else None,
            fix=f"ctx.{name} = ... in setup_context" + ("" if set_up.callbacks else ", given with setup_context="),
        )

    return missing


_AS_IT_IS = contextlib.nullcontext()


@contextlib.contextmanager
def _recorded_write() -> Iterator[None]:
    """AOTAutograd takes a write that it sees with gradients off, as in a forward, for one without a gradient."""
    guard = _compat.dispatch.below_autograd()
    try:
        with torch.enable_grad():
            yield
    finally:
        del guard


def _forward(
    definition: OperatorHandle,
    layout: Layout,
    set_up: SetUp,
    finish: Outputs,
    compares: GradientCheck,
    *,
    has_formula: bool,
) -> Fn:
    """The forward of any op. Its `Call` knows which inputs there are, and is told which outputs there are."""
    op, writes = str(definition.name), bool(layout.written)
    returns_tuple = len(definition.schema.returns) > 1

    def forward(ctx: Any, call: FlattenedCall, *flat: Any) -> Any:
        values, passed = unflatten(flat, call.lengths), call.indices(layout)
        inputs = dict(zip(passed, values, strict=True))
        if writes and has_formula:
            check_writes(layout, inputs, flat, op)
        before = copies_of_originals(layout, inputs)
        args, kwargs = call.arguments(inputs, layout)
        dirty = tensors_to_mark_dirty(layout, inputs, has_formula) if writes else []
        with _recorded_write() if dirty and _compat.dispatch.functionalizing() else _AS_IT_IS:
            result = call.fn(*args, **kwargs)
        if layout.in_place:
            result = args[0]
        elif returns_tuple and type(result) is not tuple:
            result = tuple(result)
        outputs = result if isinstance(result, tuple) else () if result is None else (result,)
        outputs += tuple(inputs.get(i) for i in layout.new_values)
        followed = dirty
        if dirty and not layout.in_place and (len(dirty) > 1 or any(x is not dirty[0] for x in flat_items(outputs))):
            call.written, followed = dirty, [*map(_compat.autograd.without_history, dirty)]
            outputs = _replaced(outputs, dirty, followed)
            inputs = {i: _replaced(value, dirty, followed) for i, value in inputs.items()}
            args, kwargs = call.arguments(inputs, layout)
        elif dirty:
            ctx.mark_dirty(*dirty)
            ctx._customops_writes = True
        needed = unflatten(ctx.needs_input_grad[1:], call.lengths)
        flags = {i: mask(flag, layout.differentiable[i]) for i, flag in zip(passed, needed, strict=True)}
        ctx.needs_input_grad = call.needs_input_grad(flags, layout)
        if set_up.callbacks:
            seen = call.arguments({**inputs, **before}, layout) if before else (args, kwargs)
            set_up(ctx, *seen, result)
            record_untracked(ctx, flat, _known(layout, inputs, before, outputs))
            if set_up.once:
                ctx._customops_links = links_to(flat)
            if _compat.autograd.saved_tensors_hooks(True) is not None:
                ctx._customops_hooked = True
        finish(ctx, flat, outputs)
        ctx._customops_passed = passed
        ctx._customops_expected = [expected_of(inputs[i], flags[i], compares.is_on) for i in passed]
        return _laid_out(ctx, call, layout, outputs, followed)

    return forward


def _known(layout: Layout, inputs: dict[int, Any], before: dict[int, Any], outputs: tuple[Any, ...]) -> list[Any]:
    """The tensors that have a history, or need none."""
    written = flat_items(inputs.get(i) for i in layout.written)
    untouched = (x for x in flat_items(inputs.values()) if all(x is not each for each in written))
    returned = (each for each, flag in zip(outputs, layout.outputs, strict=True) if flag)
    return [*untouched, *flat_items(before.values()), *flat_items(returned)]


def _replaced(value: Any, written: list[Tensor], new: list[Tensor]) -> Any:
    """`value`, or what it holds, with new tensors in the place of those that were written."""
    if isinstance(value, (list, tuple)):
        return type(value)(_replaced(item, written, new) for item in value)
    return next((other for tensor, other in zip(written, new, strict=True) if tensor is value), value)


def _laid_out(ctx: Any, call: FlattenedCall, layout: Layout, outputs: tuple[Any, ...], followed: list[Tensor]) -> Any:
    """What the node returns: its outputs, lists laid out flat, and last what else it is the new history of."""
    leaves, lengths = flatten(outputs, layout.list_outputs)
    lengths = lengths or [None] * len(leaves)
    leaves += tuple(x for x in followed if all(x is not leaf for leaf in leaves))
    call.new_values = [next(i for i, leaf in enumerate(leaves) if leaf is x) for x in followed] if call.written else []
    ctx._customops_outputs = call.output_lengths = lengths
    return leaves[0] if len(leaves) == 1 else leaves


def _backward(definition: OperatorHandle, layout: Layout, formula: Formula, compares: GradientCheck) -> Fn:
    """The backward of any op."""
    user_backward, op = formula.fn, str(definition.name)
    check = InputGradients(layout, op, user_backward, compares)
    if formula.once_differentiable:
        user_backward = OnceDifferentiable(user_backward, op)

    def backward(ctx: Any, *grads: Any) -> Any:
        grads = unflatten(grads, ctx._customops_outputs)
        if "_customops_zeros" in ctx.__dict__:
            grads = tuple(map(materialize_zeros, grads, ctx._customops_zeros))
        seen = UnpackedOnce(ctx) if "_customops_hooked" in ctx.__dict__ else ctx
        if not formula.once_differentiable and "_customops_lost" in ctx.__dict__ and may_be_differentiated():
            seen = guarded(ctx, op)
        result = user_backward(seen, *grads)
        none_allowed = any(grad is None for grad in flat_items(grads))
        expected = ctx._customops_expected
        gradients = check.flat(result, ctx._customops_passed, expected, none_allowed=none_allowed)
        return (None, *gradients)

    return backward


def _missing(definition: OperatorHandle) -> Fn:
    def backward(ctx: Any, *grads: Any) -> Any:
        raise _no_formula(definition)

    return backward


def _jvp(definition: OperatorHandle, layout: Layout, formula: Formula) -> Fn:
    user_jvp, op = formula.fn, str(definition.name)
    check = OutputTangents(layout, op, user_jvp)

    def jvp(ctx: Any, _: None, *flat: Any) -> Any:
        expected = ctx._customops_expected
        lengths = [len(each) if isinstance(each, list) else None for each in expected]
        passed = ctx.__dict__.get("_customops_passed", range(len(expected)))
        given = dict(zip(passed, unflatten(flat, lengths), strict=True))
        if "_customops_zero_tangents" in ctx.__dict__:
            flat = tuple(map(materialize_zeros, flat, ctx._customops_zero_tangents))
        filled = dict(zip(passed, unflatten(flat, lengths), strict=True))
        tangents = [filled.get(i) if has else None for i, has in enumerate(layout.differentiable)]
        result = _compat.autograd.call_jvp(user_jvp, guarded_in_jvp(ctx, op), *tangents)
        results = result if isinstance(result, tuple) else (result,)
        check.check(results, ctx._customops_results)
        outputs = tuple(map(_compat.autograd.without_tangent, flatten(results, layout.list_outputs)[0]))
        if "_customops_writes" in ctx.__dict__:
            (before,) = flat_items(given.get(i) for i in ([0] if layout.in_place else layout.new_values))
            outputs = (_compat.autograd.call_jvp(written_tangent, before, *outputs),)
        return outputs[0] if len(outputs) == 1 else outputs

    return jvp


def _missing_jvp(definition: OperatorHandle) -> Fn:
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise UnsupportedError(
            "forward-mode differentiation (jvp, jacfwd, dual numbers) of an op without a jvp rule",
            op=str(definition.name),
            fix="op.register_jvp(jvp, setup_context=...); or use reverse mode: jacrev(jacrev(f)) is a hessian, too",
        )

    return jvp


def _no_formula(definition: OperatorHandle) -> AutogradError:
    if not definition.differentiable.op:
        problem = "Trying to backward through an op that is declared not to be differentiable, but wrote its argument"
        fix = "call it under torch.no_grad() or on x.detach()"
    elif definition.schema.mutated:
        problem = "Trying to backward through an op that writes to its argument, but no autograd formula was registered"
        fix = "op.register_autograd(backward, setup_context=...); or call it under torch.no_grad() or on x.detach()"
    else:
        problem = "Trying to backward through an op, but no autograd formula was registered"
        fix = "op.register_autograd(backward, setup_context=...)"
    return AutogradError(problem, op=str(definition.name), fix=fix)
