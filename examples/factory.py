"""An op that makes a tensor out of numbers alone.

Without a tensor to look at, dispatch goes by the argument named `device`. Shows kernels for single device types: the
one the op is defined with, and another that is registered later.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from customops import custom_op


@custom_op("examples::triangle", mutates_args=(), device_types="cpu")
def triangle(size: int, value: float = 1.0, *, device: torch.device) -> Tensor:
    """A lower triangle of `value`."""
    return torch.full((size, size), value, device=device).tril()


@triangle.register_kernel("cuda")
def triangle_cuda(size: int, value: float, *, device: torch.device) -> Tensor:
    # Kernels get every argument, defaults filled in.
    return torch.ones(size, size, device=device).tril_() * value


@triangle.register_fake
def _(size: int, value: float, *, device: torch.device) -> Tensor:
    return torch.empty(size, size, device=device)


@triangle.register_samples
def _() -> Iterator[tuple[tuple[Any, ...], dict[str, torch.device]]]:
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    for device in map(torch.device, devices):
        yield (3,), {"device": device}
        yield (4, 0.5), {"device": device}


def main() -> None:
    print(triangle(3, device=torch.device("cpu")))
    print("on meta:", triangle(3, device=torch.device("meta")).shape)
    try:
        triangle(3, device=torch.device("xpu"))
    except RuntimeError as error:
        print(error)

    @torch.compile(fullgraph=True)
    def mask(scores: Tensor) -> Tensor:
        return scores.masked_fill(triangle(scores.shape[-1], device=scores.device) == 0, float("-inf"))

    print(mask(torch.zeros(3, 3)).softmax(-1))


if __name__ == "__main__":
    main()
