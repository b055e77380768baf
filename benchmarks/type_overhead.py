"""What a type that is lowered costs in a call, next to an op that takes what it is lowered to.

Both ops get a tensor of four elements and return a new one. The difference is what the call of the object, and the
callback around the kernel, do for the type.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import platform
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from node_overhead import medians
from torch import Tensor

import customops

Fn = Callable[..., Any]

#: Microseconds that a type may add; others are only shown. Fields with defaults are keyword-only, and a keyword that is
#: passed costs half a microsecond in the dispatcher.
LIMITS = {"dataclass of three": 1.5, "its defaults": 1.5, "with defaults": 3.0, "plain": 0.1}


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


# Ops ------------------------------------------------------------------------------------------------------------


def flat(x: Tensor, block: int, scale: float, mode: str) -> Tensor:
    return torch.empty_like(x)


def plain(x: Tensor, block: int, scale: float, mode: str) -> Tensor:
    return torch.empty_like(x)


def of_dataclass(x: Tensor, config: Config) -> Tensor:
    return torch.empty_like(x)


def flat_defaults(x: Tensor, block: int = 64, scale: float = 1.0, mode: str = "FAST") -> Tensor:
    return torch.empty_like(x)


def of_defaults(x: Tensor, config: Defaults = Defaults()) -> Tensor:
    return torch.empty_like(x)


def of_named(x: Tensor, config: Named) -> Tensor:
    return torch.empty_like(x)


def of_str(x: Tensor, mode: str) -> Tensor:
    return torch.empty_like(x)


def of_enum(x: Tensor, mode: Mode) -> Tensor:
    return torch.empty_like(x)


def of_literal(x: Tensor, mode: Literal["FAST", "EXACT"]) -> Tensor:
    return torch.empty_like(x)


def of_list(x: Tensor, window: list[int]) -> Tensor:
    return torch.empty_like(x)


def of_tuple(x: Tensor, window: tuple[int, int]) -> Tensor:
    return torch.empty_like(x)


def two(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


def two_named(x: Tensor) -> Out:
    return Out(torch.empty_like(x), torch.empty_like(x))


OPS: list[Fn] = [
    flat,
    plain,
    of_dataclass,
    flat_defaults,
    of_defaults,
    of_named,
    of_str,
    of_enum,
    of_literal,
    of_list,
    of_tuple,
    two,
    two_named,
]


class Case(NamedTuple):
    """A type's statement, and that of its rival."""

    type: str
    statement: str
    rival: str


CASES = [
    Case("plain", "plain(x, 32, 2.0, 'FAST')", "flat(x, 32, 2.0, 'FAST')"),
    Case("dataclass of three", "of_dataclass(x, config)", "flat(x, 32, 2.0, 'FAST')"),
    Case("with defaults", "of_defaults(x, other)", "flat_defaults(x, 32, 2.0, 'EXACT')"),
    Case("its defaults", "of_defaults(x)", "flat_defaults(x)"),
    Case("NamedTuple of three", "of_named(x, named)", "flat(x, 32, 2.0, 'FAST')"),
    Case("enum", "of_enum(x, Mode.FAST)", "of_str(x, 'FAST')"),
    Case("Literal", "of_literal(x, 'FAST')", "of_str(x, 'FAST')"),
    Case("tuple[int, int]", "of_tuple(x, (1, 2))", "of_list(x, [1, 2])"),
    Case("returns NamedTuple", "two_named(x)", "two(x)"),
]


def names() -> dict[str, Any]:
    """What the statements refer to."""
    ops = {fn.__name__: customops.custom_op(f"bench_types::{fn.__name__}", fn) for fn in OPS}
    values = {
        "x": torch.ones(4),
        "Mode": Mode,
        "config": Config(32, 2.0, Mode.FAST),
        "other": Defaults(32, 2.0, Mode.EXACT),
        "named": Named(32, 2.0, "FAST"),
    }
    return {**ops, **values}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only call each op; time nothing")
    parser.add_argument("--limits", action="store_true", help="fail where a type costs more than its limit")
    parser.add_argument("--rounds", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(1)

    variables = names()
    for case in CASES:
        ours, rival = (eval(each, variables) for each in (case.statement, case.rival))
        assert type(ours) is type(rival) or isinstance(ours, Out)
    if options.check:
        print(f"{len(CASES)} types: all calls run")
        return

    print(f"torch {torch.__version__}, Python {platform.python_version()}, one thread, {options.rounds} rounds")
    print(f"{'us':24}{'type':>10}{'lowered':>10}{'more':>10}")
    too_slow = []
    with torch.no_grad():
        for case in CASES:
            ours, rival = medians([case.statement, case.rival], variables, options.rounds)
            print(f"{case.type:24}{ours:10.2f}{rival:10.2f}{ours - rival:10.2f}")
            if ours - rival > LIMITS.get(case.type, float("inf")):
                too_slow.append(case.type)
    if options.limits and too_slow:
        raise SystemExit(f"over the limit: {', '.join(too_slow)}")


if __name__ == "__main__":
    main()
