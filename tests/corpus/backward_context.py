"""Backwards that lose, share or overwrite tensors."""

from typing import Any

import torch
from corpus.entries import fault
from corpus.parts import (
    FLOATS,
    accumulator,
    dense,
    float_only,
    floats,
    leaf,
    one_floating_dtype,
    packed,
    require,
    require_dtype,
    require_same_dtype,
    rnd,
    same_shape,
    save_inputs,
    save_tensors_and_numbers,
)
from torch import Tensor

from customops import Tag, custom_op


@fault(
    kind="backward depends on state outside its context",
    note="The module keeps inputs on a stack. Backwards in another order, or a second backward, show the fault.",
    found_by="test_gradients",
    sample=lambda: (torch.randn(3, 3, requires_grad=True),),
)
def cubed(name: str, broken: bool) -> Any:
    stack: list[Tensor] = []

    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x)
        return torch.empty_like(x).copy_(x * x * x)

    @op.register_fake
    def _(x):
        floats(x)
        return torch.empty_like(x)

    def push(ctx, inputs, output):
        stack.append(inputs[0])

    def backward(ctx, grad):
        x = stack.pop() if broken else ctx.saved_tensors[0]
        return 3 * x * x * grad

    op.register_autograd(backward, setup_context=push if broken else save_inputs)
    return op


@fault(
    kind="a tensor is kept for backward without save_for_backward",
    note="If the result is changed in place before backward, autograd raises no error, and the gradient is wrong.",
    found_by="test_grad_modes",
    sample=lambda: (rnd(3, 4).requires_grad_(),),
)
def fast_sigmoid(name: str, broken: bool):
    @float_only
    def kernel(x: Tensor) -> Tensor:
        return torch.sigmoid(x).contiguous()

    def setup_context(ctx, inputs, output):
        if broken:
            ctx.y = output.detach()
        else:
            ctx.save_for_backward(output)

    def backward(ctx, grad):
        y = ctx.y if broken else ctx.saved_tensors[0]
        return grad * y * (1 - y)

    op = custom_op(name, kernel, mutates_args=())
    op.register_fake(float_only(lambda x: x.new_empty(x.shape)))
    op.register_autograd(backward, setup_context=setup_context, once_differentiable=True)
    return op


@fault(
    kind="backward of an in-place op reads the overwritten value",
    note="The gradient of `square_` is `2 * x**2` instead of `2 * x`.",
    found_by="test_gradients",
    sample=lambda: (rnd(3, 4).requires_grad_() * 1,),
)
def square_(name: str, broken: bool):
    def kernel(x: Tensor) -> Tensor:
        return x.mul_(x)

    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad

    op = custom_op(name, kernel, mutates_args={"x"}, tags=Tag.inplace)
    op.register_autograd(backward, setup_context=save_tensors_and_numbers, **({} if broken else {"originals": "x"}))
    return op


@fault(
    kind="backward changes a saved tensor",
    note="A second backward with retain_graph=True returns a wrong gradient.",
    found_by="test_gradients",
    sample=lambda: (rnd(3, 4).requires_grad_(),),
)
def silu_with_gate(name: str, broken: bool):
    @float_only
    def kernel(x: Tensor) -> tuple[Tensor, Tensor]:
        slope = torch.sigmoid(x).contiguous()
        return (x * slope).contiguous(), slope

    def backward(ctx, grad, _):
        x, slope = ctx.saved_tensors
        local = slope.data if broken else slope.clone()
        return local.mul_(1 + x * (1 - slope)).mul_(grad)

    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(inputs[0], output[1])

    op = custom_op(name, kernel, mutates_args=(), differentiable=(True, False))
    op.register_fake(float_only(lambda x: (x.new_empty(x.shape), x.new_empty(x.shape))))
    op.register_autograd(backward, setup_context=setup_context, once_differentiable=True)
    return op


@fault(
    kind="backward writes to the incoming gradient",
    note="A gradient that another branch or the user also holds is changed.",
    found_by="test_gradients",
    sample=lambda: (rnd(3, 4).requires_grad_(),),
)
def leaky_square(name: str, broken: bool):
    @float_only
    def kernel(x: Tensor) -> Tensor:
        return torch.where(x > 0, x * x, 0.1 * x).contiguous()

    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        slope = torch.where(x > 0, 2 * x, torch.full_like(x, 0.1))
        if broken and grad.is_contiguous():
            return grad.mul_(slope)
        return grad * slope

    op = custom_op(name, kernel, mutates_args=())
    op.register_fake(float_only(lambda x: x.new_empty(x.shape)))
    op.register_autograd(backward, setup_context=save_tensors_and_numbers, once_differentiable=True)
    return op


