"""Operators as libraries define them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, List, Optional, Tuple

import numpy as np
import torch
from torch import Tensor

from helpers.drop_in.program import Args, Program, program, rand


@program
def silu_and_mul(library: Any, ns: str) -> Program:
    """vLLM's activations: the caller allocates the result; one function for each device."""

    @library.custom_op(f"{ns}::silu_and_mul", mutates_args=["out"], device_types="cpu")
    def silu_and_mul(out: Tensor, x: Tensor) -> None:
        d = x.shape[-1] // 2
        out.copy_(torch.nn.functional.silu(x[..., :d]) * x[..., d:])

    @silu_and_mul.register_kernel("cuda")
    def _(out: Tensor, x: Tensor) -> None:
        raise NotImplementedError

    @silu_and_mul.register_fake
    def _(out: Tensor, x: Tensor) -> None:
        return None

    packet = getattr(torch.ops, ns).silu_and_mul

    def run(out: Tensor, x: Tensor) -> Tensor:
        packet(out, x)
        fresh = torch.empty_like(out)
        packet(fresh, x)
        return fresh * 2

    return Program(silu_and_mul, lambda: (torch.zeros(3, 4), rand(3, 8)), run=run)


@program
def rms_norm(library: Any, ns: str) -> Program:
    """A normalisation with its gradient, tensors kept with save_for_backward."""

    @library.custom_op(f"{ns}::rms_norm", mutates_args=())
    def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight

    @library.register_fake(f"{ns}::rms_norm")
    def _(x, weight, eps=1e-6):  # type: ignore[no-untyped-def]
        torch._check(x.shape[-1] == weight.shape[0])
        return torch.empty_like(x)

    def setup_context(ctx: Any, inputs: Args, output: Tensor) -> None:
        x, weight, ctx.eps = inputs
        ctx.save_for_backward(x, weight)

    def backward(ctx: Any, grad: Tensor) -> Args:
        x, weight = ctx.saved_tensors
        inverse = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + ctx.eps)
        normed, grad_normed = x * inverse, grad * weight
        grad_x = inverse * (grad_normed - normed * (grad_normed * normed).mean(-1, keepdim=True))
        return grad_x, (grad * normed).flatten(0, -2).sum(0), None

    library.register_autograd(f"{ns}::rms_norm", backward, setup_context=setup_context)
    return Program(
        rms_norm,
        lambda: (rand(3, 4, grad=True), rand(4, grad=True), 1e-5),
        more={
            "default": lambda: rms_norm(rand(3, 4), rand(4)),
            "keywords": lambda: rms_norm(weight=rand(4), x=rand(3, 4), eps=0.5),
            "int for a float": lambda: rms_norm(rand(3, 4), rand(4), 1),
            "None for a float": lambda: rms_norm(rand(3, 4), rand(4), None),
            "the kernel raises": lambda: rms_norm(rand(3, 4), rand(5)),
            "the fake raises": lambda: rms_norm(rand(3, 4).to("meta"), rand(5).to("meta")),
            "double backward": lambda: torch.autograd.gradgradcheck(
                rms_norm, (rand(2, 3, grad=True, dtype=torch.float64), rand(3, grad=True, dtype=torch.float64))
            ),
        },
    )


@program
def rotary_embedding(library: Any, ns: str) -> Program:
    """vLLM's rotary embedding: query, and key where there is one, are rotated in place."""

    def rotate(x: Tensor, cos: Tensor, sin: Tensor, head_size: int) -> None:
        heads = x.view(x.shape[0], -1, head_size)
        first, second = heads.chunk(2, -1)
        heads.copy_(torch.cat([first * cos - second * sin, second * cos + first * sin], -1))

    @library.custom_op(f"{ns}::rotary_embedding", mutates_args={"query", "key"})
    def rotary_embedding(
        positions: Tensor, query: Tensor, key: Optional[Tensor], head_size: int, cache: Tensor, neox: bool = True
    ) -> None:
        cos, sin = (part[:, None] for part in cache[positions].chunk(2, -1))
        rotate(query, cos, sin, head_size)
        if key is not None:
            rotate(key, cos, sin, head_size)

    rotary_embedding.register_fake(lambda positions, query, key, head_size, cache, neox=True: None)

    def args(key: bool = True) -> Args:
        return torch.arange(3), rand(3, 8), rand(3, 4) if key else None, 4, rand(10, 4)

    return Program(rotary_embedding, args, more={"no key": lambda: rotary_embedding(*args(key=False))})


