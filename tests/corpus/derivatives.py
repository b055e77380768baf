"""Second derivatives, forward mode, complex gradients, and gradients in compiled code."""

import functools
from typing import Any

import torch
from corpus.entries import fault
from corpus.parts import (
    COMPLEX,
    FLOATS,
    alike,
    dense,
    float_only,
    floats,
    leaf,
    one_floating_dtype,
    packed,
    require,
    require_dtype,
    rnd,
    save_tensors_and_numbers,
)
from torch import Tensor

from customops import custom_op


@fault(
    kind="a lazily conjugated gradient is misread",
    note="Backward reads pairs of numbers from a gradient with the conjugate bit, such as that of `y.conj()`.",
    found_by="test_gradients",
    sample=lambda: (torch.randn(3, dtype=torch.complex64, requires_grad=True), 2.0),
)
def complex_scale(name: str, broken: bool):
    def check(x: Tensor) -> None:
        if x.dtype not in (torch.complex64, torch.complex128):
            raise ValueError(f"expected complex numbers, got {x.dtype}")

    @custom_op(name, mutates_args=())
    def op(x: Tensor, by: float) -> Tensor:
        check(x)
        return dense(x * by)

    @op.register_fake
    def _(x, by):
        check(x)
        return x.new_empty(x.shape)

    def setup_context(ctx, inputs, output):
        ctx.by = inputs[1]

    def backward(ctx, grad):
        pairs = torch.view_as_real(grad if broken else grad.resolve_conj())
        return torch.view_as_complex((pairs * ctx.by).contiguous()), None

    op.register_autograd(backward, setup_context=setup_context)
    return op


@fault(
    kind="a complex gradient is not conjugated",
    note="Backward multiplies by the other factor without conjugating it. An imaginary part shows the fault.",
    found_by="test_gradients",
    sample=lambda: (leaf(3, dtype=torch.complex128), leaf(3, dtype=torch.complex128)),
)
def complex_product_of_two(name: str, broken: bool) -> Any:
    def check(x: Tensor, y: Tensor) -> None:
        require_dtype(x, FLOATS + COMPLEX)
        require_dtype(y, FLOATS + COMPLEX)

    @custom_op(name, mutates_args=())
    def op(x: Tensor, y: Tensor) -> Tensor:
        check(x, y)
        return packed(x * y)

    @op.register_fake
    def _(x, y):
        check(x, y)
        return x.new_empty(torch.broadcast_shapes(x.shape, y.shape), dtype=torch.result_type(x, y))

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return (grad * y, grad * x) if broken else (grad * y.conj(), grad * x.conj())

    op.register_autograd(backward, setup_context=setup_context)
    return op


@fault(
    kind="the second derivative loses a term",
    note="The formula detaches `x`, so that double backward loses a term.",
    found_by="test_second_order",
    sample=lambda: (rnd(3, 4).requires_grad_(),),
)
def sine_gate(name: str, broken: bool):
    @float_only
    def kernel(x: Tensor) -> Tensor:
        return (x * torch.sin(x)).contiguous()

    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        if broken:
            x = x.detach()
        return grad * (torch.sin(x) + x * torch.cos(x))

    op = custom_op(name, kernel, mutates_args=())
    op.register_fake(float_only(lambda x: x.new_empty(x.shape)))
    op.register_autograd(backward, setup_context=save_tensors_and_numbers)
    return op


@fault(
    kind="backward calls an op without a gradient",
    note="Backward computes the slope without recording it. The second derivative shows the fault.",
    found_by="test_second_order",
    sample=lambda: (torch.randn(4, requires_grad=True),),
)
def softplus_like(name: str, broken: bool):
    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        one_floating_dtype(x)
        return dense(torch.logaddexp(x, torch.zeros_like(x)))

    @op.register_fake
    def _(x):
        one_floating_dtype(x)
        return x.new_empty(x.shape)

    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        with torch.set_grad_enabled(torch.is_grad_enabled() and not broken):
            slope = torch.sigmoid(x)
        return grad * slope

    op.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    return op


def save_both(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)
    ctx.save_for_forward(*inputs)


@fault(
    kind="the jvp rule lacks a term",
    note="The product rule has one of its two terms. A tangent of the second argument shows the fault.",
    found_by="test_forward_mode",
    sample=lambda: (torch.randn(4), torch.randn(4)),
)
def product(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor, y: Tensor) -> Tensor:
        alike(x, y)
        return torch.empty_like(x).copy_(x * y)

    @op.register_fake
    def _(x, y):
        alike(x, y)
        return torch.empty_like(x)

    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad * y, grad * x

    op.register_autograd(backward, setup_context=save_both)

    def jvp(ctx, change_x, change_y):
        x, y = ctx.saved_tensors
        by_x = torch.zeros_like(x) if change_x is None else change_x * y
        by_y = torch.zeros_like(y) if change_y is None or broken else change_y * x
        return by_x + by_y

    op.register_jvp(jvp)
    return op


