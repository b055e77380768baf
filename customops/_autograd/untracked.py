"""Saved tensors without an autograd graph: a second derivative through them raises instead of being zero."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from customops import _torch
from customops._dispatch.random_states import RandomStates
from customops._schema.model import is_differentiable
from customops.errors import AutogradError


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


class _Link(torch.autograd.Function):
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

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise ctx.error


def record_untracked(ctx: Any, inputs: Sequence[Any], known: Sequence[Any]) -> None:
    """Record tensors kept on `ctx` without an autograd graph: a second derivative would take them for constants.

    `known` are those that have one, or need none: inputs as they were, and returns that are differentiable. To a
    backward that is not differentiated itself the rest is as good as these. Another one gets an error instead of zeros:
    see `watched`.
    """
    without = ctx.non_differentiable or ()
    known_ids = {id(value) for value in known if isinstance(value, Tensor) and all(value is not x for x in without)}
    saved, for_forward = (
        frozenset(i for i, tensor in enumerate(tensors or ()) if _is_untracked(tensor, known_ids))
        for tensors in (ctx.to_save, ctx.saved_for_forward)
    )
    kept = ctx.__dict__.items()
    attributes = frozenset(name for name, value in kept if any(_is_untracked(x, known_ids) for x in _tensors(value)))
    if saved or for_forward or attributes:
        ctx._customops_untracked = _Untracked(links_to(inputs), saved, for_forward, attributes)


def _is_untracked(value: Any, known: set[int]) -> bool:
    if not is_differentiable(value) or value.requires_grad or id(value) in known:
        return False
    if not _torch.autograd.forward_ad_active():
        return True
    with torch.inference_mode(False):  # else no tangents are seen
        return not _torch.autograd.any_tangent((value,))


def _tensors(value: Any) -> Iterable[Any]:
    """A tensor, or what is in a list, tuple or dict."""
    return _torch.tensors.tree_leaves(value) if isinstance(value, (list, tuple, dict)) else (value,)


def may_be_differentiated() -> bool:
    """May what a backward computes be differentiated itself: backward, or forward by tangents?"""
    return torch.is_grad_enabled() or _torch.autograd.forward_ad_active()


def guarded(ctx: Any, op: str) -> Any:
    """The `ctx` of a backward that may be differentiated: untracked tensors raise when asked for a derivative."""
    untracked = ctx._customops_untracked
    return ctx if untracked is None else _Guarded(ctx, op, untracked.links, untracked.saved)


def guarded_in_jvp(ctx: Any, op: str) -> Any:
    """The same for a jvp: if an outer transform differentiates it, untracked tensors raise at once."""
    untracked = ctx._customops_untracked
    if untracked is None:
        return ctx
    with torch.inference_mode(False):  # else no tangents are seen
        is_differentiated = any(map(_torch.autograd.is_tracked_further_out, untracked.links))
    return _Guarded(ctx, op, None, untracked.saved_for_forward) if is_differentiated else ctx


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


class _Guarded(UnpackedOnce):
    """A ctx of which untracked tensors get the graph of `links`, or (None) raise."""

    def __init__(self, ctx: Any, op: str, links: tuple[Tensor, ...] | None, saved: frozenset[int]) -> None:
        vars(self).update(_ctx=ctx, _op=op, _links=links, _saved=saved)

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
        leaves, spec = _torch.tensors.tree_flatten(value)
        return _torch.tensors.tree_unflatten([self._unrecorded(leaf, f"ctx.{name}") for leaf in leaves], spec)

    def _unrecorded(self, tensor: Any, what: str) -> Any:
        if not _is_untracked(tensor, set()):
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
        links = (
            *ctx._customops_links,
            *filter(is_differentiable, _torch.tensors.tree_leaves(list(grads))),
        )
        leaves, spec = _torch.tensors.tree_flatten(result)
        wrapped = [
            cast(Any, _RaisesInBackward).apply(error, leaf, *links) if is_differentiable(leaf) else leaf
            for leaf in leaves
        ]
        return _torch.tensors.tree_unflatten(wrapped, spec)
