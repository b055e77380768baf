"""The same function under each way to run it."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.utils.checkpoint

BACKENDS = ["eager", "aot_eager", "inductor"]


def dynamo(name: str) -> Any:
    """A module of dynamo. The first test that asks for one loads it, not the collection of tests: it takes seconds."""
    return importlib.import_module(f"torch._dynamo.{name}")


def compiled(f: Any, backend: str) -> Any:
    return f if backend == "eager" else torch.compile(f, fullgraph=True, backend=backend)
