"""What autograd cannot see by itself: writes that it could not follow, and tensors made while it did not look."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from customops import _compat
from customops._formula import is_differentiable
from customops.errors import AutogradError

# Writes ---------------------------------------------------------------------------------------------------------


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
    elif base is not None and not _compat.is_fresh_view(tensor):
        problem = (
            "a view is being modified in-place that autograd cannot follow: one of several that a function returned "
            "(unbind, split, chunk), or made under torch.no_grad(), in inference mode, or by a custom Function"
        )
        fix = "a view of its own, e.g. x[i] in place of x.unbind()[i]; or x.clone()"
    if problem is not None:
        fix = f"pass {fix}, or call the op under torch.no_grad()"
        raise AutogradError(problem, op=op, argument=argument, fix=fix)


class _Written(_compat.SingleLevelFunction):
    """A tensor that has the value of `new` by now, and is to have its history.

    torch's graph has a place for a node that writes to a view only if that is all it does. So the node of an op with
    several results gives `new` as one of them, and this one is the last in the history of the view.
    """

    @staticmethod
    @_compat.outside_dynamo
    def forward(ctx: Any, tensor: Tensor, new: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    @_compat.outside_dynamo
    def backward(ctx: Any, grad: Any) -> Any:
        # Zeros: where torch gets None for the view, it takes the whole gradient of the base for none.
        return None if grad is None else torch.zeros_like(grad), grad

    @staticmethod
    @_compat.outside_dynamo
    def jvp(ctx: Any, tangent: Tensor | None, new: Tensor | None) -> Any:
        return _compat.call_jvp(written_tangent, tangent, new)


def written_tangent(before: Tensor | None, new: Tensor | None) -> Tensor | None:
    """What torch wants of an op that writes: the tangent of what is written is written too, and returned."""
    if before is None:
        return new
    return before.zero_() if new is None else before.copy_(new)


def carry_on(written: Sequence[Tensor], new: Sequence[Tensor]) -> None:
    """Give tensors that were written the history of their new values. The write itself was counted when it was done."""
    for tensor, value in zip(written, new, strict=True):
        with _compat.uncounted(tensor):
            _compat.apply_function(_Written, tensor, value)


def unfollowed_write(argument: str, op: str) -> AutogradError:
    """The error for a tensor with a history that is written, where the formula says nothing about its new value."""
    return AutogradError(
        "the op writes to a tensor that requires grad, and by its formula the new value has no gradient",
        op=op,
        argument=argument,
        fix=f'pass one that does not require grad (.detach()), or register_autograd(..., grads_of=("{argument}",))',
    )


def given_twice(argument: str, op: str) -> AutogradError:
    """The error for a tensor that is written and read: setup_context would save the new value for the old one."""
    return AutogradError(
        "the op writes to a tensor that it is also given as another argument, and is to be differentiated",
        op=op,
        argument=argument,
        fix="pass a copy (.clone()) for one of them",
    )


def captured(argument: str, op: str) -> AutogradError:
    """The error for a write to a tensor from outside of a transform that differentiates."""
    return AutogradError(
        "inside a transform (grad, vjp, jvp, ...) the op would mutate a captured tensor, one from outside of it: the "
        "transform would not see the new value",
        op=op,
        argument=argument,
        fix="make the tensor inside of the function, or pass it to the transform as an argument",
    )


# Tensors without a history --------------------------------------------------------------------------------------


class _Lost(NamedTuple):
    """Tensors that a ctx holds, made where nothing is recorded."""

    links: tuple[Tensor, ...]  # with the history and the tangents of the op's inputs
    saved: frozenset[int]
    saved_for_forward: frozenset[int]
    attributes: frozenset[str]


class NoTensors(tuple[Any, ...]):
    """What is kept on a ctx, and is known to hold no tensors."""

    __slots__ = ()


#: Types of what is kept on a ctx most often, beside tensors.
HOLD_NO_TENSORS = frozenset({NoTensors, int, float, bool, str, type(None), torch.Size, torch.dtype, torch.device})


class _Link(torch.autograd.Function):
    """Of nothing, with the history of its arguments."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.count = len(inputs)
        return inputs[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (None,) * ctx.count


def links_to(inputs: Sequence[Any]) -> tuple[Tensor, ...]:
    """Tensors of nothing, with the history and the tangents of the inputs that have some."""
    if not _compat.transforms_active() and not _compat.forward_ad_active():
        with torch.enable_grad():
            return (cast(Any, _Link).apply(*(x for x in inputs if isinstance(x, Tensor) and x.requires_grad)),)
    with torch.inference_mode(False):  # at all levels and in both modes; an autograd.Function has one level
        return tuple(x.reshape(-1)[:0].clone() for x in inputs if is_differentiable(x))


class _Unrecorded(torch.autograd.Function):
    """The same tensor, with a history that ends in an error: here something is missing."""

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


def remember_lost(ctx: Any, inputs: Sequence[Any], known: Sequence[Any]) -> None:
    """Note what a second derivative would take for a constant: tensors kept on `ctx` that have no history.

    `known` are those that have one, or need none: inputs as they were, and returns that are differentiable. To a
    backward that is not differentiated itself the rest is as good as these. Another one gets an error instead of zeros:
    see `watched`.
    """
    without = ctx.non_differentiable or ()
    known_ids = {id(value) for value in known if isinstance(value, Tensor) and all(value is not x for x in without)}
    saved, for_forward = (
        frozenset(i for i, tensor in enumerate(tensors or ()) if _is_lost(tensor, known_ids))
        for tensors in (ctx.to_save, ctx.saved_for_forward)
    )
    kept = ctx.__dict__.items()
    attributes = frozenset(name for name, value in kept if any(_is_lost(x, known_ids) for x in _tensors(value)))
    if saved or for_forward or attributes:
        ctx._customops_lost = _Lost(links_to(inputs), saved, for_forward, attributes)


def _is_lost(value: Any, known: set[int]) -> bool:
    if not is_differentiable(value) or value.requires_grad or id(value) in known:
        return False
    if not _compat.forward_ad_active():
        return True
    with torch.inference_mode(False):  # else no tangents are seen
        return not _compat.any_tangent((value,))


def _tensors(value: Any) -> Iterable[Any]:
    """A tensor, or what is in a list, tuple or dict."""
    return _compat.tree_leaves(value) if isinstance(value, (list, tuple, dict)) else (value,)


def may_be_differentiated() -> bool:
    """May what a backward computes be differentiated itself: backward, or forward by tangents?"""
    return torch.is_grad_enabled() or _compat.forward_ad_active()


def watched(ctx: Any, op: str) -> Any:
    """The `ctx` of a backward that may be differentiated: there, lost tensors raise when asked for a derivative."""
    lost = ctx.__dict__.get("_customops_lost")
    return ctx if lost is None else _Watched(ctx, op, lost.links, lost.saved)


def watched_in_jvp(ctx: Any, op: str) -> Any:
    """The same for a jvp: if a transform further out differentiates what this one does, lost tensors raise at once."""
    lost = ctx.__dict__.get("_customops_lost")
    if lost is None:
        return ctx
    with torch.inference_mode(False):  # else no tangents are seen
        is_differentiated = any(map(_compat.is_tracked_further_out, lost.links))
    return _Watched(ctx, op, None, lost.saved_for_forward) if is_differentiated else ctx


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


class _Watched(UnpackedOnce):
    """A ctx of which lost tensors get the history of `links`, or (None) raise."""

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
        if name not in self._ctx._customops_lost.attributes:
            return value
        leaves, spec = _compat.tree_flatten(value)
        return _compat.tree_unflatten([self._unrecorded(leaf, f"ctx.{name}") for leaf in leaves], spec)

    def _unrecorded(self, tensor: Any, what: str) -> Any:
        if not _is_lost(tensor, set()):
            return tensor
        error = AutogradError(
            f"a second derivative would be wrong: the formula uses {what}, which was computed where nothing is "
            "recorded, so its derivative is not known",
            op=self._op,
            fix="save the inputs and compute it from them in the formula, or make it a return that is differentiable; "
            "if it is a constant, .detach() it in the formula (for reverse mode)",
        )
        if self._links is None:
            raise error
        return cast(Any, _Unrecorded).apply(error, tensor, *self._links)


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
            "a second derivative was asked for, and the backward is registered with once_differentiable=True",
            op=self.op,
            fix="leave that out, if the backward is made of differentiable operations",
        )
        links = (
            *ctx.__dict__.get("_customops_links", ()),
            *filter(is_differentiable, _compat.tree_leaves(list(grads))),
        )
        leaves, spec = _compat.tree_flatten(result)
        wrapped = [
            cast(Any, _Unrecorded).apply(error, leaf, *links) if is_differentiable(leaf) else leaf for leaf in leaves
        ]
        return _compat.tree_unflatten(wrapped, spec)
