"""Ops that write under autograd: which writes it can follow, and the graph of what was written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from customops import _compat
from customops._autograd.layout import Layout
from customops._dispatch.results import tensors_in
from customops._schema.differentiability import is_differentiable
from customops.errors import AutogradError

__tracebackhide__ = True  # pytest leaves the frames out


def check_writes(layout: Layout, inputs: dict[int, Any], flat: tuple[Any, ...], op: str) -> None:
    """Raise for a write that would go past the history of a tensor, before it is done."""
    for i in layout.written:
        followed = layout.in_place or i in layout.new_values
        for tensor in tensors_in((inputs.get(i),)):
            if followed and sum(x is tensor for x in flat) > 1:
                raise given_twice_error(layout.inputs[i].name, op)
            if followed:
                check_write(tensor, layout.inputs[i].name, op)
            elif tensor.requires_grad:
                raise unfollowed_write_error(layout.inputs[i].name, op)


def copies_of_originals(layout: Layout, inputs: dict[int, Any]) -> dict[int, Any]:
    """Copies of inputs from before the write, with their history."""
    if not layout.originals:
        return {}
    with torch.inference_mode(False):  # the public switch for reverse and forward mode at once
        return {
            i: [x.clone() if isinstance(x, Tensor) else x for x in value]
            if isinstance(value, (list, tuple))
            else value.clone()
            for i in layout.originals
            if (value := inputs.get(i)) is not None
        }


def tensors_to_mark_dirty(layout: Layout, inputs: dict[int, Any], has_formula: bool) -> list[Tensor]:
    """The tensors of which this node is to be the history.

    Without a formula, all that can have one: else a later backward would go past the write as if it had not happened.
    A leaf that requires grad is left alone, as an optimizer does with it. So are views that autograd cannot follow,
    unless they have a history already.
    """
    if has_formula:
        indices = layout.written[:1] if layout.in_place else layout.new_values
        return [tensor for i in indices for tensor in tensors_in((inputs.get(i),))]
    written = [x for i in layout.written for x in tensors_in((inputs.get(i),)) if is_differentiable(x)]
    is_only = layout.in_place or len(written) + len(layout.outputs) == 1
    declared = any(layout.differentiable)  # else nothing is, and only what has a history already is looked after
    return [
        x
        for x in written
        if (
            not x.is_leaf
            if x.requires_grad
            else declared and (is_only or not x._is_view() or _compat.autograd.is_fresh_view(x))
        )
    ]


def check_write(tensor: Tensor, argument: str, op: str) -> None:
    """Raise where autograd could not take the op into the history of a tensor that it is about to write.

    The rules are those of torch's own in-place ops, which hold as long as gradients are enabled.
    """
    problem = fix = None
    base = tensor._base
    if tensor.requires_grad and tensor.is_leaf:
        problem, fix = "a leaf Variable that requires grad is being used in an in-place operation", "x.clone()"
    elif base is not None and base.requires_grad and base.is_leaf:
        problem = "a view of a leaf Variable that requires grad is being used in an in-place operation"
        fix = "a view of x.clone()"
    elif base is not None and not _compat.autograd.is_fresh_view(tensor):
        problem = (
            "a view is being modified in-place that autograd cannot follow: one of several that a function returned "
            "(unbind, split, chunk), or made under torch.no_grad(), in inference mode, or by a custom Function"
        )
        fix = "a view of its own, e.g. x[i] in place of x.unbind()[i]; or x.clone()"
    if problem is not None:
        fix = f"pass {fix}, or call the op under torch.no_grad()"
        raise AutogradError(problem, op=op, argument=argument, fix=fix)


class _NewValue(_compat.autograd.SingleLevelFunction):
    """A tensor that has the value of `new` by now, and is to have its history.

    torch's graph has a place for a node that writes to a view only if that is all it does. So the node of an op with
    several results gives `new` as one of them, and this one is the last in the history of the view.
    """

    @staticmethod
    @_compat.dynamo.outside_dynamo
    def forward(ctx: Any, tensor: Tensor, new: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    @_compat.dynamo.outside_dynamo
    def backward(ctx: Any, grad: Any) -> Any:
        # Zeros: where torch gets None for the view, it takes the whole gradient of the base for none.
        return None if grad is None else torch.zeros_like(grad), grad

    @staticmethod
    @_compat.dynamo.outside_dynamo
    def jvp(ctx: Any, tangent: Tensor | None, new: Tensor | None) -> Any:
        return _compat.autograd.call_jvp(written_tangent, tangent, new)


def written_tangent(before: Tensor | None, new: Tensor | None) -> Tensor | None:
    """What torch wants of an op that writes: the tangent of what is written is written too, and returned."""
    if before is None:
        return new
    return before.zero_() if new is None else before.copy_(new)


def attach_graph(written: Sequence[Tensor], new: Sequence[Tensor]) -> None:
    """Give tensors that were written the history of their new values. The write itself was counted when it was done."""
    for tensor, value in zip(written, new, strict=True):
        with _compat.autograd.uncounted(tensor):
            _compat.autograd.apply_function(_NewValue, tensor, value)


def unfollowed_write_error(argument: str, op: str) -> AutogradError:
    """The error for a tensor with a history that is written, where the formula says nothing about its new value."""
    return AutogradError(
        "the op writes to a tensor that requires grad, and by its formula the new value has no gradient",
        op=op,
        argument=argument,
        fix=f'pass one that does not require grad (.detach()), or register_autograd(..., grads_of=("{argument}",))',
    )


def given_twice_error(argument: str, op: str) -> AutogradError:
    """The error for a tensor that is written and read: setup_context would save the new value for the old one."""
    return AutogradError(
        "the op writes to a tensor that it is also given as another argument, and is to be differentiated",
        op=op,
        argument=argument,
        fix="pass a copy (.clone()) for one of them",
    )


def captured_error(argument: str, op: str) -> AutogradError:
    """The error for a write to a tensor from outside of a transform that differentiates."""
    return AutogradError(
        "inside a transform (grad, vjp, jvp, ...) the op would mutate a captured tensor, one from outside of it: the "
        "transform would not see the new value",
        op=op,
        argument=argument,
        fix="make the tensor inside of the function, or pass it to the transform as an argument",
    )
