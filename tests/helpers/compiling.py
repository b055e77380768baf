"""The same function under each way to run it."""

from __future__ import annotations

import gc
import importlib
import warnings
from typing import Any

import torch
import torch.utils.checkpoint

BACKENDS = ["eager", "aot_eager", "inductor"]


def dynamo(name: str) -> Any:
    """A module of dynamo. The first test that asks for one loads it, not the collection of tests: it takes seconds."""
    return importlib.import_module(f"torch._dynamo.{name}")


def draft_export(*args: Any) -> Any:
    """`torch.export.draft_export`, which leaves its log file open: that is a warning in whatever test collects it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        program = torch.export.draft_export(*args)
        gc.collect()
    return program


def compiled(f: Any, backend: str) -> Any:
    return f if backend == "eager" else torch.compile(f, fullgraph=True, backend=backend)
