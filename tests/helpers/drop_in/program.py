"""An operator as `torch.library` and as `customops` define it, and what a model does with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Args = tuple[Any, ...]


@dataclass
class Program:
    """An operator, and what a model does with it."""

    op: Any
    args: Callable[[], Args]
    kwargs: Callable[[], dict[str, Any]] = dict
    #: How the model calls it.
    run: Callable[..., Any] | None = None
    #: More calls to compare, by name; they may raise.
    more: dict[str, Callable[[], Any]] = field(default_factory=dict)
    #: Whether torch can trace such an op at all.
    compiles: bool = True
    #: What has to stay alive.
    keep: Any = None

    def __post_init__(self) -> None:
        self.run = self.run or self.op


Build = Callable[[Any, str], Program]
PROGRAMS: list[Build] = []


def program(build: Build) -> Build:
    PROGRAMS.append(build)
    return build


def rand(*sizes: int, grad: bool = False, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(len(sizes) + sum(sizes))
    return torch.rand(sizes, generator=generator).to(dtype).requires_grad_(grad)
