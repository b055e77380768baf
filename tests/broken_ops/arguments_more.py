"""Inputs that one of kernel and fake refuses, lists, and numbers of another kind than those at hand."""

import torch
from broken_ops.corpus import fault
from broken_ops.needs_more import dense, floating, numbers, rank
from torch import Tensor

from customops import custom_op

REFUSED = "an invalid input is refused by the fake and accepted by the kernel, or the other way round"
LISTS = "a list argument: a list of one, members of different shapes or dtypes"
SCALARS = "a scalar argument: negative, zero, float given as int; truncated by int(), a sign ignored"


@fault(
    kind=REFUSED,
    note="An odd last size is refused by the fake; the kernel drops what has no partner.",
    sample=lambda: (torch.randn(2, 6),),
)
def pair_products(name: str, broken: bool):
    def check(x: Tensor) -> None:
        floating(x)
        rank(x, 1)
        if x.shape[-1] % 2:
            raise ValueError(f"{x.shape[-1]} elements do not make pairs")

    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        if not broken:
            check(x)
        count = x.shape[-1] // 2
        return dense(x[..., :count] * x[..., count : 2 * count])

    @op.register_fake
    def _(x):
        check(x)
        return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))

    return op


@fault(
    kind=REFUSED,
    note="Integers are refused by the kernel, and promised a result by the fake.",
    sample=lambda: (torch.rand(4),),
)
def logit(name: str, broken: bool):
    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floating(x)
        return dense(x.log() - (1 - x).log())

    @op.register_fake
    def _(x):
        if not broken:
            floating(x)
        return x.new_empty(x.shape)

    return op


@fault(
    kind=REFUSED,
    note="More rows than there are is what the fake promises, and fewer what the kernel gives.",
    sample=lambda: (torch.randn(5, 2), 3),
)
def first_rows(name: str, broken: bool):
    def check(x: Tensor, count: int) -> None:
        floating(x)
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
    kind=LISTS,
    note="The fake takes all members to be as long as the first.",
    sample=lambda: ([torch.randn(3), torch.randn(3)],),
)
def joined_members(name: str, broken: bool):
    def check(xs: list[Tensor]) -> None:
        if not xs:
            raise ValueError("expected at least one tensor")
        floating(*xs)
        for x in xs:
            rank(x, 1, 1)

    @custom_op(name, mutates_args=())
    def op(xs: list[Tensor]) -> Tensor:
        check(xs)
        return torch.cat([dense(x) for x in xs])

    @op.register_fake
    def _(xs):
        check(xs)
        return xs[0].new_empty(len(xs) * xs[0].shape[0] if broken else sum(x.shape[0] for x in xs))

    return op


@fault(
    kind=LISTS,
    note="The fake gives the dtype of the first member; a list of float32 and float64 shows it.",
    sample=lambda: ([torch.randn(3), torch.randn(3)],),
)
def promoted_sum(name: str, broken: bool):
    def check(xs: list[Tensor]) -> torch.dtype:
        if not xs:
            raise ValueError("expected at least one tensor")
        numbers(*xs)
        dtype = xs[0].dtype
        for x in xs:
            if x.shape != xs[0].shape:
                raise ValueError("expected tensors of one shape")
            dtype = torch.promote_types(dtype, x.dtype)
        return dtype

    @torch.library.custom_op(name, mutates_args=())
    def op(xs: list[Tensor]) -> Tensor:
        dtype = check(xs)
        total = xs[0].to(dtype)
        for x in xs[1:]:
            total = total + x.to(dtype)
        return dense(total)

    @op.register_fake
    def _(xs):
        dtype = check(xs)
        return xs[0].new_empty(xs[0].shape, dtype=xs[0].dtype if broken else dtype)

    return op


@fault(
    kind=LISTS,
    note="The mean of a list of one is its member itself.",
    sample=lambda: ([torch.randn(3), torch.randn(3)],),
)
def averaged_members(name: str, broken: bool):
    def check(xs: list[Tensor]) -> None:
        if not xs:
            raise ValueError("expected at least one tensor")
        floating(*xs)
        if any(x.shape != xs[0].shape for x in xs):
            raise ValueError("expected tensors of one shape")

    @custom_op(name, mutates_args=())
    def op(xs: list[Tensor]) -> Tensor:
        check(xs)
        if broken and len(xs) == 1:
            return xs[0]
        return torch.stack([dense(x) for x in xs]).mean(0)

    @op.register_fake
    def _(xs):
        check(xs)
        return xs[0].new_empty(xs[0].shape)

    return op


@fault(
    kind=SCALARS,
    note="The kernel cuts the factor down to an integer, which 0.5 shows; the gradient does not.",
    sample=lambda: (torch.randn(4, requires_grad=True), 2.0),
)
def scaled_by(name: str, broken: bool):
    @custom_op(name, mutates_args=())
    def op(x: Tensor, by: float) -> Tensor:
        floating(x)
        return dense(x * (int(by) if broken else by))

    @op.register_fake
    def _(x, by):
        floating(x)
        return x.new_empty(x.shape)

    def setup_context(ctx, inputs, output):
        ctx.by = inputs[1]

    op.register_autograd(lambda ctx, grad: (grad * ctx.by, None), setup_context=setup_context)
    return op


@fault(
    kind=SCALARS,
    note="The larger of x and slope * x is the right one for slopes up to 1 alone.",
    sample=lambda: (torch.randn(4, requires_grad=True),),
)
def leaky_slope(name: str, broken: bool):
    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor, slope: float = 0.01) -> Tensor:
        floating(x)
        return dense(torch.maximum(x, slope * x) if broken else torch.where(x > 0, x, slope * x))

    @op.register_fake
    def _(x, slope=0.01):
        floating(x)
        return x.new_empty(x.shape)

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])
        ctx.slope = inputs[1]

    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return torch.where(x > 0, grad, ctx.slope * grad), None

    op.register_autograd(backward, setup_context=setup_context)
    return op


@fault(
    kind=SCALARS,
    note="A negative number of steps, or one that is larger than the size, does not roll at all.",
    sample=lambda: (torch.randn(5, requires_grad=True), 2),
)
def rolled_steps(name: str, broken: bool):
    def roll(x: Tensor, steps: int) -> Tensor:
        return torch.cat([x[max(len(x) - steps, 0) :], x[: len(x) - steps]]) if broken else x.roll(steps, 0)

    @custom_op(name, mutates_args=())
    def op(x: Tensor, steps: int) -> Tensor:
        floating(x)
        rank(x, 1)
        return dense(roll(x, steps))

    @op.register_fake
    def _(x, steps):
        floating(x)
        rank(x, 1)
        return x.new_empty(x.shape)

    def setup_context(ctx, inputs, output):
        ctx.steps = inputs[1]

    op.register_autograd(lambda ctx, grad: (grad.roll(-ctx.steps, 0), None), setup_context=setup_context)
    return op
