"""Fakes with the dtype of another result, and fakes that forget an option."""

import torch
from broken_ops.corpus import fault
from broken_ops.needs_more import dense, dimension, floating, numbers, rank
from torch import Tensor

from customops import custom_op

DTYPE = "the fake gives the dtype of one argument where the kernel promotes both, or accumulates in another dtype"
OPTION = "the fake forgets what an option changes"


@fault(
    kind=DTYPE,
    note="The kernel promotes both arguments; a float32 tensor times a float64 one shows it.",
    sample=lambda: (torch.randn(3, 4), torch.randn(4)),
)
def weighted_product(name: str, broken: bool):
    @custom_op(name, mutates_args=())
    def op(x: Tensor, weight: Tensor) -> Tensor:
        numbers(x, weight)
        return dense(x * weight)

    @op.register_fake
    def _(x, weight):
        numbers(x, weight)
        dtype = x.dtype if broken else torch.result_type(x, weight)
        return x.new_empty(torch.broadcast_shapes(x.shape, weight.shape), dtype=dtype)

    return op


@fault(
    kind=DTYPE,
    note="Sums of integers are int64; an int32 or bool tensor shows it.",
    sample=lambda: (torch.randn(3, 4),),
)
def row_totals(name: str, broken: bool):
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        numbers(x)
        rank(x, 1)
        return dense(x.sum(-1))

    @op.register_fake
    def _(x):
        numbers(x)
        rank(x, 1)
        dtype = x.dtype if broken or x.dtype.is_floating_point else torch.int64
        return x.new_empty(x.shape[:-1], dtype=dtype)

    return op


@fault(
    kind=DTYPE,
    note="Halves are accumulated, and returned, in float32; a float16 tensor shows it.",
    sample=lambda: (torch.randn(3, 4),),
)
def mean_square(name: str, broken: bool):
    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floating(x)
        wide = x if x.dtype == torch.float64 else x.float()
        return wide.square().mean()

    @op.register_fake
    def _(x):
        floating(x)
        return x.new_empty((), dtype=x.dtype if broken or x.dtype == torch.float64 else torch.float32)

    return op


@fault(
    kind=OPTION,
    note="The fake never has the dimension that keepdim=True keeps.",
    sample=lambda: (torch.randn(3, 4), 1),
)
def norms_along(name: str, broken: bool):
    @custom_op(name, mutates_args=())
    def op(x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
        floating(x)
        return dense(x.square().sum(dimension(x, dim), keepdim=keepdim).sqrt())

    @op.register_fake
    def _(x, dim, keepdim):
        floating(x)
        shape = list(x.shape)
        at = dimension(x, dim)
        if keepdim and not broken:
            shape[at] = 1
        else:
            del shape[at]
        return x.new_empty(shape)

    return op


@fault(
    kind=OPTION,
    note="With signed=True the last size is doubled, which the fake does not know.",
    sample=lambda: (torch.randn(2, 5),),
)
def signed_rectifier(name: str, broken: bool):
    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor, signed: bool = False) -> Tensor:
        floating(x)
        rank(x, 1)
        return dense(torch.cat([x.relu(), (-x).relu()], -1) if signed else x.relu())

    @op.register_fake
    def _(x, signed=False):
        floating(x)
        rank(x, 1)
        return x.new_empty((*x.shape[:-1], x.shape[-1] * (2 if signed and not broken else 1)))

    return op


@fault(
    kind=OPTION,
    note="The fake cuts the shape at dim and at dim + 1, which is 0 for dim=-1.",
    sample=lambda: (torch.randn(3, 4), 0),
)
def nonzeros_along(name: str, broken: bool):
    @custom_op(name, mutates_args=())
    def op(x: Tensor, dim: int) -> Tensor:
        numbers(x)
        return dense((x != 0).sum(dimension(x, dim)))

    @op.register_fake
    def _(x, dim):
        numbers(x)
        at = dimension(x, dim)
        if broken:
            at = dim
        return x.new_empty((*x.shape[:at], *x.shape[at + 1 :]), dtype=torch.int64)

    return op
