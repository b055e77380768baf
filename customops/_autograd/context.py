"""What is done around the callbacks of a formula: setup_context is called, and `ctx` gets what backward needs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from customops import _torch
from customops._autograd.layout import Formula, Layout
from customops._dispatch.random_states import RandomStates
from customops._schema.defaults import filler
from customops._schema.model import Schema, is_differentiable
from customops._torch.trees import flat_items, tensors_in
from customops.errors import AutogradError, UnsupportedError

#: Context manager that changes nothing.
AS_IT_IS = contextlib.nullcontext()


class SetUp:
    """Calls the setup_contexts of the formulas, each once."""

    def __init__(self, schema: Schema, formulas: Sequence[Formula]) -> None:
        self.callbacks = tuple(dict.fromkeys(filter(None, [formula.setup_context for formula in formulas])))
        self.fill = filler(schema)
        self.has_keywords = bool(schema.keyword_only)
        #: The only callback, if it is called with what the kernel got.
        is_simple = len(self.callbacks) == 1 and self.fill is None
        self.simple = self.callbacks[0] if is_simple else None
        #: Is a backward not to be differentiated? Then it is to be known what it could have been differentiated by.
        self.once = True in [formula.once_differentiable for formula in formulas]

    def __call__(self, ctx: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self.fill is not None:
            args, kwargs = self.fill(args, kwargs)
        named = {"ctx": ctx, "inputs": args, "output": output}
        if self.has_keywords:
            named["keyword_only_inputs"] = kwargs
        # Inside a transform, what setup_context computes is recorded at the levels further out.
        with torch.inference_mode(False) if _torch.dispatcher.transforms_active() else AS_IT_IS:
            for callback in self.callbacks:
                if _torch.dispatcher.autocast_is_on():
                    _torch.dispatcher.call_without_autocast(callback, **named)
                else:
                    callback(**named)


class Outputs:
    """What is to be known of a node's outputs once they are there.

    torch fills in zeros for outputs that were not used. Where there are some that can have no gradient, this is done
    here, and zeros for these take no memory. ``ctx._customops_zeros`` has what the zeros are like; None is for numbers.
    """

    def __init__(self, layout: Layout, *, for_jvp: bool, materializes: bool) -> None:
        self.layout, self.for_jvp, self.materializes = layout, for_jvp, materializes
        self.all_differentiable = all(layout.outputs)
        self.are_several = len(layout.outputs) > 1 or any(layout.list_outputs)
        #: torch would give zeros for the tangent of what is written, too, which then cannot get a batched one.
        self.fills_tangents = for_jvp and bool(layout.mutated)
        #: Is there nothing to be done for an op with one output?
        self.is_idle = self.all_differentiable and materializes and not (for_jvp or self.are_several)

    def __call__(self, ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> None:
        """`outputs` has an item for each, lists as lists; `inputs` are flat."""
        layout = self.layout
        if layout.returns_plain_lists:  # those of numbers are no lists of outputs
            pairs = zip(outputs, layout.list_outputs, strict=True)
            outputs = tuple(x if is_list or isinstance(x, Tensor) else None for x, is_list in pairs)
        without = ctx.non_differentiable or ()
        if not self.all_differentiable:
            declared = (x for x, flag in zip(outputs, layout.outputs, strict=True) if not flag)
            without = (*without, *tensors_in(flat_items(declared)))
            ctx.mark_non_differentiable(*without)
        metadata = [_facts(each, without) for each in outputs]  # None where there is no gradient
        if self.for_jvp:
            ctx._customops_results = metadata
        if not self.materializes or not ctx.__dict__.get("_customops_materialize", True):
            ctx.materialize_grads = False
        elif self.fills_tangents or (self.are_several and None in flat_metadata(metadata)):
            ctx.materialize_grads = False
            ctx._customops_zeros = [_facts(each, without, zeros=True) for each in outputs]
            if self.for_jvp:
                ctx._customops_zero_tangents = [
                    _facts(x, (), zeros=True) if is_differentiable(x) else None for x in inputs
                ]


def _facts(value: Any, without: Sequence[Tensor], *, zeros: bool = False) -> Any:
    """The metadata of an output, or None if it has no gradient; with `zeros`, of any tensor, and if it has one."""
    if isinstance(value, (list, tuple)):
        return [_facts(item, without, zeros=zeros) for item in value]
    has_gradient = is_differentiable(value) and all(value is not x for x in without)
    if zeros:
        return (*_torch.autograd.metadata(value), has_gradient) if isinstance(value, Tensor) else None
    return _torch.autograd.metadata(value) if has_gradient else None


def flat_metadata(metadata: list[Any]) -> list[Any]:
    """What `_facts` says of each tensor, those in lists too."""
    return [item for each in metadata for item in (each if isinstance(each, list) else [each])]


def set_materialize_grads(ctx: Any, value: bool) -> None:
    """``ctx.set_materialize_grads``; torch's own cannot be asked what it was set to."""
    ctx._customops_materialize = value


