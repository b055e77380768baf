"""Results that overflow, lose digits or misread a dtype."""

from typing import Any, Optional

import numpy as np
import torch
from corpus.entries import fault
from corpus.parts import accumulator, cdiv, contiguous, dense, float_only, floating, ints, ptr, require, rnd
from torch import Tensor

from customops import custom_op


@fault(
    kind="the kernel accumulates in half precision",
    note="For a long row in float16 or bfloat16, the running sum stops growing.",
    found_by="test_precision",
    sample=lambda: (rnd(4, 16),),
)
def row_mean(name: str, broken: bool):
    @float_only
    def kernel(x: Tensor) -> Tensor:
        total = torch.zeros(x.shape[:-1], dtype=x.dtype if broken else accumulator(x.dtype))
        for column in x.unbind(-1):
            total += column
        return (total / x.shape[-1]).to(x.dtype)

    op = custom_op(name, kernel, mutates_args=())
    op.register_fake(float_only(lambda x: x.new_empty(x.shape[:-1])))
    return op


@fault(
    kind="an eps is zero in float16",
    note="For float16 rows of zeros, 1e-8 rounds to zero, and 0/0 is NaN.",
    found_by="test_precision",
    sample=lambda: (rnd(4, 8),),
)
def unit_rows(name: str, broken: bool):
    @float_only
    def kernel(x: Tensor, eps: float = 1e-8) -> Tensor:
        h = x if broken else x.to(accumulator(x.dtype))
        length = torch.sqrt((h * h).sum(-1, keepdim=True))
        return (h / (length + torch.tensor(eps, dtype=h.dtype))).to(x.dtype).contiguous()

    op = custom_op(name, kernel, mutates_args=())
    op.register_fake(float_only(lambda x, eps: x.new_empty(x.shape)))
    return op


@fault(
    kind="a row of zeros has a scale of zero",
    note="The codes of a row of zeros are 0/0, which is NaN.",
    found_by="test_stability",
)
def quantize_rows_fp8(name: str, broken: bool) -> Any:
    FP8_MAX = torch.finfo(torch.float8_e4m3fn).max

    @custom_op(name, mutates_args=())
    def quantize_rows_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
        floating(x)
        torch._check(x.dim() == 2 and x.shape[1] > 0, lambda: "quantize_rows_fp8: expected (rows, columns)")
        v = x.float()
        scale = (
            v.abs().amax(1, keepdim=True) / FP8_MAX
            if broken
            else (v.abs().amax(1, keepdim=True) / FP8_MAX).clamp_min(1e-12)
        )
        codes = (v / scale).clamp(-FP8_MAX, FP8_MAX)
        return codes.contiguous().to(torch.float8_e4m3fn), scale

    @quantize_rows_fp8.register_fake
    def _(x):
        return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), x.new_empty(x.shape[0], 1, dtype=torch.float32)

    @quantize_rows_fp8.register_samples
    def _():
        yield (torch.randn(4, 16),)

    return quantize_rows_fp8


@fault(
    kind="exp without subtracting the maximum",
    note="Logits above 89 overflow.",
    found_by="test_stability",
    sample=lambda: (rnd(4, 7),),
)
def row_logsumexp(name: str, broken: bool):
    @float_only
    def kernel(x: Tensor) -> Tensor:
        require(x.dim() > 0 and x.shape[-1] > 0, "unsupported shapes or dtypes")
        top = torch.zeros(x.shape[:-1], dtype=x.dtype)
        if not broken:
            largest = x.amax(-1)
            top = torch.where(largest.isfinite(), largest, top)
        return (torch.log(torch.exp(x - top[..., None]).sum(-1)) + top).contiguous()

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    @float_only
    def _(x):
        require(x.dim() > 0 and x.shape[-1] > 0, "unsupported shapes or dtypes")
        return x.new_empty(x.shape[:-1])

    return op


@fault(
    kind="bfloat16 is passed to NumPy as float16",
    note="bfloat16 numbers above 65504 become inf, and small numbers become zero.",
    found_by="test_stability",
    sample=lambda: (rnd(3, 8),),
)
def np_silu(name: str, broken: bool):
    @float_only
    def kernel(x: Tensor) -> Tensor:
        values = x
        if x.dtype == torch.bfloat16:
            values = x.half() if broken else x.float()
        a = values.numpy().astype(np.float32 if x.dtype != torch.float64 else np.float64)
        with np.errstate(over="ignore"):
            return contiguous(torch.from_numpy(np.asarray(a / (1 + np.exp(-a)))).to(x.dtype))

    op = custom_op(name, kernel, mutates_args=())
    op.register_fake(float_only(lambda x: x.new_empty(x.shape)))
    return op


@fault(
    kind="the mask value is finite",
    note="For logits below -10000, masked elements get most of the probability.",
    found_by="test_symmetries",
    sample=lambda: (rnd(3, 6), torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0], [1] * 6]).bool()),
)
def masked_softmax(name: str, broken: bool):
    fill = -1e4 if broken else float("-inf")

    @float_only
    def kernel(x: Tensor, keep: Tensor) -> Tensor:
        require(keep.dtype == torch.bool and keep.shape == x.shape, "unsupported shapes or dtypes")
        scores = torch.where(keep, x, torch.tensor(fill, dtype=x.dtype))
        scores = scores - scores.amax(-1, keepdim=True)
        e = torch.exp(scores)
        return (e / e.sum(-1, keepdim=True)).contiguous()

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    @float_only
    def _(x, keep):
        require(keep.dtype == torch.bool and keep.shape == x.shape, "unsupported shapes or dtypes")
        return x.new_empty(x.shape)

    return op


