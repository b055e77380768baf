"""A kernel of NVIDIA Warp in an op that writes: the array is the memory of the tensor, on the CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import warp as wp
from torch import Tensor

from customops import Mut, custom_op
from customops.languages import from_warp

wp.config.log_level = wp.LOG_ERROR


@wp.kernel  # type: ignore[untyped-decorator]
def axpy_kernel(a: float, x: wp.array(dtype=float), y: wp.array(dtype=float)):  # type: ignore[no-untyped-def,valid-type]
    i = wp.tid()
    y[i] = a * x[i] + y[i]


launch = from_warp(axpy_kernel)


@custom_op("examples::warp_axpy")
def axpy_(a: float, x: Tensor, y: Mut[Tensor]) -> None:
    if x.shape != y.shape:
        raise ValueError(f"axpy_ takes two vectors of one size, not {tuple(x.shape)} and {tuple(y.shape)}")
    launch(x.numel(), a, x, y)


@axpy_.register_samples
def _() -> Iterator[tuple[float, Tensor, Tensor]]:
    yield 2.0, torch.randn(4), torch.randn(4)
    yield 0.5, torch.randn(8)[::2], torch.randn(8)[1::2]


def main() -> None:
    x, y = torch.randn(8)[::2], torch.randn(4)
    expected = 2 * x + y
    for fn in (axpy_, torch.compile(axpy_, fullgraph=True)):
        written = y.clone()
        fn(2.0, x, written)
        torch.testing.assert_close(written, expected)
    print("2x + y by Warp, written where y lies, compiled too")


if __name__ == "__main__":
    main()
