"""A running maximum that decays, in Numba: a loop that torch has no op for. `from_numpy` hands the tensors to it.

Arrays share the memory of the tensors. They are read-only, but for those named in `writable`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numba
import torch
from torch import Tensor

from customops import custom_op
from customops.languages import from_numpy


@numba.njit  # type: ignore[untyped-decorator]
def scan(x: Any, decay: float, out: Any, chosen: Any) -> None:
    for i in range(x.shape[0]):
        peak, source = -float("inf"), 0
        for j in range(x.shape[1]):
            peak *= decay if peak > 0 else 1
            if x[i, j] >= peak:
                peak, source = x[i, j], j
            out[i, j], chosen[i, j] = peak, source


run = from_numpy(scan, writable=("out", "chosen"))


@custom_op("examples::numba_scan", mutates_args=(), device_types="cpu", differentiable=(True, False))
def peaks(x: Tensor, decay: float) -> tuple[Tensor, Tensor]:
    """The decayed maximum up to each column, and the column it comes from."""
    out, chosen = torch.empty_like(x), torch.empty_like(x, dtype=torch.int64)
    run(x, decay, out, chosen)
    return out, chosen


@peaks.register_fake
def _(x: Tensor, decay: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.int64)


def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: tuple[Tensor, Tensor]) -> None:
    x, ctx.decay = inputs
    ctx.save_for_backward(x, output[1])


def backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor, None]:
    x, chosen = ctx.saved_tensors
    age = torch.arange(x.shape[1]) - chosen
    weight = torch.where(x.gather(1, chosen) > 0, ctx.decay**age, 1.0).to(grad.dtype)
    return torch.zeros_like(grad).scatter_add(1, chosen, grad * weight), None


peaks.register_autograd(backward, setup_context=setup_context)


@peaks.register_samples(vary={"decay": [0.5, 1.0], "x.dtype": [torch.float32, torch.float64]})
def _() -> Iterator[tuple[Any, ...]]:
    yield torch.randn(2, 5, dtype=torch.float64, requires_grad=True), 0.9
    yield torch.randn(4, 3).t(), 0.5


def main() -> None:
    x = torch.tensor([[4.0, 1.0, 3.0, 1.0]], requires_grad=True)
    out, chosen = peaks(x, 0.5)
    out.sum().backward()
    print("peaks", out.tolist(), "of columns", chosen.tolist(), "gradient", x.grad.tolist())
    torch.testing.assert_close(out, torch.tensor([[4.0, 2.0, 3.0, 1.5]]))
    torch.testing.assert_close(x.grad, torch.tensor([[1.5, 0.0, 1.5, 0.0]]))
    compiled, _ = torch.compile(peaks, fullgraph=True)(x, 0.5)
    torch.testing.assert_close(compiled, out)


if __name__ == "__main__":
    main()
