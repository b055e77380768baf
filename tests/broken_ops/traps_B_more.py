"""Right ops with constraints on values and layouts, with kinks, and with state that does no harm."""

from typing import Literal

import torch
from broken_ops.corpus import trap
from broken_ops.needs_more import dense, floating, rank, same_shape, single, unshared
from torch import Tensor

from customops import custom_op, get_ctx


@trap(
    why="The kernel takes sorted numbers alone, and says so; a shuffled or negative variant of the sample is no input.",
    sample=lambda: (torch.randn(5, requires_grad=True), torch.tensor([0, 0, 1, 3, 3]), 4),
)
def sorted_totals(name: str):
    def check(x: Tensor, ids: Tensor, count: int) -> None:
        single(x)
        rank(x, 1, 1)
        same_shape(x, ids)
        if ids.dtype != torch.int64 or not 0 <= count <= 1024:
            raise ValueError("expected numbers of int64, and at most 1024 segments")

    @custom_op(name, mutates_args=())
    def op(x: Tensor, ids: Tensor, count: int) -> Tensor:
        check(x, ids, count)
        if len(ids) and (bool((ids.diff() < 0).any()) or ids[0] < 0 or ids[-1] >= count):
            raise ValueError(f"the numbers of the segments are not sorted, or not in range({count})")
        return x.new_zeros(count).index_add(0, ids, x)

    @op.register_fake
    def _(x, ids, count):
        check(x, ids, count)
        return x.new_empty(count)

    op.register_autograd(
        lambda ctx, grad: (grad.index_select(0, ctx.saved_tensors[0]), None, None),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
    )
    return op


