"""Gradients that are wrong for some shapes, some arguments, some options, or the second time."""

from typing import Literal

import numpy as np
import torch
from broken_ops.corpus import fault
from broken_ops.needs_more import dense, floating, library, overload, same_shape, single
from torch import Tensor

from customops import custom_op

BROADCAST = "the gradient of a broadcast argument is summed over the wrong dimensions, or expanded instead of summed"
SUBSET = "backward returns None for an argument under a wrong condition, or the gradients of two arguments swapped"
FACTOR = "a factor is missing that is one for the sample"
SECOND = "backward calls a kernel op that has no gradient and says nothing"


def shape_of_both(x: Tensor, y: Tensor) -> torch.Size:
    """The shape that two tensors are broadcast to, which must be that of the first."""
    floating(x, y)
    if torch.broadcast_shapes(x.shape, y.shape) != x.shape:
        raise ValueError(f"{tuple(y.shape)} is not broadcast to {tuple(x.shape)}")
    return x.shape


@fault(
    kind=BROADCAST,
    note="Missing dimensions lead, but the trailing ones are summed; a square x and a vector show it.",
    sample=lambda: (torch.randn(3, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)),
)
def broadcast_gate(name: str, broken: bool):
    def summed(grad: Tensor, shape: torch.Size) -> Tensor:
        while grad.dim() > len(shape):
            grad = grad.sum(-1 if broken else 0)
        ones = [i for i, size in enumerate(shape) if size == 1]
        return grad.sum(ones, keepdim=True) if ones else grad

    @custom_op(name, mutates_args=())
    def op(x: Tensor, gate: Tensor) -> Tensor:
        shape_of_both(x, gate)
        return dense(x * gate)

    op.register_fake(lambda x, gate: x.new_empty(shape_of_both(x, gate)))

    def backward(ctx, grad):
        x, gate = ctx.saved_tensors
        return grad * gate, summed(grad * x, gate.shape)

    op.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    return op


@fault(
    kind=BROADCAST,
    note="The gradient is folded over leading dimensions; a weight of shape (3, 1) shows it.",
    sample=lambda: (torch.randn(4, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64, requires_grad=True)),
)
def shifted_by(name: str, broken: bool):
    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor, by: Tensor) -> Tensor:
        shape_of_both(x, by)
        return dense(x * x + by)

    op.register_fake(lambda x, by: x.new_empty(shape_of_both(x, by)))

    def backward(ctx, grad):
        x, by = ctx.saved_tensors
        grad_by = grad.reshape(-1, *by.shape).sum(0) if broken else grad.sum_to_size(by.shape)
        return 2 * x * grad, grad_by

    op.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    return op


@fault(
    kind=BROADCAST,
    note="The gradient is spread along the other dimension; a square x and a gradient that varies show it.",
    sample=lambda: (torch.randn(3, 3, requires_grad=True),),
)
def column_averages(name: str, broken: bool):
    def check(x: Tensor) -> None:
        floating(x)
        if x.dim() != 2 or x.shape[0] == 0:
            raise ValueError("expected a matrix of at least one row")

    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        check(x)
        return dense(x.mean(0))

    @op.register_fake
    def _(x):
        check(x)
        return x.new_empty(x.shape[1])

    def setup_context(ctx, inputs, output):
        ctx.shape = inputs[0].shape

    def backward(ctx, grad):
        return (grad / ctx.shape[0]).unsqueeze(1 if broken else 0).expand(ctx.shape)

    op.register_autograd(backward, setup_context=setup_context)
    return op


@fault(
    kind=SUBSET,
    note="Whether y needs a gradient is asked of x; a call in which y alone requires grad shows it.",
    sample=lambda: (torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)),
)
def sine_blend(name: str, broken: bool):
    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor, y: Tensor) -> Tensor:
        floating(x, y)
        same_shape(x, y)
        return dense(x * torch.sin(y))

    @op.register_fake
    def _(x, y):
        floating(x, y)
        same_shape(x, y)
        return x.new_empty(x.shape)

    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        needs_x, needs_y = ctx.needs_input_grad
        grad_x = grad * y.sin() if needs_x else None
        grad_y = grad * x * y.cos() if (needs_x if broken else needs_y) else None
        return grad_x, grad_y

    op.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    return op


@fault(
    kind=SUBSET,
    note="Gradients are packed to the front; a call in which the weight alone requires grad shows it.",
    sample=lambda: (torch.randn(3, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)),
)
def matrix_projection(name: str, broken: bool):
    def check(x: Tensor, weight: Tensor) -> None:
        floating(x, weight)
        if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[0]:
            raise ValueError("expected two matrices that can be multiplied")

    @custom_op(name, mutates_args=())
    def op(x: Tensor, weight: Tensor) -> Tensor:
        check(x, weight)
        return dense(x @ weight)

    @op.register_fake
    def _(x, weight):
        check(x, weight)
        return x.new_empty(x.shape[0], weight.shape[1])

    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grads = [grad @ weight.t() if ctx.needs_input_grad[0] else None]
        grads.append(x.t() @ grad if ctx.needs_input_grad[1] else None)
        if broken:
            grads.sort(key=lambda given: given is None)
        return tuple(grads)

    op.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    return op


