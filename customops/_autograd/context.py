"""What is done around the callbacks of a formula: setup_context is called, and `ctx` filled with what checks need."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from customops import _torch
from customops._autograd.layout import Formula, Layout
from customops._dispatch.callbacks import filler
from customops._dispatch.results import tensors_in
from customops._schema.model import Schema, is_differentiable
from customops.errors import UnsupportedError

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
                if _torch.thread_state.autocast_is_on():
                    _torch.thread_state.call_without_autocast(callback, **named)
                else:
                    callback(**named)


class Outputs:
    """What is to be known of a node's outputs once they are there.

    torch fills in zeros for outputs that were not used. Where there are some that can have no gradient, this is done
    here, and zeros for these take no memory. ``ctx._customops_zeros`` has what the zeros are like; None is for numbers.
    """

    def __init__(self, layout: Layout, *, for_jvp: bool, materializes: bool) -> None:
        self.flags = layout.outputs
        self.lists = layout.list_outputs if layout.returns_plain_lists else ()
        self.for_jvp = for_jvp
        self.materializes = materializes
        self.all_differentiable = all(layout.outputs)
        self.are_several = len(layout.outputs) > 1 or any(layout.list_outputs)
        #: torch would give zeros for the tangent of what is written, too, which then cannot get a batched one.
        self.fills_tangents = for_jvp and bool(layout.mutated)
        #: Is there nothing to be done for an op with one output?
        self.is_idle = self.all_differentiable and materializes and not (for_jvp or self.are_several)

    def __call__(self, ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> None:
        """`outputs` has an item for each, lists as lists; `inputs` are flat."""
        if self.lists:  # those of numbers are no lists of outputs
            outputs = tuple(
                x if is_list or isinstance(x, Tensor) else None for x, is_list in zip(outputs, self.lists, strict=True)
            )
        without = ctx.non_differentiable or ()
        if not self.all_differentiable:
            declared = (x for x, flag in zip(outputs, self.flags, strict=True) if not flag)
            without = (*without, *tensors_in(flat_items(declared)))
            ctx.mark_non_differentiable(*without)
        metadata = [_metadata(each, without) for each in outputs]  # None where there is no gradient
        if self.for_jvp:
            ctx._customops_results = metadata
        if not self.materializes or not ctx.__dict__.get("_customops_materialize", True):
            ctx.materialize_grads = False
        elif self.fills_tangents or (self.are_several and None in flat_metadata(metadata)):
            ctx.materialize_grads = False
            ctx._customops_zeros = [_zeros_of(each, without) for each in outputs]
            if self.for_jvp:
                ctx._customops_zero_tangents = [_zeros_of(x, ()) if is_differentiable(x) else None for x in inputs]


def _metadata(value: Any, without: Sequence[Tensor]) -> Any:
    """The metadata of an output, or None if it has no gradient."""
    if isinstance(value, (list, tuple)):
        return [_metadata(item, without) for item in value]
    return _torch.autograd.metadata(value) if _has_gradient(value, without) else None


def _zeros_of(value: Any, without: Sequence[Tensor]) -> Any:
    """What zeros for an output are like: its metadata, and whether it has a gradient."""
    if isinstance(value, (list, tuple)):
        return [_zeros_of(item, without) for item in value]
    return (*_torch.autograd.metadata(value), _has_gradient(value, without)) if isinstance(value, Tensor) else None


def _has_gradient(value: Any, without: Sequence[Tensor]) -> bool:
    return is_differentiable(value) and all(value is not x for x in without)


def flat_metadata(metadata: list[Any]) -> list[Any]:
    """What `_metadata` said of each tensor, those in lists too."""
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
            "customops cannot make zeros for the gradient of an unused nested return",
            fix="register_autograd(..., materialize_grads=False); backward then gets None for it",
        )
    if not has_gradient:
        return torch.zeros((), dtype=dtype, device=device).expand(shape)
    return torch.zeros(shape, dtype=dtype, device=device)


def flat_items(values: Iterable[Any]) -> list[Any]:
    """The values, and in the place of a list what it holds."""
    return [x for value in values for x in (value if isinstance(value, (list, tuple)) else (value,))]
