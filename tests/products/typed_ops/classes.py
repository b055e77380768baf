"""The classes that the signatures of the rows name."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple, NewType, Optional, TypeVar

import typing_extensions
from torch import Tensor
from typing_extensions import NotRequired, TypedDict

from customops import Mut


class Mode(enum.Enum):
    UP = "goes up"
    DOWN = "goes down"


class Bits(enum.IntEnum):
    FOUR = 4
    EIGHT = 8


class Form(str, enum.Enum):
    ROUND = "round"
    SQUARE = "square"


class StrForm(enum.StrEnum):
    ROUND = "round"
    SQUARE = "square"


class Options(enum.Flag):
    FAST = 1
    SAFE = 2


@dataclass(frozen=True)
class Blocks:
    """No tensors, and a default in every form."""

    size: int
    scale: float = 2.0
    mode: Mode = Mode.UP
    names: tuple[str, ...] = ("a",)


@dataclass(frozen=True)
class Outer:
    blocks: Blocks
    limit: Optional[float] = None
    window: tuple[int, int] = field(default=(-1, -1))


@dataclass(frozen=True)
class Affine:
    weight: Tensor
    by: float = 1.0
    bias: Optional[Tensor] = None


class Pair(NamedTuple):
    weight: Tensor
    by: float = 1.0


class Weights(TypedDict):
    weight: Tensor
    bias: NotRequired[Tensor]


class Settings(TypedDict):
    by: float
    mode: NotRequired[Mode]


class Scaled(NamedTuple):
    out: Tensor
    total: Optional[Tensor]
    length: int


@dataclass(frozen=True)
class Parts:
    out: Tensor
    rest: Tensor


class Named(TypedDict):
    out: Tensor
    rest: Tensor


@dataclass(frozen=True)
class Buffers:
    total: Tensor
    by: Tensor


class MutBuffers(TypedDict):
    """One is written, the other is read."""

    total: Mut[Tensor]
    by: Tensor


Count = NewType("Count", int)
Scale = NewType("Scale", float)
Window = typing_extensions.TypeAliasType("Window", tuple[int, int])
AnyMode = TypeVar("AnyMode", bound=Mode)