@fault(
    kind=FACTOR,
    note="The gradient lacks alpha, which is 1 by default.",
    sample=lambda: (torch.randn(5, requires_grad=True),),
)
def scaled_silu(name: str, broken: bool):
    @custom_op(name, mutates_args=())
    def op(x: Tensor, alpha: float = 1.0) -> Tensor:
        floating(x)
        return dense(alpha * x * x.sigmoid())

    @op.register_fake
    def _(x, alpha):
        floating(x)
        return x.new_empty(x.shape)

    def setup_context(ctx, inputs, output):
        x, ctx.alpha = inputs
        ctx.save_for_backward(x)

    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        slope = s * (1 + x * (1 - s))
        return grad * slope * (1 if broken else ctx.alpha), None

    op.register_autograd(backward, setup_context=setup_context)
    return op


@fault(
    kind=FACTOR,
    note="With reduction='mean' the gradient is not divided by the number of elements.",
    sample=lambda: (torch.randn(3, 2, requires_grad=True), torch.randn(3, 2)),
)
def squared_error(name: str, broken: bool):
    @custom_op(name, mutates_args=())
    def op(x: Tensor, target: Tensor, reduction: Literal["sum", "mean"] = "sum") -> Tensor:
        floating(x, target)
        same_shape(x, target)
        error = (x - target).square()
        return error.sum() if reduction == "sum" else error.mean()

    @op.register_fake
    def _(x, target, reduction):
        floating(x, target)
        same_shape(x, target)
        return x.new_empty(())

    def setup_context(ctx, inputs, output):
        x, target, ctx.reduction = inputs
        ctx.save_for_backward(x, target)

    def backward(ctx, grad):
        x, target = ctx.saved_tensors
        grad_x = 2 * (x - target) * grad
        if ctx.reduction == "mean" and not broken:
            grad_x = grad_x / max(x.numel(), 1)
        return grad_x, -grad_x, None

    op.register_autograd(backward, setup_context=setup_context)
    return op


@fault(
    kind=FACTOR,
    note="The gradient of y lacks beta, which is 1 by default.",
    sample=lambda: (torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True), 0.5),
)
def alpha_beta_sum(name: str, broken: bool):
    lib = library(name)
    lib.define(f"{name.split('::')[1]}(Tensor x, Tensor y, float alpha, float beta=1.0) -> Tensor")

    def kernel(x, y, alpha, beta=1.0):
        floating(x, y)
        same_shape(x, y)
        return dense(alpha * x + beta * y)

    def fake(x, y, alpha, beta=1.0):
        floating(x, y)
        same_shape(x, y)
        return x.new_empty(x.shape)

    def setup_context(ctx, inputs, output):
        _, _, ctx.alpha, ctx.beta = inputs

    def backward(ctx, grad):
        return grad * ctx.alpha, grad * (1.0 if broken else ctx.beta), None, None

    lib.impl(name.split("::")[1], kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(name, fake, lib=lib)
    torch.library.register_autograd(name, backward, setup_context=setup_context, lib=lib)
    return overload(name)


@fault(
    kind=SECOND,
    note="backward calls a kernel that records nothing; the second derivative shows it.",
    sample=lambda: (torch.randn(4, requires_grad=True),),
)
def cube_by_numpy(name: str, broken: bool):
    def slope_kernel(x: Tensor, grad: Tensor) -> Tensor:
        with np.errstate(all="ignore"):
            return dense(torch.from_numpy(np.asarray(3 * x.detach().numpy() ** 2 * grad.detach().numpy())))

    lib = library(name)
    lib.define(f"{name.split('::')[1]}_backward(Tensor x, Tensor grad) -> Tensor")
    lib.impl(f"{name.split('::')[1]}_backward", slope_kernel, "CPU")
    torch.library.register_fake(f"{name}_backward", lambda x, grad: x.new_empty(x.shape), lib=lib)
    slope = overload(f"{name}_backward")

    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        single(x)
        return dense(x * x * x)

    @op.register_fake
    def _(x):
        single(x)
        return x.new_empty(x.shape)

    op.register_autograd(
        lambda ctx, grad: slope(ctx.saved_tensors[0], grad),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
        once_differentiable=not broken,
    )
    return op


@fault(
    kind=SECOND,
    note="backward computes the slope with nothing recorded; the second derivative shows it.",
    sample=lambda: (torch.randn(4, requires_grad=True),),
)
def softplus_like(name: str, broken: bool):
    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floating(x)
        return dense(torch.logaddexp(x, torch.zeros_like(x)))

    @op.register_fake
    def _(x):
        floating(x)
        return x.new_empty(x.shape)

    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        with torch.set_grad_enabled(torch.is_grad_enabled() and not broken):
            slope = torch.sigmoid(x)
        return grad * slope

    op.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    return op
