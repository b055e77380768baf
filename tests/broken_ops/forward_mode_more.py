"""Forward-mode rules that take every argument to have a tangent, or that give one of another shape."""

import torch
from broken_ops.corpus import fault
from broken_ops.needs_more import dense, floating, same_shape
from torch import Tensor

from customops import custom_op

KIND = "the jvp rule mistakes None tangents, or gives a tangent of the wrong shape or dtype for broadcast inputs"


def keep(ctx, inputs, output):
    """Save the inputs for both modes."""
    ctx.save_for_backward(*inputs)
    ctx.save_for_forward(*inputs)


def given(grad: Tensor | None, x: Tensor) -> Tensor:
    """The gradient of a result like x, or the zeros that are meant by none."""
    return torch.zeros_like(x) if grad is None else grad


@fault(
    kind=KIND,
    note="The rule adds up both tangents; a tangent for one argument alone shows it.",
    sample=lambda: (torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)),
)
def cross_term(name: str, broken: bool):
    @custom_op(name, mutates_args=())
    def op(x: Tensor, y: Tensor) -> Tensor:
        floating(x, y)
        same_shape(x, y)
        return dense(x * y)

    @op.register_fake
    def _(x, y):
        floating(x, y)
        same_shape(x, y)
        return x.new_empty(x.shape)

    def jvp(ctx, dx, dy):
        x, y = ctx.saved_tensors
        if broken:
            return dx * y + x * dy
        terms = [d * other for d, other in ((dx, y), (dy, x)) if d is not None]
        return sum(terms[1:], terms[0])

    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        grad = given(grad, x)
        return grad * y, grad * x

    op.register_autograd(backward, setup_context=keep, materialize_grads=False)
    op.register_jvp(jvp)
    return op


@fault(
    kind=KIND,
    note="The tangent of the bias has the shape of the bias; a tangent for the bias alone shows it.",
    sample=lambda: (torch.randn(2, 3, requires_grad=True), torch.randn(3, requires_grad=True)),
)
def biased_sine(name: str, broken: bool):
    def check(x: Tensor, bias: Tensor) -> None:
        floating(x, bias)
        if x.dim() != 2 or bias.shape != x.shape[1:]:
            raise ValueError("expected a matrix, and a bias for each of its columns")

    @custom_op(name, mutates_args=())
    def op(x: Tensor, bias: Tensor) -> Tensor:
        check(x, bias)
        return dense(x.sin() + bias)

    @op.register_fake
    def _(x, bias):
        check(x, bias)
        return x.new_empty(x.shape)

    def jvp(ctx, dx, dbias):
        x, _ = ctx.saved_tensors
        if dx is None:
            return dbias if broken else dbias.expand(x.shape)
        slope = x.cos() * dx
        return slope if dbias is None else slope + dbias

    def backward(ctx, grad):
        x, _ = ctx.saved_tensors
        grad = given(grad, x)
        return grad * x.cos(), grad.sum(0)

    op.register_autograd(backward, setup_context=keep, materialize_grads=False)
    op.register_jvp(jvp)
    return op


@fault(
    kind=KIND,
    note="A missing tangent of the scale is taken for zeros of the shape of x; a scale of its own shape shows it.",
    sample=lambda: (torch.randn(4, 3, requires_grad=True), torch.randn(4, requires_grad=True)),
)
def row_scaled(name: str, broken: bool):
    def check(x: Tensor, scale: Tensor) -> None:
        floating(x, scale)
        if x.dim() != 2 or scale.shape != x.shape[:1]:
            raise ValueError("expected a matrix, and a scale for each of its rows")

    @custom_op(name, mutates_args=())
    def op(x: Tensor, scale: Tensor) -> Tensor:
        check(x, scale)
        return dense(x * scale.unsqueeze(1))

    @op.register_fake
    def _(x, scale):
        check(x, scale)
        return x.new_empty(x.shape)

    def jvp(ctx, dx, dscale):
        x, scale = ctx.saved_tensors
        dx = torch.zeros_like(x) if dx is None else dx
        dscale = torch.zeros_like(x if broken else scale) if dscale is None else dscale
        return dx * scale.unsqueeze(1) + x * dscale.unsqueeze(1)

    def backward(ctx, grad):
        x, scale = ctx.saved_tensors
        grad = given(grad, x)
        return grad * scale.unsqueeze(1), (grad * x).sum(1)

    op.register_autograd(backward, setup_context=keep, materialize_grads=False)
    op.register_jvp(jvp)
    return op
