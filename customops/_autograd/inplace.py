"""Ops that write under autograd: which writes it can follow, and the graph of what was written."""

from __future__ import annotations

import contextlib
from typing import Any, cast

import torch
from torch import Tensor

from customops import _torch
from customops._autograd.context import AS_IT_IS, has_tangent
from customops._autograd.layout import Layout, Lengths, flatten
from customops._schema.model import is_differentiable
from customops._torch.trees import flat_items, tensors_in
from customops.errors import AutogradError

__tracebackhide__ = True  # pytest leaves the frames out


class Outcome:
    """What one call of a node is told, beside the outputs that autograd passes on."""

    __slots__ = ("followed", "lengths", "mutated", "new_values")

    def __init__(self) -> None:
        #: How many flat outputs each output became.
        self.lengths: Lengths = ()
        #: Tensors that were mutated, and the flat outputs that are their new values: see `attach_graph`.
        self.mutated: list[Tensor] = []
        self.new_values: list[int] = []
        #: The tensors of which the node is the new graph.
        self.followed: list[Tensor] = []


class Mutation:
    """What the forward of an op that mutates does beside that. `inputs` are by index, lists as lists."""

    def __init__(self, layout: Layout, op: str, *, has_formula: bool) -> None:
        self.layout, self.op, self.has_formula = layout, op, has_formula

    def begin(self, inputs: dict[int, Any], flat: tuple[Any, ...]) -> tuple[dict[int, Any], list[Tensor]]:
        """Copies of the inputs that setup_context gets as they were, and the tensors to be followed."""
        layout = self.layout
        mutated = {i: tensors_in((inputs.get(i),)) for i in layout.mutated}
        for i, tensors in mutated.items():
            for tensor in tensors:
                self._check_write(i, tensor, flat)
        originals: dict[int, Any] = {}
        for i in layout.originals:  # copied with their graph
            value = inputs[i]
            with torch.inference_mode(False):  # the public switch for reverse and forward mode at once
                if isinstance(value, (list, tuple)):
                    originals[i] = [x.clone() if isinstance(x, Tensor) else x for x in value]
                elif value is not None:
                    originals[i] = value.clone()
        if self.has_formula:
            followed = layout.mutated[:1] if layout.in_place else layout.new_values
            return originals, [tensor for i in followed for tensor in mutated[i]]
        # Without a formula, the node is the graph of all that can have one: else a later backward would go past the
        # write as if it had not happened. A leaf that requires grad is left alone, as an optimizer does with it. So are
        # views that autograd cannot follow, unless they have a graph already.
        candidates = [x for tensors in mutated.values() for x in tensors if is_differentiable(x)]
        is_only = layout.in_place or len(candidates) + len(layout.outputs) == 1
        declared = any(layout.differentiable)  # else nothing is, and only what has a graph already is looked after
        return originals, [
            x
            for x in candidates
            if (
                not x.is_leaf
                if x.requires_grad
                else declared and (is_only or not _torch.autograd.is_view(x) or _torch.autograd.is_fresh_view(x))
            )
        ]

    def _check_write(self, i: int, tensor: Tensor, flat: tuple[Any, ...]) -> None:
        """Raise, before it is done, for a write that would go past the graph of a tensor, or that cannot be in it.

        The rules are those of torch's own in-place ops, which hold as long as gradients are enabled.
        """
        layout, argument = self.layout, self.layout.operands[i].name
        if not self.has_formula and not (any(layout.differentiable) and tensor.requires_grad and tensor.is_leaf):
            return
        problem = fix = None
        base, otherwise = _torch.autograd.base_of(tensor), "or call the op under torch.no_grad()"
        if self.has_formula and not (layout.in_place or i in layout.new_values):
            if tensor.requires_grad or has_tangent(tensor):
                problem = (
                    "the op writes to a tensor that requires grad, but its formula gives the new value no gradient"
                )
                fix = "pass one that does not require grad (.detach())"
                otherwise = f'or register_autograd(..., grads_of=("{argument}",))'
        elif self.has_formula and sum(x is tensor for x in flat) > 1:  # setup_context would save the new value
            problem = "the op writes to a tensor that is also another argument, so it cannot be differentiated"
            fix, otherwise = "pass a copy (.clone()) for one of them", ""
        elif tensor.requires_grad and tensor.is_leaf:
            problem = "a leaf Variable that requires grad is being used in an in-place operation"
            fix = "pass x.clone()"
        elif base is not None and base.requires_grad and base.is_leaf:
            problem = "a view of a leaf Variable that requires grad is being used in an in-place operation"
            fix = "pass a view of x.clone()"
        elif base is not None and not _torch.autograd.is_fresh_view(tensor):
            problem = (
                "a view is being modified in-place that autograd cannot follow: one of several that a function "
                "returned (unbind, split, chunk), or made under torch.no_grad(), in inference mode, or by a custom "
                "Function"
            )
            fix = "use a view of its own, e.g. x[i] instead of x.unbind()[i], or x.clone()"
        if problem is not None:
            fix = ", ".join(filter(None, [fix, otherwise]))
            raise AutogradError(problem, op=self.op, argument=argument, fix=fix)

    def recorded(self, dirty: list[Tensor]) -> contextlib.AbstractContextManager[Any]:
        """Context manager for the call of the kernel.

        AOTAutograd takes a write that it sees with gradients off, as in a forward, for one without a gradient.
        """
        if not dirty or not _torch.dispatcher.functionalizing():
            return AS_IT_IS
        stack = contextlib.ExitStack()
        stack.enter_context(_torch.dispatcher.below_autograd())
        stack.enter_context(torch.enable_grad())
        return stack

    def end(
        self, ctx: Any, outcome: Outcome, inputs: dict[int, Any], outputs: tuple[Any, ...], dirty: list[Tensor]
    ) -> tuple[Any, ...]:
        """The outputs of the node. What cannot be marked dirty is replaced in them and the inputs: `attach_graph`."""
        outcome.followed = dirty
        if not dirty:
            return outputs
        if self.layout.in_place or (len(dirty) == 1 and all(x is dirty[0] for x in flat_items(outputs))):
            ctx.mark_dirty(*dirty)
            ctx._customops_writes = True
            return outputs
        outcome.mutated, outcome.followed = dirty, [*map(_torch.autograd.without_history, dirty)]
        for i, value in inputs.items():
            inputs[i] = _replaced(value, dirty, outcome.followed)
        return cast(tuple[Any, ...], _replaced(outputs, dirty, outcome.followed))

    def known(self, inputs: dict[int, Any], originals: dict[int, Any], outputs: tuple[Any, ...]) -> list[Any]:
        """The tensors that have a graph, or need none."""
        mutated = flat_items(inputs[i] for i in self.layout.mutated)
        untouched = (x for x in flat_items(inputs.values()) if all(x is not each for each in mutated))
        returned = (each for each, flag in zip(outputs, self.layout.outputs, strict=True) if flag)
        return [*untouched, *flat_items(originals.values()), *flat_items(returned)]

    def flatten_outputs(self, ctx: Any, outcome: Outcome, outputs: tuple[Any, ...]) -> Any:
        """What the node returns: its outputs, lists flattened, and last what else it is the new graph of."""
        leaves, lengths = flatten(outputs, self.layout.list_outputs)
        followed = outcome.followed
        leaves += tuple(x for x in followed if all(x is not leaf for leaf in leaves))
        if outcome.mutated:
            outcome.new_values = [next(i for i, leaf in enumerate(leaves) if leaf is x) for x in followed]
        ctx._customops_outputs = outcome.lengths = lengths
        return leaves[0] if len(leaves) == 1 else leaves


