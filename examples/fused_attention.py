"""Attention as fused kernels have it: with a window, a soft cap, and a log-sum-exp for those who ask for it.

Shows a pair of ints, options that may be None, and a NamedTuple with a field that is not always there. Kernel, fake
impl, formula and callers get what the signature says: nobody packs, unpacks, or stands for None with an empty tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from customops import custom_op


class Attention(NamedTuple):
    out: Tensor  # (batch, queries, heads, width)
    lse: Tensor | None  # (batch, heads, queries): the logarithm of what the softmax divides by


@custom_op("examples::fused_attention")
def fused_attention(
    q: Tensor,  # (batch, queries, heads, width)
    k: Tensor,  # (batch, keys, heads, width)
    v: Tensor,
    scale: float | None = None,  # None: 1 / sqrt(width)
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),  # how many keys are seen to the left and to the right; -1: all
    softcap: float | None = None,
    *,
    return_lse: bool = False,
) -> Attention:
    # A real one would go through the keys block by block, and never hold all weights.
    weights, lse, _ = weigh(q, k, scale, causal, window, softcap)
    return Attention(torch.einsum("bhqk,bkhd->bqhd", weights, v).contiguous(), lse if return_lse else None)


@fused_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any, return_lse: bool) -> Attention:
    batch, queries, heads = q.shape[:3]
    return Attention(q.new_empty(q.shape), q.new_empty(batch, heads, queries) if return_lse else None)


def weigh(
    q: Tensor, k: Tensor, scale: float | None, causal: bool, window: tuple[int, int], softcap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The weights of the keys, the log-sum-exp, and how much a score changes with the product of query and key."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    slope = torch.full_like(scores, scale)
    if softcap is not None:
        capped = torch.tanh(scores / softcap)
        scores, slope = softcap * capped, slope * (1 - capped * capped)
    lse = (scores := scores.masked_fill(~visible(q, k, causal, window), -torch.inf)).logsumexp(-1)
    lowest = torch.finfo(lse.dtype).min  # a query that sees no key has weights of 0
    return (scores - lse.clamp(min=lowest).unsqueeze(-1)).exp(), lse, slope


def visible(q: Tensor, k: Tensor, causal: bool, window: tuple[int, int]) -> Tensor:
    """Which query sees which key. The last query stands at the last key."""
    queries, keys = q.shape[1], k.shape[1]
    left, right = window[0], 0 if causal else window[1]
    ahead = torch.arange(keys, device=q.device) - torch.arange(keys - queries, keys, device=q.device).unsqueeze(-1)
    return (ahead >= (-left if left >= 0 else -keys)) & (ahead <= (right if right >= 0 else keys))


def setup_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Attention) -> None:
    q, k, v, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, output.out)


def backward(ctx: Any, grad: Tensor, grad_lse: Tensor | None) -> dict[str, Tensor]:
    q, k, v, out = ctx.saved_tensors
    weights, _, slope = weigh(q, k, *ctx.options)
    grad_rows = (0 if grad_lse is None else grad_lse) - torch.einsum("bqhd,bqhd->bhq", grad, out)
    grad_products = weights * (torch.einsum("bqhd,bkhd->bhqk", grad, v) + grad_rows.unsqueeze(-1)) * slope
    return {
        "q": torch.einsum("bhqk,bkhd->bqhd", grad_products, k),
        "k": torch.einsum("bhqk,bqhd->bkhd", grad_products, q),
        "v": torch.einsum("bhqk,bqhd->bkhd", weights, grad),
    }


fused_attention.register_autograd(backward, setup_context=setup_context)


def inputs(queries: int = 4, keys: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(2, n, 3, 8, dtype=torch.float64, requires_grad=True) for n in (queries, keys, keys))
    return q, k, v


@fused_attention.register_samples
def _() -> Iterator[Any]:
    yield inputs()
    yield (*inputs(), 0.5, True, (2, -1), 3.0), {"return_lse": True}


def main() -> None:
    print("schema:", fused_attention.schema)
    q, k, v = leaves = inputs()
    out, lse = fused_attention(q, k, v, 0.3, window=(1, 2))
    mask, rows = visible(q, k, causal=False, window=(1, 2)), [x.transpose(1, 2) for x in leaves]
    expected = F.scaled_dot_product_attention(*rows, attn_mask=mask, scale=0.3).transpose(1, 2)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), leaves) for y in (out, expected)))
    print("output and gradients are those of torch's attention; the log-sum-exp is", lse)

    capped = functools.partial(fused_attention, causal=True, softcap=3.0, return_lse=True)
    assert torch.autograd.gradcheck(capped, inputs())
    compiled = torch.compile(capped, fullgraph=True, dynamic=True)
    torch.testing.assert_close(compiled(*leaves), capped(*leaves))
    print("gradients through both outputs agree with finite differences; compiled, the result is the same")


if __name__ == "__main__":
    main()
