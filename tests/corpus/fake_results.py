"""Fake impls that return a wrong dtype or layout, or an argument."""

from typing import Any, Optional

import numpy as np
import torch
from corpus.entries import fault
from corpus.parts import (
    FLOATS,
    HALVES,
    accumulator,
    contiguous,
    dense,
    floats,
    ints,
    numpy_only,
    one_floating_dtype,
    packed,
    require,
    require_dtype,
    rnd,
)
from torch import Tensor

from customops import custom_op


@fault(
    kind="the fake impl promises the strides of its input",
    note="For a transposed input, the kernel returns a contiguous result, and the fake impl a transposed one.",
    found_by="test_faketensor",
    sample=lambda: (rnd(4, 6),),
)
def np_sinc(name: str, broken: bool):
    @numpy_only
    def kernel(x: Tensor) -> Tensor:
        return contiguous(
            torch.from_numpy(np.ascontiguousarray(np.sinc(x.numpy())).astype(x.numpy().dtype)).view(x.shape)
        )

    op = custom_op(name, kernel, mutates_args=())
    op.register_fake(numpy_only(torch.empty_like if broken else lambda x: x.new_empty(x.shape)))
    return op


@fault(
    kind="the fake impl promises a contiguous result",
    note="The kernel keeps the strides of its input. A transposed input shows the fault.",
    found_by="test_faketensor",
    sample=lambda: (torch.randn(3, 4),),
)
def saturate(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x)
        return torch.tanh(x, out=torch.empty_like(x))

    @op.register_fake
    def _(x):
        floats(x)
        return x.new_empty(x.shape) if broken else torch.empty_like(x)

    return op


def pitched(x: Tensor, rows: Any, columns: Any) -> Tensor:
    """Return zeros in rows that begin every 16 bytes."""
    each = 16 // x.element_size()
    return x.new_zeros(rows, (columns + each - 1) // each * each)[:, :columns]


@fault(
    kind="the fake impl ignores the row pitch",
    note="The kernel pads each row to 16 bytes. A width that is not a multiple of 16 bytes shows the fault.",
    found_by="test_faketensor",
    sample=lambda: (torch.randn(3, 8),),
)
def pitched_tanh(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x, dims=2)
        return pitched(x, *x.shape).copy_(x.tanh())

    @op.register_fake
    def _(x):
        floats(x, dims=2)
        return x.new_empty(x.shape) if broken else pitched(x, *x.shape)

    return op


@fault(
    kind="the fake impl returns the default dtype",
    note="A float64 input shows the fault.",
    found_by="test_faketensor",
    sample=lambda: (torch.randn(5),),
)
def window(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x, dims=1)
        return dense(x * torch.hann_window(len(x), dtype=x.dtype, device=x.device))

    @op.register_fake
    def _(x):
        floats(x, dims=1)
        return torch.empty(len(x), device=x.device) if broken else x.new_empty(len(x))

    return op


@fault(
    kind="the fake impl ignores the accumulation dtype",
    note="The kernel returns float32 for float16 inputs, and the fake impl float16.",
    found_by="test_faketensor",
    sample=lambda: (torch.randn(3, 4),),
)
def mean_square(name: str, broken: bool):
    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        one_floating_dtype(x)
        wide = x if x.dtype == torch.float64 else x.float()
        return wide.square().mean()

    @op.register_fake
    def _(x):
        one_floating_dtype(x)
        return x.new_empty((), dtype=x.dtype if broken or x.dtype == torch.float64 else torch.float32)

    return op


@fault(
    kind="the fake impl has another default than the kernel",
    note="Without `out_dtype`, the kernel keeps the dtype of `x`, and the fake impl returns float32.",
    found_by="test_faketensor",
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


def wide(x: Tensor) -> torch.dtype:
    """Return the dtype in which sums and angles of a tensor are computed."""
    return torch.promote_types(x.dtype, torch.float32)


@fault(
    kind="kernel and fake impl differ under autocast",
    note="The kernel returns at least float32, the fake impl the dtype of `x`. Autocast or bfloat16 show the fault.",
    found_by="test_faketensor",
    sample=lambda: (torch.randn(3, 8),),
)
def row_energy(name: str, broken: bool) -> Any:
    def check(x: Tensor) -> None:
        require_dtype(x, FLOATS + HALVES)
        if x.dim() == 0:
            raise ValueError("expected one dimension at least")

    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        check(x)
        return packed(x.to(wide(x)).square().sum(-1))

    @op.register_fake
    def _(x):
        check(x)
        return x.new_empty(x.shape[:-1], dtype=x.dtype if broken else wide(x))

    op.register_autocast("cpu", torch.bfloat16)
    return op


@fault(
    kind="the fake impl returns its argument",
    note="In a traced call, the result is the input itself, so that a later write to the result changes the input.",
    found_by="test_faketensor",
    sample=lambda: (rnd(3, 4),),
)
def cube_root(name: str, broken: bool):
    @numpy_only
    def kernel(x: Tensor) -> Tensor:
        return contiguous(torch.from_numpy(np.asarray(np.cbrt(x.numpy(), order="C"))))

    op = custom_op(name, kernel, mutates_args=())
    op.register_fake(numpy_only(lambda x: x if broken else x.new_empty(x.shape)))
    return op


@fault(
    kind="a uint8 index is taken for a mask",
    note="The kernel indexes with integers of all dtypes. torch treats uint8 as a mask.",
    found_by="test_faketensor",
    sample=lambda: (torch.randn(3, 2), torch.tensor([1, 0, 1])),
)
def pick_any(name: str, broken: bool) -> Any:
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
