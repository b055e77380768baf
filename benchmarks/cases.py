"""The table of cases that bench.py times. A case makes the same call by several contenders.

The cases of a group are in the module `cases_<subject>.py`, which is imported when the group is selected. The ops of a
case are defined when the case runs. To add a case, add a row to the function `cases` of a module.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
import time
import timeit
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Fn = Callable[..., Any]

#: Group -> the module with its cases.
GROUPS = {
    "calls": "cases_calls",
    "definitions": "cases_calls",
    "serving": "cases_serving",
    "languages": "cases_languages",
    "graphs": "cases_graphs",
    "parts": "cases_parts",
    "node": "cases_node",
    "layouts": "cases_layouts",
    "types": "cases_types",
    "kernels": "cases_kernels",
    "checks": "cases_checks",
    "import": "cases_import",
}
#: Unit of time -> how many of it make a second.
PER_SECOND = {"us": 1e6, "ms": 1e3, "s": 1.0}


# Contenders -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Statement:
    """A contender that runs Python code, in which `f` is its function."""

    code: str
    f: Fn

    def outcome(self, case: Case) -> Any:
        """Return the result of the statement and the tensors that it used, which it may have written."""
        variables = case.inputs() | {"f": self.f}
        with case.context():
            result = eval(self.code + case.then, variables)
        return result, [value for value in variables.values() if isinstance(value, Tensor)]

    def meter(self, case: Case) -> Callable[[], float]:
        """Return a function that measures the time of a call, in the unit of the case."""
        timer = timeit.Timer(self.code, "", case.clock, case.inputs() | {"f": self.f})
        scale = PER_SECOND[case.unit] / case.runs / case.calls
        return lambda: timer.timeit(case.runs) * scale


@dataclass(frozen=True)
class Cold:
    """A contender that runs a program in a new process. The program prints one number, in the unit of the case."""

    program: str
    arguments: tuple[str, ...] = ()
    stdin: str = ""
    #: Does the same work in this process. Without it, `outcome` starts a process and returns None.
    work: Callable[[], Any] | None = None

    def outcome(self, case: Case) -> Any:
        """Return the result of the work, to be compared with that of the other contenders."""
        if self.work is not None:
            return self.work()
        self.measure()
        return None

    def meter(self, case: Case) -> Callable[[], float]:
        """Return a function that measures one process."""
        return self.measure

    def measure(self) -> float:
        here = str(Path(__file__).parent)
        path = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
        done = subprocess.run(
            [sys.executable, "-c", self.program, *self.arguments],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            input=self.stdin,
            env=os.environ | {"PYTHONPATH": path},
        )
        return float(done.stdout.splitlines()[-1])


Contenders = dict[str, Statement] | dict[str, Cold]


def each(code: str, functions: Callable[[], dict[str, Fn]]) -> Callable[[], Contenders]:
    """Return the contenders of a case in which all functions run the same code."""
    return lambda: {contender: Statement(code, f) for contender, f in functions().items()}


# Inputs ---------------------------------------------------------------------------------------------------------


def tensors(requires_grad: bool = False) -> dict[str, Any]:
    """Return the variables of most statements: small tensors, so that the kernels take little time."""
    variables: dict[str, Any] = {name: torch.ones(4) for name in ("y", "out", "grad_out")}
    return variables | {"x": torch.arange(1.0, 5.0, requires_grad=requires_grad), "grad": torch.autograd.grad}


def with_gradient() -> dict[str, Any]:
    return tensors(requires_grad=True)


def inference_tensors() -> dict[str, Any]:
    with torch.inference_mode():
        return tensors()


# Results --------------------------------------------------------------------------------------------------------


def equal(found: Any, expected: Any) -> None:
    """Raise AssertionError unless two outcomes are equal."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def alike(found: Any, expected: Any) -> None:
    """Raise AssertionError unless two outcomes have the same structure, shapes and dtypes.

    For kernels that return uninitialized memory.
    """
    if isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for pair in zip(found, expected, strict=True):
            alike(*pair)
    else:
        assert type(found) is type(expected)
        if isinstance(expected, Tensor):
            assert (found.shape, found.dtype) == (expected.shape, expected.dtype)


# Cases ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A row of the table: one call, made by each contender. Ratios compare with the first contender."""

    name: str
    group: str
    #: Defines the ops and returns the contenders by name.
    make: Callable[[], Contenders]
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    #: The variables of a statement, made anew for each contender.
    inputs: Callable[[], dict[str, Any]] = tensors
    #: Compares two outcomes.
    agree: Callable[[Any, Any], None] = equal
    #: Code that is appended to the statements when outcomes are compared.
    then: str = ""
    #: Measurements of each contender.
    rounds: int = 300
    #: Runs of the statement in one measurement.
    runs: int = 200
    #: Calls of the function in one run.
    calls: int = 1
    unit: str = "us"
    #: Processor time excludes the time in which another process has the core.
    clock: Callable[[], float] = time.process_time
    #: How often `verify` runs each contender.
    repeats: int = 2
    #: The highest ratio that `bench.py --limits` accepts.
    limit: float | None = None

    @cached_property
    def contenders(self) -> Contenders:
        return self.make()

    @property
    def label(self) -> str:
        return self.name if self.unit == "us" else f"{self.name} ({self.unit})"

    def verify(self) -> None:
        """Raise AssertionError unless all contenders have the same outcome, each time."""
        expected, *others = (
            contender.outcome(self) for _ in range(self.repeats) for contender in self.contenders.values()
        )
        for other in others:
            self.agree(other, expected)


def table(groups: Sequence[str] = tuple(GROUPS), only: str = "") -> Iterator[Case]:
    """Yield the cases of some groups that have `only` in their names."""
    for group in groups:
        for case in importlib.import_module(GROUPS[group]).cases():
            if case.group == group and only in case.name:
                yield case