def materialize_zeros(grad: Any, like: Any) -> Any:
    """`grad`; where it is None, zeros as `like` says, or None if that says nothing."""
    if isinstance(like, list):
        return [materialize_zeros(*pair) for pair in zip(grad, like, strict=True)]
    if grad is not None or like is None:
        return grad
    shape, dtype, device, has_gradient = like
    if shape is None and not has_gradient:
        return None
    if shape is None:
        raise UnsupportedError(
            "cannot make zeros for the gradient of a nested tensor that the op returned and nobody used",
            fix="register_autograd(..., materialize_grads=False); backward then gets None for that gradient",
        )
    if not has_gradient:
        return torch.zeros((), dtype=dtype, device=device).expand(shape)
    return torch.zeros(shape, dtype=dtype, device=device)


# Saved tensors without an autograd graph: a second derivative through them raises instead of being zero ---------------


class _Untracked(NamedTuple):
    """Tensors that a ctx holds, made where nothing is recorded."""

    links: tuple[Tensor, ...]  # with the graph and the tangents of the op's inputs
    saved: frozenset[int]
    saved_for_forward: frozenset[int]
    attributes: frozenset[str]


class NoTensors(tuple[Any, ...]):
    """What is kept on a ctx, and is known to hold no tensors."""

    __slots__ = ()


#: Types of what is kept on a ctx most often, beside tensors.
HOLD_NO_TENSORS = frozenset(
    {NoTensors, RandomStates, int, float, bool, str, type(None), torch.Size, torch.dtype, torch.device}
)


