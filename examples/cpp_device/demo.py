"""A small transformer, trained on the CPU and on the second toy device: `python demo.py` builds what it needs.

Its attention is followed by a scaling that is an op of ours, with a kernel for the device. What has no kernel there
runs on the CPU, and is counted.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import toy
from torch import Tensor, nn
from torch.nn import functional as F

from customops import custom_op

ON_THE_DEVICE = 0  # how often the kernel for "toy" ran


@custom_op("examples_cpp_device::scale", mutates_args=(), device_types="cpu")
def scale(x: Tensor, by: float) -> Tensor:
    return x * by


@scale.register_fake
def _(x: Tensor, by: float) -> Tensor:
    return torch.empty_like(x)


def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
    _, ctx.by = inputs


def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return scale(grad, ctx.by), None


scale.register_autograd(backward, setup_context=setup_context)


def scale_on_toy(x: Tensor, by: float) -> Tensor:
    global ON_THE_DEVICE
    ON_THE_DEVICE += 1
    return x * by


class Model(nn.Module):
    """Predicts the next token."""

    def __init__(self, tokens: int = 7, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True)
        self.last = nn.Linear(width, tokens)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        return self.last(scale(self.layer(self.embedding(x), src_mask=mask, is_causal=True), 0.5))


def train(device: str, steps: int = 30) -> list[float]:
    """The losses of learning to count."""
    torch.manual_seed(0)
    model, counting = Model().to(device), torch.arange(40, device=device).view(4, 10) % 7
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for _ in range(steps):
        loss = F.cross_entropy(model(counting[:, :-1]).flatten(0, 1), counting[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    toy.register(*sys.argv[1:])
    scale.register_kernel("toy", scale_on_toy)

    expected, losses = train("cpu"), train("toy:1")
    for step in range(0, len(losses), 7):
        print(f"step {step:2}: loss {expected[step]:.5f} on the CPU, {losses[step]:.5f} on toy:1")
    torch.testing.assert_close(losses, expected, rtol=1e-3, atol=1e-4)
    print(f"the same losses; {ON_THE_DEVICE} calls of examples_cpp_device::scale on the device")

    counts = sorted(torch.toy.fallback_counts().items(), key=lambda item: -item[1])
    print(f"{sum(count for _, count in counts)} calls of {len(counts)} operators ran on the CPU, most often")
    for name, count in counts[:8]:
        print(f"  {count:5} {name}")
    print(f"bytes that are still allocated: {[torch.toy.memory_allocated(i) for i in range(2)]}")


if __name__ == "__main__":
    main()