@fault(
    kind="backward adds to .grad",
    note="Backward adds to an existing `.grad` and returns the gradient as well, so that the second step is wrong.",
    found_by="test_grad_modes",
    sample=lambda: (torch.randn(3, 2), torch.randn(2)),
)
def bias_sine(name: str, broken: bool) -> Any:
    def valid(x, bias):
        floats(x, bias)
        require(x.dim() == 2 and bias.dim() == 1 and x.shape[1] == len(bias), "a bias for each column is needed")

    @custom_op(name, mutates_args=())
    def op(x: Tensor, bias: Tensor) -> Tensor:
        valid(x, bias)
        return dense((x + bias).sin())

    @op.register_fake
    def _(x, bias):
        valid(x, bias)
        return x.new_empty(x.shape)

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @op.register_autograd(setup_context=setup_context)
    def _(ctx, grad):
        x, bias = ctx.saved_tensors
        slope = grad * (x + bias).cos()
        by_bias = slope.sum(0)
        if broken and bias.is_leaf and bias.grad is not None:
            bias.grad.add_(by_bias.detach())  # as a fused kernel would
        return slope, by_bias

    return op


@fault(
    kind="backward can run only once",
    note="Backward pops the lengths from a list on `ctx`. A second backward finds the list empty.",
    found_by="test_gradients",
    sample=lambda: (torch.randn(3, 2), torch.randn(2, 2)),
)
def join(name: str, broken: bool) -> Any:
    def valid(x, y):
        floats(x, y)
        require(x.dim() == 2 and y.dim() == 2 and x.shape[1] == y.shape[1], "rows of one length are needed")

    @custom_op(name, mutates_args=())
    def op(x: Tensor, y: Tensor) -> Tensor:
        valid(x, y)
        return dense(torch.cat([x, y]))

    @op.register_fake
    def _(x, y):
        valid(x, y)
        return x.new_empty(x.shape[0] + y.shape[0], x.shape[1])

    def setup_context(ctx, inputs, output):
        ctx.lengths = [each.shape[0] for each in inputs]

    @op.register_autograd(setup_context=setup_context)
    def _(ctx, grad):
        if broken:
            second, first = ctx.lengths.pop(), ctx.lengths.pop()
        else:
            first, second = ctx.lengths
        return grad[:first], grad[first : first + second]

    return op


@fault(
    kind="a saved tensor has a Python attribute",
    note="setup_context sets an attribute on the saved tensor. A tensor from a saved-tensor hook lacks the attribute.",
    found_by="test_grad_modes",
    sample=lambda: (torch.randn(4, 3),),
)
def annotated_mean(name: str, broken: bool) -> Any:
    def valid(x):
        floats(x, dims=2)
        require(x.shape[0] > 0, "a row is needed")

    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        valid(x)
        return dense(x.sin().mean(0))

    @op.register_fake
    def _(x):
        valid(x)
        return x.new_empty(x.shape[1])

    def setup_context(ctx, inputs, output):
        (x,) = inputs
        (x if broken else ctx)._rows = x.shape[0]
        ctx.save_for_backward(x)

    @op.register_autograd(setup_context=setup_context)
    def _(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x.cos() / (x if broken else ctx)._rows

    return op


@fault(
    kind="a tensor is saved under the wrong condition",
    note="If only `weight` requires grad, backward raises, because the tensor it needs was saved for `x` only.",
    found_by="test_gradients",
    sample=lambda: (rnd(4, 6).requires_grad_(), rnd(6, seed=1).requires_grad_()),
)
def scale_norm(name: str, broken: bool):
    @float_only
    def kernel(x: Tensor, weight: Tensor) -> Tensor:
        require(weight.shape == x.shape[-1:], "unsupported shapes or dtypes")
        h = x.to(accumulator(x.dtype))
        return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype).mul(weight).contiguous()

    def setup_context(ctx, inputs, output):
        x, weight = inputs
        ctx.save_for_backward(weight, *([x] if ctx.needs_input_grad[0] or not broken else []))

    def backward(ctx, grad):
        weight, x = ctx.saved_tensors
        h, g = x.to(accumulator(x.dtype)), (grad * weight).to(accumulator(x.dtype))
        r = torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)
        by_x = g * r - h * r**3 * (g * h).mean(-1, keepdim=True)
        return by_x.to(x.dtype), (grad * h * r).to(weight.dtype)

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    @float_only
    def _(x, weight):
        require(weight.shape == x.shape[-1:], "unsupported shapes or dtypes")
        return x.new_empty(x.shape, dtype=torch.result_type(x, weight))

    op.register_autograd(backward, setup_context=setup_context)
    return op


