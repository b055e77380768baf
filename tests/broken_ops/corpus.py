"""A corpus of ops: broken ones, each with its corrected twin, and right ones that look suspicious.

`FAULTS` and `TRAPS` hold what the modules of this folder register.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Fault:
    """An op with a fault and its twin without it.

    Attributes:
        name: a name of its own.
        kind: the kind of fault; several ops share one.
        note: what is wrong, and which call shows it.
        build: `build(qualname, broken)` defines the op and returns it.
        sample: makes the arguments of one ordinary call, as a tuple or as `(args, kwargs)`.
        isolate: the op may end the process.
    """

    name: str
    kind: str
    note: str
    build: Callable[[str, bool], Any]
    sample: Callable[[], tuple[Any, ...]]
    isolate: bool = False


@dataclass(frozen=True)
class Trap:
    """A right op that a careless checker takes for a broken one; attributes as of `Fault`, `why` says what misleads."""

    name: str
    why: str
    build: Callable[[str], Any]
    sample: Callable[[], tuple[Any, ...]]


FAULTS: dict[str, Fault] = {}
TRAPS: dict[str, Trap] = {}


def fault(
    *, kind: str, note: str, sample: Callable[[], tuple[Any, ...]], isolate: bool = False
) -> Callable[[Callable[[str, bool], Any]], Callable[[str, bool], Any]]:
    """Register a broken op and its twin."""

    def register(build: Callable[[str, bool], Any]) -> Callable[[str, bool], Any]:
        name = build.__name__
        if name in FAULTS or name in TRAPS:
            raise ValueError(f"two ops of the corpus are named {name}")
        FAULTS[name] = Fault(name, kind, note, build, sample, isolate)
        return build

    return register


def trap(*, why: str, sample: Callable[[], tuple[Any, ...]]) -> Callable[[Callable[[str], Any]], Callable[[str], Any]]:
    """Register a right op that looks suspicious."""

    def register(build: Callable[[str], Any]) -> Callable[[str], Any]:
        name = build.__name__
        if name in FAULTS or name in TRAPS:
            raise ValueError(f"two ops of the corpus are named {name}")
        TRAPS[name] = Trap(name, why, build, sample)
        return build

    return register


def load() -> None:
    """Import every module of this folder."""
    package = importlib.import_module("broken_ops")
    for module in pkgutil.iter_modules(package.__path__):
        if not module.name.startswith("test_"):
            importlib.import_module(f"broken_ops.{module.name}")
