"""Right ops whose gradients look wrong."""

from typing import Any

import torch
from corpus.entries import right_op
from corpus.parts import (
    dense,
    float_only,
    floating,
    like_single,
    require,
    rnd,
    save_inputs,
    save_tensors_and_numbers,
    single,
)
from torch import Tensor

from customops import custom_op


@right_op(
    why="Backward clips the gradient on purpose.",
    witness={
        "checks/autograd_registration.py: check": "test_autograd_registration",
        "checks/laws.py: _Unordered._changes_elsewhere": "test_permutations",
        "checks/gradients.py: _Comparison.run": "test_gradients",
        "checks/_derivatives.py: Differences.__init__": "test_gradients",
    },
    sample=lambda: (rnd(3, 4).requires_grad_(),),
)
def clip_gradient(name: str):
    def kernel(x: Tensor) -> Tensor:
        return x.clone(memory_format=torch.contiguous_format)

    op = custom_op(name, kernel, mutates_args=())
    op.register_fake(lambda x: x.new_empty(x.shape))
    op.register_autograd(lambda ctx, grad: grad.clamp(-1, 1))
    return op


@right_op(
    why="The op rounds to bfloat16, and backward ignores the rounding on purpose.",
    witness={
        "checks/gradients.py: _Comparison._exemption": "test_gradients",
    },
    sample=lambda: (rnd(3, 5),),
)
def through_bfloat16(name: str):
    @float_only
    def kernel(x: Tensor) -> Tensor:
        return x.to(torch.bfloat16, copy=True).to(x.dtype).contiguous()

    op = custom_op(name, kernel, mutates_args=())
    op.register_fake(float_only(lambda x: x.new_empty(x.shape)))
    op.register_autograd(lambda ctx, grad: grad)
    return op


@right_op(
    why="The op returns its input, and backward reverses the gradient on purpose.",
    witness={
        "checks/gradients.py: _Comparison._exemption": "test_gradients",
    },
    sample=lambda: (rnd(3, 4).requires_grad_(), 0.5),
)
def reverse_gradient(name: str):
    def kernel(x: Tensor, by: float) -> Tensor:
        return x.clone(memory_format=torch.contiguous_format)

    op = custom_op(name, kernel, mutates_args=())
    op.register_fake(lambda x, by: x.new_empty(x.shape))
    op.register_autograd(
        lambda ctx, grad: (-ctx.by * grad, None),
        setup_context=lambda ctx, inputs, output: setattr(ctx, "by", inputs[1]),
    )
    return op


@right_op(
    why="The op rounds, which has no derivative, and backward passes the gradient on.",
    witness={
        "checks/gradients.py: _Comparison._exemption": "test_gradients",
    },
)
def round_ste_2(name: str) -> Any:
    @custom_op(name, mutates_args=())
    def round_ste(x: Tensor, step: float, top: int = 127) -> Tensor:
        floating(x)
        torch._check(step > 0 and top > 0, lambda: "round_ste: step and top must be positive")
        return (torch.round(x / step).clamp(-top, top) * step).contiguous()

    @round_ste.register_fake
    def _(x, step, top):
        return x.new_empty(x.shape)

    def setup_context(ctx, inputs, output):
        x, ctx.step, ctx.top = inputs
        ctx.save_for_backward(x)

    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return torch.where((x / ctx.step).abs() <= ctx.top, grad, 0), None, None

    round_ste.register_autograd(backward, setup_context=setup_context)

    @round_ste.register_samples
    def _():
        yield torch.randn(4, 6, requires_grad=True), 0.05

    return round_ste


