"""An op with a gradient inside a small model, trained in eager mode and compiled: the losses are the same.

Shows that the op is called as what it is, an object of the module, from within torch.compile: no graph break, and
forward and backward both compiled around the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from customops import custom_op


@custom_op("examples::swiglu", mutates_args=())
def swiglu(gate: Tensor, x: Tensor) -> Tensor:
    torch._check(gate.shape == x.shape and gate.dtype == x.dtype, lambda: "gate and x need one shape and dtype")
    return F.silu(gate) * x


@swiglu.register_fake
def _(gate: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(gate)


def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    gate, x = ctx.saved_tensors
    sigmoid = gate.sigmoid()
    return grad * x * sigmoid * (1 + gate * (1 - sigmoid)), grad * gate * sigmoid


swiglu.register_autograd(backward, setup_context=setup_context)


@swiglu.register_samples
def _() -> Iterator[tuple[Tensor, Tensor]]:
    yield torch.randn(2, 3), torch.randn(2, 3)
    yield torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)


class Net(nn.Module):
    """One hidden layer, gated by the op."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(2, 32)
        self.last = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(swiglu(*self.hidden(x).tensor_split(2, dim=-1)))


def train(*, compiled: bool, steps: int = 40) -> list[float]:
    """The losses of learning to multiply two numbers."""
    torch.manual_seed(0)
    net, inputs = Net(), torch.randn(256, 2)
    targets = inputs.prod(-1, keepdim=True)
    forward = torch.compile(net, fullgraph=True) if compiled else net
    optimizer, losses = torch.optim.Adam(net.parameters(), lr=0.05), []
    for _ in range(steps):
        loss = F.mse_loss(forward(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    eager, compiled = train(compiled=False), train(compiled=True)
    for step in range(0, len(eager), 13):
        print(f"step {step:2}: loss {eager[step]:.6f} in eager mode, {compiled[step]:.6f} compiled")
    torch.testing.assert_close(compiled, eager, rtol=1e-3, atol=1e-5)
    assert eager[-1] < eager[0] / 10


if __name__ == "__main__":
    main()
