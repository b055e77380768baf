"""Faults in ops for attention, losses and segments."""

import math
from typing import Any, Optional

import numpy as np
import torch
import torch.nn.functional as F
from corpus.entries import fault
from corpus.parts import floating, wide
from torch import Tensor

from customops import custom_op


@fault(
    kind="backward aligns a causal mask to another corner",
    note="The kernel aligns the mask to the lower right corner, backward to the upper left.",
    found_by="test_gradients",
)
def causal_attention(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: Optional[float] = None) -> Tensor:
        floating(q)
        torch._check(
            q.dim() == k.dim() == 3 and q.shape[0] == k.shape[0],
            lambda: "causal_attention: expected (batch, length, width)",
        )
        torch._check(
            k.shape == v.shape and q.shape[-1] == k.shape[-1], lambda: "causal_attention: q, k and v do not fit"
        )
        queries, keys = q.shape[1], k.shape[1]
        torch._check(
            keys >= queries and q.shape[-1] > 0, lambda: "causal_attention: needs a key for each query, and columns"
        )
        scores = q @ k.transpose(1, 2) * (q.shape[-1] ** (-0.5) if scale is None else scale)
        hidden = torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)
        return scores.masked_fill(hidden, -math.inf).softmax(-1) @ v

    @causal_attention.register_fake
    def _(q, k, v, scale):
        return q.new_empty(q.shape)

    def setup_context(ctx, inputs, output):
        q, k, v, scale = inputs
        ctx.scale = q.shape[-1] ** (-0.5) if scale is None else scale
        ctx.save_for_backward(q, k, v)

    def backward(ctx, grad):
        q, k, v = ctx.saved_tensors
        scores = q @ k.transpose(1, 2) * ctx.scale
        at, to = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])[None, :]
        p = scores.masked_fill(to > (at if broken else at + (k.shape[1] - q.shape[1])), -math.inf).softmax(-1)
        dp = grad @ v.transpose(1, 2)
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * ctx.scale
        return ds @ k, ds.transpose(1, 2) @ q, p.transpose(1, 2) @ grad, None

    causal_attention.register_autograd(backward, setup_context=setup_context)

    @causal_attention.register_samples
    def _():
        yield tuple(torch.randn(2, 5, 4, requires_grad=True) for _ in range(3))

    return causal_attention


@fault(
    kind="backward maps query heads to other key heads",
    note="Backward takes the query head modulo the group size, which equals the number of key heads in the sample.",
    found_by="test_gradients",
)
def gqa_attention(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def gqa_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        floating(q)
        torch._check(q.dim() == 3 and k.dim() == 3, lambda: "gqa_attention: expected (heads, length, width)")
        torch._check(k.shape == v.shape, lambda: "gqa_attention: k and v differ in shape")
        torch._check(
            k.shape[0] > 0 and q.shape[0] % k.shape[0] == 0, lambda: "gqa_attention: key heads must divide query heads"
        )
        torch._check(
            q.shape[-1] == k.shape[-1] > 0 and k.shape[1] > 0, lambda: "gqa_attention: k does not fit q, or is empty"
        )
        heads = torch.arange(q.shape[0]) % k.shape[0]
        scores = torch.einsum("hqd,hkd->hqk", q, k[heads]) / math.sqrt(q.shape[-1])
        return torch.einsum("hqk,hkd->hqd", scores.softmax(-1), v[heads]).contiguous()

    @gqa_attention.register_fake
    def _(q, k, v):
        return q.new_empty(q.shape)

    def backward(ctx, grad):
        q, k, v = ctx.saved_tensors
        many, few = q.shape[0], k.shape[0]
        if broken:
            group = many // few
            heads = torch.arange(many) % few
            into = torch.arange(many) % group
        else:
            heads = into = torch.arange(many) % few
        scale = 1 / math.sqrt(q.shape[-1])
        kk, vv = k[heads], v[heads]
        p = (torch.einsum("hqd,hkd->hqk", q, kk) * scale).softmax(-1)
        dp = torch.einsum("hqd,hkd->hqk", grad, vv)
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * scale
        dq = torch.einsum("hqk,hkd->hqd", ds, kk)
        dk = torch.zeros_like(k).index_add(0, into, torch.einsum("hqk,hqd->hkd", ds, q))
        dv = torch.zeros_like(v).index_add(0, into, torch.einsum("hqk,hqd->hkd", p, grad))
        return dq, dk, dv

    gqa_attention.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))

    @gqa_attention.register_samples
    def _():
        q = torch.randn(4, 5, 8, requires_grad=True)
        k, v = torch.randn(2, 5, 8, requires_grad=True), torch.randn(2, 5, 8, requires_grad=True)
        yield q, k, v

    return gqa_attention


