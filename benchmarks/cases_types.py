"""Types that are lowered, beside an op that takes the lowered arguments.

Both ops take a tensor of four elements and return a new one. The difference is the time that the call of the object,
and the callback around the kernel, spend on the type.
"""

from __future__ import annotations

import dataclasses
import enum
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from cases import Case, Contenders, Fn, Statement, alike
from torch import Tensor

import customops


class Mode(enum.Enum):
    FAST = "fast"
    EXACT = "exact"


@dataclasses.dataclass(frozen=True)
class Config:
    block: int
    scale: float
    mode: Mode


@dataclasses.dataclass(frozen=True)
class Defaults:
    block: int = 64
    scale: float = 1.0
    mode: Mode = Mode.FAST


class Named(NamedTuple):
    block: int
    scale: float
    mode: str


class Out(NamedTuple):
    first: Tensor
    second: Tensor


def flat(x: Tensor, block: int, scale: float, mode: str) -> Tensor:
    return torch.empty_like(x)


def plain(x: Tensor, block: int, scale: float, mode: str) -> Tensor:
    return torch.empty_like(x)


def with_dataclass(x: Tensor, config: Config) -> Tensor:
    return torch.empty_like(x)


def flat_defaults(x: Tensor, block: int = 64, scale: float = 1.0, mode: str = "FAST") -> Tensor:
    return torch.empty_like(x)


def with_defaults(x: Tensor, config: Defaults = Defaults()) -> Tensor:
    return torch.empty_like(x)


def with_named(x: Tensor, config: Named) -> Tensor:
    return torch.empty_like(x)


def with_str(x: Tensor, mode: str) -> Tensor:
    return torch.empty_like(x)


def with_enum(x: Tensor, mode: Mode) -> Tensor:
    return torch.empty_like(x)


def with_literal(x: Tensor, mode: Literal["FAST", "EXACT"]) -> Tensor:
    return torch.empty_like(x)


def with_list(x: Tensor, window: list[int]) -> Tensor:
    return torch.empty_like(x)


def with_tuple(x: Tensor, window: tuple[int, int]) -> Tensor:
    return torch.empty_like(x)


def two(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


def two_named(x: Tensor) -> Out:
    return Out(torch.empty_like(x), torch.empty_like(x))


@cache
def define(fn: Fn) -> Fn:
    return customops.custom_op(f"bench_types::{fn.__name__}", fn)


def inputs() -> dict[str, Any]:
    return {
        "x": torch.ones(4),
        "Mode": Mode,
        "config": Config(32, 2.0, Mode.FAST),
        "other": Defaults(32, 2.0, Mode.EXACT),
        "named": Named(32, 2.0, "FAST"),
    }


def case(name: str, code: str, fn: Fn, lowered_code: str, lowered: Fn, limit: float | None = None) -> Case:
    def contenders() -> Contenders:
        return {"type": Statement(code, define(fn)), "lowered": Statement(lowered_code, define(lowered))}

    return Case(name, "types", contenders, torch.no_grad, inputs, agree=alike, rounds=100, runs=100, limit=limit)


def cases() -> list[Case]:
    call = "f(x, 32, 2.0, 'FAST')"
    return [
        case("plain", call, plain, call, flat, limit=1.1),
        case("dataclass of three", "f(x, config)", with_dataclass, call, flat, limit=1.5),
        # Fields with defaults are keyword-only, and the dispatcher takes half a microsecond for each keyword.
        case("with defaults", "f(x, other)", with_defaults, "f(x, 32, 2.0, 'EXACT')", flat_defaults, limit=2.0),
        case("its defaults", "f(x)", with_defaults, "f(x)", flat_defaults, limit=1.5),
        case("NamedTuple of three", "f(x, named)", with_named, call, flat),
        case("enum", "f(x, Mode.FAST)", with_enum, "f(x, 'FAST')", with_str),
        case("Literal", "f(x, 'FAST')", with_literal, "f(x, 'FAST')", with_str),
        case("tuple[int, int]", "f(x, (1, 2))", with_tuple, "f(x, [1, 2])", with_list),
        case("returns NamedTuple", "f(x)", two_named, "f(x)", two),
    ]
