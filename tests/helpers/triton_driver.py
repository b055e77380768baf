"""A driver that lets Triton compile kernels where there is no GPU, as far as tracing asks for; nothing can be run."""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.interpreter import InterpretedFunction


class NoDevice:
    """Says that there is a GPU."""

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0


def install() -> None:
    triton.runtime.driver.set_active(NoDevice())


def interpret_captured() -> None:
    """Let the interpreter run the kernels of the graphs that were traced, on CPU tensors."""
    table = torch._higher_order_ops.triton_kernel_wrap.kernel_side_table
    for number, kernel in table.id_to_kernel.items():
        table.id_to_kernel[number] = InterpretedFunction(kernel.fn)
