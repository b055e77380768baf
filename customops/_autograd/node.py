"""The graph node of an op: an autograd.Function made for its formula.

It derives from the class that functorch itself uses for one level of differentiation, so that ``torch.func.grad``,
``vjp``, ``jvp`` and their compositions see the op as they see an aten op.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from customops import _torch
from customops._autograd import node_codegen
from customops._autograd.context import Outputs, SetUp, flat_items, materialize_zeros, set_materialize_grads
from customops._autograd.gradient_checks import GradientCheck, OutputTangents
from customops._autograd.inplace import Mutation, written_tangent
from customops._autograd.layout import Formula, Layout, flatten, unflatten
from customops._autograd.recompute import draws_again
from customops._autograd.untracked import guarded_in_jvp
from customops._dispatch.callbacks import Fn
from customops._dispatch.operator import OperatorHandle
from customops.errors import AutogradError, ContextError, UnsupportedError, where

__tracebackhide__ = True  # pytest leaves the frames out


class Node(NamedTuple):
    """The autograd.Function of an op and its formulas, and what applies it: ``apply(kernel, *args, **kwargs)``."""

    function: Any
    apply: Fn


def make_node(operator: OperatorHandle, layout: Layout, backward: Formula | None, jvp: Formula | None) -> Node:
    """The node of an op for these formulas."""
    formulas = [formula for formula in (backward, jvp) if formula is not None]
    op = operator.qualname
    set_up = SetUp(operator.schema, formulas)
    finish = Outputs(layout, for_jvp=jvp is not None, materializes=False not in [f.materialize_grads for f in formulas])
    compares = GradientCheck(operator.when)
    mutation = Mutation(layout, op, has_formula=bool(formulas))
    draws = True in [draws_again(formula.fn) for formula in formulas]
    statics = {
        "forward": node_codegen.forward(layout, set_up, finish, compares, mutation, draws_again=draws),
        "backward": node_codegen.backward(layout, op, backward, compares) if backward else _no_backward(operator),
        "jvp": _jvp(layout, op, jvp) if jvp else _no_jvp(op),
    }
    name = "_".join(filter(None, operator.name))  # torch puts "Backward" after it
    marked = {key: staticmethod(_torch.dynamo.outside_dynamo(member)) for key, member in statics.items()}
    function = type(name, (_torch.autograd.SingleLevelFunction,), marked)
    context = _torch.autograd.context_class(function)
    context.set_materialize_grads = set_materialize_grads
    # Compiled autograd reads ctx through another object.
    context._customops_zeros = context._customops_untracked = context._customops_graph = None
    context._customops_hooked, context._customops_links = False, ()

    def missing(ctx: Any, name: str) -> Any:
        """What Python calls where `ctx` has no attribute of a name."""
        there = [each for each in vars(ctx) if not each.startswith("_customops_")]
        raise ContextError(
            f"ctx has no attribute {name!r}" + ("" if set_up.callbacks else ": no setup_context is registered"),
            op=op,
            expected=f"one that setup_context set: {', '.join(there)}" if there else None,
            where=where(formulas[0].fn) if formulas else None,
            fix=f"ctx.{name} = ... in setup_context" + ("" if set_up.callbacks else ", given with setup_context="),
        )

    context.__getattr__ = missing
    return Node(function, node_codegen.apply(layout, function))


def _no_backward(operator: OperatorHandle) -> Fn:
    problem = "Trying to backward through an op, but no autograd formula was registered"
    fix = "op.register_autograd(backward, setup_context=...)"
    if not operator.differentiable.op:
        problem = "Trying to backward through an op that is declared not to be differentiable, but wrote its argument"
        fix = "call it under torch.no_grad() or on x.detach()"
    elif operator.schema.mutated:
        problem = "Trying to backward through an op that writes to its argument, but no autograd formula was registered"
        fix = "op.register_autograd(backward, setup_context=...); or call it under torch.no_grad() or on x.detach()"

    def backward(ctx: Any, *grads: Any) -> Any:
        raise AutogradError(problem, op=operator.qualname, where=operator.spec.source, fix=fix)

    return backward


def _jvp(layout: Layout, op: str, formula: Formula) -> Fn:
    user_jvp, head = formula.fn, len(layout.head)
    check = OutputTangents(layout, op, user_jvp)

    def jvp(ctx: Any, *given: Any) -> Any:
        flat, expected = given[head:], ctx._customops_expected
        lengths = [len(each) if isinstance(each, list) else None for each in expected]
        indices = layout.indices(len(expected))
        before = dict(zip(indices, unflatten(flat, lengths), strict=True))
        if "_customops_zero_tangents" in ctx.__dict__:
            flat = tuple(map(materialize_zeros, flat, ctx._customops_zero_tangents))
        filled = dict(zip(indices, unflatten(flat, lengths), strict=True))
        tangents = [filled.get(i) if has else None for i, has in enumerate(layout.differentiable)]
        result = _torch.autograd.call_jvp(
            _torch.thread_state.call_without_autocast, user_jvp, guarded_in_jvp(ctx, op), *tangents
        )
        results = result if isinstance(result, tuple) else (result,)
        check.check(results, ctx._customops_results)
        outputs = tuple(map(_torch.autograd.without_tangent, flatten(results, layout.list_outputs)[0]))
        if "_customops_writes" in ctx.__dict__:
            (mutated,) = flat_items(before.get(i) for i in ([0] if layout.in_place else layout.new_values))
            outputs = (_torch.autograd.call_jvp(written_tangent, mutated, *outputs),)
        return outputs[0] if len(outputs) == 1 else outputs

    return jvp


def _no_jvp(op: str) -> Fn:
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise UnsupportedError(
            "forward-mode differentiation (jvp, jacfwd, dual numbers) of an op without a jvp rule",
            op=op,
            fix="op.register_jvp(jvp, setup_context=...); or use reverse mode: jacrev(jacrev(f)) is a hessian, too",
        )

    return jvp
