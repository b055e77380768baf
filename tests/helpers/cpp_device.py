"""A test that passes if a function does in a process that has the device of examples/cpp_device."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from helpers.warm import PYTHON

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "cpp_device"


CHECKS: dict[str, Callable[[], None]] = {}


def on_device(check: Callable[[], None]) -> Callable[[dict[str, str]], None]:
    """A test that passes if the function did, in the process that has the device."""
    CHECKS[check.__name__] = check

    def test(outcomes: dict[str, str]) -> None:
        if outcomes[check.__name__]:
            pytest.fail(outcomes[check.__name__], pytrace=False)

    return test


def python(*arguments: Any) -> subprocess.CompletedProcess[str]:
    """A run of Python that sees this package and the example; code, or a file and its arguments."""
    path = os.pathsep.join(
        [str(ROOT), str(ROOT / "tests"), str(EXAMPLE), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    # A file starts threads for its backwards, with which torch 2.13 and 2.15 at times fail in forks of forks.
    start = [sys.executable] if Path(str(arguments[0])).is_file() else [PYTHON, "-c"]
    command = [*start, *map(str, arguments)]
    env = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}  # torch has one accelerator
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    return run


def main(build: str) -> None:
    """The script: the outcomes of all checks, as a file in the directory of the build."""
    toy = importlib.import_module("toy")
    torch.set_num_threads(1)
    toy.register(build)
    # Loaded once, before the forks, which otherwise spend most of their time on it.
    importlib.import_module("torch._dynamo")
    assert_close(torch.zeros(1), torch.zeros(1))
    outcomes = {name: outcome(check) for name, check in CHECKS.items()}
    Path(build, f"{Path(sys.argv[0]).stem}.json").write_text(json.dumps(outcomes))


def outcome(check: Callable[[], None]) -> str:
    """What a function raises, in a process of its own; "" if nothing."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="Guards may run slower on Python 3.13.0")
        try:
            torch.manual_seed(0)
            check()
        except BaseException:
            os.write(write, traceback.format_exc()[-8000:].encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as lines:
        raised = lines.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return raised if status == 0 else f"{raised}\nended with {status}"


def counted(fn: Callable[[], Any]) -> dict[str, int]:
    """The operators that a function leaves to the CPU."""
    torch.toy.reset_fallback_counts()
    fn()
    return torch.toy.fallback_counts()


def equal(ours: Tensor, expected: Tensor) -> None:
    assert ours.device.type == "toy"
    assert_close(ours.cpu(), expected, rtol=0, atol=0, equal_nan=True, check_stride=False)


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.uint8]
DTYPES += [torch.bool, torch.int8, torch.complex128]


def sample(dtype: torch.dtype, *size: int) -> Tensor:
    return torch.randn(size, dtype=torch.complex64 if dtype.is_complex else torch.float32).mul(3).to(dtype)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.last = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(self.layer(self.embed(tokens)))
