"""Arguments of a call in a few words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from customops.errors import brief

_ITEMS = 4  #: of a list that are shown
_ELEMENTS = 8  #: of a tensor whose values are shown


def described(value: Any) -> str:
    """``float32[2, 3] strides=[1, 2]`` for a tensor, with its values if they are few; the start of the repr else."""
    return _described(value, _values)


def outlined(value: Any) -> str:
    """The same without the values."""
    return _described(value, lambda tensor: "")


def _described(value: Any, values: Callable[[torch.Tensor], str]) -> str:
    if isinstance(value, (list, tuple)):
        items = [_described(item, values) for item in value[:_ITEMS]] + (["..."] if len(value) > _ITEMS else [])
        return f"[{', '.join(items)}]"
    if not isinstance(value, torch.Tensor):
        return brief(value)
    text = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if value.layout is not torch.strided:
        text += f" {value.layout}"
    else:
        text += "" if value.is_contiguous() else f" strides={list(value.stride())}"
        text += f" offset={value.storage_offset()}" if value.storage_offset() else ""
        text += " conj" if value.is_conj() else ""
        text += " neg" if value.is_neg() else ""
    text += f" on {value.device}" if value.device.type != "cpu" else ""
    text += " requires_grad" if value.requires_grad else ""
    return text + values(value)


def _values(tensor: torch.Tensor) -> str:
    if not 0 < tensor.numel() <= _ELEMENTS or tensor.layout is not torch.strided or tensor.is_quantized:
        return ""
    with torch.no_grad():
        wide = tensor.detach().to("cpu", torch.float64) if tensor.is_floating_point() else tensor.detach().cpu()
        values = wide.resolve_conj().resolve_neg().tolist()
    return f" = {brief(_rounded(values))}"


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value
