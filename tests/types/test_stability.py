"""Programs of before: what was exported, or calls ``torch.ops``, goes on to work when a field or a choice is added."""

from __future__ import annotations

from pathlib import Path

import pytest

from customops.testing import run_isolated

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


def check(tmp_path: Path, **changes: str) -> None:
    file = str(tmp_path / "program.pt2")
    run_isolated(PROGRAM.format(**BEFORE) + EXPORT.format(file=file))
    run_isolated(PROGRAM.format(**{**BEFORE, **changes}) + CHECK.format(file=file))


@pytest.mark.parametrize(
    "changes",
    [
        {"config": "plus: float = 0.0"},
        {"config": "bias: Tensor | None = None"},
        {"inner": "plus: float = 0.0"},
        {"parameter": ", more: float = 0.0"},
        {"members": "SIDEWAYS, DOWN, UP = 5, 6, 7"},
    ],
    ids=["a field", "a tensor", "a field of an inner class", "a parameter", "members"],
)
def test_what_may_be_added(tmp_path: Path, changes: dict[str, str]) -> None:
    check(tmp_path, **changes)
