"""The same function under each way to run it."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils.checkpoint

BACKENDS = ["eager", "aot_eager", "inductor"]


def compiled(f: Any, backend: str) -> Any:
    return f if backend == "eager" else torch.compile(f, fullgraph=True, backend=backend)
