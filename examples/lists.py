"""An op on lists of tensors, as optimizers and optimizer-like kernels take them ("foreach" ops).

Shows list arguments and returns. In setup_context and backward a list stays a list: `inputs`, `output`, the incoming
gradients, `ctx.needs_input_grad` and what backward returns all have the shape of the op's signature.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from customops import custom_op


@custom_op("examples::clip_all", mutates_args=())
def clip_all(tensors: list[Tensor], bound: float) -> list[Tensor]:
    return [tensor.clamp(-bound, bound) for tensor in tensors]


@clip_all.register_fake
def _(tensors: list[Tensor], bound: float) -> list[Tensor]:
    return [torch.empty_like(tensor, dtype=torch.result_type(tensor, bound)) for tensor in tensors]


def setup_context(ctx: Any, inputs: tuple[list[Tensor], float], output: list[Tensor]) -> None:
    tensors, ctx.bound = inputs
    ctx.save_for_backward(*tensors)


def backward(ctx: Any, grads: list[Tensor]) -> tuple[list[Tensor | None], None]:
    needed, _ = ctx.needs_input_grad
    return [
        grad * (tensor.abs() <= ctx.bound) if wanted else None
        for tensor, grad, wanted in zip(ctx.saved_tensors, grads, needed, strict=True)
    ], None  # a list for the list, None for the number


clip_all.register_autograd(backward, setup_context=setup_context)


@clip_all.register_samples
def _() -> Iterator[tuple[list[Tensor], float]]:
    yield [torch.randn(3), torch.randn(2, 2)], 0.5
    yield [torch.randn(3, requires_grad=True), torch.randn(2), torch.randn(4, 1, requires_grad=True)], 1.0


def main() -> None:
    print("schema:", clip_all.schema)

    tensors = [torch.tensor([-2.0, 0.5], requires_grad=True), torch.tensor([0.1, 3.0], requires_grad=True)]
    first, second = clip_all(tensors, 1.0)
    print("clipped:", first.tolist(), second.tolist())
    (first.sum() + 10 * second.sum()).backward()
    print("gradients:", [tensor.grad.tolist() for tensor in tensors])

    compiled = torch.compile(lambda tensors: [2 * y for y in clip_all(tensors, 1.0)], fullgraph=True)
    print("compiled:", [y.tolist() for y in compiled(tensors)])


if __name__ == "__main__":
    main()
