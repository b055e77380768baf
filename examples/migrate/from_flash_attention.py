"""flash-attention's wrappers: `custom_op` where torch has it, else the plain function, and a `triton_op` of its own.

It looks at torch's version, wraps functions in functions that do nothing on older ones, tries ``torch.ops`` for each op
and falls back to the function, and has a copy of torch's `triton_op` that looks at ``schema=``. Here the wrapper
returns an op or the function, which a caller calls directly, and `schema` is an option.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from customops import adopt, custom_op, helper

SUPPORTED = hasattr(torch.library, "custom_op")


@helper
def custom_op_wrapper(
    name: str,
    fn: Callable[..., Any] | None = None,
    /,
    *,
    mutates_args: str | Iterable[str],
    device_types: str | None = None,
    schema: str | None = None,
) -> Any:
    """Define an op and return its object; with a torch that is too old, return the function unchanged."""
    if not SUPPORTED:
        return fn or (lambda function: function)
    return custom_op(name, fn, mutates_args=mutates_args, device_types=device_types, schema=schema)


@helper
def register_fake_wrapper(
    op: str, fn: Callable[..., Any] | None = None, /, *, lib: Any = None, _stacklevel: int = 1
) -> Any:
    """Register the fake impl of an op that `custom_op_wrapper` defined."""
    if fn is None:
        return functools.partial(register_fake_wrapper, op, lib=lib)
    if SUPPORTED:
        adopt(op).register_fake(fn, lib=lib)
    return fn


@helper
def triton_op(
    name: str,
    fn: Callable[..., Any] | None = None,
    /,
    *,
    mutates_args: str | Iterable[str],
    schema: str | None = None,
    allow_decomposition: bool = True,
) -> Any:
    """An op of wrapped Triton kernels and torch's ops, which compilers trace into if `allow_decomposition` says so."""
    if fn is None:
        options = {"mutates_args": mutates_args, "schema": schema, "allow_decomposition": allow_decomposition}
        return functools.partial(triton_op, name, **options)
    op = custom_op(name, fn, mutates_args=mutates_args, schema=schema, traceable=allow_decomposition)
    if not allow_decomposition:
        op.register_fake("kernel")
    return op


# Ops of the kinds that flash-attention has: several results, and a backward that writes into what the caller has ------


@custom_op_wrapper("examples_flash_attention::forward", mutates_args=(), device_types="cpu")
def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool, alibi_slopes: Tensor | None
) -> tuple[Tensor, Tensor]:
    torch._check(q.shape[:-2] == k.shape[:-2] == v.shape[:-2], lambda: "q, k and v must have the same batches")
    scores = (q @ k.mT) * softmax_scale
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


@register_fake_wrapper("examples_flash_attention::forward")
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1])


@custom_op_wrapper("examples_flash_attention::backward", mutates_args=("dq", "dk", "dv"), device_types="cpu")
def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    softmax_scale: float,
    causal: bool,
) -> Tensor:
    scores = (q @ k.mT) * softmax_scale
    weights = (scores - lse[..., None]).exp()
    if causal:
        weights = weights.tril()
    dweights = dout @ v.mT
    delta = (weights * dweights).sum(-1)
    dscores = weights * (dweights - delta[..., None]) * softmax_scale
    for gradient, value in ((dq, dscores @ k), (dk, dscores.mT @ q), (dv, weights.mT @ dout)):
        if gradient is not None:
            gradient.copy_(value)
    return delta


@register_fake_wrapper("examples_flash_attention::backward")
def _(dout: Tensor, q: Tensor, *others: Any) -> Tensor:
    return q.new_empty(q.shape[:-1])


class Attention(torch.autograd.Function):
    """The gradient stays in an `autograd.Function` around the two ops, as it was."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
        out, lse = attention_forward(q, k, v, scale, causal, None)
        ctx.save_for_backward(q, k, v, lse)
        ctx.scale, ctx.causal = scale, causal
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, lse = ctx.saved_tensors
        gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        attention_backward(dout, q, k, v, lse, *gradients, ctx.scale, ctx.causal)
        return *gradients, None, None


@attention_forward.register_samples
def _() -> Iterator[tuple[Any, ...]]:
    yield torch.randn(2, 3, 4), torch.randn(2, 3, 4), torch.randn(2, 3, 4), 0.5, True, None
    yield torch.randn(3, 4), torch.randn(5, 4), torch.randn(5, 2), 1.0, False, None


@attention_backward.register_samples
def _() -> Iterator[tuple[Any, ...]]:
    q, k, v, dout = torch.randn(4, 2, 3, 4)
    lse = (q @ k.mT * 0.5).logsumexp(-1)
    yield dout, q, k, v, lse, torch.zeros_like(q), None, torch.zeros_like(v), 0.5, False


def main() -> None:
    q, k, v = (torch.randn(2, 3, 4, requires_grad=True) for _ in range(3))
    Attention.apply(q, k, v, 0.5, True).sum().backward()
    print("gradient of q:", q.grad)


if __name__ == "__main__":
    main()
