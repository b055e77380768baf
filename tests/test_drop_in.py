"""Code written for `torch.library` moves by an import: operators as libraries write them, run through both.

Each function below is such code. It is given `library`, which is `torch.library` or `customops`, and a namespace, and
defines an operator as the libraries and tutorials it is taken after do. Everything a user can see of the two operators
is then compared: schema, results, writes, gradients, compiled and exported programs, metadata, and which errors are
raised. An error of ours may be a subclass of torch's, so that code that catches torch's goes on to do so.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, List, NamedTuple, Optional, Tuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_map

import customops

Args = tuple[Any, ...]


@dataclass
class Program:
    """An operator, and what a model does with it."""

    op: Any
    args: Callable[[], Args]
    kwargs: Callable[[], dict[str, Any]] = dict
    #: How the model calls it.
    run: Callable[..., Any] | None = None
    #: More calls to compare, by name; they may raise.
    more: dict[str, Callable[[], Any]] = field(default_factory=dict)
    #: Whether torch can trace such an op at all.
    compiles: bool = True
    #: What has to stay alive.
    keep: Any = None

    def __post_init__(self) -> None:
        self.run = self.run or self.op


Build = Callable[[Any, str], Program]
PROGRAMS: list[Build] = []


def program(build: Build) -> Build:
    PROGRAMS.append(build)
    return build


def rand(*sizes: int, grad: bool = False, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(len(sizes) + sum(sizes))
    return torch.rand(sizes, generator=generator).to(dtype).requires_grad_(grad)


# -- the programs ------------------------------------------------------------------------------


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


@program
def select_row(library: Any, ns: str) -> Program:
    """A view, which only a schema written by hand can say."""
    op = library.custom_op(
        f"{ns}::select_row", lambda x, row: x[row], mutates_args=(), schema="(Tensor(a) x, int row) -> Tensor(a)"
    )
    op.register_fake(lambda x, row: x[row])

    def setup_context(ctx: Any, inputs: Args, output: Tensor) -> None:
        x, ctx.row = inputs
        ctx.sizes = x.shape
        ctx._is_pure_view = True

    def backward(ctx: Any, grad: Tensor) -> Args:
        full = grad.new_zeros(ctx.sizes)
        full[ctx.row] = grad
        return full, None

    op.register_autograd(backward, setup_context=setup_context)

    def write_through() -> Tensor:
        x = rand(3, 4)
        op(x, 1).zero_()
        return x

    return Program(op, lambda: (rand(3, 4, grad=True), 1), more={"write through": write_through}, compiles=False)


@program
def clamp_(library: Any, ns: str) -> Program:
    """Tag.inplace: what is written to is what comes back."""

    @library.custom_op(f"{ns}::clamp_", mutates_args={"x"}, tags=torch.Tag.inplace)
    def clamp_(x: Tensor, low: float, high: float = 1.0) -> Tensor:
        return x.clamp_(low, high)

    def run(x: Tensor, low: float) -> Tensor:
        y = x * 2
        return clamp_(y, low) + y

    def same() -> bool:
        x = rand(3)
        return clamp_(x, 0.5) is x

    return Program(
        clamp_,
        lambda: (rand(3, 4), 0.9),
        run=run,
        more={"same": same, "a leaf": lambda: clamp_(rand(3, grad=True), 0.5).sum().backward()},
    )


@program
def mul_out(library: Any, ns: str) -> Program:
    """Tag.out: a functional op and its out variant, as overloads."""

    @library.custom_op(f"{ns}::mul.out", mutates_args={"out"}, tags=(torch.Tag.out,))
    def mul_out(x: Tensor, y: Tensor, *, out: Tensor) -> Tensor:
        return torch.mul(x, y, out=out)

    def same() -> bool:
        out = rand(3)
        return mul_out(rand(3), rand(3), out=out) is out

    def run(x: Tensor, y: Tensor, *, out: Tensor) -> Tensor:
        return mul_out(x, y, out=out) + 1

    return Program(
        mul_out,
        lambda: (rand(3, 4), rand(3, 4)),
        lambda: {"out": torch.zeros(3, 4)},
        run=run,
        more={
            "same": same,
            "a gradient": lambda: mul_out(rand(3, grad=True), rand(3), out=rand(3)),
        },
    )


@program
def foreach_scale(library: Any, ns: str) -> Program:
    """A list in, a list out, differentiable."""

    @library.custom_op(f"{ns}::foreach_scale", mutates_args=())
    def foreach_scale(xs: List[Tensor], scalars: Sequence[float]) -> List[Tensor]:
        return [x * s for x, s in zip(xs, scalars, strict=True)]

    foreach_scale.register_fake(lambda xs, scalars: [torch.empty_like(x) for x in xs])

    def setup_context(ctx: Any, inputs: Args, output: Any) -> None:
        ctx.scalars = inputs[1]

    def backward(ctx: Any, grads: list[Tensor]) -> Args:
        return [grad * s for grad, s in zip(grads, ctx.scalars, strict=True)], None

    foreach_scale.register_autograd(backward, setup_context=setup_context)
    return Program(
        foreach_scale,
        lambda: ([rand(3, grad=True), rand(4, grad=True), rand(2, 2, grad=True)], [1.0, 2.0, 3.0]),
        more={
            "no tensors": lambda: foreach_scale([], []),
            "None in a list": lambda: foreach_scale([rand(3), None], [1.0, 2.0]),
        },
    )


@program
def gelu_tanh(library: Any, ns: str) -> Program:
    """Keyword-only numbers, which setup_context is given apart."""

    @library.custom_op(f"{ns}::gelu_tanh", mutates_args=())
    def gelu_tanh(x: Tensor, *, alpha: float = 1.5, approximate: str = "tanh") -> Tensor:
        return x * torch.sigmoid(alpha * x)

    @gelu_tanh.register_fake
    def _(x: Tensor, *, alpha: float = 1.5, approximate: str = "tanh") -> Tensor:
        return torch.empty_like(x)

    def setup_context(ctx: Any, inputs: Args, keyword_only_inputs: dict[str, Any], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.alpha = keyword_only_inputs["alpha"]
        assert keyword_only_inputs["approximate"] == "tanh"  # a default, filled in

    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(ctx.alpha * x)
        return grad * gate * (1 + x * ctx.alpha * (1 - gate))

    gelu_tanh.register_autograd(backward, setup_context=setup_context)
    return Program(
        gelu_tanh,
        lambda: (rand(3, 4, grad=True),),
        lambda: {"alpha": 0.7},
        more={"by position": lambda: gelu_tanh(rand(3), 0.7)},
    )


@program
def convert(library: Any, ns: str) -> Program:
    """dtypes and devices as arguments and as defaults; any number as a Scalar."""

    @library.custom_op(f"{ns}::convert", mutates_args=())
    def convert(
        x: Tensor,
        dtype: torch.dtype,
        by: torch.types.Number,
        device: Optional[torch.device] = None,
        other: torch.dtype = torch.bfloat16,
    ) -> Tensor:
        assert isinstance(dtype, torch.dtype)
        assert other is torch.bfloat16
        assert device is None or isinstance(device, torch.device)
        return x.to(device, dtype, copy=True) * by

    @convert.register_fake
    def _(x, dtype, by, device=None, other=torch.bfloat16):  # type: ignore[no-untyped-def]
        return torch.empty_like(x, dtype=torch.result_type(x.to(dtype), by), device=device or x.device)

    return Program(
        convert,
        lambda: (rand(3, 4), torch.float16, 2),
        more={
            "device": lambda: convert(rand(3, 4), torch.float16, 2, torch.device("cpu")),
            "defaults": lambda: convert(rand(3), torch.float64, 2.5),
            "bool": lambda: convert(rand(3), torch.float64, True),
            "str for a device": lambda: convert(rand(3), torch.float64, 1, "cpu"),
            "str for a dtype": lambda: convert(rand(3), "float64", 1),
            "Python type for a dtype": lambda: convert(rand(3), float, 1),
        },
    )


@program
def scale(library: Any, ns: str) -> Program:
    """Overloads of one name."""

    @library.custom_op(f"{ns}::scale", mutates_args=())
    def scale(x: Tensor) -> Tensor:
        return x * 2

    @library.custom_op(f"{ns}::scale.Tensor", mutates_args=())
    def scale_tensor(x: Tensor, by: Tensor) -> Tensor:
        return x * by

    @library.custom_op(f"{ns}::scale.int", mutates_args=())
    def scale_int(x: Tensor, by: int) -> Tensor:
        return x * (by + 1)

    for op in (scale, scale_tensor, scale_int):
        op.register_fake(lambda x, *by: torch.empty_like(x))
    packet = getattr(torch.ops, ns).scale

    def run(x: Tensor, by: Tensor) -> Tensor:
        return packet(x) + packet(x, by) + packet(x, 3)

    return Program(
        scale_tensor,
        lambda: (rand(3, 4), rand(4)),
        run=run,
        more={"overloads": lambda: sorted(packet.overloads()), "no overload fits": lambda: packet(rand(3), "text")},
    )


@program
def fill_all(library: Any, ns: str) -> Program:
    """Everything may be written to, also what is in lists; nothing comes back."""

    @library.custom_op(f"{ns}::fill_all", mutates_args="unknown")
    def fill_all(x: Tensor, others: Sequence[Optional[Tensor]], value: float, last: Optional[Tensor] = None) -> None:
        x.fill_(value)
        for tensor in (*others, last):
            if tensor is not None:
                tensor.fill_(value)

    @fill_all.register_fake
    def _(x: Tensor, others: Sequence[Optional[Tensor]], value: float, last: Optional[Tensor] = None) -> None: ...

    def versions() -> list[int]:
        tensors = [rand(3) for _ in range(3)]
        fill_all(tensors[0], [None, tensors[1]], 3.0, last=tensors[2])
        return [tensor._version for tensor in tensors]

    def compiled_with_none() -> None:
        # torch cannot functionalize a write to a list in which there is a None: neither can we.
        torch.compile(fill_all, backend="aot_eager", fullgraph=True)(rand(3), [rand(4), None], 0.5)

    return Program(
        fill_all,
        lambda: (rand(3), [rand(4), rand(2, 2)], 0.5, rand(3, 4)),
        more={"versions": versions, "compiled with a None": compiled_with_none},
    )


@program
def numpy_cube(library: Any, ns: str) -> Program:
    """From torch's tutorial: the backward is made of custom ops, and there is a vmap rule."""

    @library.custom_op(f"{ns}::numpy_mul", mutates_args=())
    def numpy_mul(x: Tensor, y: Tensor) -> Tensor:
        return torch.from_numpy(np.asarray(x.numpy() * y.numpy()))

    @library.custom_op(f"{ns}::numpy_cube", mutates_args=())
    def numpy_cube(x: Tensor) -> Tuple[Tensor, Tensor]:
        array = x.numpy()
        return torch.from_numpy(np.asarray(array**3)), torch.from_numpy(np.asarray(3 * array**2))

    numpy_mul.register_fake(lambda x, y: x.new_empty(torch.broadcast_shapes(x.shape, y.shape)))
    numpy_cube.register_fake(lambda x: (torch.empty_like(x), torch.empty_like(x)))
    numpy_mul.register_autograd(
        lambda ctx, grad: (grad * ctx.saved_tensors[1], grad * ctx.saved_tensors[0]),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    numpy_cube.register_autograd(
        lambda ctx, grad, grad_dx: numpy_mul(grad, ctx.saved_tensors[1]) + 6 * numpy_mul(grad_dx, ctx.saved_tensors[0]),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0], output[1]),
    )

    @numpy_cube.register_vmap
    def _(info: Any, in_dims: Any, x: Tensor) -> Any:
        return numpy_cube(x), (in_dims[0], in_dims[0])

    return Program(
        numpy_cube,
        lambda: (rand(3, 4, grad=True),),
        more={
            "vmap": lambda: torch.vmap(numpy_cube)(rand(3, 4)),
            "vmap along 1": lambda: torch.vmap(numpy_cube, in_dims=1, out_dims=(1, 0))(rand(3, 4)),
            "vmap in vmap": lambda: torch.vmap(torch.vmap(numpy_cube))(rand(2, 3, 4)),
            "vmap without a rule": lambda: torch.vmap(lambda x: numpy_cube(x)[0])(rand(2, 3)),
        },
    )


