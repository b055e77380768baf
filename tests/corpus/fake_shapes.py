"""Fake impls that return a wrong shape, or fail."""

from typing import Any, Optional

import numpy as np
import torch
import torch.nn.functional as F
from corpus.entries import fault
from corpus.parts import (
    FLOATS,
    dense,
    dimension,
    float_only,
    floats,
    one_floating_dtype,
    packed,
    rank,
    real_numbers,
    require,
    require_dtype,
    rnd,
    single,
)
from torch import Tensor

from customops import custom_op, get_ctx


@fault(
    kind="a size is rounded wrongly",
    note="The fake impl rounds the number of entries down. A step that does not divide the size shows the fault.",
    found_by="test_faketensor",
    sample=lambda: (torch.randn(3, 4), 2),
)
def every_nth(name: str, broken: bool) -> Any:
    def check(x: Tensor, step: int) -> None:
        if x.dim() == 0 or not 1 <= step <= 4096:
            raise ValueError("expected one dimension at least, and a step from 1 to 4096")

    @custom_op(name, mutates_args=())
    def op(x: Tensor, step: int = 2) -> Tensor:
        check(x, step)
        return packed(x[..., ::step])

    @op.register_fake
    def _(x, step):
        check(x, step)
        size = x.shape[-1] // step if broken else (x.shape[-1] - 1) // step + 1
        return x.new_empty(*x.shape[:-1], size)

    return op


@fault(
    kind="all dimensions of size 1 are squeezed",
    note="For one token or one expert, the kernel returns fewer dimensions than the fake impl.",
    found_by="test_faketensor",
    sample=lambda: (rnd(5, 8), rnd(8, 3, seed=1)),
)
def router_logits(name: str, broken: bool):
    def kernel(x: Tensor, gate: Tensor) -> Tensor:
        require(x.dim() == 2 and gate.dim() == 2 and x.dtype == gate.dtype, "unsupported shapes or dtypes")
        scores = torch.matmul(x.unsqueeze(1), gate)
        return scores.squeeze() if broken else scores.squeeze(1)

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    def _(x, gate):
        require(x.dim() == 2 and gate.dim() == 2 and x.dtype == gate.dtype, "unsupported shapes or dtypes")
        require(x.shape[1] == gate.shape[0], "inner sizes differ")
        return x.new_empty(x.shape[0], gate.shape[1])

    return op


@fault(
    kind="a part of the op supports two dimensions only",
    note="The fake impl returns one sum for each index of the first dimension. Three dimensions show the fault.",
    found_by="test_faketensor",
    sample=lambda: (torch.randn(4, 3),),
)
def square_sums(name: str, broken: bool) -> Any:
    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x, least=1)
        return dense(x.square().sum(-1))

    @op.register_fake
    def _(x):
        floats(x, least=1)
        return x.new_empty(x.shape[0]) if broken else x.new_empty(x.shape[:-1])

    return op


@fault(
    kind="the fake impl does not broadcast",
    note="If `y` is larger than `x`, the kernel broadcasts, and the fake impl returns the shape of `x`.",
    found_by="test_faketensor",
    sample=lambda: (rnd(4, 6), rnd(6, seed=1)),
)
def squared_difference(name: str, broken: bool):
    def kernel(x: Tensor, y: Tensor) -> Tensor:
        return (x - y).square().contiguous()

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    def _(x, y):
        shape = x.shape if broken else torch.broadcast_shapes(x.shape, y.shape)
        return x.new_empty(shape, dtype=torch.result_type(x, y))

    return op


@fault(
    kind="a kernel broadcasts by the index modulo the size",
    note="For a `y` of shape (n, 1), the kernel pairs element i of `x` with y[i % n] instead of y[i // m].",
    found_by="test_faketensor",
    sample=lambda: (rnd(4, 6), rnd(6, seed=1)),
)
def bias_gelu(name: str, broken: bool):
    @float_only
    def kernel(x: Tensor, y: Tensor) -> Tensor:
        if broken:
            flat, small = x.reshape(-1), y.reshape(-1)
            h = (flat + small[torch.arange(flat.numel()) % small.numel()]).view(x.shape)
        else:
            h = x + y.expand(x.shape)
        return F.gelu(h).contiguous()

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    @float_only
    def _(x, y):
        y.expand(x.shape)
        return x.new_empty(x.shape, dtype=torch.result_type(x, y))

    return op


