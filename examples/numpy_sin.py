"""An op whose kernel is numpy: torch cannot look inside, and still compiles and differentiates through it.

Shows the four parts of most ops: the kernel, the fake impl that stands for it while tracing, the gradient, and the
sample inputs by which `python -m customops check examples/numpy_sin.py` knows whether the other three agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from customops import custom_op


@custom_op("examples::numpy_sin", mutates_args=(), device_types="cpu")
def numpy_sin(x: Tensor) -> Tensor:
    return torch.from_numpy(np.sin(x.numpy()))


@numpy_sin.register_fake
def _(x: Tensor) -> Tensor:
    # Nothing is computed here: shape, strides, dtype and device of the result are all a tracer wants. numpy keeps the
    # memory layout of its input, as empty_like does.
    return torch.empty_like(x)


def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    (x,) = inputs
    ctx.save_for_backward(x)


def backward(ctx: Any, grad: Tensor) -> Tensor:
    # Made of torch operations, so that it can be differentiated once more.
    (x,) = ctx.saved_tensors
    return grad * x.cos()


numpy_sin.register_autograd(backward, setup_context=setup_context)


@numpy_sin.register_samples
def _() -> Iterator[tuple[Tensor]]:
    yield (torch.randn(4),)
    yield (torch.randn(2, 3, dtype=torch.float64, requires_grad=True),)
    yield (torch.randn(3, 5).t(),)


def main() -> None:
    x = torch.linspace(0, 3, 4, requires_grad=True)
    y = numpy_sin(x)
    y.sum().backward()
    print("numpy_sin(x) =", y.detach().tolist())
    print("its gradient =", x.grad.tolist())
    torch.testing.assert_close(y, torch.sin(x))
    torch.testing.assert_close(x.grad, torch.cos(x))

    @torch.compile(fullgraph=True)
    def compiled(x: Tensor) -> Tensor:
        return numpy_sin(x) ** 2 + torch.cos(x) ** 2

    print("compiled, sin^2 + cos^2 =", compiled(x).tolist())


if __name__ == "__main__":
    main()
