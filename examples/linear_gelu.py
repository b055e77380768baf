"""A fused layer, gelu(x @ weight.T + bias), with a gradient that saves memory by computing the inside again.

Shows a backward for several inputs, how it leaves out the gradients nobody asked for, and how to verify one: against
torch's own operations, and numerically with `torch.autograd.gradcheck`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from customops import custom_op


@custom_op("examples::linear_gelu", mutates_args=())
def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    # A real one would launch a single kernel here; the steps below are what that kernel would do.
    return F.gelu(torch.addmm(bias, x, weight.t()))


@linear_gelu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, bias = ctx.saved_tensors
    z = torch.addmm(bias, x, weight.t())
    normal_cdf = 0.5 * (1 + torch.erf(z / math.sqrt(2)))
    normal_pdf = torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    grad_z = grad * (normal_cdf + z * normal_pdf)
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad
    return (
        grad_z @ weight if needs_x else None,
        grad_z.t() @ x if needs_weight else None,
        grad_z.sum(0) if needs_bias else None,
    )


linear_gelu.register_autograd(backward, setup_context=setup_context)


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(size, dtype=dtype, requires_grad=True) for size in [(4, 3), (5, 3), (5,)])


@linear_gelu.register_samples
def _() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    yield inputs(torch.float64)
    x, weight, bias = inputs()
    yield (x.detach(), weight, bias)  # as in the first layer of a model


def main() -> None:
    x, weight, bias = leaves = inputs()
    y, expected = linear_gelu(x, weight, bias), F.gelu(F.linear(x, weight, bias))
    torch.testing.assert_close(y, expected)

    ours = torch.autograd.grad(y.square().sum(), leaves)
    theirs = torch.autograd.grad(expected.square().sum(), leaves)
    for name, mine, torchs in zip(("x", "weight", "bias"), ours, theirs, strict=True):
        torch.testing.assert_close(mine, torchs)
        print(f"gradient of {name:<6} differs from torch's by at most {(mine - torchs).abs().max():.1e}")

    assert torch.autograd.gradcheck(linear_gelu, inputs(torch.float64))
    print("and agrees with finite differences")


if __name__ == "__main__":
    main()