@trap(
    why="Values that are not positive raise, which the fake cannot see.",
    sample=lambda: (torch.tensor([0.5, 2.0, 1e-3], requires_grad=True),),
)
def log_of_positive(name: str):
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        single(x)
        if not bool((x > 0).all()):
            raise ValueError("expected positive values")
        return dense(x.log())

    @op.register_fake
    def _(x):
        single(x)
        return x.new_empty(x.shape)

    op.register_autograd(
        lambda ctx, grad: grad / ctx.saved_tensors[0],
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    return op


@trap(
    why="The last size has to be a multiple of 4: kernel and fake refuse others.", sample=lambda: (torch.randn(2, 8),)
)
def in_fours(name: str):
    def check(x: Tensor) -> None:
        floating(x)
        rank(x, 1)
        if x.shape[-1] % 4:
            raise ValueError(f"{x.shape[-1]} is no multiple of 4")

    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        check(x)
        return dense(x.unflatten(-1, (x.shape[-1] // 4, 4)).flip(-1).flatten(-2))

    @op.register_fake
    def _(x):
        check(x)
        return x.new_empty(x.shape)

    return op


@trap(
    why="The kernel reads flat, and takes contiguous tensors alone, as the fake does.",
    sample=lambda: (torch.randn(3, 4),),
)
def contiguous_only(name: str):
    def check(x: Tensor) -> None:
        floating(x)
        if not x.is_contiguous():
            raise ValueError("expected a contiguous tensor")

    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        check(x)
        elements = torch.as_strided(x, (x.numel(),), (1,), x.storage_offset())
        return dense(elements * 3).view(x.shape)

    @op.register_fake
    def _(x):
        check(x)
        return x.new_empty(x.shape)

    return op


@trap(why="The size of the result depends on the values.", sample=lambda: (torch.tensor([0.0, 2.0, -1.0, 0.0]),))
def positions(name: str):
    @custom_op(name, mutates_args=(), differentiable=False)
    def op(x: Tensor) -> Tensor:
        single(x)
        rank(x, 1, 1)
        return dense(torch.nonzero(x > 0).flatten())

    @op.register_fake
    def _(x):
        single(x)
        rank(x, 1, 1)
        return x.new_empty(get_ctx().new_dynamic_size(), dtype=torch.int64)

    return op


@trap(
    why="At zero there are several slopes, of which the formula takes one.",
    sample=lambda: (torch.tensor([-1.0, 0.0, 2.0, 0.0], requires_grad=True),),
)
def hinge(name: str):
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floating(x)
        return dense(x.relu())

    @op.register_fake
    def _(x):
        floating(x)
        return x.new_empty(x.shape)

    op.register_autograd(
        lambda ctx, grad: grad * (ctx.saved_tensors[0] > 0),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    return op


@trap(
    why="Equal arguments share the gradient, which no one-sided difference gives.",
    sample=lambda: (torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([1.0, 3.0], requires_grad=True)),
)
def larger_of_two(name: str):
    def check(x: Tensor, y: Tensor) -> None:
        single(x, y)
        same_shape(x, y)

    @custom_op(name, mutates_args=())
    def op(x: Tensor, y: Tensor) -> Tensor:
        check(x, y)
        return dense(torch.maximum(x, y))

    @op.register_fake
    def _(x, y):
        check(x, y)
        return x.new_empty(x.shape)

    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        share = (x > y).to(grad.dtype) + 0.5 * (x == y).to(grad.dtype)
        return grad * share, grad * (1 - share)

    op.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    return op


@trap(
    why="The op counts its calls in an argument, and declares it: two calls leave two different counts.",
    sample=lambda: (torch.randn(3, requires_grad=True), torch.zeros((), dtype=torch.int64)),
)
def counted_cube(name: str):
    def check(x: Tensor, calls: Tensor) -> None:
        single(x)
        unshared(calls)
        if calls.dtype != torch.int64:
            raise ValueError(f"expected a count of int64, got {calls.dtype}")

    @custom_op(name, mutates_args={"calls"})
    def op(x: Tensor, calls: Tensor) -> Tensor:
        check(x, calls)
        calls.add_(1)
        return dense(x**3)

    @op.register_fake
    def _(x, calls):
        check(x, calls)
        return x.new_empty(x.shape)

    op.register_autograd(
        lambda ctx, grad: (3 * ctx.saved_tensors[0].square() * grad, None),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
    )
    return op


@trap(
    why="Halves are accumulated in float32 and rounded once: right for halves, and far from the result in double.",
    sample=lambda: (torch.randn(64, dtype=torch.float16), torch.randn(64, dtype=torch.float16)),
)
def half_dot(name: str):
    def check(x: Tensor, y: Tensor) -> None:
        floating(x, y)
        same_shape(x, y)

    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor, y: Tensor) -> Tensor:
        check(x, y)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        return (x.to(wide) * y.to(wide)).sum().to(x.dtype, copy=True)

    @op.register_fake
    def _(x, y):
        check(x, y)
        return x.new_empty(())

    return op


@trap(
    why="A second derivative is refused, as the author says: backward computes in place.",
    sample=lambda: (torch.randn(4, requires_grad=True),),
)
def tanh_once(name: str):
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floating(x)
        return dense(x.tanh())

    @op.register_fake
    def _(x):
        floating(x)
        return x.new_empty(x.shape)

    def backward(ctx, grad):
        slope = ctx.saved_tensors[0].square()
        return slope.neg_().add_(1).mul_(grad)

    op.register_autograd(
        backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output), once_differentiable=True
    )
    return op


@trap(
    why="Ties keep their order: the indices of equal values are no accident.",
    sample=lambda: (torch.tensor([2.0, 1.0, 2.0, 1.0], requires_grad=True),),
)
def stable_order(name: str):
    def check(x: Tensor) -> None:
        single(x)
        rank(x, 1, 1)

    @custom_op(name, mutates_args=(), differentiable=(True, False))
    def op(x: Tensor, order: Literal["up", "down"] = "up") -> tuple[Tensor, Tensor]:
        check(x)
        values, places = torch.sort(x, descending=order == "down", stable=True)
        return dense(values), dense(places)

    @op.register_fake
    def _(x, order):
        check(x)
        return x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.int64)

    def backward(ctx, grad, _):
        (places,) = ctx.saved_tensors
        return torch.zeros_like(grad).scatter(0, places, grad), None

    op.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1]))
    return op


@trap(why="The op notes the shapes that it has seen, and no result depends on it.", sample=lambda: (torch.randn(3, 2),))
def noting(name: str):
    seen: dict[torch.Size, int] = {}

    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floating(x)
        seen[x.shape] = seen.get(x.shape, 0) + 1
        return dense(x + 0.5)

    @op.register_fake
    def _(x):
        floating(x)
        return x.new_empty(x.shape)

    return op
