"""Classes for hints, and functions made of source, in which all names of this module are known."""

# No `from __future__ import annotations` here: hints are objects.

import collections
import collections.abc
import dataclasses
import enum
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import Annotated, Any, Generic, Literal, NamedTuple, Optional, Protocol, TypeVar, Union

import numpy as np
import torch
from torch import Tensor
from typing_extensions import NotRequired, Required, TypedDict, Unpack

from customops._schema.annotations import Keys, Mut, Mutates, SameAs

T = TypeVar("T")
#: What source may name besides the classes below.
KNOWN = (
    collections,
    Callable,
    Iterable,
    Mapping,
    Sequence,
    Annotated,
    Any,
    Literal,
    Optional,
    Union,
    np,
    torch,
    Tensor,
)
KNOWN_TOO = (dataclasses, pathlib, NotRequired, Required, Unpack, Keys, Mut, Mutates, SameAs)


class Mode(enum.Enum):
    FAST = "f"
    SLOW = "s"


class Bits(enum.IntEnum):
    INT4 = 4
    INT8 = 8


class Point(NamedTuple):
    a: int
    t: Tensor


class Stats(NamedTuple):
    out: Tensor
    lse: Tensor


@dataclass(frozen=True)
class Config:
    block: int
    mode: Mode = Mode.FAST


@dataclass(frozen=True)
class Outer:
    inner: Config
    scale: float = 1.0


@dataclass
class Mutable:
    block: int


@dataclass(frozen=True)
class WithInitVar:
    block: int
    seed: InitVar[int] = 0


@dataclass(frozen=True)
class Box(Generic[T]):
    value: T


@dataclass(frozen=True)
class Table:
    named: dict[str, int]


@dataclass(frozen=True)
class Deep:
    inner: Table


@dataclass(frozen=True)
class Choice:
    block: Union[int, str]


@dataclass(frozen=True)
class WithTensor:
    w: Tensor = torch.ones(1)  # noqa: RUF009


@dataclass(frozen=True)
class WrongDefault:
    block: int = "x"  # type: ignore[assignment]


class Options(TypedDict):
    k: int


class Sometimes(TypedDict, total=False):
    k: int


class NoneOrAbsent(TypedDict, total=False):
    k: Optional[int]


class Plain:
    def __init__(self, block: int) -> None:
        self.block = block


class Runs(Protocol):
    def run(self) -> int: ...


def function(source: str) -> Any:
    """The function `f` that `source` defines, in a file ``user.py`` that is not there."""
    names = dict(globals())
    exec(compile(source, "user.py", "exec"), names)
    return names["f"]
