"""Batches whose indices are not shifted or whose writes are lost, tangents that are overwritten, types mistaken."""

from __future__ import annotations

from typing import Any

import torch
from broken_ops.corpus import fault
from broken_ops.defining import dense, floats, require, writable
from torch import Tensor

from customops import custom_op

SHIFT = "vmap: the rule lays the batch out as rows, and forgets to shift the indices into them"
LOST = "vmap: the rule of an op that writes gives it a copy, so that the write is lost"
TANGENT = "forward mode: the rule writes into a tangent, or into what was saved"
WIDTH = "dtypes: one is taken for another of the same width"
INTEGERS = "an integer tensor of another width is misread: uint8 taken for a mask, int32 read as int64"
COMPLEX = "a complex input loses its imaginary part on the way"


def batched_first(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """The batch in front, also of a tensor that has none."""
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


@fault(
    kind=SHIFT,
    note="All elements of a batch pick from the rows of the first one.",
    sample=lambda: (torch.randn(4, 3), torch.tensor([2, 0])),
)
def u_pick_clamped(name: str, broken: bool) -> Any:
    def valid(x, index):
        floats(x, dims=2)
        require(x.shape[0] > 0, "a row is needed")
        require(index.dtype == torch.int64 and index.dim() == 1, "a vector of int64 is needed")

    @custom_op(name, mutates_args=())
    def op(x: Tensor, index: Tensor) -> Tensor:
        valid(x, index)
        return dense(x[index.clamp(0, x.shape[0] - 1)])

    @op.register_fake
    def _(x, index):
        valid(x, index)
        return x.new_empty(index.shape[0], x.shape[1])

    @op.register_vmap
    def _(info, in_dims, x, index):
        size = info.batch_size
        x, index = (batched_first(each, dim, size) for each, dim in zip((x, index), in_dims, strict=True))
        rows, columns, count = x.shape[1], x.shape[2], index.shape[1]
        if size == 0:
            return x.new_empty(0, count, columns), 0
        index = index.clamp(0, rows - 1)
        if not broken:
            index = index + rows * torch.arange(size, device=index.device)[:, None]
        picked = op(x.reshape(size * rows, columns), index.reshape(size * count))
        return picked.view(size, count, columns), 0

    return op


@fault(
    kind=SHIFT,
    note="The windows of each element of a batch are cut from the first one.",
    sample=lambda: (torch.randn(6), torch.tensor([0, 3, 2]), 2),
)
def u_windows(name: str, broken: bool) -> Any:
    def valid(x, starts, width):
        floats(x, dims=1)
        require(0 < width <= x.shape[0], "a width within the length is needed")
        require(starts.dtype == torch.int64 and starts.dim() == 1, "a vector of int64 is needed")

    @custom_op(name, mutates_args=())
    def op(x: Tensor, starts: Tensor, width: int) -> Tensor:
        valid(x, starts, width)
        first = starts.clamp(0, len(x) - width)
        return dense(x[first[:, None] + torch.arange(width, device=x.device)])

    @op.register_fake
    def _(x, starts, width):
        valid(x, starts, width)
        return x.new_empty(starts.shape[0], width)

    @op.register_vmap
    def _(info, in_dims, x, starts, width):
        size = info.batch_size
        x, starts = (batched_first(each, dim, size) for each, dim in zip((x, starts), in_dims, strict=False))
        length, count = x.shape[1], starts.shape[1]
        if size == 0:
            return x.new_empty(0, count, width), 0
        starts = starts.clamp(0, length - width)
        if not broken:
            starts = starts + length * torch.arange(size, device=starts.device)[:, None]
        cut = op(x.reshape(size * length), starts.reshape(size * count), width)
        return cut.view(size, count, width), 0

    return op


@fault(
    kind=LOST,
    note="The rule makes the batch contiguous in front; for in_dims=0 that is the tensor itself, else a copy.",
    sample=lambda: (torch.randn(3), 2.0),
)
def u_batched_scale(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args={"x"})
    def op(x: Tensor, by: float) -> None:
        floats(x)
        writable(x)
        x.mul_(by)

    @op.register_fake
    def _(x, by):
        floats(x)
        writable(x)

    @op.register_vmap
    def _(info, in_dims, x, by):
        x = x.movedim(in_dims[0], 0)
        op(x.contiguous() if broken else x, by)
        return None, None

    return op


@fault(
    kind=LOST,
    note="The rule flattens batch and rows by reshape, a copy for a cache whose batch is not in front.",
    sample=lambda: (torch.zeros(4, 2), torch.randn(4, 2)),
)
def u_batched_store(name: str, broken: bool) -> Any:
    def valid(cache, rows):
        floats(cache, rows)
        require(cache.dim() >= 1 and cache.shape == rows.shape, "two tensors of one shape are needed")
        writable(cache)

    @custom_op(name, mutates_args={"cache"})
    def op(cache: Tensor, rows: Tensor) -> None:
        valid(cache, rows)
        cache.copy_(rows.tanh())

    @op.register_fake
    def _(cache, rows):
        valid(cache, rows)

    @op.register_vmap
    def _(info, in_dims, cache, rows):
        where, other = in_dims
        if where is None:
            raise ValueError("the rows are batched, and the cache is not")
        cache, rows = cache.movedim(where, 0), batched_first(rows, other, info.batch_size)
        if broken:
            width = cache.shape[-1]
            cache, rows = (each.reshape(each.numel() // max(width, 1), width) for each in (cache, rows))
        op(cache, rows)
        return None, None

    return op


@fault(
    kind=TANGENT,
    note="The rule multiplies the tangent in place, which is the caller's tensor.",
    sample=lambda: (torch.randn(3),),
)
def u_forward_cube(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x)
        return dense(x * x * x)

    @op.register_fake
    def _(x):
        floats(x)
        return x.new_empty(x.shape)

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    def slope(ctx, change):
        (x,) = ctx.saved_tensors
        return 3 * x * x * change

    def jvp(ctx, change):
        (x,) = ctx.saved_tensors
        return change.mul_(3 * x * x) if broken else 3 * x * x * change

    op.register_autograd(slope, setup_context=setup_context)
    op.register_jvp(jvp)
    return op


@fault(
    kind=TANGENT,
    note="The rule computes 1 - y * y in the memory of the result y, so that the result beside the tangent is another.",
    sample=lambda: (torch.randn(3),),
)
def u_forward_tanh(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x)
        return dense(x.tanh())

    @op.register_fake
    def _(x):
        floats(x)
        return x.new_empty(x.shape)

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    def slope(ctx, change):
        (y,) = ctx.saved_tensors
        return (1 - y * y) * change

    def jvp(ctx, change):
        (y,) = ctx.saved_tensors
        return y.square_().neg_().add_(1) * change if broken else (1 - y * y) * change

    op.register_autograd(slope, setup_context=setup_context)
    op.register_jvp(jvp)
    return op


@fault(
    kind=WIDTH,
    note="Two bytes are read as float16, whether they are that or bfloat16.",
    sample=lambda: (torch.randn(4).half(),),
)
def u_half_tanh(name: str, broken: bool) -> Any:
    def valid(x):
        require(x.dtype in (torch.float16, torch.bfloat16, torch.float32), "float16, bfloat16 or float32 is needed")

    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        valid(x)
        if broken and x.element_size() == 2:
            bits = dense(x).view(torch.float16)
            return dense(bits.float().tanh().half()).view(x.dtype)
        return dense(x.float().tanh().to(x.dtype))

    @op.register_fake
    def _(x):
        valid(x)
        return x.new_empty(x.shape)

    return op


@fault(
    kind=WIDTH,
    note="Bytes are read as int8, also those of uint8: 200 is taken for -56, and not where int32 has the same numbers.",
    sample=lambda: (torch.tensor([3, -7, 100, 0], dtype=torch.int8), 0.5),
)
def u_dequantize(name: str, broken: bool) -> Any:
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
    kind=INTEGERS,
    note="Any integer type is taken, and indexed with as it is: torch reads uint8 as a mask.",
    sample=lambda: (torch.randn(3, 2), torch.tensor([1, 0, 1])),
)
def u_pick_any(name: str, broken: bool) -> Any:
    def valid(x, index):
        floats(x, dims=2)
        require(index.dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64), "integers are needed")
        require(index.dim() == 1, "a vector is needed")

    @custom_op(name, mutates_args=())
    def op(x: Tensor, index: Tensor) -> Tensor:
        valid(x, index)
        wide = index.long()
        require(bool(((wide >= 0) & (wide < len(x))).all()), "an index is out of range")
        return dense(x[index if broken else wide])

    @op.register_fake
    def _(x, index):
        valid(x, index)
        return x.new_empty(index.shape[0], x.shape[1])

    return op


@fault(
    kind=INTEGERS,
    note="The shifts are read by a pointer to int64; int32 is accepted, of which each two are read as one.",
    sample=lambda: (torch.randn(3, 4), torch.tensor([1, -2, 0])),
)
def u_shift_rows(name: str, broken: bool) -> Any:
    def valid(x, shifts):
        floats(x, dims=2)
        require(shifts.dtype in (torch.int32, torch.int64), "int32 or int64 is needed")
        require(shifts.dim() == 1 and shifts.shape[0] == x.shape[0], "a shift for each row is needed")

    @custom_op(name, mutates_args=())
    def op(x: Tensor, shifts: Tensor) -> Tensor:
        valid(x, shifts)
        if broken:
            raw = dense(shifts).view(torch.uint8)
            missing = 8 * len(shifts) - len(raw)
            numbers = torch.cat([raw, raw.new_zeros(missing)]).view(torch.int64).tolist()
        else:
            numbers = shifts.tolist()
        result = x.new_empty(x.shape)
        for row, shift in enumerate(numbers):
            result[row] = x[row].roll(shift % x.shape[1]) if x.shape[1] else x[row]
        return result

    @op.register_fake
    def _(x, shifts):
        valid(x, shifts)
        return x.new_empty(x.shape)

    return op


def real_or_complex(*tensors: Tensor) -> None:
    """Refuse all but float32, float64 and the complex types of these, mixed types, and other shapes than vectors."""
    for tensor in tensors:
        require(tensor.is_floating_point() or tensor.is_complex(), "real or complex numbers are needed")
        require(tensor.element_size() >= (8 if tensor.is_complex() else 4), "the type is too narrow")
        require(tensor.dtype == tensors[0].dtype, "one dtype is needed")
        require(tensor.dim() == 1 and tensor.shape == tensors[0].shape, "vectors of one length are needed")


@fault(
    kind=COMPLEX,
    note="The sums are accumulated in float64, whatever comes in; for a complex input formula and kernel differ.",
    sample=lambda: (torch.randn(4),),
)
def u_double_sums(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        real_or_complex(x)
        wide = torch.float64 if broken or not x.is_complex() else torch.complex128
        return dense(x.to(wide).cumsum(0).to(x.dtype))

    @op.register_fake
    def _(x):
        real_or_complex(x)
        return x.new_empty(x.shape)

    @op.register_autograd
    def _(ctx, grad):
        return grad.flip(0).cumsum(0).flip(0)

    return op


@fault(
    kind=COMPLEX,
    note="The weights are taken for real numbers; complex ones are accepted, for which the formula has a gradient.",
    sample=lambda: (torch.randn(4), torch.rand(4)),
)
def u_weighted_total(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor, weight: Tensor) -> Tensor:
        real_or_complex(x, weight)
        factor = weight.real.to(weight.dtype) if broken else weight
        return dense((x * factor).sum())

    @op.register_fake
    def _(x, weight):
        real_or_complex(x, weight)
        return x.new_empty(())

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @op.register_autograd(setup_context=setup_context)
    def _(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight.conj(), grad * x.conj()

    return op
