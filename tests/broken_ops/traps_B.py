"""Right ops that a careless checker takes for broken ones."""

import itertools
import math
from typing import Optional

import torch
from broken_ops.corpus import trap
from broken_ops.needs_more import dense, numbers, rank, single
from torch import Tensor

from customops import custom_op


def save_inputs(ctx, inputs, output):
    """Save all inputs, which are tensors."""
    ctx.save_for_backward(*inputs)


def like_single(x: Tensor, *_: object) -> Tensor:
    """The fake of an op on float32 or float64 that gives a contiguous tensor like its first argument."""
    single(x)
    return x.new_empty(x.shape)


@trap(
    why="exp is so steep that differences are off by orders of magnitude, or inf.",
    sample=lambda: (torch.tensor([-90.0, 0.5, 30.0, 88.0], requires_grad=True),),
)
def steep_exp(name: str):
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        single(x)
        return dense(x.exp())

    op.register_fake(like_single)
    op.register_autograd(lambda ctx, grad: grad * ctx.saved_tensors[0].exp(), setup_context=save_inputs)
    return op


@trap(
    why="1/x near 0: a step of the usual size jumps over the pole.",
    sample=lambda: (torch.tensor([1e-6, -1e-4, 0.5], dtype=torch.float64, requires_grad=True),),
)
def near_the_pole(name: str):
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        single(x)
        return dense(1 / x)

    op.register_fake(like_single)
    op.register_autograd(lambda ctx, grad: -grad / ctx.saved_tensors[0].square(), setup_context=save_inputs)
    return op


@trap(
    why="Large terms cancel in a running sum, taken in blocks on the CPU: rounding is all that is left.",
    sample=lambda: (torch.tensor([1e8, 1.0, -1e8, 0.5, 3e7, -3e7, 0.25, 1.0]),),
)
def blockwise_running_sum(name: str):
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        single(x)
        rank(x, 1)
        return dense(x.cumsum(-1))

    @op.register_kernel("cpu")
    def _(x):
        single(x)
        rank(x, 1)
        blocks = [block.cumsum(-1) for block in x.split(4, -1)]
        for before, block in itertools.pairwise(blocks):
            block += before[..., -1:]
        return torch.cat([dense(block) for block in blocks], -1)

    @op.register_fake
    def _(x):
        rank(x, 1)
        return like_single(x)

    return op


@trap(
    why="softmax of large numbers is right, though each exp of them alone is inf.",
    sample=lambda: (torch.tensor([[1e4, 1e4 + 1, -1e4], [3e38, 0.0, 1.0]], requires_grad=True),),
)
def large_softmax(name: str):
    def check(x: Tensor) -> None:
        single(x)
        rank(x, 1)

    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        check(x)
        return dense(x.softmax(-1))

    @op.register_fake
    def _(x):
        check(x)
        return x.new_empty(x.shape)

    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return y * (grad - (grad * y).sum(-1, keepdim=True))

    op.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output))
    return op