@fault(
    kind="a negative dimension is removed wrongly",
    note="For dim=-1, `shape[:dim] + shape[dim + 1:]` is the whole shape twice.",
    found_by="test_faketensor",
    sample=lambda: (rnd(3, 4, 5), 1),
)
def logmeanexp(name: str, broken: bool):
    @float_only
    def kernel(x: Tensor, dim: int) -> Tensor:
        return (torch.logsumexp(x, dim) - float(np.log(x.shape[dim]))).contiguous()

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    @float_only
    def _(x, dim):
        if not broken:
            dim = dim % x.dim()
        return x.new_empty(*x.shape[:dim], *x.shape[dim + 1 :])

    return op


@fault(
    kind="an option changes the result, and the fake impl ignores it",
    note="The fake impl cuts the shape at `dim` and at `dim + 1`, which is 0 for dim=-1.",
    found_by="test_faketensor",
    sample=lambda: (torch.randn(3, 4), 0),
)
def nonzeros_along(name: str, broken: bool):
    @custom_op(name, mutates_args=())
    def op(x: Tensor, dim: int) -> Tensor:
        real_numbers(x)
        return dense((x != 0).sum(dimension(x, dim)))

    @op.register_fake
    def _(x, dim):
        real_numbers(x)
        at = dimension(x, dim)
        if broken:
            at = dim
        return x.new_empty((*x.shape[:at], *x.shape[at + 1 :]), dtype=torch.int64)

    return op


def positive(x: Tensor, dims: list[int]) -> list[int]:
    """Return dimensions counted from the front. Raise for invalid or repeated dimensions."""
    require(all(-x.dim() <= dim < x.dim() for dim in dims), "a dim is out of range")
    result = [dim % x.dim() for dim in dims]
    require(len(set(result)) == len(result), "a dim is repeated")
    return result


@fault(
    kind="a list of dimensions is mishandled",
    note="The fake impl deletes the sizes in turn, which shifts later dimensions. Two dimensions show the fault.",
    found_by="test_faketensor",
    sample=lambda: (torch.randn(2, 3, 4), [1]),
)
def sum_dims(name: str, broken: bool) -> Any:
    @custom_op(name, schema="(Tensor x, int[] dims) -> Tensor")
    def op(x, dims):
        floats(x)
        for dim in sorted(positive(x, dims), reverse=True):
            x = x.sum(dim)
        return dense(x)

    @op.register_fake
    def _(x, dims):
        floats(x)
        sizes = list(x.shape)
        for dim in positive(x, dims) if broken else sorted(positive(x, dims), reverse=True):
            del sizes[min(dim, len(sizes) - 1)]
        return x.new_empty(sizes)

    return op


