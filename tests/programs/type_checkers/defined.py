"""Ops of every form, for the files beside this one. None of these is run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple, Optional, TypedDict

import torch
from torch import Tensor

from customops import Mut, SameAs, custom_op


@custom_op("typing::three")
def three(x: Tensor, y: Tensor, by: float = 2.0) -> Tensor:
    return x * y * by


@custom_op("typing::named")
def named(x: Tensor, n: int = 1, *, times: int = 1) -> Tensor:
    return x * n * times


@custom_op("typing::out")
def out(x: Tensor, *, out: Mut[Tensor], eps: float = 1e-5) -> None:
    out.copy_(x + eps)


@custom_op("typing::add_")
def add_(x: Mut[Tensor], y: Annotated[Tensor, "the other"]) -> Annotated[Tensor, SameAs("x")]:
    return x.add_(y)


@custom_op("typing::write")
def write(x: Mut[Tensor], value: float) -> None:
    x.fill_(value)


@custom_op("typing::counted")
def counted(x: Tensor, state: Mut[Tensor]) -> Tensor:
    return x * state.add_(1)


@custom_op("typing::pair")
def pair(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x.clone(), y.clone()


@custom_op("typing::several")
def several(x: Tensor) -> list[Tensor]:
    return [x.clone()]


@custom_op("typing::size")
def size(x: Tensor) -> int:
    return x.numel()


@custom_op("typing::maybe")
def maybe(x: Tensor, wanted: bool) -> Optional[Tensor]:
    return x.clone() if wanted else None


@custom_op("typing::text")
def text(x: Tensor) -> str:
    return str(x.dtype)


class Moments(NamedTuple):
    mean: Tensor
    var: Tensor


@custom_op("typing::moments")
def moments(x: Tensor) -> Moments:
    return Moments(x.mean(), x.var())


class Parts(TypedDict):
    a: Tensor
    b: Tensor


@custom_op("typing::parts")
def parts(x: Tensor) -> Parts:
    return {"a": x.clone(), "b": x.clone()}


@dataclass(frozen=True)
class Config:
    scale: Tensor
    eps: float = 1e-5


@custom_op("typing::configured")
def configured(x: Tensor, config: Config) -> Config:
    return Config(x * config.scale)


CPU = torch.device("cpu")


@custom_op("typing::make")
def make(*, n: int, device: torch.device = CPU) -> Tensor:
    return torch.empty(n, device=device)


@custom_op("typing::zeros")
def zeros(n: int = 3) -> Tensor:
    return torch.zeros(n)
