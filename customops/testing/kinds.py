"""Kinds of calls: what of the inputs decides which code of an operator runs, in a few words."""

from __future__ import annotations

from typing import Any

import torch

from customops.checks import Trial
from customops.errors import brief

#: Of values of these types every single one is a kind; of numbers the type is.
_CHOICES = (bool, str, torch.dtype, torch.layout, torch.memory_format, type(None))


def kind_of(trial: Trial) -> str:
    """``x: float32 2d grad, by: float``: the arguments of a call, without sizes and elements.

    Of a tensor it is the dtype, the number of dimensions, and, where they are not the usual ones, its layout, device,
    class, and whether it requires grad or is empty; of numbers the type, of other values the value.
    """
    return ", ".join(f"{name}: {_kind(value)}" for name, value in trial.arguments.items()) or "no arguments"


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _kind_of_tensor(value)
    if isinstance(value, (list, tuple)):
        kinds = sorted({_kind(item) for item in value})
        return f"[{' | '.join(kinds)}]"
    return brief(value, 40) if isinstance(value, _CHOICES) else type(value).__name__


def _kind_of_tensor(tensor: torch.Tensor) -> str:
    words = [str(tensor.dtype).removeprefix("torch."), f"{tensor.dim()}d", *_layout(tensor)]
    if tensor.device.type != "cpu":
        words.append(tensor.device.type)
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        words.append(type(tensor).__name__)
    if tensor.requires_grad:
        words.append("grad")
    return " ".join(words)


def _layout(tensor: torch.Tensor) -> list[str]:
    if tensor.layout is not torch.strided or tensor.is_nested:
        return [str(tensor.layout).removeprefix("torch.")]
    words = [word for word, is_so in (("conj", tensor.is_conj()), ("neg", tensor.is_neg())) if is_so]
    if tensor.numel() == 0:
        words.append("empty")
    elif 0 in tensor.stride():
        words.append("expanded")
    elif not tensor.is_contiguous():
        words.append("strided")
    return words
