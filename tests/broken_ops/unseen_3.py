"""Writes, metadata of arguments, out variants; memory behind an argument, strides that mean nothing."""

from __future__ import annotations

from typing import Any

import torch
from broken_ops.corpus import fault
from broken_ops.defining import alike, dense, floats, memory, require, writable
from torch import Tensor

from customops import custom_op

SWAP = "an op that writes gives its argument other memory instead of writing into it"
PAST = "a write goes past the end of the argument, into what lies behind it in memory"
METADATA = "the kernel changes the shape or strides of an argument, though not its data"
OUT = "out variants: inplace= is declared, and the kernel reads what it has overwritten"
BEHIND = "what lies behind an argument in memory gets into the result"
ONES = "layout: the stride of a dimension of size one is believed"


@fault(
    kind=SWAP,
    note=(
        "An argument that is not contiguous is made so by x.data = ...; the tensor of which it is a view "
        "stays as it was."
    ),
    sample=lambda: (torch.randn(3, 4), 2.0),
)
def u_scale_dense(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args={"x"})
    def op(x: Tensor, by: float) -> None:
        floats(x)
        writable(x)
        if broken and not x.is_contiguous():
            x.data = x.contiguous()
        x.mul_(by)

    @op.register_fake
    def _(x, by):
        floats(x)
        writable(x)

    return op


@fault(
    kind=SWAP,
    note=(
        "The result is put in place by out.data = ..., without a copy; a view of out, or what out is a view "
        "of, lacks it."
    ),
    sample=lambda: (torch.zeros(4), torch.randn(4)),
)
def u_sine_into(name: str, broken: bool) -> Any:
    def valid(out, x):
        alike(out, x)
        writable(out)

    @custom_op(name, mutates_args={"out"})
    def op(out: Tensor, x: Tensor) -> None:
        valid(out, x)
        result = x.sin()
        if broken:
            out.data = result
        else:
            out.copy_(result)

    @op.register_fake
    def _(out, x):
        valid(out, x)

    return op


def behind(x: Tensor) -> int:
    """How many elements of the storage lie behind the last one of a contiguous tensor."""
    return x.untyped_storage().nbytes() // x.element_size() - x.storage_offset() - x.numel()


@fault(
    kind=PAST,
    note="The last block of four is written in full; what lies behind a slice of other lengths is scaled, too.",
    sample=lambda: (torch.randn(8), 2.0),
)
def u_scale_blocks(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args={"x"})
    def op(x: Tensor, by: float) -> None:
        floats(x)
        writable(x)
        if broken and x.is_contiguous():
            whole = x.numel() + min(-x.numel() % 4, behind(x))
            torch.as_strided(x, (whole,), (1,)).mul_(by)
        else:
            x.mul_(by)

    @op.register_fake
    def _(x, by):
        floats(x)
        writable(x)

    return op


@fault(
    kind=PAST,
    note=(
        "Rows are written in vectors of four where the row stride leaves room; a slice of columns shows the "
        "zeros there."
    ),
    sample=lambda: (torch.zeros(3, 4), torch.randn(3, 4)),
)
def u_store_tanh(name: str, broken: bool) -> Any:
    def valid(out, x):
        alike(out, x)
        require(out.dim() == 2, "two dimensions are needed")
        writable(out)

    @custom_op(name, mutates_args={"out"})
    def op(out: Tensor, x: Tensor) -> None:
        valid(out, x)
        values = x.tanh()
        rows, columns = out.shape
        wide = (columns + 3) // 4 * 4
        if broken and rows > 1 and out.stride(1) == 1 and out.stride(0) >= wide:
            whole = torch.as_strided(out, (rows - 1, wide), out.stride())
            whole.copy_(torch.nn.functional.pad(values[:-1], (0, wide - columns)))
            out[-1] = values[-1]
        else:
            out.copy_(values)

    @op.register_fake
    def _(out, x):
        valid(out, x)

    return op


@fault(
    kind=METADATA,
    note="A vector is made a matrix by unsqueeze_, and stays one for the caller.",
    sample=lambda: (torch.randn(3, 4),),
)
def u_softmax_rows(name: str, broken: bool) -> Any:
    def valid(x):
        floats(x)
        require(x.dim() in (1, 2), "one or two dimensions are needed")

    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        valid(x)
        shape = x.shape
        if x.dim() == 1:
            x = x.unsqueeze_(0) if broken else x.unsqueeze(0)
        return dense(x.softmax(1).view(shape))

    @op.register_fake
    def _(x):
        valid(x)
        return x.new_empty(x.shape)

    return op


@fault(
    kind=METADATA,
    note="A tall weight is turned by t_() for the kernel of wide ones, and not turned back.",
    sample=lambda: (torch.randn(3, 4), torch.randn(2, 4)),
)
def u_turned_linear(name: str, broken: bool) -> Any:
    def valid(x, weight):
        floats(x, weight)
        require(x.dim() == 2 and weight.dim() == 2 and x.shape[1] == weight.shape[1], "matrices that fit are needed")

    @custom_op(name, mutates_args=())
    def op(x: Tensor, weight: Tensor) -> Tensor:
        valid(x, weight)
        if weight.shape[0] > weight.shape[1]:
            weight = weight.t_() if broken else weight.t()
            return dense(x @ weight)
        return dense(x @ weight.t())

    @op.register_fake
    def _(x, weight):
        valid(x, weight)
        return x.new_empty(x.shape[0], weight.shape[0])

    return op


