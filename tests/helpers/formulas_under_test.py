"""Ops with a formula each, to try checks of gradients on."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import torch

from customops.checks import Trial
from customops.checks._trial import resolve

_numbers = count()

Formula = Callable[..., Any]


def save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*(value for value in inputs if isinstance(value, torch.Tensor)))
    ctx.numbers = [value for value in inputs if not isinstance(value, torch.Tensor)]


def saved(formula: Callable[..., Any]) -> Formula:
    """A backward of the gradient and the saved tensors."""
    return lambda ctx, *grads: formula(*grads, *ctx.saved_tensors)


def op_of(
    ns: str, schema: str, kernel: Callable[..., Any], backward: Formula | None = None, setup: Any = save_inputs
) -> Any:
    """An op of torch.library, under a name of its own."""
    op = torch.library.custom_op(f"{ns}::f{next(_numbers)}", kernel, mutates_args=(), schema=schema)
    if backward is not None:
        op.register_autograd(backward, setup_context=setup)
    return op


def trial_of(op: Any, *args: Any, **kwargs: Any) -> Trial:
    return Trial(resolve(op), args, kwargs)