def _replaced(value: Any, mutated: list[Tensor], new: list[Tensor]) -> Any:
    """`value`, or what it holds, with new tensors in the place of those that were mutated."""
    if isinstance(value, (list, tuple)):
        return type(value)(_replaced(item, mutated, new) for item in value)
    return next((other for tensor, other in zip(mutated, new, strict=True) if tensor is value), value)


class _NewValue(_torch.autograd.SingleLevelFunction):
    """A tensor that has the value of `new` by now, and is to have its graph.

    torch's graph has a place for a node that writes to a view only if that is all it does. So the node of an op with
    several results gives `new` as one of them, and this one is the last in the graph of the view.
    """

    @staticmethod
    @_torch.dynamo.outside_dynamo
    def forward(ctx: Any, tensor: Tensor, new: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    @_torch.dynamo.outside_dynamo
    def backward(ctx: Any, grad: Any) -> Any:
        # Zeros: where torch gets None for the view, it takes the whole gradient of the base for none.
        return None if grad is None else torch.zeros_like(grad), grad

    @staticmethod
    @_torch.dynamo.outside_dynamo
    def jvp(ctx: Any, tangent: Tensor | None, new: Tensor | None) -> Any:
        return _torch.autograd.call_jvp(written_tangent, tangent, new)


def written_tangent(before: Tensor | None, new: Tensor | None) -> Tensor | None:
    """What torch wants of an op that writes: the tangent of what is written is written too, and returned."""
    if before is None:
        return new
    return before.zero_() if new is None else before.copy_(new)


def attach_graph(outcome: Outcome, result: tuple[Tensor, ...]) -> None:
    """Give tensors that were mutated the graph of their new values. The write was counted when it was done."""
    for tensor, i in zip(outcome.mutated, outcome.new_values, strict=True):
        with _torch.autograd.uncounted(tensor):
            _torch.autograd.apply_function(_NewValue, tensor, result[i])