@fault(
    kind="needs_input_grad is read for the wrong argument",
    note="Backward asks whether `x` requires grad to decide about `y`. A call in which only `y` does shows the fault.",
    found_by="test_gradients",
    sample=lambda: (torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)),
)
def sine_blend(name: str, broken: bool):
    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor, y: Tensor) -> Tensor:
        one_floating_dtype(x, y)
        same_shape(x, y)
        return dense(x * torch.sin(y))

    @op.register_fake
    def _(x, y):
        one_floating_dtype(x, y)
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
    kind="backward does not expect the gradient None",
    note="If only one result is used, the gradient of the other result is None, and backward raises.",
    found_by="test_gradients",
    sample=lambda: (rnd(3, 4).requires_grad_(),),
)
def sin_cos(name: str, broken: bool):
    @float_only
    def kernel(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.sin(x).contiguous(), torch.cos(x).contiguous()

    def backward(ctx, by_sin, by_cos):
        (x,) = ctx.saved_tensors
        if broken:
            return by_sin * torch.cos(x) - by_cos * torch.sin(x)
        total = torch.zeros_like(x)
        if by_sin is not None:
            total = total + by_sin * torch.cos(x)
        if by_cos is not None:
            total = total - by_cos * torch.sin(x)
        return total

    op = custom_op(name, kernel, mutates_args=())
    op.register_fake(float_only(lambda x: (x.new_empty(x.shape), x.new_empty(x.shape))))
    op.register_autograd(backward, setup_context=save_tensors_and_numbers, materialize_grads=False)
    return op


@fault(
    kind="backward uses one gradient for all results",
    note="Backward uses the gradient of the first result for both. A loss of the second result shows the fault.",
    found_by="test_gradients",
    sample=lambda: (torch.randn(4, requires_grad=True),),
)
def sin_and_cos(name: str, broken: bool):
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> tuple[Tensor, Tensor]:
        one_floating_dtype(x)
        return dense(x.sin()), dense(x.cos())

    @op.register_fake
    def _(x):
        one_floating_dtype(x)
        return x.new_empty(x.shape), x.new_empty(x.shape)

    def backward(ctx, grad_sin, grad_cos):
        (x,) = ctx.saved_tensors
        return grad_sin * x.cos() - (grad_sin if broken else grad_cos) * x.sin()

    op.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    return op


@fault(
    kind="the gradient of a second result is ignored",
    note="For a loss that uses `lse`, a part of the gradient is missing.",
    found_by="test_gradients",
    sample=lambda: (rnd(3, 5).requires_grad_(),),
)
def softmax_with_lse(name: str, broken: bool):
    @float_only
    def kernel(x: Tensor) -> tuple[Tensor, Tensor]:
        lse = torch.logsumexp(x, -1, keepdim=True)
        return torch.exp(x - lse).contiguous(), lse.squeeze(-1).contiguous()

    def backward(ctx, grad, grad_lse):
        (p,) = ctx.saved_tensors
        by_x = p * (grad - (grad * p).sum(-1, keepdim=True))
        return by_x if broken else by_x + p * grad_lse[..., None]

    op = custom_op(name, kernel, mutates_args=())
    op.register_fake(float_only(lambda x: (x.new_empty(x.shape), x.new_empty(x.shape[:-1]))))
    op.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[0]))
    return op


@fault(
    kind="the gradient of an optional result is ignored",
    note="The op returns the log-sum-exp on request, and backward ignores its gradient.",
    found_by="test_gradients",
    sample=lambda: (torch.randn(3, 4),),
)
def softmax_lse(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor, want_lse: bool = False) -> tuple[Tensor, Tensor | None]:
        floats(x, dims=2)
        require(x.shape[1] > 0, "a column is needed")
        return dense(x.softmax(-1)), dense(x.logsumexp(-1)) if want_lse else None

    @op.register_fake
    def _(x, want_lse):
        floats(x, dims=2)
        require(x.shape[1] > 0, "a column is needed")
        return x.new_empty(x.shape), x.new_empty(x.shape[0]) if want_lse else None

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    @op.register_autograd(setup_context=setup_context)
    def _(ctx, grad, grad_lse):
        (x,) = ctx.saved_tensors
        p = x.softmax(-1)
        result = p * (grad - (grad * p).sum(-1, keepdim=True))
        if grad_lse is not None and not broken:
            result = result + p * grad_lse.unsqueeze(-1)
        return result, None

    return op