@program
def reshape_and_cache(library: Any, ns: str) -> Program:
    """Writing keys and values to the slots of a paged cache."""

    @library.custom_op(
        f"{ns}::reshape_and_cache", mutates_args=("key_cache", "value_cache"), device_types=("cpu", "cuda")
    )
    def reshape_and_cache(
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str = "auto",
        scales: Optional[Sequence[float]] = None,  # torch takes no list as a default; we do
    ) -> None:
        scales = scales or [1.0, 2.0]
        assert kv_cache_dtype in ("auto", "fp8")
        key_cache.view(-1, key.shape[-1])[slot_mapping] = key / scales[0]
        value_cache.view(-1, key.shape[-1])[slot_mapping] = value / scales[1]

    @library.register_fake(reshape_and_cache)
    def _(*args: Any) -> None: ...

    def args() -> Args:
        slots = torch.tensor([5, 0, 2])
        return rand(3, 4), rand(3, 4), torch.zeros(2, 4, 4), torch.zeros(2, 4, 4), slots, "auto", [1.0, 4.0]

    return Program(
        reshape_and_cache,
        args,
        more={
            "the kernel asserts": lambda: reshape_and_cache(*args()[:5], "int3"),
            "number for a str": lambda: reshape_and_cache(*args()[:5], 3),
        },
    )


@program
def paged_attention(library: Any, ns: str) -> Program:
    """Attention with optional tensors and an optional window, defined with the older spellings of hints."""

    def paged_attention_impl(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: Optional[float] = None,
        alibi_slopes: Optional[Tensor] = None,
        window: Optional[List[int]] = None,
        seq_lens: Optional[Sequence[int]] = None,
    ) -> Tensor:
        scores = q @ k.mT * (scale or 1 / math.sqrt(q.shape[-1]))
        if alibi_slopes is not None:
            scores = scores + alibi_slopes[:, None, None] * torch.arange(k.shape[-2])
        if window is not None:
            scores = scores.tril(window[1]).triu(-window[0])
        return scores.softmax(-1) @ v

    op = library.custom_op(f"{ns}::paged_attention", paged_attention_impl, mutates_args=())
    library.register_fake(op, lambda q, *args: torch.empty_like(q))

    def qkv() -> Args:
        return rand(2, 3, 4), rand(2, 5, 4), rand(2, 6, 4)[:, :5]

    return Program(
        op,
        lambda: (*qkv(), 0.5, rand(2), [1, 2], [3, 4]),
        more={
            "defaults": lambda: op(*qkv()),
            "one keyword": lambda: op(*qkv(), alibi_slopes=rand(2)),
            "text for an optional tensor": lambda: op(*qkv(), None, "text"),
        },
    )


