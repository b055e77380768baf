"""Fakes that are wrong about broadcasting, about rounding of sizes, and that keep or read what they must not."""

from __future__ import annotations

from typing import Any

import torch
from broken_ops.aside_parts import FLOATS, NUMBERS, packed, require, require_same_dtype
from broken_ops.corpus import fault
from torch import Tensor

from customops import custom_op, get_ctx

BROADCAST = "the fake ignores broadcasting"
ROUNDING = "the fake rounds a size wrongly"
IMPURE = "the fake keeps state or reads data"


@fault(
    kind=BROADCAST,
    note="The fake has the shape of x. It shows when y is the larger one, or x has a dimension of size 1.",
    sample=lambda: (torch.randn(3, 4), torch.randn(4)),
)
def aside_broadcast_product(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor, y: Tensor) -> Tensor:
        require(x, NUMBERS)
        require(y, NUMBERS)
        return packed(x * y)

    @op.register_fake
    def _(x, y):
        require(x, NUMBERS)
        require(y, NUMBERS)
        shape = x.shape if broken else torch.broadcast_shapes(x.shape, y.shape)
        return x.new_empty(shape, dtype=torch.result_type(x, y))

    return op


@fault(
    kind=BROADCAST,
    note="The fake has the shape of the first member. It shows when another member is larger.",
    sample=lambda: ([torch.randn(3, 4), torch.randn(3, 4)], torch.tensor([1.0, 0.5])),
)
def aside_broadcast_list(name: str, broken: bool) -> Any:
    def check(xs: list[Tensor], weights: Tensor) -> None:
        if not xs or weights.dim() != 1 or weights.shape[0] != len(xs):
            raise ValueError("expected a weight for each member, and one member at least")
        require(weights, FLOATS)
        require_same_dtype(weights, *xs)

    @torch.library.custom_op(name, mutates_args=())
    def op(xs: list[Tensor], weights: Tensor) -> Tensor:
        check(xs, weights)
        total = xs[0] * weights[0]
        for x, weight in zip(xs[1:], weights[1:], strict=True):
            total = total + x * weight
        return packed(total)

    @op.register_fake
    def _(xs, weights):
        check(xs, weights)
        shape = xs[0].shape if broken else torch.broadcast_shapes(*[x.shape for x in xs])
        return weights.new_empty(shape)

    return op


@fault(
    kind=BROADCAST,
    note="The fake takes the leading dimensions of x. It shows when those of y are more, or those of x have size 1.",
    sample=lambda: (torch.randn(2, 3, 4), torch.randn(2, 4, 5)),
)
def aside_broadcast_matmul(name: str, broken: bool) -> Any:
    def check(x: Tensor, y: Tensor) -> None:
        require(x, FLOATS)
        require_same_dtype(x, y)
        if x.dim() < 2 or y.dim() < 2 or x.shape[-1] != y.shape[-2]:
            raise ValueError(f"expected matrices that fit, got {tuple(x.shape)} and {tuple(y.shape)}")

    @custom_op(name, mutates_args=())
    def op(x: Tensor, y: Tensor) -> Tensor:
        check(x, y)
        return packed(x @ y)

    @op.register_fake
    def _(x, y):
        check(x, y)
        lead = x.shape[:-2] if broken else torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
        return x.new_empty(*lead, x.shape[-2], y.shape[-1])

    return op


@fault(
    kind=ROUNDING,
    note="The fake floors the number of entries. It shows when the step does not divide the last size.",
    sample=lambda: (torch.randn(3, 4), 2),
)
def aside_every_nth(name: str, broken: bool) -> Any:
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
    kind=ROUNDING,
    note="The fake divides the two sizes one by one. It shows when the hop divides neither of them.",
    sample=lambda: (torch.randn(2, 16), 4, 2),
)
def aside_overlapping_frames(name: str, broken: bool) -> Any:
    def check(x: Tensor, size: int, hop: int) -> None:
        if x.dim() == 0 or size < 1 or hop < 1 or x.shape[-1] < size:
            raise ValueError("expected a positive size and hop, and a frame at least")

    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor, size: int, hop: int) -> Tensor:
        check(x, size, hop)
        return packed(x.unfold(-1, size, hop))

    @op.register_fake
    def _(x, size, hop):
        check(x, size, hop)
        n = x.shape[-1]
        count = n // hop - size // hop + 1 if broken else (n - size) // hop + 1
        return x.new_empty(*x.shape[:-1], count, size)

    return op


@fault(
    kind=ROUNDING,
    note="The fake adds a block even where nothing is to be filled. It shows for multiples, zero among them.",
    sample=lambda: (torch.randn(3, 5), 4),
)
def aside_pad_to_multiple(name: str, broken: bool) -> Any:
    def check(x: Tensor, multiple: int) -> None:
        if x.dim() == 0 or not 1 <= multiple <= 1024:
            raise ValueError("expected one dimension at least, and a multiple from 1 to 1024")

    @custom_op(name, mutates_args=())
    def op(x: Tensor, multiple: int = 8) -> Tensor:
        check(x, multiple)
        n = x.shape[-1]
        out = x.new_zeros(*x.shape[:-1], -(-n // multiple) * multiple)
        out[..., :n] = x
        return out

    @op.register_fake
    def _(x, multiple):
        check(x, multiple)
        n = x.shape[-1]
        blocks = n // multiple + 1 if broken else (n + multiple - 1) // multiple
        return x.new_empty(*x.shape[:-1], blocks * multiple)

    return op


@fault(
    kind=IMPURE,
    note="The fake remembers the first shape for a number of dimensions. The second size of an input shows it.",
    sample=lambda: (torch.randn(3, 4),),
)
def aside_remembered_shape(name: str, broken: bool) -> Any:
    shapes: dict[int, torch.Size] = {}

    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        require(x, FLOATS)
        return packed(x.sin())

    @op.register_fake
    def _(x):
        require(x, FLOATS)
        shape = shapes.setdefault(x.dim(), x.shape) if broken else x.shape
        return x.new_empty(shape)

    return op


@fault(
    kind=IMPURE,
    note="The fake adds up data, which a fake tensor has not. Any trace shows it.",
    sample=lambda: (torch.tensor([2, 0, 3]),),
)
def aside_expand_lengths(name: str, broken: bool) -> Any:
    def check(lengths: Tensor) -> None:
        require(lengths, (torch.int32, torch.int64))
        if lengths.dim() != 1:
            raise ValueError(f"expected one dimension, got {lengths.dim()}")

    @custom_op(name, mutates_args=())
    def op(lengths: Tensor) -> Tensor:
        check(lengths)
        if bool(((lengths < 0) | (lengths > 4096)).any()):
            raise ValueError("expected lengths from 0 to 4096")
        return torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)

    @op.register_fake
    def _(lengths):
        check(lengths)
        size = int(lengths.sum()) if broken else get_ctx().new_dynamic_size()
        return lengths.new_empty(size, dtype=torch.int64)

    return op


@fault(
    kind=IMPURE,
    note="The fake extends a list that it shares with later traces. The second trace has dimensions too many.",
    sample=lambda: (torch.randn(3, 4),),
)
def aside_extended_shape(name: str, broken: bool) -> Any:
    leading = [2]

    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        require(x, NUMBERS)
        return packed(torch.stack([x * 1, x * 2]))

    @op.register_fake
    def _(x):
        require(x, NUMBERS)
        shape = leading if broken else list(leading)
        shape += x.shape
        return x.new_empty(shape)

    return op