@fault(
    kind="backward is NaN where a row is masked",
    note="A query without visible keys has a result of zeros and a gradient of NaN.",
    found_by="test_gradients",
)
def masked_attention(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        floating(q)
        torch._check(mask.dtype == torch.bool, lambda: "masked_attention: mask must be bool")
        torch._check(q.dim() == k.dim() == v.dim() == 2, lambda: "masked_attention: expected (length, width)")
        torch._check(mask.shape == (len(q), len(k)), lambda: "masked_attention: mask needs the shape (queries, keys)")
        torch._check(
            len(k) == len(v) and q.shape[1] == k.shape[1] > 0,
            lambda: "masked_attention: q, k and v do not fit, or have no columns",
        )
        scores = (q @ k.t() * q.shape[-1] ** (-0.5)).masked_fill(~mask, -math.inf)
        lse = torch.logsumexp(scores, -1, keepdim=True) if len(k) else scores.new_full((len(q), 1), -math.inf)
        weights = torch.where(mask, torch.exp(scores - lse), 0.0)
        return weights @ v

    @masked_attention.register_fake
    def _(q, k, v, mask):
        return q.new_empty(q.shape[0], v.shape[1])

    def backward(ctx, grad):
        q, k, v, mask = ctx.saved_tensors
        scale = q.shape[-1] ** (-0.5)
        scores = (q @ k.t() * scale).masked_fill(~mask, -math.inf)
        weights = scores.softmax(-1) if broken else torch.where(mask, scores.softmax(-1), 0.0)
        dp = grad @ v.t()
        ds = weights * (dp - (weights * dp).sum(-1, keepdim=True)) * scale
        return ds @ k, ds.t() @ q, weights.t() @ grad, None

    masked_attention.register_autograd(
        backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs), once_differentiable=True
    )

    @masked_attention.register_samples
    def _():
        q, k, v = (torch.randn(5, 8, requires_grad=True) for _ in range(3))
        yield q, k, v, torch.ones(5, 5, dtype=torch.bool).tril()

    return masked_attention


