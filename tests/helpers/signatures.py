"""Functions of many signatures: each checks that it is called with what its hints say."""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import Annotated, Any, Literal, NamedTuple, Optional, Sequence, TypedDict

import torch
from torch import Tensor
from typing_extensions import NotRequired, Unpack

from customops._schema.annotations import Keys, Mut, SameAs


class Mode(enum.Enum):
    FAST = "f"
    SLOW = "s"


class Bits(enum.IntEnum):
    FOUR = 4
    EIGHT = 8


class Epilogue(enum.Flag):
    BIAS = 1
    RELU = 2
    SCALE = 4


@dataclasses.dataclass(frozen=True)
class Tile:
    rows: int
    columns: int = 5

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError("no rows")


@dataclasses.dataclass(frozen=True)
class Config:
    tile: Tile
    mode: Mode = Mode.FAST
    scale: Optional[float] = None
    weight: Optional[Tensor] = None
    tile2: Optional[Tile] = None


class Pair(NamedTuple):
    first: Tensor
    kind: Literal["a", "b"] = "a"


class Extras(TypedDict):
    bias: Tensor
    eps: NotRequired[float]
    mask: NotRequired[Tensor]


class Options(TypedDict, total=False):
    eps: float
    mode: Mode


def is_all(values: Any, type_: type, container: type = list) -> bool:
    return type(values) is container and all(type(value) is type_ for value in values)


def plain(x: Tensor, n: int, by: float = 2.0, *, name: str = "", flag: bool = False) -> Tensor:
    assert (type(n), type(by), type(name), type(flag)) == (int, float, str, bool)
    return x * n * by


def optionals(x: Optional[Tensor], n: Optional[int], by: Optional[float] = None, inf: float = math.inf) -> int:
    assert n is None or type(n) is int
    assert by is None or math.isfinite(by)
    return int(x is None)


def lists(x: Tensor, ns: Sequence[int], bys: list[float], flags: list[bool], names: list[str]) -> Tensor:
    assert is_all(ns, int)
    assert is_all(bys, float)
    assert is_all(flags, bool)
    assert is_all(names, str)
    return x.clone()


def tensor_lists(x: Tensor, xs: list[Tensor], maybe: list[Optional[Tensor]], none: Optional[list[Tensor]]) -> int:
    assert is_all(xs, Tensor)
    assert all(each.shape == x.shape for each in [*xs, *(none or [])])
    return len(maybe)


def only_lists(xs: list[Tensor], ys: list[list[Tensor]]) -> Tensor:
    assert is_all(ys, list)
    return sum(xs) + sum(sum(y) for y in ys)


def factory(size: tuple[int, ...], dtype: torch.dtype, device: torch.device, layout: torch.layout) -> Tensor:
    return torch.zeros([abs(each) for each in size], dtype=dtype, device=device, layout=layout)


def numbers(x: Tensor, c: complex, n: int | float, either: float | Tensor, maybe: int | Tensor | None = 2) -> Tensor:
    assert type(c) is complex
    assert type(n) in (int, float)
    assert type(maybe) in (int, Tensor, type(None))
    return x * n * either


def enums(x: Tensor, mode: Mode, bits: Bits = Bits.FOUR, maybe: Optional[Mode] = None) -> Tensor:
    assert type(mode) is Mode
    assert type(bits) is Bits
    return x.clone()


def flags(x: Tensor, epilogue: Epilogue) -> Tensor:
    assert type(epilogue) is Epilogue
    return x.clone()


def literals(x: Tensor, kind: Literal["a", "b", None], n: Literal[1, 2] = 1, m: Literal[3, "3", True] = 3) -> Tensor:
    assert kind in ("a", "b", None)
    assert n in (1, 2)
    assert m in (3, "3", True)
    return x.clone()


def enum_lists(x: Tensor, modes: list[Mode], kinds: tuple[Literal["a", "b"], ...], dtypes: list[torch.dtype]) -> Tensor:
    assert is_all(modes, Mode)
    assert is_all(kinds, str, tuple)
    return x.clone()


def tuples(x: Tensor, window: tuple[int, int], sizes: torch.Size, mixed: tuple[int, Tensor, Mode]) -> Tensor:
    assert is_all(window, int, tuple)
    assert len(window) == 2
    assert type(sizes) is torch.Size
    assert list(map(type, mixed)) == [int, Tensor, Mode]
    return x * mixed[1]


