"""Inputs that differ by rounding: how much results change with them says how well these are determined."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch


def nudges(eps: float) -> Iterator[Callable[[str, torch.Tensor], torch.Tensor]]:
    """Changes of the inputs by about what a dtype resolves."""
    for seed, size in enumerate((eps, -eps, 4 * eps, -4 * eps)):
        yield Nudge(size, None)
        yield Nudge(size, seed)


class Nudge:
    """Changes floating-point numbers a little, all in one direction or each in its own."""

    def __init__(self, size: float, seed: int | None) -> None:
        self.size, self.seed = size, seed

    def __call__(self, _name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or tensor.is_quantized or tensor.layout is not torch.strided:
            return tensor
        if self.seed is None:
            return tensor * (1 + self.size)
        signs = torch.randint(-1, 2, tensor.shape, generator=torch.Generator().manual_seed(self.seed))
        return (tensor * (1 + self.size * signs.to(tensor.device))).to(tensor.dtype)
