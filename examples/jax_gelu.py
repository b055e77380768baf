"""A function of JAX as an op, and its gradient by JAX: the backward is another op, made with `jax.vjp`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import torch
from torch import Tensor

from customops import custom_op
from customops.languages import from_jax

FLOATS = [torch.float32, torch.bfloat16]  # JAX narrows float64, unless it is told not to: from_jax refuses it


@custom_op("examples::jax_gelu", mutates_args=())
@from_jax(copy=True)
@jax.jit
def gelu(x: Tensor) -> Tensor:
    return jax.nn.gelu(x)  # type: ignore[no-any-return]


@custom_op("examples::jax_gelu_backward", mutates_args=())
@from_jax(copy=True)
@jax.jit
def gelu_backward(x: Tensor, grad: Tensor) -> Tensor:
    _, vjp = jax.vjp(jax.nn.gelu, x)
    return vjp(grad)[0]  # type: ignore[no-any-return]


@gelu.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@gelu_backward.register_fake
def _(x: Tensor, grad: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def backward(ctx: Any, grad: Tensor) -> Tensor:
    return gelu_backward(*ctx.saved_tensors, grad)


gelu.register_autograd(backward, setup_context=setup_context, once_differentiable=True)
gelu.register_vmap("broadcast_all")


@gelu.register_samples(vary={"x.dtype": FLOATS})
def _() -> Iterator[tuple[Tensor]]:
    yield (torch.randn(3, 4, requires_grad=True),)
    yield (torch.randn(4, 3).t(),)


@gelu_backward.register_samples(vary={"x.dtype": FLOATS, "grad.dtype": FLOATS})
def _() -> Iterator[tuple[Tensor, Tensor]]:
    yield torch.randn(3, 4), torch.randn(3, 4)
    yield torch.randn(4, 3).t(), torch.randn(3, 4)


def main() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    expected = torch.nn.functional.gelu(x, approximate="tanh")
    for fn in (gelu, torch.compile(gelu, fullgraph=True)):
        torch.testing.assert_close(fn(x), expected)
    ours, theirs = (torch.autograd.grad(y.sum(), x)[0] for y in (gelu(x), expected))
    torch.testing.assert_close(ours, theirs)
    print("gelu and its gradient by JAX are those of torch, compiled too")


if __name__ == "__main__":
    main()
