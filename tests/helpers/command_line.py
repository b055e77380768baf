"""What the tests of the command line share: files that define ops, and programs that are run."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Result(NamedTuple):
    code: int
    out: str
    err: str


#: Runs the command line in this process.
Command = Callable[..., Result]


HEAD = """
import torch
from torch import Tensor
from customops import custom_op
"""


GOOD = """
@custom_op("cli::good", mutates_args=())
def good(x: Tensor) -> Tensor:
    return x * 2

good.register_fake(torch.empty_like)
good.register_autograd(lambda ctx, grad: grad * 2)

@good.register_samples
def _():
    yield (torch.randn(3),)
    yield (torch.randn(3, requires_grad=True),)
"""


BROKEN = """
@custom_op("cli::broken", mutates_args=())
def broken(x: Tensor, sizes: list[int], *, name: str = "a") -> Tensor:
    return x * 2

@broken.register_fake
def _(x, sizes, name):
    return torch.empty_like(x, dtype=torch.float64)

@broken.register_samples
def _():
    yield (torch.randn(2, 3, requires_grad=True).t(), [1, 2]), {"name": "[bold]"}
"""


BARE = """
@custom_op("cli::bare", mutates_args=())
def bare(x: Tensor) -> Tensor:
    return x * 2
"""


RAISING = """
@custom_op("cli::raising", mutates_args=())
def raising(x: Tensor) -> Tensor:
    return x * 2

raising.register_fake(torch.empty_like)

@raising.register_samples
def _():
    yield (torch.randn(3),)
    raise LookupError("no data here")
"""


def write(name: str, *parts: str) -> str:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text("".join([HEAD, *parts]), encoding="utf-8")
    importlib.invalidate_caches()
    return name


def in_shell(*arguments: str, **environment: str) -> Result:
    run = subprocess.run(
        [sys.executable, "-m", "customops", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONIOENCODING": "utf-8", **environment},
        capture_output=True,
        encoding="utf-8",
    )
    return Result(run.returncode, run.stdout, run.stderr)
