"""A project with ops and tests, and pytest with our plugin run on it."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest

#: Three ops: one that is right, one with a wrong fake impl, one without samples.
OPS = """
import torch
from torch import Tensor
from customops import custom_op

@custom_op("NS::double", mutates_args=())
def double(x: Tensor) -> Tensor:
    return x * 2

double.register_fake(torch.empty_like)

@double.register_samples
def _():
    yield (torch.randn(3),)
    yield (torch.randn(2, 3),)

@custom_op("NS::flip", mutates_args=())
def flip(x: Tensor) -> Tensor:
    return x.t().clone()

@flip.register_fake
def _(x):
    return x.new_empty(x.shape[1], x.shape[0])  # strides!

@flip.register_samples
def _():
    yield (torch.randn(2, 3),)

@custom_op("NS::bare", mutates_args=())
def bare(x: Tensor) -> Tensor:
    return x + 1
"""


class Project:
    """Files, in which NS stands for a namespace of this test, and runs of pytest on them."""

    def __init__(self, pytester: pytest.Pytester, ns: str) -> None:
        self.pytester, self.ns = pytester, ns
        self.ops = f"ops_{ns}"
        self.write("pytest.ini", "[pytest]\naddopts = --strict-markers --import-mode=importlib\npythonpath = .\n")
        self.write(f"{self.ops}.py", OPS)

    def write(self, name: str, text: str) -> Path:
        """Write a file; OPS stands for the module of the ops."""
        path = self.pytester.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("NS", self.ns).replace("OPS", self.ops))
        return path

    def read(self, name: str) -> str:
        return (self.pytester.path / name).read_text().replace(self.ns, "NS")

    def run(self, *args: str, status: int | None = None) -> str:
        """What pytest prints, with NS and OPS in it."""
        return self._said(self.pytester.runpytest_inprocess(*plugin(), *args), status)

    def run_process(self, *args: str, status: int | None = None) -> str:
        """The same, in a process of its own."""
        return self._said(self.pytester.runpytest_subprocess(*plugin(), *args), status)

    def _said(self, result: Any, status: int | None) -> str:
        said = "\n".join([*result.outlines, *result.errlines])
        assert status is None or result.ret == status, said
        return said.replace(self.ops, "OPS").replace(self.ns, "NS")

    def outcomes(self, *args: str) -> dict[str, str]:
        """The name of each check that ran -> how it went."""
        result = self.pytester.inline_run(*plugin(), *args)
        found: dict[str, str] = {}
        for report in result.getreports("pytest_runtest_logreport"):
            if report.when == "call" or report.outcome == "skipped":
                outcome = "xfailed" if hasattr(report, "wasxfail") else report.outcome
                found[report.nodeid.replace(self.ops, "OPS").replace(self.ns, "NS")] = outcome
        return found


def plugin() -> tuple[str, ...]:
    """How to load the plugin: pytest does where customops was installed with its entry point."""
    points = importlib.metadata.entry_points(group="pytest11")
    return () if any(point.name == "customops" for point in points) else ("-p", "customops_pytest.plugin")