def configs(x: Tensor, config: Config, other: Optional[Config] = None) -> Tensor:
    assert type(config.tile) is Tile
    assert type(other) in (Config, type(None))
    return x.clone() if config.weight is None else x * config.weight


def named_tuples(pair: Pair, maybe: Optional[Pair] = None) -> Tensor:
    assert type(pair) is Pair
    assert pair.kind in ("a", "b")
    return pair.first.clone() if maybe is None else pair.first + maybe.first


def typed_dicts(x: Tensor, extras: Extras) -> Tensor:
    assert {"bias"} <= extras.keys() <= {"bias", "eps", "mask"}
    assert None not in extras.values()
    return x + extras["bias"]


def fixed_dicts(parts: Annotated[dict[str, Tensor], Keys("q", "k")], n: int = 0) -> Tensor:
    assert set(parts) == {"q", "k"}
    return parts["q"] * parts["k"]


def nested(x: Tensor, parts: list[list[Tensor]], maybe: Optional[list[list[Tensor]]] = None) -> int:
    assert is_all(parts, list)
    return sum(map(len, parts))


def variadic(x: Tensor, n: int = 3, *xs: Tensor) -> Tensor:
    assert is_all(xs, Tensor, tuple)
    return x * n + sum(xs)


def only_variadic(*xs: Tensor) -> Tensor:
    return sum(xs) + torch.zeros(())


def by_keyword(x: Tensor, **options: Unpack[Options]) -> Tensor:
    assert options.keys() <= {"eps", "mode"}
    return x * options.get("eps", 1.0)


def positional(x: Tensor, n: int = 1, /, y: Optional[Tensor] = None, *, mode: Mode = Mode.SLOW) -> Tensor:
    return x * n if y is None else x * y


def writes(x: Mut[Tensor], y: Tensor, caches: Mut[list[Tensor]]) -> None:
    x += y
    for each in caches:
        each += y


def in_place(x: Mut[Tensor], by: float | Tensor) -> Annotated[Tensor, SameAs("x")]:
    return x.mul_(by)


def devices(x: Tensor, device: torch.device | str, where: Optional[torch.device] = None) -> Tensor:
    assert torch.device(device) == x.device
    return x.clone()


def generators(x: Tensor, generator: Optional[torch.Generator], mf: torch.memory_format) -> Tensor:
    return x.clone(memory_format=mf)


class Access(enum.IntFlag):
    READ = 1
    WRITE = 2


@dataclasses.dataclass(frozen=True)
class Cache:
    pages: list[list[Tensor]]
    extras: Optional[Pair] = None
    access: Optional[Access] = Access.READ
    scale: float | Tensor = 1.0


class Setup(NamedTuple):
    cache: Optional[Cache]
    sizes: tuple[int, ...] = (1, 2)


def deep(x: Tensor, setup: Setup, parts: Optional[Annotated[dict[str, Tensor], Keys("q")]] = None) -> Tensor:
    assert type(setup.cache) in (Cache, type(None))
    assert is_all(setup.sizes, int, tuple)
    return x.clone() if parts is None else x + parts["q"]


def unnamed(x: Tensor, t: tuple[tuple[int, int], Optional[Tensor]], u: Optional[tuple[Tensor, Mode]] = None) -> Tensor:
    assert is_all(t[0], int, tuple)
    return x.clone() if u is None else x * u[0]


def modes(x: Tensor, *modes: Mode, access: Access = Access.READ | Access.WRITE, mf: Optional[int] = None) -> Tensor:
    assert is_all(modes, Mode, tuple)
    assert type(access) is Access
    return x.clone()


def into(x: Tensor, *, out: Mut[Tensor]) -> Annotated[Tensor, SameAs("out")]:
    return out.copy_(x)


#: Called with all the arguments that strategies draw.
FUNCTIONS = (
    plain, optionals, lists, tensor_lists, only_lists, factory, numbers, enums, flags, literals, enum_lists, tuples,
    configs, named_tuples, typed_dicts, fixed_dicts, nested, variadic, only_variadic, by_keyword, positional, writes,
    in_place, devices, generators, deep, unnamed, modes, into,
)  # fmt: skip
