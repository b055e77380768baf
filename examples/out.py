"""An op that writes its result into a tensor the caller gives it, as torch's functions with `out=` do.

Shows `torch.Tag.out`: the tensors written to are keyword-only, and are what the op returns. Like torch's, it has no
gradient; it says so when an argument requires one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from customops import Tag, custom_op


@custom_op("examples::min_max_out", mutates_args={"low", "high"}, tags=Tag.out)
def min_max_out(x: Tensor, dim: int = 0, *, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    shape = x.shape[:dim] + x.shape[dim:][1:]
    torch._check(low.shape == high.shape == shape, lambda: f"low and high need the shape {tuple(shape)}")
    torch.amin(x, dim, out=low)
    torch.amax(x, dim, out=high)
    return low, high  # in the order of the parameters


@min_max_out.register_samples
def _() -> Iterator[tuple[tuple[Any, ...], dict[str, Tensor]]]:
    # Keyword arguments come second: (args, kwargs).
    yield (torch.randn(3, 4),), {"low": torch.empty(4), "high": torch.empty(4)}
    yield (torch.randn(3, 4), 1), {"low": torch.empty(3), "high": torch.zeros(6)[::2]}


def main() -> None:
    print("schema:", min_max_out.schema)

    x = torch.arange(6.0).reshape(2, 3)
    low, high = torch.empty(3), torch.empty(3)
    results = min_max_out(x, low=low, high=high)
    assert results[0] is low
    assert results[1] is high
    print("columns range from", low.tolist(), "to", high.tolist())

    try:
        min_max_out(x.requires_grad_(), low=low, high=high)
    except RuntimeError as error:
        print("refused:", error)


if __name__ == "__main__":
    main()