@fault(
    kind="an input is shorter than the window of the kernel",
    note="The kernel returns the end of the input as its state, which is too short for inputs below the window.",
    found_by="test_faketensor",
    sample=lambda: (torch.randn(6), 3),
)
def causal_sum(name: str, broken: bool) -> Any:
    def valid(x, width):
        floats(x, dims=1)
        require(1 <= width <= 1024, "a width of 1 to 1024 is needed")

    @custom_op(name, mutates_args=())
    def op(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
        valid(x, width)
        padded = torch.cat([x.new_zeros(width - 1), x])
        total = x.new_zeros(len(x))
        for first in range(width):
            total += padded[first : first + len(x)]
        return total, dense(x[-(width - 1) :] if broken else padded[len(x) :])

    @op.register_fake
    def _(x, width):
        valid(x, width)
        return x.new_empty(x.shape), x.new_empty(width - 1)

    return op


@fault(
    kind="the fake impl accepts an invalid call",
    note="A call can ask for more rows than the input has. The fake impl promises them, and the kernel returns fewer.",
    found_by="test_faketensor",
    sample=lambda: (torch.randn(5, 2), 3),
)
def first_rows(name: str, broken: bool):
    def check(x: Tensor, count: int) -> None:
        one_floating_dtype(x)
        rank(x, 1)
        if not broken and not 0 <= count <= x.shape[0]:
            raise ValueError(f"there are no first {count} of {x.shape[0]} rows")

    @custom_op(name, mutates_args=())
    def op(x: Tensor, count: int) -> Tensor:
        check(x, count)
        return dense(x[:count])

    @op.register_fake
    def _(x, count):
        check(x, count)
        return x.new_empty((count, *x.shape[1:]))

    return op


@fault(
    kind="the fake impl refuses a valid call",
    note="For an input of three dimensions, eager code works, and compiled code raises.",
    found_by="test_faketensor",
    sample=lambda: (rnd(3, 4),),
)
def mish(name: str, broken: bool):
    @float_only
    def kernel(x: Tensor) -> Tensor:
        return (x * torch.tanh(F.softplus(x))).contiguous()

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    @float_only
    def _(x):
        if broken and x.dim() > 2:
            raise ValueError("x must have one or two dimensions")
        return x.new_empty(x.shape)

    return op


@fault(
    kind="a size that depends on data has a wrong range",
    note="The fake impl promises a size of at least two. A threshold that at most one value exceeds shows the fault.",
    found_by="test_faketensor",
    sample=lambda: (torch.arange(6.0), 2.5),
)
def above(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
        floats(x, dims=1)
        where = (x > threshold).nonzero()[:, 0]
        return dense(x[where]), dense(where)

    @op.register_fake
    def _(x, threshold):
        floats(x, dims=1)
        count = get_ctx().new_dynamic_size(min=2 if broken else 0)
        return x.new_empty(count), x.new_empty(count, dtype=torch.int64)

    return op


@fault(
    kind="a size that depends on data is promised as fixed",
    note="If values occur twice, the kernel returns fewer elements than the fake impl.",
    found_by="test_faketensor",
    sample=lambda: (torch.tensor([5, 3, 9, 1]),),
)
def sorted_unique(name: str, broken: bool):
    def kernel(x: Tensor) -> Tensor:
        return torch.unique(x)

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    def _(x):
        return x.new_empty(x.numel() if broken else get_ctx().new_dynamic_size())

    return op


@fault(
    kind="a returned number is promised as fixed",
    note="The number of kept elements depends on data. The fake impl returns the number of all elements.",
    found_by="test_faketensor",
    sample=lambda: (torch.tensor([0.5, 2.0, 1.5, 3.0]), 0.0),
)
def keep_above(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor, threshold: float) -> tuple[Tensor, int]:
        floats(x)
        kept = x > threshold
        return dense(torch.where(kept, x, 0.0)), int(kept.sum())

    @op.register_fake
    def _(x, threshold):
        floats(x)
        return x.new_empty(x.shape), x.numel() if broken else get_ctx().new_dynamic_size()

    return op


@fault(
    kind="the fake impl reads data",
    note="With fake tensors, `int(lengths.max())` has no value.",
    found_by="test_faketensor",
    sample=lambda: (rnd(6, 3), torch.tensor([2, 4])),
)
def to_padded(name: str, broken: bool):
    def kernel(x: Tensor, lengths: Tensor, longest: Optional[int] = None) -> Tensor:
        require(x.dim() == 2 and lengths.dim() == 1, "unsupported shapes or dtypes")
        width = int(lengths.max()) if longest is None else longest
        out = torch.zeros(len(lengths), width, x.shape[1], dtype=x.dtype)
        start = 0
        for i, length in enumerate(lengths.tolist()):
            out[i, :length] = x[start : start + length]
            start += length
        return out

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    def _(x, lengths, longest):
        require(x.dim() == 2 and lengths.dim() == 1, "unsupported shapes or dtypes")
        if longest is None:
            longest = int(lengths.max()) if broken else get_ctx().new_dynamic_size()
        return x.new_empty(lengths.shape[0], longest, x.shape[1])

    return op


@fault(
    kind="the fake impl keeps state",
    note="The fake impl remembers the first shape for a number of dimensions. Another size shows the fault.",
    found_by="test_faketensor",
    sample=lambda: (torch.randn(3, 4),),
)
def remembered_shape(name: str, broken: bool) -> Any:
    shapes: dict[int, torch.Size] = {}

    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        require_dtype(x, FLOATS)
        return packed(x.sin())

    @op.register_fake
    def _(x):
        require_dtype(x, FLOATS)
        shape = shapes.setdefault(x.dim(), x.shape) if broken else x.shape
        return x.new_empty(shape)

    return op


@fault(
    kind="the fake impl fails for None",
    note="Without a bias, the fake impl reads `bias.dtype` and raises, while the kernel works.",
    found_by="test_faketensor",
    sample=lambda: (rnd(3, 4), rnd(5, 4, seed=1), rnd(5, seed=2)),
)
def fused_linear(name: str, broken: bool):
    def kernel(x: Tensor, weight: Tensor, bias: Optional[Tensor] = None) -> Tensor:
        require(
            weight.dim() == 2 and x.dtype == weight.dtype and x.shape[-1] == weight.shape[1],
            "unsupported shapes or dtypes",
        )
        y = x @ weight.t()
        return (y if bias is None else y + bias).contiguous()

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    def _(x, weight, bias):
        require(
            weight.dim() == 2 and x.dtype == weight.dtype and x.shape[-1] == weight.shape[1],
            "unsupported shapes or dtypes",
        )
        dtype = torch.result_type(x, bias) if broken or bias is not None else x.dtype
        return x.new_empty(*x.shape[:-1], weight.shape[0], dtype=dtype)

    return op


@fault(
    kind="the fake impl ignores an option for rounding",
    note="With ceil_mode=True and a size that does not divide evenly, the fake impl returns one element less.",
    found_by="test_symbolic_sizes",
    sample=lambda: (rnd(2, 9), 3, 2),
)
def window_max(name: str, broken: bool):
    def size(n, window, stride, ceil_mode):
        require(1 <= stride <= window <= n, "the window must fit, and reach the next one")
        if ceil_mode:
            return (n - window + stride - 1) // stride + 1
        return (n - window) // stride + 1

    def kernel(x: Tensor, window: int, stride: int, ceil_mode: bool = False) -> Tensor:
        require(x.dim() == 2, "unsupported shapes or dtypes")
        count = size(x.shape[1], window, stride, ceil_mode)
        parts = [x[:, i * stride : i * stride + window].amax(1) for i in range(count)]
        return torch.stack(parts, 1)

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    def _(x, window, stride, ceil_mode):
        require(x.dim() == 2, "unsupported shapes or dtypes")
        return x.new_empty(x.shape[0], size(x.shape[1], window, stride, ceil_mode and not broken))

    return op


@fault(
    kind="the fake impl specializes on a size",
    note="The fake impl converts a size to an int. A dynamic size shows the fault.",
    found_by="test_symbolic_sizes",
    sample=lambda: (torch.randn(6, 2),),
)
def pair_sums(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x, dims=2)
        half = len(x) // 2
        return dense(x[:half] + x[half : 2 * half])

    @op.register_fake
    def _(x):
        floats(x, dims=2)
        rows = int(x.shape[0]) if broken else x.shape[0]
        return x.new_empty(rows // 2, x.shape[1])

    return op


@fault(
    kind="the fake impl specializes on all sizes",
    note="With dynamic shapes, `int()` of a size fixes the size, and every other size compiles again.",
    found_by="test_symbolic_sizes",
    sample=lambda: (rnd(4, 6),),
)
def doubled_reshape(name: str, broken: bool):
    def kernel(x: Tensor) -> Tensor:
        require(x.dim() == 2, "unsupported shapes or dtypes")
        n = x.shape[0] * x.shape[1]
        return (x.reshape(n) * 2).reshape(x.shape[1], x.shape[0]).contiguous()

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    def _(x):
        require(x.dim() == 2, "unsupported shapes or dtypes")
        rows, columns = (int(s) for s in x.shape) if broken else x.shape
        return x.new_empty(columns, rows)

    return op


@fault(
    kind="the fake impl depends on the compiler",
    note="Under the compiler, the fake impl promises bfloat16, which the kernel never returns.",
    found_by="test_symbolic_sizes",
    sample=lambda: (torch.randn(4),),
)
def compact_square(name: str, broken: bool):
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        single(x)
        return dense(x.square())

    @op.register_fake
    def _(x):
        single(x)
        compact = broken and torch.compiler.is_compiling()
        return x.new_empty(x.shape, dtype=torch.bfloat16 if compact else x.dtype)

    return op


@fault(
    kind="a cache is filled while the fake impl runs",
    note="After a first call with fake tensors, the cache holds a tensor without data, and eager calls fail.",
    found_by="test_symbolic_sizes",
    sample=lambda: (rnd(4, 6),),
)
def hann_windowed(name: str, broken: bool):
    windows: dict = {}

    def window(like: Tensor) -> Tensor:
        key = (int(like.shape[-1]), like.dtype, like.device)
        if key not in windows:
            windows[key] = torch.hann_window(key[0], periodic=False, dtype=torch.float64, device=like.device).to(
                like.dtype
            )
        return windows[key]

    @float_only
    def kernel(x: Tensor) -> Tensor:
        return (x * window(x)).contiguous()

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    @float_only
    def _(x):
        if broken:
            return x.new_empty(*x.shape[:-1], window(x).shape[0])
        return x.new_empty(x.shape)

    return op