@right_op(
    why="Close to the pole of 1/x, a finite difference of the usual step jumps over the pole.",
    witness={
        "checks/_derivatives.py: Differences.differs": "test_second_order",
    },
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


@right_op(
    why="The op replaces NaN by a number, as `nan_to_num` does.",
    witness={
        "checks/grad_modes.py: _Modes._compare": "test_grad_modes",
    },
    sample=lambda: (rnd(3, 4),),
)
def clean(name: str):
    @float_only
    def kernel(x: Tensor, value: float = 0.0) -> Tensor:
        return torch.where(torch.isfinite(x), x, torch.tensor(value, dtype=x.dtype)).contiguous()

    op = custom_op(name, kernel, mutates_args=())
    op.register_fake(float_only(lambda x, value: x.new_empty(x.shape)))
    op.register_autograd(
        lambda ctx, grad: (torch.where(torch.isfinite(ctx.saved_tensors[0]), grad, 0), None),
        setup_context=save_tensors_and_numbers,
    )
    return op


@right_op(
    why="The op refuses all dtypes but float32.",
    witness={
        "checks/_derivatives.py: Function.of": "test_forward_mode",
    },
    sample=lambda: (torch.rand(5, requires_grad=True),),
)
def rooted(name: str) -> Any:
    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        require(x.dtype == torch.float32, "float32 is needed")
        return torch.empty_like(x).copy_((x * x + 1).sqrt())

    @op.register_fake
    def _(x):
        require(x.dtype == torch.float32, "float32 is needed")
        return torch.empty_like(x)

    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x / (x * x + 1).sqrt()

    op.register_autograd(backward, setup_context=save_inputs)
    return op


@right_op(
    why="The loss has three reductions, and its gradient depends on the size of the batch.",
    witness={
        "checks/laws.py: _check_batches_of_sizes": "test_backward",
    },
    sample=lambda: (rnd(3, 4).requires_grad_(), rnd(3, 4, seed=1)),
)
def huber_loss(name: str):
    def validate(x, y, reduction):
        require(x.shape == y.shape and x.dtype == y.dtype, "x and y must be alike")
        require(reduction in ("none", "mean", "sum"), "reduction must be none, mean or sum")

    @float_only
    def kernel(x: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
        validate(x, y, reduction)
        d = (x - y).abs()
        loss = torch.where(d < 1, 0.5 * d * d, d - 0.5)
        return {"none": loss, "mean": loss.mean(), "sum": loss.sum()}[reduction].contiguous()

    def backward(ctx, grad):
        (x, y), (reduction,) = ctx.saved_tensors, ctx.numbers
        by_x = (x - y).clamp(-1, 1) * grad
        if reduction == "mean":
            by_x = by_x / x.numel()
        return by_x, -by_x, None

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    @float_only
    def _(x, y, reduction):
        validate(x, y, reduction)
        return x.new_empty(x.shape if reduction == "none" else ())

    op.register_autograd(backward, setup_context=save_tensors_and_numbers)
    return op


@right_op(
    why="The gradient of a complex product is conjugated.",
    witness={
        "checks/_inputs.py: _Block.copy_of": "test_layouts",
        "checks/_derivatives.py: Differences.slope": "test_second_order",
    },
    sample=lambda: (torch.randn(3, dtype=torch.cfloat),) * 2,
)
def complex_product(name: str) -> Any:
    def check(x, y):
        require(x.dtype == y.dtype and x.is_complex(), "two complex tensors are needed")
        require(x.dtype in (torch.complex64, torch.complex128), "complex64 or complex128 is needed")
        require(x.shape == y.shape, "one shape is needed")

    @custom_op(name, mutates_args=())
    def op(x: Tensor, y: Tensor) -> Tensor:
        check(x, y)
        return torch.empty_like(x).copy_(x * y)

    @op.register_fake
    def _(x, y):
        check(x, y)
        return torch.empty_like(x)

    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad * y.conj(), grad * x.conj()

    op.register_autograd(backward, setup_context=save_inputs)
    return op


@right_op(
    why="Under autocast, the op receives and returns bfloat16.",
    witness={
        "checks/autocast.py: check": "test_autocast",
    },
    sample=lambda: (torch.randn(3, 4, requires_grad=True), torch.randn(4, requires_grad=True)),
)
def projected(name: str) -> Any:
    def check(x, weight):
        known = (torch.bfloat16, torch.float32, torch.float64)
        require(x.dtype in known and weight.dtype == x.dtype, "one dtype is needed, bfloat16 or wider")
        require(x.dim() == 2 and weight.shape == x.shape[1:], "a weight for each column is needed")

    @custom_op(name, mutates_args=())
    def op(x: Tensor, weight: Tensor) -> Tensor:
        check(x, weight)
        return x.new_empty(len(x)).copy_((x.double() * weight.double()).sum(1))

    @op.register_fake
    def _(x, weight):
        check(x, weight)
        return x.new_empty(len(x))

    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad[:, None] * weight, (grad[:, None] * x).sum(0)

    op.register_autograd(backward, setup_context=save_inputs)
    op.register_autocast("cpu", torch.bfloat16)
    return op
