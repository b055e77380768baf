"""Ops of all kinds, for the stub in tests/programs/type_checkers/torch_ops.pyi."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple, Optional

import torch
from torch import Tensor

import customops
from customops import custom_op
from customops._schema.annotations import Mutates


class Mode(enum.Enum):
    FAST = "f"
    SLOW = "s"


class Bits(enum.IntEnum):
    INT4 = 4
    INT8 = 8


@dataclasses.dataclass(frozen=True)
class Config:
    block: int
    mode: Mode = Mode.FAST
    weight: Optional[Tensor] = None


class Out(NamedTuple):
    out: Tensor
    lse: Optional[Tensor]
    count: int
    sizes: list[int]


@custom_op("stubbed::scale")
def scale(x: Tensor, by: float = 2.0, *, times: int = 1) -> Tensor:
    r"""Scale a tensor, \o/.

    Args:
        by: a "number"
    """
    return x * by * times


@custom_op("stubbed::plain")
def plain(
    x: Tensor,
    maybe: Optional[Tensor],
    tensors: Sequence[Tensor],
    gaps: Sequence[Optional[Tensor]],
    n: int,
    limit: float = float("inf"),
    number: torch.types.Number = 2,
    text: str = 'it\'s "here"\n',
    dtype: torch.dtype = torch.float16,
    device: torch.device | None = None,
    layout: torch.layout = torch.strided,
    memory_format: torch.memory_format = torch.channels_last,
    z: complex = 2j,
    generator: Optional[torch.Generator] = None,
    floats: Sequence[float] = (1.0, float("-inf")),
    ints: list[int] = [3],  # noqa: B006
    flags: list[bool] = [],  # noqa: B006
    dtypes: Sequence[torch.dtype] = (torch.int8, torch.float32),
) -> Tensor:
    return x.clone()


@custom_op("stubbed::rich")
def rich(
    x: Tensor,
    window: tuple[int, int] = (-1, -1),
    *,
    kind: Literal["a", "b"] = "a",
    kinds: list[Literal[1, 2]] = [1],  # noqa: B006
    maybe: Optional[Literal["c"]] = None,
    mode: Mode = Mode.SLOW,
    bits: Bits = Bits.INT8,
    config: Config = Config(3),
    cap: float | Tensor = 1.0,
) -> Out:
    """Many types."""
    return Out(x.clone(), None, 1, [2])


@custom_op("stubbed::write")
def write(x: Annotated[Tensor, Mutates], y: Annotated[Tensor, Mutates], z: Tensor) -> None:
    """Write z."""


@custom_op("stubbed::several", mutates_args=())
def several(x: Tensor, xs: list[Tensor]) -> tuple[Tensor, list[Tensor], int, float, bool, torch.types.Number]:
    return x.clone(), [], 1, 1.0, True, 1


customops.define("stubbed::add", "(Tensor self, Tensor other) -> Tensor")
customops.define("stubbed::add.int", "(Tensor self, int other) -> int")
customops.define("stubbed::add.Tensor", "(Tensor self, Tensor other, float alpha) -> float")
customops.define(
    "stubbed::range", "(int[2] from, int n=1, float[2] to=1.0, *, Tensor? out=None, int? lambda=None) -> Tensor"
)
customops.define("stubbed::nothing", "() -> ()")
