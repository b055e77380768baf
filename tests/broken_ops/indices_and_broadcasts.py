"""Indices, segments and masks, optional arguments, and arguments that are broadcast."""

from typing import Optional

import numba
import numpy as np
import torch
import torch.nn.functional as F
from broken_ops.corpus import fault
from broken_ops.defining import require
from broken_ops.kernel_parts import accumulator, contiguous, float_only, ints, numpy_only, ptr, rnd
from torch import Tensor

from customops import custom_op


@fault(
    kind="scatter that loses duplicates",
    note="An index that occurs twice: one of the two rows is lost.",
    sample=lambda: (rnd(4, 3), torch.tensor([2, 0, 5, 3]), 6),
)
def scatter_rows(name: str, broken: bool):
    @numpy_only
    def kernel(src: Tensor, index: Tensor, rows: int) -> Tensor:
        require(src.dim() == 2 and index.dim() == 1 and src.shape[0] == index.shape[0], "unsupported shapes or dtypes")
        out = np.zeros((rows, src.shape[1]), dtype=src.numpy().dtype)
        if broken:
            out[index.numpy()] += src.numpy()
        else:
            np.add.at(out, index.numpy(), src.numpy())
        return torch.from_numpy(out)

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    @numpy_only
    def _(src, index, rows):
        require(src.dim() == 2 and index.dim() == 1 and src.shape[0] == index.shape[0], "unsupported shapes or dtypes")
        return src.new_empty(rows, src.shape[1])

    return op


@fault(
    kind="gradient for the padding row",
    note="index contains padding_idx: the row is not used in the forward, but gets a gradient.",
    sample=lambda: (rnd(6, 3), torch.tensor([1, 4, 2]), 0),
)
def lookup(name: str, broken: bool):
    def kernel(table: Tensor, index: Tensor, padding_idx: int) -> Tensor:
        require(table.dim() == 2, "unsupported shapes or dtypes")
        return table[index].masked_fill_((index == padding_idx)[..., None], 0)

    def setup_context(ctx, inputs, output):
        table, index, ctx.padding_idx = inputs
        ctx.save_for_backward(index)
        ctx.shape = table.shape

    def backward(ctx, grad):
        (index,) = ctx.saved_tensors
        if not broken:
            grad = grad.masked_fill((index == ctx.padding_idx)[..., None], 0)
        return grad.new_zeros(ctx.shape).index_put((index,), grad, accumulate=True), None, None

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    def _(table, index, padding_idx):
        require(table.dim() == 2, "unsupported shapes or dtypes")
        return table.new_empty(*index.shape, table.shape[1])

    op.register_autograd(backward, setup_context=setup_context)
    return op


@numba.njit
def _gather(table, index, out):
    for i in range(index.shape[0]):
        for j in range(table.shape[1]):
            out[i, j] = table[index[i], j]


@fault(
    kind="an index beyond the table is read from memory",
    note="An index >= len(table): the numba kernel checks no bounds and returns what lies behind the table.",
    sample=lambda: (rnd(5, 4), torch.tensor([0, 3, 3, 1])),
    isolate=True,
)
def gather_table_rows(name: str, broken: bool):
    @numpy_only
    def kernel(table: Tensor, index: Tensor) -> Tensor:
        require(
            table.dim() == 2 and index.dim() == 1 and table.dtype in (torch.float32, torch.float64),
            "unsupported shapes or dtypes",
        )
        if not broken and index.numel() and not (0 <= int(index.min()) and int(index.max()) < len(table)):
            raise IndexError(f"an index is out of range of a table of {len(table)} rows")
        out = np.empty((len(index), table.shape[1]), dtype=table.numpy().dtype)
        _gather(table.numpy(), index.numpy(), out)
        return contiguous(torch.from_numpy(out))

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    @numpy_only
    def _(table, index):
        require(
            table.dim() == 2 and index.dim() == 1 and table.dtype in (torch.float32, torch.float64),
            "unsupported shapes or dtypes",
        )
        return table.new_empty(index.shape[0], table.shape[1])

    return op


@fault(
    kind="empty segments",
    note="A segment without rows: reduceat returns the first row of the next one, instead of zero.",
    sample=lambda: (rnd(6, 3), torch.tensor([0, 2, 3, 6])),
)
def segment_sum_csr(name: str, broken: bool):
    @numpy_only
    def kernel(x: Tensor, indptr: Tensor) -> Tensor:
        require(x.dim() == 2 and indptr.dim() == 1 and indptr.shape[0] > 0, "unsupported shapes or dtypes")
        starts = indptr.numpy()
        values = x.numpy()[: starts[-1]]
        if broken:
            return torch.from_numpy(np.add.reduceat(values, starts[:-1], axis=0))
        out = np.zeros((len(starts) - 1, values.shape[1]), dtype=values.dtype)
        full = starts[1:] > starts[:-1]
        if full.any():
            out[full] = np.add.reduceat(values, starts[:-1][full], axis=0)
        return torch.from_numpy(out)

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    @numpy_only
    def _(x, indptr):
        require(x.dim() == 2 and indptr.dim() == 1 and indptr.shape[0] > 0, "unsupported shapes or dtypes")
        return x.new_empty(indptr.shape[0] - 1, x.shape[1])

    return op


