"""The same function under each way to run it."""

from __future__ import annotations

import importlib
import logging
from typing import Any

import torch
import torch.utils.checkpoint

BACKENDS = ["eager", "aot_eager", "inductor"]


def dynamo(name: str) -> Any:
    """A module of dynamo. The first test that asks for one loads it, not the collection of tests: it takes seconds."""
    return importlib.import_module(f"torch._dynamo.{name}")


def draft_export(*args: Any) -> Any:
    """`torch.export.draft_export`, which leaves its log file open: collected later, it is a warning in any test."""
    program = torch.export.draft_export(*args)
    for reference in list(logging._handlerList):  # type: ignore[attr-defined]
        handler = reference()
        if type(handler).__name__ == "CaptureStructuredTrace":
            handler.close()
    return program


def compiled(f: Any, backend: str) -> Any:
    return f if backend == "eager" else torch.compile(f, fullgraph=True, backend=backend)
