"""Kernels that differ from the other kernels of the op."""

import math
from typing import Any

import torch
from corpus.entries import fault
from corpus.parts import dense, floats, one_floating_dtype, only_integers, require, rnd, same_shape, single
from torch import Tensor

from customops import custom_op


@fault(
    kind="two kernels differ for zero",
    note="The CPU kernel returns 1 for zero, and the general kernel returns 0.",
    found_by="test_kernels",
    sample=lambda: (torch.randn(5),),
)
def direction(name: str, broken: bool):
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        one_floating_dtype(x)
        return dense((x > 0).to(x.dtype) - (x < 0).to(x.dtype))

    @op.register_kernel("cpu")
    def _(x):
        one_floating_dtype(x)
        ahead = x >= 0 if broken else x > 0
        return dense(torch.where(ahead, 1.0, torch.where(x < 0, -1.0, 0.0)).to(x.dtype))

    @op.register_fake
    def _(x):
        one_floating_dtype(x)
        return x.new_empty(x.shape)

    return op


@fault(
    kind="a comparison drops NaN",
    note="The CPU kernel returns the bound for NaN, and the general kernel keeps NaN.",
    found_by="test_kernels",
    sample=lambda: (torch.randn(5), 0.0),
)
def floor_at(name: str, broken: bool):
    def check(x: Tensor, low: float) -> None:
        single(x)
        if math.isnan(low):
            raise ValueError("nan is no bound")

    @custom_op(name, mutates_args=())
    def op(x: Tensor, low: float) -> Tensor:
        check(x, low)
        return dense(torch.maximum(x, torch.tensor(low, dtype=x.dtype)))

    @op.register_kernel("cpu")
    def _(x, low):
        check(x, low)
        bound = torch.tensor(low, dtype=x.dtype)
        return dense(torch.where(x > bound, x, bound) if broken else torch.where(x < bound, bound, x))

    @op.register_fake
    def _(x, low):
        check(x, low)
        return x.new_empty(x.shape)

    return op


@fault(
    kind="two kernels round halves differently",
    note="The CPU kernel rounds halves up, and the general kernel rounds to even.",
    found_by="test_kernels",
    sample=lambda: (torch.randn(5),),
)
def rounded_halves(name: str, broken: bool):
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        single(x)
        return dense(x.round())

    @op.register_kernel("cpu")
    def _(x):
        single(x)
        return dense((x + 0.5).floor() if broken else x.round())

    @op.register_fake
    def _(x):
        single(x)
        return x.new_empty(x.shape)

    return op


@fault(
    kind="an index overflows int32",
    note="The kernel computes the index in int32. Row 70000 in rows of 70000 elements shows the fault.",
    found_by="test_kernels",
    sample=lambda: (torch.tensor([0, 2, 1]), torch.tensor([3, 0, 4]), 5),
)
def cell_index(name: str, broken: bool):
    def check(rows: Tensor, columns: Tensor) -> None:
        only_integers(rows, columns)
        same_shape(rows, columns)

    @custom_op(name, mutates_args=())
    def op(rows: Tensor, columns: Tensor, width: int) -> Tensor:
        check(rows, columns)
        return dense(rows.long() * width + columns.long())

    @op.register_kernel("cpu")
    def _(rows, columns, width):
        check(rows, columns)
        dtype = torch.int32 if broken else torch.int64
        return dense((rows.to(dtype) * width + columns.to(dtype)).long())

    @op.register_fake
    def _(rows, columns, width):
        check(rows, columns)
        return rows.new_empty(rows.shape, dtype=torch.int64)

    return op


@fault(
    kind="an out variant adds to its buffer",
    note="If `out` is not zero before the call, the old content is in the result.",
    found_by="test_kernels",
    sample=lambda: (rnd(3, 8), rnd(8, 4, seed=1)),
)
def chunked_matmul(name: str, broken: bool):
    def accumulate(a: Tensor, b: Tensor, out: Tensor) -> None:
        for s in range(0, a.shape[1], 4):
            out += a[:, s : s + 4] @ b[s : s + 4]

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        require(a.dim() == 2 and b.dim() == 2 and a.dtype == b.dtype, "unsupported shapes or dtypes")
        require(a.shape[1] == b.shape[0], "inner sizes differ")
        out = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype)
        accumulate(a, b, out)
        return out

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    def _(a, b):
        require(a.dim() == 2 and b.dim() == 2 and a.dtype == b.dtype, "unsupported shapes or dtypes")
        require(a.shape[1] == b.shape[0], "inner sizes differ")
        return a.new_empty(a.shape[0], b.shape[1])

    @op.register_out
    def _(a, b, *, out):
        if not broken:
            out.zero_()
        accumulate(a, b, out)

    return op


@fault(
    kind="an out variant with inplace= reads overwritten elements",
    note="The out variant declares that it can write over `x`, and reads elements that it has overwritten.",
    found_by="test_kernels",
    sample=lambda: (torch.randn(5),),
)
def differences(name: str, broken: bool) -> Any:
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