def keep(ctx, inputs, output):
    """Save the inputs for both modes."""
    ctx.save_for_backward(*inputs)
    ctx.save_for_forward(*inputs)


def given(grad: Tensor | None, x: Tensor) -> Tensor:
    """Return a gradient, or zeros for None."""
    return torch.zeros_like(x) if grad is None else grad


@fault(
    kind="a tangent has the wrong shape",
    note="The tangent has the shape of the bias. A tangent for the bias only shows the fault.",
    found_by="test_forward_mode",
    sample=lambda: (torch.randn(2, 3, requires_grad=True), torch.randn(3, requires_grad=True)),
)
def biased_sine(name: str, broken: bool):
    def check(x: Tensor, bias: Tensor) -> None:
        one_floating_dtype(x, bias)
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
    kind="the jvp rule writes to a tangent",
    note="The rule multiplies the tangent of the caller in place.",
    found_by="test_forward_mode",
    sample=lambda: (torch.randn(3),),
)
def forward_cube(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x)
        return dense(x * x * x)

    @op.register_fake
    def _(x):
        floats(x)
        return x.new_empty(x.shape)

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    def slope(ctx, change):
        (x,) = ctx.saved_tensors
        return 3 * x * x * change

    def jvp(ctx, change):
        (x,) = ctx.saved_tensors
        return change.mul_(3 * x * x) if broken else 3 * x * x * change

    op.register_autograd(slope, setup_context=setup_context)
    op.register_jvp(jvp)
    return op


@fault(
    kind="backward branches on data",
    note="Backward has a shortcut for zero gradients. The branch breaks jacrev, is_grads_batched and compilation.",
    found_by="test_aot_backward",
    sample=lambda: (torch.randn(4),),
)
def quick_cube(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x)
        return dense(x * x * x)

    @op.register_fake
    def _(x):
        floats(x)
        return x.new_empty(x.shape)

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @op.register_autograd(setup_context=setup_context)
    def _(ctx, grad):
        (x,) = ctx.saved_tensors
        if broken and not grad.any():
            return grad
        return 3 * x * x * grad

    return op


@fault(
    kind="the fake impl of the backward op is wrong",
    note="The backward op sums the gradient of the bias, and its fake impl does not. Compiled training is wrong.",
    found_by="test_aot_backward",
    sample=lambda: (torch.randn(3, 4), torch.randn(4)),
)
def biased_sine_by_ops(name: str, broken: bool) -> Any:
    def valid(x, bias):
        floats(x, bias)
        require(x.dim() == 2 and bias.dim() == 1 and x.shape[1] == bias.shape[0], "a bias for each column is needed")

    @custom_op(name, mutates_args=())
    def op(x: Tensor, bias: Tensor) -> Tensor:
        valid(x, bias)
        return dense((x + bias).sin())

    @op.register_fake
    def _(x, bias):
        valid(x, bias)
        return x.new_empty(x.shape)

    @custom_op(f"{name}_backward", mutates_args=())
    def op_backward(grad: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        slope = grad * (x + bias).cos()
        return dense(slope), dense(slope.sum(0))

    @op_backward.register_fake
    def _(grad, x, bias):
        return x.new_empty(x.shape), x.new_empty(x.shape if broken else bias.shape)

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @op.register_autograd(setup_context=setup_context)
    def _(ctx, grad):
        return op_backward(grad, *ctx.saved_tensors)

    return op


def cosines(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a table of cosines."""
    return torch.arange(count, dtype=dtype, device=device).cos()


@fault(
    kind="a constant is created while tracing",
    note="The module creates its table once. A table that a compiler traces is a fake tensor in all later calls.",
    found_by="test_aot_backward",
    sample=lambda: (torch.randn(5),),
)
def windowed(name: str, broken: bool) -> Any:
    table = functools.lru_cache(maxsize=None)(cosines) if broken else cosines

    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x, dims=1)
        return dense(x * cosines(x.shape[0], x.dtype, x.device))

    @op.register_fake
    def _(x):
        floats(x, dims=1)
        return x.new_empty(x.shape)

    @op.register_autograd
    def _(ctx, grad):
        return grad * table(grad.shape[0], grad.dtype, grad.device)

    return op
