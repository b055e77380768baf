"""What backward finds when something was written, or not used, in between."""

import torch
from broken_ops.corpus import fault
from broken_ops.needs_more import dense, floating, same_shape
from torch import Tensor

from customops import custom_op

SAVED = "an output is saved which is overwritten later, or a tensor is kept on ctx instead of being saved"
UNUSED = "backward assumes that each return has a gradient that is not zero, or uses one gradient for all returns"


def check_pair(x: Tensor, y: Tensor) -> None:
    """Two tensors of one dtype and shape."""
    floating(x, y)
    same_shape(x, y)


@fault(
    kind=SAVED,
    note="The input is kept on ctx, so nobody sees that it is written after the forward.",
    sample=lambda: (torch.randn(4, requires_grad=True),),
)
def kept_input(name: str, broken: bool):
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floating(x)
        return dense(x.square())

    @op.register_fake
    def _(x):
        floating(x)
        return x.new_empty(x.shape)

    def setup_context(ctx, inputs, output):
        if broken:
            (ctx.x,) = inputs
        else:
            ctx.save_for_backward(*inputs)

    def backward(ctx, grad):
        (x,) = (ctx.x,) if broken else ctx.saved_tensors
        return 2 * x * grad

    op.register_autograd(backward, setup_context=setup_context)
    return op


@fault(
    kind=SAVED,
    note="The output is kept on ctx; the caller scales it in place before backward.",
    sample=lambda: (torch.randn(4, requires_grad=True),),
)
def kept_output(name: str, broken: bool):
    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floating(x)
        return dense(x.tanh())

    @op.register_fake
    def _(x):
        floating(x)
        return x.new_empty(x.shape)

    def setup_context(ctx, inputs, output):
        if broken:
            ctx.y = output
        else:
            ctx.save_for_backward(output)

    def backward(ctx, grad):
        (y,) = (ctx.y,) if broken else ctx.saved_tensors
        return grad * (1 - y * y)

    op.register_autograd(backward, setup_context=setup_context)
    return op


@fault(
    kind=SAVED,
    note="What is saved has a version counter of its own; an input written after the forward shows it.",
    sample=lambda: (torch.randn(4, requires_grad=True), torch.randn(4)),
)
def saved_data(name: str, broken: bool):
    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor, gain: Tensor) -> Tensor:
        check_pair(x, gain)
        return dense(x * gain)

    @op.register_fake
    def _(x, gain):
        check_pair(x, gain)
        return x.new_empty(x.shape)

    def setup_context(ctx, inputs, output):
        x, gain = inputs
        ctx.save_for_backward(*((x.data, gain.data) if broken else (x, gain)))

    def backward(ctx, grad):
        x, gain = ctx.saved_tensors
        return grad * gain, grad * x

    op.register_autograd(backward, setup_context=setup_context)
    return op


@fault(
    kind=UNUSED,
    note="The gradient of the first return is used for both; a loss of the second alone shows it.",
    sample=lambda: (torch.randn(4, requires_grad=True),),
)
def sin_and_cos(name: str, broken: bool):
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> tuple[Tensor, Tensor]:
        floating(x)
        return dense(x.sin()), dense(x.cos())

    @op.register_fake
    def _(x):
        floating(x)
        return x.new_empty(x.shape), x.new_empty(x.shape)

    def backward(ctx, grad_sin, grad_cos):
        (x,) = ctx.saved_tensors
        return grad_sin * x.cos() - (grad_sin if broken else grad_cos) * x.sin()

    op.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    return op


@fault(
    kind=UNUSED,
    note="Gradients come as None where a return is not used, which backward multiplies all the same.",
    sample=lambda: (torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)),
)
def rotated_pair(name: str, broken: bool):
    @custom_op(name, mutates_args=())
    def op(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        check_pair(x, y)
        return dense(0.6 * x - 0.8 * y), dense(0.8 * x + 0.6 * y)

    @op.register_fake
    def _(x, y):
        check_pair(x, y)
        return x.new_empty(x.shape), x.new_empty(x.shape)

    def backward(ctx, grad_u, grad_v):
        x, _ = ctx.saved_tensors
        if not broken:
            grad_u = torch.zeros_like(x) if grad_u is None else grad_u
            grad_v = torch.zeros_like(x) if grad_v is None else grad_v
        return 0.6 * grad_u + 0.8 * grad_v, 0.6 * grad_v - 0.8 * grad_u

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    op.register_autograd(backward, setup_context=setup_context, materialize_grads=False)
    return op


@fault(
    kind=UNUSED,
    note="Without a gradient of the mean backward gives up; a loss of the second return alone shows it.",
    sample=lambda: (torch.randn(5, requires_grad=True),),
)
def mean_and_energy(name: str, broken: bool):
    def check(x: Tensor) -> None:
        floating(x)
        if x.numel() == 0:
            raise ValueError("there is no mean of nothing")

    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor) -> tuple[Tensor, Tensor]:
        check(x)
        return x.mean(), x.square().mean()

    @op.register_fake
    def _(x):
        check(x)
        return x.new_empty(()), x.new_empty(())

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)

    def backward(ctx, grad_mean, grad_energy):
        (x,) = ctx.saved_tensors
        if grad_mean is None and broken:
            return None
        grad = torch.zeros_like(x)
        if grad_mean is not None:
            grad = grad + grad_mean / x.numel()
        if grad_energy is not None:
            grad = grad + 2 * x * grad_energy / x.numel()
        return grad

    op.register_autograd(backward, setup_context=setup_context)
    return op