@trap(
    why="Two kernels add in another order, so they differ in the last digits.",
    sample=lambda: (torch.randn(257),),
)
def sum_in_pairs(name: str):
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        single(x)
        return x.sum()

    @op.register_kernel("cpu")
    def _(x):
        single(x)
        values = x.flatten()
        while len(values) > 1:
            values = torch.cat([values[: len(values) // 2 * 2].view(-1, 2).sum(1), values[len(values) // 2 * 2 :]])
        return dense(values.sum())

    @op.register_fake
    def _(x):
        single(x)
        return x.new_empty(())

    return op


@trap(
    why="The second return is there on request alone.",
    sample=lambda: (torch.randn(3, 4), True),
)
def norm_and_scale(name: str):
    @custom_op(name)
    def op(x: Tensor, want_scale: bool = False) -> tuple[Tensor, Optional[Tensor]]:
        single(x)
        rank(x, 1)
        scale = x.square().sum(-1, keepdim=True).add(1).rsqrt()
        return dense(x * scale), dense(scale) if want_scale else None

    @op.register_fake
    def _(x, want_scale):
        single(x)
        rank(x, 1)
        return x.new_empty(x.shape), x.new_empty((*x.shape[:-1], 1)) if want_scale else None

    return op


@trap(
    why="Counts are integers: a small change of the input changes nothing, or jumps.",
    sample=lambda: (torch.tensor([0.1, 0.9, 0.4, 0.95]), 4),
)
def histogram(name: str):
    def check(x: Tensor, bins: int) -> None:
        single(x)
        if not 1 <= bins <= 1024:
            raise ValueError(f"expected up to 1024 bins, got {bins}")

    @custom_op(name, mutates_args=(), differentiable=False)
    def op(x: Tensor, bins: int) -> Tensor:
        check(x, bins)
        inside = x[(x >= 0) & (x < 1)]
        return torch.bincount((inside * bins).long().clamp(max=bins - 1), minlength=bins)

    @op.register_fake
    def _(x, bins):
        check(x, bins)
        return x.new_empty(bins, dtype=torch.int64)

    return op


@trap(why="Indices have no gradient, and the op says so.", sample=lambda: (torch.randn(3, 4, requires_grad=True),))
def last_largest(name: str):
    def check(x: Tensor) -> None:
        single(x)
        rank(x, 1)
        if x.shape[-1] == 0:
            raise ValueError("there is no largest of none")

    @custom_op(name, mutates_args=(), differentiable=False)
    def op(x: Tensor) -> Tensor:
        check(x)
        return dense(x.shape[-1] - 1 - x.flip(-1).argmax(-1))

    @op.register_fake
    def _(x):
        check(x)
        return x.new_empty(x.shape[:-1], dtype=torch.int64)

    return op


@trap(why="Rounding is random, and the tag says so.", sample=lambda: (torch.randn(64),))
def stochastic_rounding(name: str):
    @custom_op(name, mutates_args=(), tags=torch.Tag.nondeterministic_seeded)
    def op(x: Tensor) -> Tensor:
        single(x)
        return dense((x + torch.rand(x.shape, dtype=x.dtype)).floor())

    op.register_fake(like_single)
    return op


@trap(
    why="The dtype of the mean depends on that of the input: integers give float32, float64 stays.",
    sample=lambda: (torch.tensor([1, 2, 5]),),
)
def mean_of_numbers(name: str):
    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        numbers(x)
        return x.to(x.dtype if x.is_floating_point() else torch.float32).mean()

    @op.register_fake
    def _(x):
        numbers(x)
        return x.new_empty((), dtype=x.dtype if x.is_floating_point() else torch.float32)

    return op


@trap(
    why="A step function whose author wants the gradient of the identity.",
    sample=lambda: (torch.tensor([0.3, -1.2, 2.7], requires_grad=True), 0.25),
)
def quantized(name: str):
    def check(x: Tensor, step: float) -> None:
        single(x)
        if not (step > 0 and math.isfinite(step)):
            raise ValueError(f"there are no steps of {step}")

    @custom_op(name, mutates_args=())
    def op(x: Tensor, step: float) -> Tensor:
        check(x, step)
        return dense((x / step).round() * step)

    @op.register_fake
    def _(x, step):
        check(x, step)
        return x.new_empty(x.shape)

    op.register_autograd(lambda ctx, grad: (grad, None))
    return op


@trap(why="Tables are kept between calls, by all that they depend on.", sample=lambda: (torch.randn(4), 2.0))
def with_table(name: str):
    tables: dict[tuple[int, torch.dtype, float], Tensor] = {}

    @custom_op(name, mutates_args=())
    def op(x: Tensor, base: float) -> Tensor:
        single(x)
        rank(x, 1)
        key = (x.shape[-1], x.dtype, base)
        if key not in tables:
            tables[key] = torch.arange(x.shape[-1], dtype=x.dtype) * base
        return dense(x + tables[key])

    @op.register_fake
    def _(x, base):
        rank(x, 1)
        return like_single(x)

    return op


@trap(
    why="The index has no gradient: backward gives None for it.",
    sample=lambda: (torch.randn(4, 2, requires_grad=True), torch.tensor([3, 0, 0])),
)
def rows_at(name: str):
    def check(table: Tensor, index: Tensor) -> None:
        single(table)
        rank(table, 1)
        rank(index, 1, 1)
        if index.dtype != torch.int64:
            raise ValueError(f"expected an index of int64, got {index.dtype}")

    @custom_op(name, mutates_args=())
    def op(table: Tensor, index: Tensor) -> Tensor:
        check(table, index)
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < len(table):
            raise ValueError(f"there are {len(table)} rows, and the index asks for others")
        return dense(table.index_select(0, index))

    @op.register_fake
    def _(table, index):
        check(table, index)
        return table.new_empty((*index.shape, *table.shape[1:]))

    def backward(ctx, grad):
        table, index = ctx.saved_tensors
        return torch.zeros_like(table).index_add(0, index, grad), None

    op.register_autograd(backward, setup_context=save_inputs)
    return op


@trap(
    why="The members of the list have sizes of their own, and so have the gradients.",
    sample=lambda: ([torch.randn(2, requires_grad=True), torch.randn(3, 2, requires_grad=True), torch.randn(())],),
)
def flattened_members(name: str):
    def check(xs: list[Tensor]) -> int:
        if not xs:
            raise ValueError("expected at least one tensor")
        single(*xs)
        return sum(x.numel() for x in xs)

    @custom_op(name, mutates_args=())
    def op(xs: list[Tensor]) -> Tensor:
        check(xs)
        return torch.cat([dense(x).view(-1) for x in xs])

    @op.register_fake
    def _(xs):
        size = check(xs)
        return xs[0].new_empty(size)

    def backward(ctx, grad):
        parts = grad.split([shape.numel() for shape in ctx.shapes])
        return ([part.reshape(shape) for part, shape in zip(parts, ctx.shapes, strict=True)],)

    op.register_autograd(
        backward, setup_context=lambda ctx, inputs, output: setattr(ctx, "shapes", [x.shape for x in inputs[0]])
    )
    return op


@trap(why="There is no largest of nothing: empty rows raise, no rows do not.", sample=lambda: (torch.randn(3, 4),))
def row_largest(name: str):
    def check(x: Tensor) -> None:
        single(x)
        rank(x, 2, 2)
        if x.shape[1] == 0:
            raise ValueError("there is no largest of an empty row")

    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        check(x)
        return dense(x.amax(1))

    @op.register_fake
    def _(x):
        check(x)
        return x.new_empty(x.shape[0])

    return op