@fault(
    kind="an integer-like result is differentiable by mistake",
    note="The op returns positions as floats, and backward adds their gradient to the gradient of the values.",
    found_by="test_gradients",
    sample=lambda: (torch.randn(6, requires_grad=True),),
)
def peak(name: str, broken: bool) -> Any:
    def check(x):
        floats(x, dims=1)
        if len(x) == 0:
            raise ValueError("a value is needed")

    @custom_op(name, mutates_args=(), differentiable=True if broken else (True, False))
    def op(x: Tensor) -> tuple[Tensor, Tensor]:
        check(x)
        at = x.argmax()
        return x[at].clone(), at.to(x.dtype)

    @op.register_fake
    def _(x):
        check(x)
        return x.new_empty(()), x.new_empty(())

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0].argmax())
        ctx.size = len(inputs[0])

    def backward(ctx, grad_value, grad_at):
        (at,) = ctx.saved_tensors
        grad = grad_value + grad_at if broken else grad_value
        return grad.new_zeros(ctx.size).scatter(0, at[None], grad[None])

    op.register_autograd(backward, setup_context=setup_context)
    return op


@fault(
    kind="a loop variable is bound late",
    note="For a list of different tensors, backward computes all gradients from the last tensor.",
    found_by="test_gradients",
    sample=lambda: ([rnd(4).requires_grad_(), rnd(4, seed=1).requires_grad_()],),
)
def foreach_square(name: str, broken: bool):
    def kernel(xs: list[Tensor]) -> list[Tensor]:
        return [(x * x).contiguous() for x in xs]

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[0])

    def backward(ctx, grads):
        rules = []
        for x in ctx.saved_tensors:
            if broken:
                rules.append(lambda grad: 2 * x * grad)  # noqa: B023
            else:
                rules.append(lambda grad, x=x: 2 * x * grad)
        return [rule(grad) for rule, grad in zip(rules, grads, strict=True)]

    op = custom_op(name, kernel, mutates_args=())
    op.register_fake(lambda xs: [x.new_empty(x.shape) for x in xs])
    op.register_autograd(backward, setup_context=setup_context)
    return op


@fault(
    kind="the gradients of a list are misaligned",
    note="Backward finds a gradient by the identity of the tensor. A tensor that is given twice shows the fault.",
    found_by="test_gradients",
    sample=lambda: ([leaf(2, 3), leaf(2, 3)],),
)
def ranked_stack(name: str, broken: bool) -> Any:
    def check(xs: list[Tensor]) -> None:
        if not xs or any(x.shape != xs[0].shape for x in xs):
            raise ValueError("expected tensors of one shape, one at least")
        require_dtype(xs[0], FLOATS)
        require_same_dtype(*xs)

    @custom_op(name, mutates_args=())
    def op(xs: list[Tensor]) -> Tensor:
        check(xs)
        return packed(torch.stack([x * (i + 1) for i, x in enumerate(xs)]))

    @op.register_fake
    def _(xs):
        check(xs)
        return xs[0].new_empty(len(xs), *xs[0].shape)

    def setup_context(ctx, inputs, output):
        (xs,) = inputs
        slots = {id(x): i for i, x in enumerate(xs)}
        ctx.slots = [slots[id(x)] if broken else i for i, x in enumerate(xs)]

    def backward(ctx, grad):
        parts = [part * (i + 1) for i, part in enumerate(grad.unbind(0))]
        return [parts[slot] for slot in ctx.slots]

    op.register_autograd(backward, setup_context=setup_context)
    return op


@fault(
    kind="backward expects a contiguous gradient",
    note="Backward views the gradient as pairs, which fails for a gradient in another layout.",
    found_by="test_gradients",
    sample=lambda: (torch.randn(3, 4, requires_grad=True),),
)
def quarter_turn(name: str, broken: bool) -> Any:
    def check(x):
        floats(x, dims=2)
        require(x.shape[1] % 2 == 0, "pairs are needed")

    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        check(x)
        pairs = x.reshape(-1, 2)
        return torch.stack([-pairs[:, 1], pairs[:, 0]], 1).view(x.shape)

    @op.register_fake
    def _(x):
        check(x)
        return x.new_empty(x.shape)

    def backward(ctx, grad):
        pairs = grad.view(-1, 2) if broken else grad.reshape(-1, 2)
        return torch.stack([pairs[:, 1], -pairs[:, 0]], 1).reshape(grad.shape)

    op.register_autograd(backward)
    return op