@fault(
    kind=OUT,
    note="The out variant may write over x, it says, and reads the element before the one that it writes.",
    sample=lambda: (torch.randn(5),),
)
def u_differences(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x, dims=1)
        result = dense(x)
        result[1:] -= x[:-1]
        return result

    @op.register_fake
    def _(x):
        floats(x, dims=1)
        return x.new_empty(x.shape)

    @op.register_out(inplace=("x",) if broken else ())
    def _(x, *, out):
        floats(x, dims=1)
        for i in range(len(x)):
            out[i] = x[i] - x[i - 1] if i else x[i]

    return op


@fault(
    kind=OUT,
    note="The out variant uses out for the squares before it reads x again, and declares that out may be x.",
    sample=lambda: (torch.randn(3, 4), 1e-3),
)
def u_rms_into(name: str, broken: bool) -> Any:
    def valid(x, eps):
        floats(x, dims=2)
        require(x.shape[1] > 0, "a column is needed")
        require(eps > 0, "a positive eps is needed")

    @custom_op(name, mutates_args=())
    def op(x: Tensor, eps: float) -> Tensor:
        valid(x, eps)
        return dense(x * (x.square().mean(1, keepdim=True) + eps).rsqrt())

    @op.register_fake
    def _(x, eps):
        valid(x, eps)
        return x.new_empty(x.shape)

    @op.register_out(inplace=("x",) if broken else ())
    def _(x, eps, *, out):
        valid(x, eps)
        torch.mul(x, x, out=out)
        scale = (out.mean(1, keepdim=True) + eps).rsqrt()
        torch.mul(x, scale, out=out)

    return op


@fault(
    kind=BEHIND,
    note="The maximum is that of whole blocks of four; for a slice of another length it sees what lies behind.",
    sample=lambda: (torch.randn(8),),
)
def u_block_max(name: str, broken: bool) -> Any:
    def valid(x):
        floats(x, dims=1)
        require(x.shape[0] > 0, "an element is needed")

    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        valid(x)
        flat = x.contiguous()
        return dense(memory(flat, (len(x) + 3) // 4 * 4).amax() if broken else flat.amax())

    @op.register_fake
    def _(x):
        valid(x)
        return x.new_empty(())

    return op


@fault(
    kind=BEHIND,
    note=(
        "Rows are read in vectors of four, as if what the row stride leaves over were zeros; a slice of "
        "columns shows it."
    ),
    sample=lambda: (torch.randn(3, 4),),
)
def u_row_energy(name: str, broken: bool) -> Any:
    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x, dims=2)
        rows, columns = x.shape
        wide = (columns + 3) // 4 * 4
        if broken and rows > 1 and x.stride(1) == 1 and x.stride(0) >= wide:
            whole = torch.as_strided(x, (rows - 1, wide), x.stride())
            return torch.cat([whole.square().sum(1), x[-1:].square().sum(1)])
        return dense(x.square().sum(1))

    @op.register_fake
    def _(x):
        floats(x, dims=2)
        return x.new_empty(len(x))

    return op


@fault(
    kind=ONES,
    note=(
        "The leading dimension must be a row's length at least; for one row the stride may be anything, and is refused."
    ),
    sample=lambda: (torch.randn(3, 4),),
)
def u_leading_dimension(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x, dims=2)
        rows, columns = x.shape
        flat = x.contiguous()
        if flat.numel() == 0:
            return x.new_empty(x.shape)
        leading = flat.stride(0) if broken or rows > 1 else columns
        require(leading >= columns, "the leading dimension is less than the number of columns")
        where = torch.arange(rows)[:, None] * leading + torch.arange(columns)
        values = memory(flat, rows * leading)[where.reshape(-1)].view(rows, columns)
        return dense(values.cumsum(1))

    @op.register_fake
    def _(x):
        floats(x, dims=2)
        return x.new_empty(x.shape)

    return op


@fault(
    kind=ONES,
    note=(
        "The number of rows is the quotient of two strides, right for a contiguous batch of two; a batch of "
        "one has any."
    ),
    sample=lambda: (torch.randn(2, 3, 4),),
)
def u_batch_mean(name: str, broken: bool) -> Any:
    def valid(x):
        floats(x, dims=3)
        require(x.shape[1] > 0 and x.shape[2] > 0, "rows and columns are needed")

    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        valid(x)
        flat = x.contiguous()
        rows = flat.stride(0) // flat.stride(1) if broken else flat.shape[1]
        return dense(flat.sum(1) / rows)

    @op.register_fake
    def _(x):
        valid(x)
        return x.new_empty(x.shape[0], x.shape[2])

    return op