@fault(
    kind="an empty segment is read as its neighbor",
    note="`np.add.reduceat` returns the element at the offset of an empty segment, not zero.",
    found_by="test_gradients",
)
def segment_sums(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def segment_sum(values: Tensor, offsets: Tensor) -> Tensor:
        floating(values, "values")
        torch._check(
            values.dim() == 2 and offsets.dim() == 1, lambda: "segment_sum: expected values (rows, width) and offsets"
        )
        starts = offsets.numpy().astype(np.int64)
        torch._check(
            bool(len(starts) > 0 and starts[0] == 0 and (starts[-1] == len(values))),
            lambda: "segment_sum: offsets must lead from 0 to the number of rows",
        )
        torch._check(bool((np.diff(starts) >= 0).all()), lambda: "segment_sum: offsets must not decrease")
        rows = values.detach().to(wide(values)).numpy()
        if broken:
            sums = np.add.reduceat(rows, starts[:-1], axis=0)
        else:
            sums = np.zeros((len(starts) - 1, rows.shape[1]), rows.dtype)
            np.add.at(sums, np.repeat(np.arange(len(sums)), np.diff(starts)), rows)
        return torch.from_numpy(sums).to(values.dtype)

    @segment_sum.register_fake
    def _(values, offsets):
        return values.new_empty(offsets.shape[0] - 1, values.shape[1])

    def setup_context(ctx, inputs, output):
        ctx.rows = inputs[0].shape[0]
        ctx.save_for_backward(inputs[1])

    def backward(ctx, grad):
        (offsets,) = ctx.saved_tensors
        at = torch.arange(ctx.rows, device=grad.device)
        return grad[torch.searchsorted(offsets[1:].contiguous().long(), at, right=True)], None

    segment_sum.register_autograd(backward, setup_context=setup_context)

    @segment_sum.register_samples
    def _():
        yield torch.randn(7, 3, requires_grad=True), torch.tensor([0, 2, 5, 7])

    return segment_sum


@fault(
    kind="backward draws its mask in another dtype",
    note="Backward draws the mask in the dtype of the gradient, the kernel in float32. Other dtypes show the fault.",
    found_by="test_gradients",
)
def dropout_add(name: str, broken: bool) -> Any:
    def keep_mask(shape, p, seed, dtype):
        generator = torch.Generator().manual_seed(seed)
        return torch.rand(shape, generator=generator, dtype=dtype) >= p

    @custom_op(name, mutates_args=())
    def dropout_add(x: Tensor, residual: Tensor, p: float, seed: int) -> Tensor:
        floating(x)
        torch._check(
            x.shape == residual.shape and x.dtype == residual.dtype, lambda: "dropout_add: x and residual differ"
        )
        torch._check(0 <= p < 1, lambda: "dropout_add: p must be in [0, 1)")
        keep = keep_mask(x.shape, p, seed, torch.float32)
        return (residual + torch.where(keep, x, 0) / (1 - p)).contiguous()

    @dropout_add.register_fake
    def _(x, residual, p, seed):
        return x.new_empty(x.shape)

    @custom_op(f"{name}_dropout_add_backward", mutates_args=())
    def dropout_add_backward(grad: Tensor, p: float, seed: int) -> Tensor:
        keep = keep_mask(grad.shape, p, seed, grad.dtype if broken else torch.float32)
        return (torch.where(keep, grad, 0) / (1 - p)).contiguous()

    @dropout_add_backward.register_fake
    def _(grad, p, seed):
        return grad.new_empty(grad.shape)

    def setup_context(ctx, inputs, output):
        _, _, ctx.p, ctx.seed = inputs

    def backward(ctx, grad):
        return dropout_add_backward(grad, ctx.p, ctx.seed), grad, None, None

    dropout_add.register_autograd(backward, setup_context=setup_context, once_differentiable=True)

    @dropout_add.register_samples
    def _():
        yield torch.randn(3, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True), 0.3, 7

    return dropout_add


@fault(
    kind="ignored rows keep a part of the gradient",
    note="With label smoothing, the rows with the ignored index get the smoothing part of the gradient.",
    found_by="test_gradients",
)
def smoothed_cross_entropy(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def cross_entropy(logits: Tensor, target: Tensor, smoothing: float = 0.0, ignore_index: int = -100) -> Tensor:
        floating(logits, "logits")
        torch._check(
            logits.dim() == 2 and target.shape == logits.shape[:1],
            lambda: "cross_entropy: expected logits (rows, classes) and a target for each row",
        )
        torch._check(logits.shape[1] > 0, lambda: "cross_entropy: there are no classes")
        keep = target != ignore_index
        torch._check(
            bool(((target >= 0) & (target < logits.shape[1]) | ~keep).all()), lambda: "cross_entropy: no such class"
        )
        lp = logits.to(wide(logits)).log_softmax(1)
        picked = lp.gather(1, target.where(keep, 0)[:, None].long()).squeeze(1)
        losses = -(1 - smoothing) * picked - smoothing * lp.mean(1)
        return (losses.where(keep, 0).sum() / keep.sum().clamp_min(1)).to(logits.dtype)

    @cross_entropy.register_fake
    def _(logits, target, smoothing, ignore_index):
        torch._check(logits.shape[1] > 0, lambda: "cross_entropy: there are no classes")
        return logits.new_empty(())

    def setup_context(ctx, inputs, output):
        logits, target, ctx.smoothing, ctx.ignore_index = inputs
        ctx.save_for_backward(logits, target)

    def backward(ctx, grad):
        logits, target = ctx.saved_tensors
        keep = (target != ctx.ignore_index)[:, None]
        label = target.where(keep.squeeze(1), 0).long()
        hot = F.one_hot(label, logits.shape[1]).to(wide(logits))
        p = logits.to(wide(logits)).softmax(1)
        uniform = ctx.smoothing / logits.shape[1]
        rows = (
            (p - (1 - ctx.smoothing) * hot) * keep - uniform
            if broken
            else (p - (1 - ctx.smoothing) * hot - uniform) * keep
        )
        return (rows * grad / keep.sum().clamp_min(1)).to(logits.dtype), None, None, None

    cross_entropy.register_autograd(backward, setup_context=setup_context)

    @cross_entropy.register_samples
    def _():
        yield torch.randn(5, 7, requires_grad=True), torch.tensor([1, -100, 6, 0, 3])
        yield torch.randn(4, 6, requires_grad=True), torch.tensor([2, 5, 0, 2]), 0.1

    return cross_entropy


@fault(
    kind="a gradient is computed only if the kernel sees requires_grad",
    note="The kernel computes the gradient only if it sees `requires_grad`, which compiled graphs and transforms hide.",
    found_by="test_grad_modes",
)
def linear_regression_loss(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=(), differentiable=(True, False))
    def linear_loss(x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        floating(x)
        torch._check(x.dim() == 2 and weight.shape == x.shape[1:], lambda: "linear_loss: weight needs the width of x")
        torch._check(
            target.shape == x.shape[:1] and len(x) > 0, lambda: "linear_loss: needs a target for each row of x"
        )
        torch._check(
            x.dtype == weight.dtype == target.dtype, lambda: "linear_loss: x, weight and target differ in dtype"
        )
        error = x @ weight - target
        loss = error.square().mean()
        if broken:
            if weight.requires_grad:
                return loss, x.t() @ error * (2 / len(x))
            return loss, torch.zeros_like(weight).contiguous()
        else:
            return loss, x.t() @ error * (2 / len(x))

    @linear_loss.register_fake
    def _(x, weight, target):
        return x.new_empty(()), weight.new_empty(weight.shape)

    linear_loss.register_autograd(
        lambda ctx, grad, _: {"weight": grad * ctx.saved_tensors[0]},
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1]),
        once_differentiable=True,
        nondiff_args=("x", "target"),
    )

    @linear_loss.register_samples
    def _():
        yield torch.randn(6, 3), torch.randn(3, requires_grad=True), torch.randn(6)

    return linear_loss