@program
def nms(library: Any, ns: str) -> Program:
    """torchvision's: declared in a library, kernel by dispatch key, a size that depends on data."""
    lib = torch.library.Library(ns, "FRAGMENT")
    lib.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

    def kernel(dets: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
        order, kept = scores.argsort(descending=True).tolist(), []
        for i in order:
            left, right = torch.minimum(dets[i], dets), torch.maximum(dets[i], dets)
            overlap = (left[:, 2:] - right[:, :2]).clamp(min=0).prod(-1)
            area = (dets[:, 2:] - dets[:, :2]).prod(-1)
            iou = overlap / (area + area[i] - overlap)
            if all(iou[k] <= iou_threshold for k in kept):
                kept.append(i)
        return torch.tensor(kept)

    lib.impl("nms", kernel, "CPU")

    @library.register_fake(f"{ns}::nms", lib=lib)
    def _(dets: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
        torch._check(dets.dim() == 2, lambda: "boxes should be a 2d tensor")
        return dets.new_empty(library.get_ctx().new_dynamic_size(max=len(dets)), dtype=torch.long)

    def args() -> Args:
        corners = rand(6, 2)
        return torch.cat([corners, corners + 0.3 + rand(6, 2)], 1), rand(6), 0.5

    op = getattr(torch.ops, ns).nms
    return Program(op, args, run=lambda *inputs: op(*inputs) * 2, keep=lib)


@program
def roi_align(library: Any, ns: str) -> Program:
    """A pooling whose backward needs only numbers, kept on ctx."""

    @library.custom_op(f"{ns}::roi_align", mutates_args=())
    def roi_align(
        x: Tensor, rois: Tensor, spatial_scale: float, height: int, width: int, aligned: bool = False
    ) -> Tensor:
        return x.mean((2, 3))[rois[:, 0].long()][:, :, None, None].repeat(1, 1, height, width) * spatial_scale

    @roi_align.register_fake
    def _(x: Tensor, rois: Tensor, spatial_scale: float, height: int, width: int, aligned: bool = False) -> Tensor:
        return x.new_empty((rois.shape[0], x.shape[1], height, width))

    def setup_context(ctx: Any, inputs: Args, output: Tensor) -> None:
        x, ctx.rois, ctx.scale, *_ = inputs
        ctx.sizes = x.shape

    def backward(ctx: Any, grad: Tensor) -> Args:
        n, channels, height, width = ctx.sizes
        images = grad.new_zeros(n, channels).index_add(0, ctx.rois[:, 0].long(), grad.sum((2, 3)) * ctx.scale)
        return (images[:, :, None, None] / (height * width)).expand(ctx.sizes), None, None, None, None, None

    roi_align.register_autograd(backward, setup_context=setup_context)
    rois = torch.tensor([[0.0, 1, 1, 2, 2], [1.0, 0, 0, 3, 3], [0.0, 0, 0, 1, 1]])
    return Program(roi_align, lambda: (rand(2, 3, 4, 4, grad=True), rois, 0.5, 2, 3))


@program
def jagged_to_padded_dense(library: Any, ns: str) -> Program:
    """FBGEMM's: lists of tensors and of sizes; sizes of the result are symbols when compiled."""

    @library.custom_op(f"{ns}::jagged_to_padded_dense", mutates_args=())
    def dense(values: Tensor, offsets: list[Tensor], max_lengths: Sequence[int], padding_value: float = 0.0) -> Tensor:
        bounds = offsets[0].tolist()
        rows = values.new_full((len(bounds) - 1, max_lengths[0], values.shape[1]), padding_value)
        for row, start, stop in zip(rows, bounds, bounds[1:], strict=False):
            row[: stop - start] = values[start:stop]
        return rows

    @dense.register_fake
    def _(values: Tensor, offsets: list[Tensor], max_lengths: Sequence[int], padding_value: float = 0.0) -> Tensor:
        return values.new_empty(len(offsets[0]) - 1, *max_lengths, values.shape[1])

    def setup_context(ctx: Any, inputs: Args, output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1])

    def backward(ctx: Any, grad: Tensor) -> Args:
        (offsets,) = ctx.saved_tensors
        lengths = offsets.diff()
        mask = torch.arange(grad.shape[1]) < lengths[:, None]
        return (grad * mask[:, :, None])[:, :2].flatten(0, 1), [None], None, None

    dense.register_autograd(backward, setup_context=setup_context)
    return Program(
        dense,
        lambda: (rand(6, 2, grad=True), [torch.tensor([0, 2, 4, 6])], [3], -1.0),
        more={
            "tuples": lambda: dense(rand(6, 2), (torch.tensor([0, 2, 4, 6]),), (3,)),
            "a tensor for a list": lambda: dense(rand(6, 2), torch.tensor([0, 6]), [3]),
            "floats for ints": lambda: dense(rand(6, 2), [torch.tensor([0, 6])], [3.5]),
        },
    )


@program
def quantize(library: Any, ns: str) -> Program:
    """Returns numbers beside a tensor."""

    @library.custom_op(f"{ns}::quantize", mutates_args=())
    def quantize(x: Tensor, bits: int = 8) -> Tuple[Tensor, float, int, bool]:
        levels = 2**bits - 1
        return (x * levels).round().to(torch.int16), 1 / levels, levels, bits < 8

    @quantize.register_fake
    def _(x: Tensor, bits: int = 8) -> Args:
        levels = 2**bits - 1
        return torch.empty_like(x, dtype=torch.int16), 1 / levels, levels, bits < 8

    def run(x: Tensor) -> Tensor:
        values, scale, levels, narrow = quantize(x, 4)
        return values * scale + levels if narrow else values

    return Program(quantize, lambda: (rand(3, 4),), run=run, more={"all": lambda: quantize(rand(3, 4), 9)})


@program
def topk_softmax(library: Any, ns: str) -> Program:
    """Several outputs, one of which has no gradient."""

    @library.custom_op(f"{ns}::topk_softmax", mutates_args=())
    def topk_softmax(gating: Tensor, k: int, renormalize: bool = False) -> tuple[Tensor, Tensor]:
        weights, ids = gating.softmax(-1).topk(k, -1)
        return weights.clone(), ids

    @topk_softmax.register_fake
    def _(gating: Tensor, k: int, renormalize: bool = False) -> Args:
        sizes = (*gating.shape[:-1], k)
        return gating.new_empty(sizes), gating.new_empty(sizes, dtype=torch.int64)

    def setup_context(ctx: Any, inputs: Args, output: Args) -> None:
        gating, *_ = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(gating, output[1])

    def backward(ctx: Any, grad: Tensor, _: Any) -> Args:
        gating, ids = ctx.saved_tensors
        weights = gating.softmax(-1)
        full = torch.zeros_like(weights).scatter(-1, ids, grad)
        return weights * (full - (full * weights).sum(-1, keepdim=True)), None, None

    topk_softmax.register_autograd(backward, setup_context=setup_context)
    return Program(
        topk_softmax,
        lambda: (rand(3, 5, grad=True), 2),
        more={"history": lambda: [out.requires_grad for out in topk_softmax(rand(3, 5, grad=True), 2)]},
    )


@program
def block_table(library: Any, ns: str) -> Program:
    """A factory: no tensor comes in, dispatch goes by the device."""

    @library.custom_op(f"{ns}::block_table", mutates_args=(), device_types="cpu")
    def block_table(n: int, m: int, device: torch.device, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.arange(n * m, dtype=dtype, device=device).view(n, m).clone()

    @block_table.register_fake
    def _(n: int, m: int, device: torch.device, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(n, m, dtype=dtype, device=device)

    return Program(
        block_table,
        lambda: (3, 2, torch.device("cpu")),
        more={
            "str": lambda: block_table(3, 2, "cpu"),
            "dtype": lambda: block_table(3, 4, dtype=torch.float16, device="cpu"),
            "a device without a kernel": lambda: block_table(3, 2, device="cuda"),
            "no device": lambda: block_table(3, 2),
            "no such device": lambda: block_table(3, 2, device="gpu"),
        },
    )


@program
def numpy_nonzero(library: Any, ns: str) -> Program:
    """From torch's tutorial: NumPy inside, and a size that depends on data."""

    @library.custom_op(f"{ns}::numpy_nonzero", mutates_args=())
    def numpy_nonzero(x: Tensor) -> Tensor:
        return torch.tensor(np.stack(np.nonzero(x.numpy()), axis=1), device=x.device)

    @numpy_nonzero.register_fake
    def _(x: Tensor) -> Tensor:
        return x.new_empty(library.get_ctx().new_dynamic_size(), x.dim(), dtype=torch.int64)

    def run(x: Tensor) -> Tensor:
        return numpy_nonzero(x).sum(0)

    return Program(
        numpy_nonzero,
        lambda: ((rand(3, 4) > 0.5).float(),),
        run=run,
        more={"an array for a tensor": lambda: numpy_nonzero(np.ones(3))},
    )
