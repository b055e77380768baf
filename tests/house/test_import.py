"""Importing the package: what an import loads, and what it changes in torch. See also `test_architecture.py`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from customops.testing import run_isolated

ROOT = Path(__file__).parents[2]


@pytest.mark.process
def test_importing_the_package_loads_few_modules_of_its_own() -> None:
    """Commands, checks, devices and other languages are loaded by the code that uses them."""
    program = "import sys, customops; print(*(name for name in sys.modules if name.startswith('customops.')))"
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)
    loaded = {name.split(".")[1] for name in run.stdout.split()}
    assert "_op" in loaded
    late = {"_cli", "backend", "checking", "checks", "languages", "legacy", "recording", "testing", "tuning"}
    assert loaded & late == set()


@pytest.mark.process
def test_reloading_the_package_changes_torch_once() -> None:
    program = """
import importlib, sys, torch, customops
customops.custom_op("reloaded::f", lambda x: x.clone(), schema="(Tensor x) -> Tensor")
before = [*sys.meta_path], torch.library.Library.impl
importlib.reload(customops)
customops.custom_op("reloaded::g", lambda x: x.clone(), schema="(Tensor x) -> Tensor")
result = before == ([*sys.meta_path], torch.library.Library.impl)
"""
    assert run_isolated(program).value is True


@pytest.mark.process
def test_a_call_with_fakes_loads_no_compiler() -> None:
    """torch itself loads Dynamo for fake tensors, and nothing of inductor beside its settings."""
    program = """
import sys, torch
from torch._subclasses import FakeTensorMode
with FakeTensorMode():
    x = torch.ones(2)
before = {name for name in sys.modules if name.startswith("torch._inductor")}
import customops
op = customops.custom_op("fakes::f", lambda x: x.clone(), schema="(Tensor x) -> Tensor")
op.register_fake(torch.empty_like)
with FakeTensorMode():
    op(torch.ones(2))
result = {name for name in sys.modules if name.startswith("torch._inductor")} - before
"""
    assert run_isolated(program).value == set()
