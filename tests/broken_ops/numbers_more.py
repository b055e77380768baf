"""Kernels that disagree on options, on large integers, on nan, and on what is negative or half."""

import math

import torch
from broken_ops.corpus import fault
from broken_ops.needs_more import dense, floating, integers, rank, same_shape, single
from torch import Tensor

from customops import custom_op

KERNELS = "the CPU kernel and the reference (another kernel, the fallback kernel) disagree"
INTEGERS = "integers overflow or are truncated on the way: an int32 index or sum, uint8 negation, int64 through float"
NAN = "nan or inf are dropped, or swallowed: max and clamp by comparisons, a mask multiplied"
SIGN = "the sign of zero, negative modulo, division that truncates instead of floors, rounding halves"


@fault(
    kind=KERNELS,
    note="The kernel for the CPU knows the approximation alone; approximate=False shows it.",
    sample=lambda: (torch.randn(5), True),
)
def gelu_like(name: str, broken: bool):
    def general(x: Tensor, approximate: bool) -> Tensor:
        single(x)
        if approximate:
            return dense(0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))
        return dense(0.5 * x * (1 + torch.erf(x / math.sqrt(2))))

    @custom_op(name, mutates_args=())
    def op(x: Tensor, approximate: bool = False) -> Tensor:
        return general(x, approximate)

    @op.register_kernel("cpu")
    def _(x, approximate):
        return general(x, approximate or broken)

    @op.register_fake
    def _(x, approximate):
        single(x)
        return x.new_empty(x.shape)

    return op


@fault(
    kind=KERNELS,
    note="The kernel for the CPU gives 1 at zero, the general one 0.",
    sample=lambda: (torch.randn(5),),
)
def direction(name: str, broken: bool):
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floating(x)
        return dense((x > 0).to(x.dtype) - (x < 0).to(x.dtype))

    @op.register_kernel("cpu")
    def _(x):
        floating(x)
        ahead = x >= 0 if broken else x > 0
        return dense(torch.where(ahead, 1.0, torch.where(x < 0, -1.0, 0.0)).to(x.dtype))

    @op.register_fake
    def _(x):
        floating(x)
        return x.new_empty(x.shape)

    return op


@fault(
    kind=KERNELS,
    note="The kernel for the CPU divides by n - 1 also where n is 1.",
    sample=lambda: (torch.randn(3, 4),),
)
def row_variance(name: str, broken: bool):
    def deviations(x: Tensor) -> Tensor:
        single(x)
        rank(x, 1)
        return (x - x.mean(-1, keepdim=True)).square().sum(-1)

    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        return dense(deviations(x) / max(x.shape[-1] - 1, 1))

    @op.register_kernel("cpu")
    def _(x):
        return dense(deviations(x) / (x.shape[-1] - 1 if broken and x.numel() else max(x.shape[-1] - 1, 1)))

    @op.register_fake
    def _(x):
        single(x)
        rank(x, 1)
        return x.new_empty(x.shape[:-1])

    return op


@fault(
    kind=INTEGERS,
    note="The index is computed in int32; a row of 70000 in rows of 70000 shows it.",
    sample=lambda: (torch.tensor([0, 2, 1]), torch.tensor([3, 0, 4]), 5),
)
def cell_index(name: str, broken: bool):
    def check(rows: Tensor, columns: Tensor) -> None:
        integers(rows, columns)
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
    kind=INTEGERS,
    note="Integers are summed as float32; 2**24 + 1 shows it.",
    sample=lambda: (torch.arange(6).view(2, 3),),
)
def ledger(name: str, broken: bool):
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        integers(x)
        rank(x, 1)
        return dense(x.long().sum(-1))

    @op.register_kernel("cpu")
    def _(x):
        integers(x)
        rank(x, 1)
        return dense((x.float() if broken else x.long()).sum(-1).long())

    @op.register_fake
    def _(x):
        integers(x)
        rank(x, 1)
        return x.new_empty(x.shape[:-1], dtype=torch.int64)

    return op