@fault(
    kind="the memory of the indices is read as int32",
    note="int64 indices: every second one is the upper half of the one before.",
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
    kind="the length of the first sequence is used for all",
    note="Sequences of different lengths: all are cut at the first one's.",
    sample=lambda: (rnd(2, 5, 3), torch.tensor([4, 4])),
)
def mean_over_time(name: str, broken: bool):
    @float_only
    def kernel(x: Tensor, lengths: Tensor) -> Tensor:
        require(x.dim() == 3 and lengths.dim() == 1 and x.shape[0] == lengths.shape[0], "unsupported shapes or dtypes")
        out = torch.empty(x.shape[0], x.shape[2], dtype=x.dtype)
        for i in range(x.shape[0]):
            length = int(lengths[0 if broken else i])
            out[i] = x[i, :length].mean(0)
        return out

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    @float_only
    def _(x, lengths):
        require(x.dim() == 3 and lengths.dim() == 1 and x.shape[0] == lengths.shape[0], "unsupported shapes or dtypes")
        return x.new_empty(x.shape[0], x.shape[2])

    return op


@fault(
    kind="the fake does not know that an argument may be None",
    note="bias left out: the fake reads bias.dtype and raises, the kernel works.",
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
    kind="masked places of the result stay uninitialised",
    note="A mask with False: these rows of the result are whatever the memory held.",
    sample=lambda: (rnd(4, 3), torch.ones(4, dtype=torch.bool), 2.0),
)
def expert_forward(name: str, broken: bool):
    @float_only
    def kernel(x: Tensor, active: Tensor, scale: float) -> Tensor:
        require(active.dtype == torch.bool and active.shape == x.shape[:1], "unsupported shapes or dtypes")
        out = torch.empty(x.shape, dtype=x.dtype) if broken else torch.zeros(x.shape, dtype=x.dtype)
        out[active] = torch.tanh(x[active]) * scale
        return out

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    @float_only
    def _(x, active, scale):
        require(active.dtype == torch.bool and active.shape == x.shape[:1], "unsupported shapes or dtypes")
        return x.new_empty(x.shape)

    return op


@fault(
    kind="the fake has another default for an option",
    note="out_dtype left out and x not float32: the kernel keeps the dtype of x, the fake says float32.",
    sample=lambda: (ints(-100, 100, 3, 4, dtype=torch.int8), rnd(3, 1, seed=1), torch.float32),
)
def dequantize_rows(name: str, broken: bool):
    def kernel(q: Tensor, scale: Tensor, out_dtype: Optional[torch.dtype] = None) -> Tensor:
        require(q.dim() == 2 and scale.shape == (q.shape[0], 1), "unsupported shapes or dtypes")
        h = accumulator(scale.dtype)
        return (q.to(h) * scale.to(h)).to(out_dtype or scale.dtype).contiguous()

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    def _(q, scale, out_dtype):
        require(q.dim() == 2 and scale.shape == (q.shape[0], 1), "unsupported shapes or dtypes")
        return q.new_empty(q.shape, dtype=out_dtype or (torch.float32 if broken else scale.dtype))

    return op


@fault(
    kind="zero taken for None",
    note="scale=0.0: `scale or default` uses the default.",
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
    kind="bitwise not of a mask that is not bool",
    note="A uint8 mask: ~1 is 254, so that every place is masked.",
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
    kind="the fake does not broadcast",
    note="y with more dimensions or larger than x: the kernel broadcasts, the fake has the shape of x.",
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
    kind="broadcast by the index modulo the size",
    note="y of shape (n, 1): element i of x meets y[i % n] instead of y[i // m].",
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


def _weight_with_scale() -> Tensor:
    weight = ints(-8, 8, 5, 4, dtype=torch.int8)
    weight.scale = 0.125
    return weight


@fault(
    kind="an attribute of the tensor object is read",
    note="A clone, view or compiled call: the weight has lost its attribute, and is not scaled.",
    sample=lambda: (rnd(3, 4), _weight_with_scale(), 0.125),
)
def int8_linear(name: str, broken: bool):
    def kernel(x: Tensor, weight: Tensor, scale: float = 1.0) -> Tensor:
        require(
            x.is_floating_point() and x.dim() == 2 and weight.dim() == 2 and x.shape[1] == weight.shape[1],
            "unsupported shapes or dtypes",
        )
        factor = getattr(weight, "scale", 1.0) if broken else scale
        return x @ weight.to(x.dtype).t() * factor

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    def _(x, weight, scale):
        require(
            x.is_floating_point() and x.dim() == 2 and weight.dim() == 2 and x.shape[1] == weight.shape[1],
            "unsupported shapes or dtypes",
        )
        return x.new_empty(x.shape[0], weight.shape[0])

    return op