class _Link(_torch.autograd.SingleLevelFunction):
    """An empty tensor, linked to the autograd graph of the arguments."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.count = len(inputs)
        return inputs[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (None,) * ctx.count


def links_to(inputs: Sequence[Any]) -> tuple[Tensor, ...]:
    """Empty tensors, linked to the autograd graph and the tangents of the inputs that have some."""
    if not _torch.dispatcher.transforms_active() and not _torch.autograd.forward_ad_active():
        with torch.enable_grad():
            return (cast(Any, _Link).apply(*(x for x in inputs if isinstance(x, Tensor) and x.requires_grad)),)
    with torch.inference_mode(False):  # at all levels and in both modes; an autograd.Function has one level
        return tuple(x.reshape(-1)[:0].clone() for x in inputs if is_differentiable(x))


class _RaisesInBackward(torch.autograd.Function):
    """The same tensor, whose autograd graph is an error: a derivative through it is not known."""

    generate_vmap_rule = True

    @staticmethod
    def forward(error: AutogradError, tensor: Tensor, *links: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.error = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise ctx.error

    jvp = backward


def record_untracked(ctx: Any, inputs: Sequence[Any], known: Sequence[Any]) -> None:
    """Record tensors kept on `ctx` without an autograd graph: a second derivative would take them for constants.

    `known` are those that have one, or need none: inputs as they were, and returns that are differentiable. To a
    backward that is not differentiated itself the rest is as good as these. Another one gets an error: see `Guarded`.
    """
    without = ctx.non_differentiable or ()
    known_ids = {id(value) for value in known if isinstance(value, Tensor) and all(value is not x for x in without)}
    saved, for_forward = (
        frozenset(i for i, tensor in enumerate(tensors or ()) if _is_untracked(tensor, known_ids))
        for tensors in (ctx.to_save, ctx.saved_for_forward)
    )
    attributes = frozenset(
        name
        for name, value in ctx.__dict__.items()
        for leaf in (_torch.trees.tree_leaves(value) if isinstance(value, (list, tuple, dict)) else (value,))
        if _is_untracked(leaf, known_ids)
    )
    if saved or for_forward or attributes:
        ctx._customops_untracked = _Untracked(links_to(inputs), saved, for_forward, attributes)


def _is_untracked(value: Any, known: Collection[int] = ()) -> bool:
    may_be = is_differentiable(value) and not value.requires_grad and id(value) not in known
    return may_be and not has_tangent(value)


def has_tangent(tensor: Tensor) -> bool:
    if not _torch.autograd.forward_ad_active():
        return False
    with torch.inference_mode(False):  # else no tangents are seen
        return _torch.autograd.any_tangent((tensor,))


def may_be_differentiated() -> bool:
    """May what a backward computes be differentiated itself: backward, or forward by tangents?"""
    return torch.is_grad_enabled() or _torch.autograd.forward_ad_active()


class UnpackedOnce:
    """A ctx, for one call of backward. Attributes go through to it; saved tensors are unpacked when first asked for.

    What saved-tensor hooks bring back, non-reentrant checkpointing for one, they may bring back only once.
    """

    def __init__(self, ctx: Any) -> None:
        vars(self).update(_ctx=ctx)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._ctx, name, value)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._ctx, name)
        if name == "saved_tensors":
            vars(self)[name] = value
        return value


class Guarded(UnpackedOnce):
    """The `ctx` of a backward that may be differentiated: untracked tensors raise when asked for a derivative.

    In a jvp they raise at once.
    """

    def __init__(self, ctx: Any, op: str, *, in_jvp: bool = False) -> None:
        untracked = ctx._customops_untracked
        saved = untracked.saved_for_forward if in_jvp else untracked.saved
        vars(self).update(_ctx=ctx, _op=op, _links=None if in_jvp else untracked.links, _saved=saved)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._ctx, name)
        if name == "saved_tensors":
            value = tuple(
                self._unrecorded(tensor, f"saved tensor {i}") if i in self._saved else tensor
                for i, tensor in enumerate(value)
            )
            vars(self)[name] = value
        if name not in self._ctx._customops_untracked.attributes:
            return value
        return _torch.trees.tree_map(lambda leaf: self._unrecorded(leaf, f"ctx.{name}"), value)

    def _unrecorded(self, tensor: Any, what: str) -> Any:
        if not _is_untracked(tensor):
            return tensor
        error = AutogradError(
            f"a second derivative would be wrong: the formula uses {what}, which was computed without recording "
            "a graph, so its derivative is unknown",
            op=self._op,
            fix="save the inputs and compute it from them in the formula, or make it a differentiable return; "
            "if it is a constant, .detach() it in the formula (for reverse mode)",
        )
        if self._links is None:
            raise error
        return cast(Any, _RaisesInBackward).apply(error, tensor, *self._links)


class OnceDifferentiable:
    """A backward that runs with nothing recorded, and whose results raise when asked for a derivative."""

    def __init__(self, backward: Callable[..., Any], op: str) -> None:
        self.backward, self.op = backward, op

    def __call__(self, ctx: Any, *grads: Any) -> Any:
        if not may_be_differentiated():
            return self.backward(ctx, *grads)
        with torch.no_grad():
            result = self.backward(ctx, *grads)
        error = AutogradError(
            "a second derivative was requested, but the backward is registered with once_differentiable=True",
            op=self.op,
            fix="remove once_differentiable=True if the backward is made of differentiable operations",
        )
        links = (*ctx._customops_links, *filter(is_differentiable, _torch.trees.tree_leaves(list(grads))))
        raises = cast(Any, _RaisesInBackward).apply
        return _torch.trees.tree_map(lambda x: raises(error, x, *links) if is_differentiable(x) else x, result)