@fault(
    kind=INTEGERS,
    note="The difference of bytes wraps around where the second is larger.",
    sample=lambda: (torch.tensor([9, 200, 30], dtype=torch.uint8), torch.tensor([3, 100, 30], dtype=torch.uint8)),
)
def contrast(name: str, broken: bool):
    def check(x: Tensor, y: Tensor) -> None:
        if x.dtype != torch.uint8 or y.dtype != torch.uint8:
            raise ValueError(f"expected bytes, got {x.dtype} and {y.dtype}")
        same_shape(x, y)

    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor, y: Tensor) -> Tensor:
        check(x, y)
        return dense((x - y).abs() if broken else torch.where(x > y, x - y, y - x))

    @op.register_fake
    def _(x, y):
        check(x, y)
        return x.new_empty(x.shape)

    return op


@fault(
    kind=NAN,
    note="The kernel for the CPU compares, and takes the bound for nan; the general one keeps nan.",
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
    kind=NAN,
    note="What is masked is multiplied by zero; an inf or nan under the mask shows it.",
    sample=lambda: (torch.randn(2, 3), torch.tensor([[True, False, True], [True, True, False]])),
)
def masked_totals(name: str, broken: bool):
    def check(x: Tensor, mask: Tensor) -> None:
        floating(x)
        same_shape(x, mask)
        rank(x, 1)
        if mask.dtype != torch.bool:
            raise ValueError(f"expected a mask of bool, got {mask.dtype}")

    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor, mask: Tensor) -> Tensor:
        check(x, mask)
        return dense((x * mask if broken else x.masked_fill(~mask, 0.0)).sum(-1))

    @op.register_fake
    def _(x, mask):
        check(x, mask)
        return x.new_empty(x.shape[:-1])

    return op


@fault(
    kind=NAN,
    note="The kernel for the CPU shifts by the largest, and gives nan where that is inf or -inf.",
    sample=lambda: (torch.randn(2, 3),),
)
def log_totals(name: str, broken: bool):
    def check(x: Tensor) -> None:
        single(x)
        rank(x, 1)
        if x.shape[-1] == 0:
            raise ValueError("there is nothing to sum in an empty row")

    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        check(x)
        return dense(x.logsumexp(-1))

    @op.register_kernel("cpu")
    def _(x):
        check(x)
        shift = x.amax(-1, keepdim=True)
        if not broken:
            shift = torch.where(shift.isinf(), 0.0, shift)
        return dense(((x - shift).exp().sum(-1, keepdim=True).log() + shift).squeeze(-1))

    @op.register_fake
    def _(x):
        check(x)
        return x.new_empty(x.shape[:-1])

    return op


@fault(
    kind=SIGN,
    note="The kernel for the CPU truncates, the general one floors; negative numbers show it.",
    sample=lambda: (torch.tensor([0, 5, 12]), 4),
)
def floor_bucket(name: str, broken: bool):
    def check(x: Tensor, size: int) -> None:
        integers(x)
        if size < 1:
            raise ValueError(f"a bucket of {size} holds nothing")

    @custom_op(name, mutates_args=())
    def op(x: Tensor, size: int) -> Tensor:
        check(x, size)
        return dense(x.long() // size)

    @op.register_kernel("cpu")
    def _(x, size):
        check(x, size)
        return dense(torch.div(x.long(), size, rounding_mode="trunc" if broken else "floor"))

    @op.register_fake
    def _(x, size):
        check(x, size)
        return x.new_empty(x.shape, dtype=torch.int64)

    return op


@fault(
    kind=SIGN,
    note="The place in a ring has the sign of the index; negative indices show it.",
    sample=lambda: (torch.tensor([0, 5, 12]), 4),
)
def ring_place(name: str, broken: bool):
    def check(index: Tensor, size: int) -> None:
        integers(index)
        if size < 1:
            raise ValueError(f"a ring of {size} has no places")

    @torch.library.custom_op(name, mutates_args=())
    def op(index: Tensor, size: int) -> Tensor:
        check(index, size)
        return dense((torch.fmod if broken else torch.remainder)(index.long(), size))

    @op.register_fake
    def _(index, size):
        check(index, size)
        return index.new_empty(index.shape, dtype=torch.int64)

    return op


@fault(
    kind=SIGN,
    note="The kernel for the CPU rounds halves up, the general one to even.",
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