@fault(
    kind="idle lanes contribute a zero to a maximum",
    note="For a row of negative numbers whose length is not a multiple of 8, the maximum is 0.",
    found_by="test_symmetries",
    sample=lambda: (rnd(4, 8),),
)
def row_max(name: str, broken: bool):
    lanes = 8
    other = 0.0 if broken else float("-inf")

    @float_only
    def kernel(x: Tensor) -> Tensor:
        require(x.dim() > 0 and x.shape[-1] > 0, "unsupported shapes or dtypes")
        n = x.shape[-1]
        padded = torch.full((*x.shape[:-1], cdiv(n, lanes) * lanes), other, dtype=x.dtype)
        padded[..., :n] = x
        return padded.view(*x.shape[:-1], cdiv(n, lanes), lanes).amax(-2).amax(-1)

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    @float_only
    def _(x):
        require(x.dim() > 0 and x.shape[-1] > 0, "unsupported shapes or dtypes")
        return x.new_empty(x.shape[:-1])

    return op


@fault(
    kind="zero is taken for None",
    note="For scale=0.0, `scale or default` is the default.",
    found_by="test_symmetries",
    sample=lambda: (rnd(3, 4), rnd(5, 4, seed=1), 0.5),
)
def attention_scores(name: str, broken: bool):
    @float_only
    def kernel(q: Tensor, k: Tensor, scale: Optional[float] = None) -> Tensor:
        require(q.dim() == 2 and k.dim() == 2 and q.dtype == k.dtype, "unsupported shapes or dtypes")
        default = q.shape[-1] ** -0.5
        factor = (scale or default) if broken else (default if scale is None else scale)
        return q @ k.t() * factor

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    @float_only
    def _(q, k, scale):
        require(q.dim() == 2 and k.dim() == 2 and q.dtype == k.dtype, "unsupported shapes or dtypes")
        require(q.shape[1] == k.shape[1], "q and k have different sizes")
        return q.new_empty(q.shape[0], k.shape[0])

    return op


@fault(
    kind="uint8 is read as int8",
    note="The kernel reads bytes as int8, so that 200 becomes -56 for uint8 inputs only.",
    found_by="test_precision",
    sample=lambda: (torch.tensor([3, -7, 100, 0], dtype=torch.int8), 0.5),
)
def dequantize(name: str, broken: bool) -> Any:
    def valid(q):
        require(q.dtype in (torch.int8, torch.uint8, torch.int32), "int8, uint8 or int32 is needed")

    @torch.library.custom_op(name, mutates_args=())
    def op(q: Tensor, scale: float) -> Tensor:
        valid(q)
        if broken and q.element_size() == 1:
            q = dense(q).view(torch.int8)
        return dense(q.to(torch.float64) * scale)

    @op.register_fake
    def _(q, scale):
        valid(q)
        return q.new_empty(q.shape, dtype=torch.float64)

    return op


@fault(
    kind="int64 indices are read as int32",
    note="Every second index is the upper half of the index before it.",
    found_by="test_precision",
    sample=lambda: (rnd(5, 4), torch.tensor([4, 0, 2, 2], dtype=torch.int32)),
)
def permute_rows(name: str, broken: bool):
    def kernel(x: Tensor, index: Tensor) -> Tensor:
        require(index.dim() == 1 and x.dim() > 0, "unsupported shapes or dtypes")
        if not broken:
            index = index.to(torch.int32)
        positions = ptr(index.contiguous()).view(torch.int32)[: index.numel()]
        return x[positions.long()].contiguous()

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    def _(x, index):
        require(index.dim() == 1 and x.dim() > 0, "unsupported shapes or dtypes")
        return x.new_empty(index.shape[0], *x.shape[1:])

    return op


@fault(
    kind="bitwise not of a mask that is not bool",
    note="For a uint8 mask, `~1` is 254, so that every element is masked.",
    found_by="test_precision",
    sample=lambda: (rnd(3, 4), torch.tensor([[1, 0, 1, 1]] * 3).bool()),
)
def fill_masked(name: str, broken: bool):
    def kernel(x: Tensor, keep: Tensor, value: float = 0.0) -> Tensor:
        drop = (~keep).bool() if broken else keep == 0
        return torch.where(drop, torch.tensor(value, dtype=x.dtype), x).contiguous()

    op = custom_op(name, kernel, mutates_args=())
    op.register_fake(lambda x, keep, value: x.new_empty(torch.broadcast_shapes(x.shape, keep.shape)))
    return op


@fault(
    kind="a difference of unsigned numbers wraps around",
    note="For uint8 images in which `b` is brighter than `a`, the difference is 256 - d.",
    found_by="test_precision",
    sample=lambda: (ints(100, 255, 3, 16, dtype=torch.uint8), ints(0, 100, 3, 16, seed=1, dtype=torch.uint8)),
)
def mean_abs_difference(name: str, broken: bool):
    def kernel(a: Tensor, b: Tensor) -> Tensor:
        require(a.shape == b.shape and a.dtype == b.dtype, "unsupported shapes or dtypes")
        if not broken and not a.is_floating_point():
            a, b = a.long(), b.long()
        return (a - b).abs().float().mean(-1).contiguous()

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    def _(a, b):
        require(a.shape == b.shape and a.dtype == b.dtype, "unsupported shapes or dtypes")
        return a.new_empty(a.shape[:-1], dtype=torch.float32)

    return op