@program
def fused_linear(library: Any, ns: str) -> Program:
    """Autocast, on an op with an optional bias and a gradient."""

    @library.custom_op(f"{ns}::fused_linear", mutates_args=())
    def fused_linear(x: Tensor, weight: Tensor, bias: Optional[Tensor] = None) -> Tensor:
        return torch.nn.functional.linear(x, weight, bias)

    @fused_linear.register_fake
    def _(x: Tensor, weight: Tensor, bias: Optional[Tensor] = None) -> Tensor:
        return x.new_empty(*x.shape[:-1], weight.shape[0])

    def setup_context(ctx: Any, inputs: Args, output: Tensor) -> None:
        x, weight, _ = inputs
        ctx.save_for_backward(x, weight)

    def backward(ctx: Any, grad: Tensor) -> Args:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.mT @ x, grad.sum(0) if ctx.needs_input_grad[2] else None

    fused_linear.register_autograd(backward, setup_context=setup_context)
    library.register_autocast(fused_linear, "cpu", torch.bfloat16)

    def run(x: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return fused_linear(x, weight, bias)

    return Program(
        fused_linear,
        lambda: (rand(3, 4, grad=True), rand(5, 4, grad=True), rand(5, grad=True)),
        run=run,
        more={"no autocast": lambda: fused_linear(rand(3, 4), rand(5, 4), rand(5)).dtype},
    )


@program
def int8_linear(library: Any, ns: str) -> Program:
    """bitsandbytes': schemas first, then a kernel for "default" and one for a device; an out variant as an overload."""
    define, register_fake, register_kernel = library.define, library.register_fake, library.register_kernel
    define(f"{ns}::int8_linear", "(Tensor A, Tensor B, float scale=1.0) -> (Tensor, Tensor?)")
    define(f"{ns}::int8_linear.out", "(Tensor A, Tensor B, Tensor! out) -> ()")

    @register_fake(f"{ns}::int8_linear")
    def _(A: Tensor, B: Tensor, scale: float = 1.0) -> tuple[Tensor, Optional[Tensor]]:
        return torch.empty((*A.shape[:-1], B.shape[0]), device=A.device), None

    @register_fake(f"{ns}::int8_linear.out")
    def _(A: Tensor, B: Tensor, out: Tensor) -> None:
        torch._check(out.shape == (*A.shape[:-1], B.shape[0]), lambda: f"not {out.shape}")

    @register_kernel(f"{ns}::int8_linear", "default")
    def _(A: Tensor, B: Tensor, scale: float = 1.0) -> tuple[Tensor, Optional[Tensor]]:
        return A.float() @ B.float().T * scale, None

    @register_kernel(f"{ns}::int8_linear.out", "default")
    def _(A: Tensor, B: Tensor, out: Tensor) -> None:
        out.copy_(A.float() @ B.float().T)

    @register_kernel(f"{ns}::int8_linear", "cuda")
    def _(A: Tensor, B: Tensor, scale: float = 1.0) -> tuple[Tensor, Optional[Tensor]]:
        raise NotImplementedError

    packet = getattr(torch.ops, ns).int8_linear

    def run(A: Tensor, B: Tensor) -> Tensor:
        out = torch.empty(A.shape[0], B.shape[0])
        packet.out(A, B, out)
        return packet.default(A, B, scale=0.5)[0] + out

    return Program(
        packet.default,
        lambda: (torch.arange(6, dtype=torch.int8).view(2, 3), torch.arange(12, dtype=torch.int8).view(4, 3)),
        run=run,
    )


# -- both --------------------------------------------------------------------------------------


class Both(NamedTuple):
    theirs: Program
    ours: Program


every_program = pytest.mark.parametrize("build", PROGRAMS, ids=[build.__name__ for build in PROGRAMS])


@pytest.fixture
def both(build: Build, ns: str) -> Iterator[Both]:
    with customops.default_registry.scope():
        yield Both(build(torch.library, f"{ns}_theirs"), build(customops, f"{ns}_ours"))


def overload(op: Any) -> Any:
    return getattr(op, "_opoverload", None) or getattr(op, "default", op)


def anonymous(text: str, ns: str) -> str:
    """Without what has to differ."""
    return text.replace(f"{ns}_theirs", "NS").replace(f"{ns}_ours", "NS")


def plain(value: Any) -> Any:
    """A tensor, as what can be compared with `==`, nan included."""
    if not isinstance(value, Tensor):
        return value
    meta = tuple(value.shape), value.stride(), value.dtype, value.device
    return meta if value.is_meta or isinstance(value, torch._subclasses.FakeTensor) else (meta, str(value.tolist()))


def outcome(call: Callable[[], Any]) -> tuple[Any, type[Exception] | None]:
    """What a call returns (with the types of containers), or the type of what it raises."""
    try:
        values, shape = tree_flatten(call())
    except Exception as error:
        print(repr(error)[:600])
        return None, type(error)
    return ([plain(value) for value in values], shape), None


def same(theirs: Callable[[], Any], ours: Callable[[], Any]) -> bool:
    """Returns whether there was a result rather than an error."""
    (their_value, their_error), (our_value, our_error) = outcome(theirs), outcome(ours)
    if their_error is None:
        assert our_error is None, our_error
        assert our_value == their_value
    else:
        assert our_error is not None, f"torch raises {their_error}"
        assert issubclass(our_error, their_error)
    return our_error is None


def called(program: Program, run: Callable[..., Any]) -> Callable[[], Any]:
    """A call of `run` with fresh arguments, to compare with what it leaves in them."""

    def call() -> Any:
        args, kwargs = program.args(), program.kwargs()
        result = run(*args, **kwargs)
        return result, tree_map(detached, (args, kwargs))

    return call


# -- the comparisons ---------------------------------------------------------------------------


@every_program
def test_schema(both: Both, ns: str) -> None:
    theirs, ours = (overload(program.op) for program in both)
    assert anonymous(str(ours._schema), ns) == anonymous(str(theirs._schema), ns)
    assert set(ours.tags) == set(theirs.tags)
    assert anonymous(str(ours), ns) == anonymous(str(theirs), ns)


@every_program
def test_eager(both: Both) -> None:
    assert same(*(called(program, program.op) for program in both))
    assert same(*(called(program, program.run) for program in both))


@every_program
def test_more_calls(both: Both) -> None:
    for name, theirs in both.theirs.more.items():
        print(name)
        same(theirs, both.ours.more[name])


@every_program
def test_wrong_calls(both: Both) -> None:
    for name, wrong in WRONG.items():
        print(name)
        assert not same(*(functools.partial(call_wrongly, wrong, program) for program in both))


def call_wrongly(wrong: Callable[..., Any], program: Program) -> Any:
    return wrong(program.op, program.args(), program.kwargs())


def replaced(args: Args, old: Callable[[Any], bool], new: Any) -> Args:
    index = next((i for i, arg in enumerate(args) if old(arg)), 0)
    return (*args[:index], new, *args[index + 1 :])


WRONG: dict[str, Callable[..., Any]] = {
    "no arguments": lambda op, args, kwargs: op(),
    "too many": lambda op, args, kwargs: op(*args, *[torch.ones(1)] * 20, **kwargs),
    "unknown keyword": lambda op, args, kwargs: op(*args, **kwargs, nonsense=1),
    "twice": lambda op, args, kwargs: op(*args, **kwargs, **{overload(op)._schema.arguments[0].name: args[0]}),
    "text for a tensor": lambda op, args, kwargs: op(*replaced(args, torch.is_tensor, "text"), **kwargs),
    "None for a tensor": lambda op, args, kwargs: op(*replaced(args, torch.is_tensor, None), **kwargs),
}


def gradients(program: Program) -> Any:
    """Of all outputs, with respect to all inputs."""
    args, kwargs = program.args(), program.kwargs()
    inputs = [x for x in tree_flatten(args)[0] if isinstance(x, Tensor)]
    inputs = [x for x in inputs if x.requires_grad] or [x.requires_grad_() for x in inputs if x.is_floating_point()]
    assert program.run is not None
    outputs = [x for x in tree_flatten(program.run(*args, **kwargs))[0] if isinstance(x, Tensor) and x.requires_grad]
    weights = [rand(*x.shape, dtype=x.dtype) + 1 for x in outputs]
    return torch.autograd.grad(outputs, inputs, weights, allow_unused=True)


@every_program
def test_gradients(both: Both) -> None:  # also what is raised by ops without a formula
    if both.ours.op.__name__ == "silu_and_mul":  # torch goes past the write: the gradient is None
        with pytest.raises(RuntimeError, match="no autograd formula"):
            gradients(both.ours)
        return
    same(*(lambda program=program: gradients(program) for program in both))


@every_program
def test_compiled(both: Both) -> None:
    calls = []
    for program in both:
        compiled = torch.compile(program.run, backend="aot_eager", fullgraph=True, dynamic=True)
        calls.append(called(program, compiled))
    assert same(*calls) == both.ours.compiles
    if both.ours.compiles:
        same(called(both.ours, both.ours.run), calls[1])


class Model(torch.nn.Module):
    """`run`, given tensors; other arguments are part of the model."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program, self.args, self.kwargs = program, program.args(), program.kwargs()

    def tensors(self) -> Args:
        values = (*self.args, *self.kwargs.values())
        return tuple(tree_map(detached, value) for value in values if holds_tensors(value))

    def forward(self, *tensors: Any) -> Any:
        given = iter(tensors)
        args = [next(given) if holds_tensors(value) else value for value in self.args]
        kwargs = {name: next(given) if holds_tensors(value) else value for name, value in self.kwargs.items()}
        return self.program.run(*args, **kwargs)  # type: ignore[misc]


def detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def holds_tensors(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, list) and isinstance(value[0], Tensor))


def exported(program: Program, ns: str) -> list[str]:
    model = Model(program)
    found = torch.export.export(model, model.tensors(), strict=True)
    lower = found.run_decompositions()
    items = [found.graph, found.graph_signature]
    overload = getattr(program.op, "_opoverload", None) or getattr(program.op, "default", program.op)
    if not {torch.Tag.inplace, torch.Tag.out} & set(overload.tags):
        items += [lower.graph, lower.graph_module.code]  # below, ours are ops that only write
    return [anonymous(str(item), ns) for item in items]


@every_program
@pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec:FutureWarning")  # torch's own
def test_exported(both: Both, ns: str) -> None:
    assert same(*(functools.partial(exported, program, ns) for program in both)) == both.ours.compiles


@every_program
def test_without_data(both: Both) -> None:
    def on_meta(program: Program) -> Any:
        args, kwargs = tree_map(lambda x: x.detach().to("meta") if isinstance(x, Tensor) else x, called_with(program))
        return program.op(*args, **kwargs)

    def on_fakes(program: Program) -> Any:
        with FakeTensorMode() as mode:
            fakes = tree_map(lambda x: mode.from_tensor(x) if isinstance(x, Tensor) else x, called_with(program))
            return program.op(*fakes[0], **fakes[1])

    for run in (on_meta, on_fakes):
        same(*(lambda program=program, run=run: run(program) for program in both))


def called_with(program: Program) -> tuple[Args, dict[str, Any]]:
    return program.args(), program.kwargs()


# -- where ours is meant to differ: what torch does is said, and ours asserted -------------------


@pytest.mark.parametrize(
    "build", [rms_norm, roi_align, jagged_to_padded_dense, topk_softmax, foreach_scale, gelu_tanh, numpy_cube]
)
def test_func_grad(build: Build, ns: str) -> None:  # torch raises: its custom ops have no rule for functorch
    with customops.default_registry.scope():
        ours = build(customops, ns)
        args, kwargs = tree_map(detached, (ours.args(), ours.kwargs()))
        is_list = isinstance(args[0], list)

        def loss(first: Any) -> Tensor:
            outputs = ours.op(first, *args[1:], **kwargs)
            return sum(out.sum() for out in tree_flatten(outputs)[0] if out.is_floating_point())  # type: ignore[return-value]

        found = torch.func.grad(loss)(args[0])
        inputs = tree_map(lambda x: x.clone().requires_grad_(), args[0])
        expected = torch.autograd.grad(loss(inputs), inputs)
        torch.testing.assert_close(found if is_list else [found], list(expected))


def test_factory_with_a_keyword_only_device(ns: str) -> None:  # torch: IndexError where a default is left out
    with customops.default_registry.scope():

        @customops.custom_op(f"{ns}::table", mutates_args=(), device_types="cpu")
        def table(n: int, m: int = 2, *, device: torch.device) -> Tensor:
            return torch.zeros(n, m, device=device)

        assert table(3, device=torch.device("cpu")).shape == (3, 2)


def test_fakes_see_defaults(ns: str) -> None:  # torch calls a fake as the op was called: a TypeError here
    with customops.default_registry.scope():

        @customops.custom_op(f"{ns}::tile", mutates_args=())
        def tile(x: Tensor, n: int = 3) -> Tensor:
            return x.repeat(n)

        tile.register_fake(lambda x, n: x.new_empty(len(x) * n))
        assert tile(rand(2).to("meta")).shape == (6,)


def test_lists_as_defaults(ns: str) -> None:  # torch: ValueError from infer_schema
    with customops.default_registry.scope():

        @customops.custom_op(f"{ns}::tile", mutates_args=())
        def tile(x: Tensor, sizes: Sequence[int] = (2, 1)) -> Tensor:
            return x.repeat(*sizes)

        assert tile(rand(2)).shape == (2, 2)


def test_out_by_position(ns: str) -> None:  # RuntimeError from the dispatcher, as torch 2.13; TypeError in torch 2.15
    with customops.default_registry.scope():
        with pytest.raises(RuntimeError, match="takes 2 positional argument"):
            mul_out(customops, ns).op(rand(3), rand(3), rand(3))


@every_program
def test_opcheck(build: Build, ns: str) -> None:  # ours alone: torch 2.15's warns, an error here, if inputs need grad
    with customops.default_registry.scope():
        program = build(customops, ns)
        results = customops.opcheck(overload(program.op), *called_with(program), raise_exception=False)
        assert program.compiles == all(result == "SUCCESS" for result in results.values())


# -- torch's own collection of custom ops, by an import -----------------------------------------


@pytest.fixture(scope="module")
def custom_op_db() -> Iterator[list[tuple[Any, Any]]]:
    """Each entry of it with the same entry made by our `custom_op`, from the same text."""
    theirs = importlib.import_module("torch.testing._internal.custom_op_db")
    text, _, _ = inspect.getsource(theirs).partition("lib = torch.library.Library(")
    text = text.replace("torch.library.custom_op(", "customops.custom_op(").replace("_torch_testing", "drop_in_db")
    module = ModuleType("custom_op_db_of_ours")
    vars(module)["customops"] = customops
    sys.modules[module.__name__] = module  # where the hints of its functions are looked up
    with customops.default_registry.scope():
        exec(text, vars(module))
        yield list(zip(theirs.custom_op_db, module.custom_op_db, strict=True))
    del sys.modules[module.__name__]


@pytest.mark.parametrize("index", range(11))
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.filterwarnings("ignore:`create_unbacked_symint` is deprecated:FutureWarning")  # in the text
def test_custom_op_db(custom_op_db: list[tuple[Any, Any]], index: int, requires_grad: bool) -> None:  # item 82
    assert len(custom_op_db) == 11
    theirs, ours = custom_op_db[index]
    assert theirs.name == ours.name
    samples = list(ours.sample_inputs("cpu", torch.float32, requires_grad=requires_grad))
    assert samples
    for sample in samples:
        args = (sample.input, *sample.args)
        assert same(
            lambda a=args, k=sample.kwargs: theirs.op(*a, **k), lambda a=args, k=sample.kwargs: ours.op(*a, **k)
        )
        results = customops.opcheck(ours.op, args, sample.kwargs)
        assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("index", range(11))
def test_custom_op_db_batched(custom_op_db: list[tuple[Any, Any]], index: int) -> None:  # item 82
    # Which vmap rules raise is torch's matter, too: those of sizes that depend on data do, and that of cat is broken.
    theirs, ours = custom_op_db[index]
    sample = next(iter(ours.sample_inputs("cpu", torch.float32)))
    args = tree_map(lambda x: torch.stack([x, x.flip(0)]) if torch.is_tensor(x) else x, (sample.input, *sample.args))
    dims = tree_map(lambda x: 0 if torch.is_tensor(x) else None, args)

    def batched(op: Any) -> Any:
        def tensors(*args: Any) -> Any:
            return [x for x in tree_flatten(op(*args, **sample.kwargs))[0] if torch.is_tensor(x)]

        return torch.vmap(tensors, in_dims=dims)(*args)

    worked = same(lambda: batched(theirs.op), lambda: batched(ours.op))
    assert worked == (not re.search("Nonzero|NMS|Cat", ours.name))
