"""The registry of the corpus: broken ops with their corrected twins, and right ops that a checker could mistake.

The modules of this folder add their ops to `FAULTS` and `RIGHT_OPS`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Sample = Callable[[], tuple[Any, ...]]


@dataclass(frozen=True)
class Fault:
    """An op with a fault, and its twin without the fault.

    Attributes:
        name: a unique name.
        kind: the kind of fault. Each kind has one op.
        note: the fault of this op, and the inputs that show it.
        found_by: the check that reports the fault.
        build: ``build(qualname, broken)`` defines the op and returns it.
        sample: returns the arguments of one ordinary call, as a tuple or as ``(args, kwargs)``. None if the op has
            samples.
    """

    name: str
    kind: str
    note: str
    found_by: str
    build: Callable[[str, bool], Any]
    sample: Sample | None


@dataclass(frozen=True)
class RightOp:
    """A right op that a check would report without a special case.

    Attributes:
        name: a unique name.
        why: the property of the op that looks like a fault.
        witness: the special cases of the checker that the op needs, as ``"file: function"``, each with the check that
            would report the op without the special case.
        build: ``build(qualname)`` defines the op and returns it.
        sample: as for `Fault`.
    """

    name: str
    why: str
    witness: dict[str, str]
    build: Callable[[str], Any]
    sample: Sample | None


FAULTS: dict[str, Fault] = {}
RIGHT_OPS: dict[str, RightOp] = {}


def fault(
    *, kind: str, note: str, found_by: str, sample: Sample | None = None
) -> Callable[[Callable[[str, bool], Any]], Callable[[str, bool], Any]]:
    """Register a broken op and its twin."""

    def register(build: Callable[[str, bool], Any]) -> Callable[[str, bool], Any]:
        name = _unused(build.__name__)
        FAULTS[name] = Fault(name, kind, note, found_by, build, sample)
        return build

    return register


def right_op(
    *, why: str, witness: dict[str, str], sample: Sample | None = None
) -> Callable[[Callable[[str], Any]], Callable[[str], Any]]:
    """Register a right op that looks suspicious."""

    def register(build: Callable[[str], Any]) -> Callable[[str], Any]:
        name = _unused(build.__name__)
        RIGHT_OPS[name] = RightOp(name, why, witness, build, sample)
        return build

    return register


def _unused(name: str) -> str:
    if name in FAULTS or name in RIGHT_OPS:
        raise ValueError(f"two ops of the corpus are named {name}")
    return name


def sample_of(entry: Fault | RightOp, op: Any) -> tuple[Any, ...]:
    """Return the arguments of one ordinary call of an op."""
    if entry.sample is not None:
        return entry.sample()
    first = op.samples()[0]
    return first.args, first.kwargs


def load() -> None:
    """Import every module of this folder that defines ops."""
    package = importlib.import_module("corpus")
    for module in pkgutil.iter_modules(package.__path__):
        if not module.name.startswith("test_"):
            importlib.import_module(f"corpus.{module.name}")
