"""Programs of before: what was exported, or calls ``torch.ops``, goes on to work when a field or a choice is added."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from helpers.processes import Program, run

from customops.testing import run_each_isolated

pytestmark = [pytest.mark.compile, pytest.mark.process]

#: An op and calls of it; the places where it changes are named.
PROGRAM = """
import enum
import torch
from dataclasses import dataclass
from torch import Tensor
from customops import custom_op

class Mode(enum.Enum):
    {members}

@dataclass(frozen=True)
class Inner:
    by: float = 1.0
    {inner}

@dataclass(frozen=True)
class Config:
    size: int
    inner: Inner = Inner()
    mode: Mode = Mode.UP
    {config}

@custom_op("stable::f")
def f(x: Tensor, config: Config{parameter}) -> Tensor:
    y = x * config.size * config.inner.by + getattr(config, "plus", 0.0) + getattr(config.inner, "plus", 0.0)
    return y if config.mode is Mode.UP else -y

f.register_fake(lambda x, config, *args: torch.empty_like(x))

class Program(torch.nn.Module):
    def forward(self, x):
        named = torch.ops.stable.f(x, 7, config_mode="DOWN", config_inner_by=0.5)
        return f(x, Config(3)), f(x, Config(5, Inner(2.0), Mode.DOWN)), named

x = torch.ones(2)
"""
EXPORT = "torch.export.save(torch.export.export(Program(), (x,)), {file!r})"
CHECK = """
def right(results):
    return [y.tolist() for y in results] == [[3.0, 3.0], [-10.0, -10.0], [-3.5, -3.5]]

assert right(Program()(x))
assert right(torch.export.load({file!r}).module()(x))
"""
BEFORE = {"members": "UP, DOWN = 1, 2", "inner": "", "config": "", "parameter": ""}


CHANGES = {
    "a field": {"config": "plus: float = 0.0"},
    "a tensor": {"config": "bias: Tensor | None = None"},
    "a field of an inner class": {"inner": "plus: float = 0.0"},
    "a parameter": {"parameter": ", more: float = 0.0"},
    "members": {"members": "SIDEWAYS, DOWN, UP = 5, 6, 7"},
}


def test_what_may_be_added(tmp_path: Path) -> None:
    file = str(tmp_path / "program.pt2")
    programs = [PROGRAM.format(**BEFORE) + EXPORT.format(file=file)]
    programs += [PROGRAM.format(**{**BEFORE, **changes}) + CHECK.format(file=file) for changes in CHANGES.values()]
    found = run_each_isolated([functools.partial(run, Program(code)) for code in programs], setup=import_export)
    found[0].get()
    failed = {name: each.error for name, each in zip(CHANGES, found[1:], strict=True) if each.error is not None}
    assert failed == {}


def import_export() -> None:
    import torch.export  # noqa: PLC0415

    torch.export.export(torch.nn.Linear(1, 1), (torch.ones(1, 1),))  # what it imports when it is first used
