"""A device whose kernels are NumPy, and a small transformer that learns on it as it does on the CPU.

What has no kernel below runs on the CPU, counted. Run it by itself: a process has one such device, for good.

    python examples/numpy_device.py
"""

from __future__ import annotations

import copy
import math

import numpy as np
import torch
from torch import Tensor, nn

from customops.backend import Backend, register_backend


def make_device(**options) -> Backend:
    backend = register_backend("npy", **options)

    def array(x: Tensor | float) -> np.ndarray | float:  # the dispatcher hands numbers on as numbers
        return backend.numpy(x) if isinstance(x, Tensor) else x

    @backend.kernel("aten::add.out", dtypes=[torch.float32])  # serves x + y, x += y and out= alike
    def add(a, b, *, alpha=1, out):
        np.add(array(a), array(b) if alpha == 1 else alpha * array(b), out=array(out))

    @backend.kernel("aten::mul.out", dtypes=[torch.float32])
    def mul(a, b, *, out):
        np.multiply(array(a), array(b), out=array(out))

    @backend.kernel("aten::mm.out", dtypes=[torch.float32])
    def mm(a, b, *, out):
        np.matmul(array(a), array(b), out=array(out))

    @backend.kernel("aten::bmm.out", dtypes=[torch.float32])
    def bmm(a, b, *, out):
        np.matmul(array(a), array(b), out=array(out))

    @backend.kernel("aten::addmm.out", dtypes=[torch.float32])
    def addmm(bias, a, b, *, beta=1, alpha=1, out):
        np.add(beta * array(bias), alpha * (array(a) @ array(b)), out=array(out))

    @backend.kernel("aten::_softmax.out", dtypes=[torch.float32])
    def softmax(x, dim, half_to_float, *, out):
        shifted = np.exp(array(x) - array(x).max(dim, keepdims=True, initial=-np.inf))
        np.divide(shifted, shifted.sum(dim, keepdims=True), out=array(out))

    @backend.kernel("aten::relu", dtypes=[torch.float32])
    def relu(x):
        return backend.wrap(np.maximum(array(x), 0))

    @backend.kernel("aten::threshold_backward.grad_input", dtypes=[torch.float32])
    def relu_backward(grad, x, threshold, *, grad_input):
        np.multiply(array(grad), array(x) > threshold, out=array(grad_input))

    return backend


class Transformer(nn.Module):
    """Reads letters, and says for each which one comes next."""

    def __init__(self, letters: int, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(letters, width)
        self.layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, letters)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        return self.head(self.layer(self.embedding(tokens), src_mask=mask, is_causal=True))


def train(model: Transformer, tokens: Tensor, steps: int = 30) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> tuple[list[float], list[float], dict[str, int]]:
    text = "a device of ones own is a few lines of python. " * 8
    letters = sorted(set(text))
    tokens = torch.tensor([letters.index(c) for c in text]).view(8, -1)
    torch.manual_seed(0)
    model = Transformer(len(letters))
    on_cpu = train(copy.deepcopy(model), tokens)

    backend = make_device()
    on_npy = train(model.to("npy"), tokens.to("npy"))

    print("step   cpu      npy")
    for step in (0, len(on_cpu) // 2, len(on_cpu) - 1):
        print(f"{step:4}   {on_cpu[step]:.4f}   {on_npy[step]:.4f}")
    assert all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(on_cpu, on_npy, strict=True))
    counts = backend.fallback_counts()
    print("on the CPU instead:", ", ".join(f"{op} {count}" for op, count in list(counts.items())[:6]), "...")
    return on_cpu, on_npy, counts


if __name__ == "__main__":
    main()
