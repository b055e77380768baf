"""Backward formulas that are wrong for some values, options or shapes."""

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from corpus.entries import fault
from corpus.parts import (
    FLOATS,
    accumulator,
    alike,
    cdiv,
    dense,
    float_only,
    floating,
    floats,
    library,
    one_floating_dtype,
    overload,
    packed,
    require,
    require_dtype,
    rnd,
    same_shape,
    save_inputs,
    save_tensors_and_numbers,
    wide,
)
from torch import Tensor

from customops import custom_op


@fault(
    kind="a missing factor that is 1 in the sample",
    note="The gradient of `y` lacks the factor `beta`, which is 1 by default.",
    found_by="test_gradients",
    sample=lambda: (torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True), 0.5),
)
def alpha_beta_sum(name: str, broken: bool):
    lib = library(name)
    lib.define(f"{name.split('::')[1]}(Tensor x, Tensor y, float alpha, float beta=1.0) -> Tensor")

    def kernel(x, y, alpha, beta=1.0):
        one_floating_dtype(x, y)
        same_shape(x, y)
        return dense(alpha * x + beta * y)

    def fake(x, y, alpha, beta=1.0):
        one_floating_dtype(x, y)
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
    kind="backward ignores a number",
    note="The gradient lacks the factor `scale`. A scale other than 1 shows the fault.",
    found_by="test_gradients",
    sample=lambda: (rnd(3, 4),),
)
def scaled_swish(name: str, broken: bool):
    @float_only
    def kernel(x: Tensor, scale: float = 1.0) -> Tensor:
        return (x * torch.sigmoid(scale * x)).contiguous()

    def backward(ctx, grad):
        (x,), (scale,) = ctx.saved_tensors, ctx.numbers
        s = torch.sigmoid(scale * x)
        return grad * (s + x * s * (1 - s) * (1.0 if broken else scale)), None

    op = custom_op(name, kernel, mutates_args=())
    op.register_fake(float_only(lambda x, scale: x.new_empty(x.shape)))
    op.register_autograd(backward, setup_context=save_tensors_and_numbers)
    return op


@fault(
    kind="a number is truncated",
    note="The kernel truncates the factor to an integer; backward does not. A factor of 0.5 shows the fault.",
    found_by="test_gradients",
    sample=lambda: (torch.randn(4, requires_grad=True), 2.0),
)
def scaled_by(name: str, broken: bool):
    @custom_op(name, mutates_args=())
    def op(x: Tensor, by: float) -> Tensor:
        one_floating_dtype(x)
        return dense(x * (int(by) if broken else by))

    @op.register_fake
    def _(x, by):
        one_floating_dtype(x)
        return x.new_empty(x.shape)

    def setup_context(ctx, inputs, output):
        ctx.by = inputs[1]

    op.register_autograd(lambda ctx, grad: (grad * ctx.by, None), setup_context=setup_context)
    return op


@fault(
    kind="backward ignores an option",
    note='With reduction="mean", the gradient is not divided by the number of elements.',
    found_by="test_gradients",
    sample=lambda: (rnd(3, 4), rnd(3, 4, seed=1)),
)
def squared_loss(name: str, broken: bool):
    @float_only
    def kernel(x: Tensor, y: Tensor, reduction: str = "sum") -> Tensor:
        require(x.shape == y.shape and reduction in ("mean", "sum"), "unsupported shapes or dtypes")
        loss = (x - y).square()
        return loss.mean() if reduction == "mean" else loss.sum()

    def backward(ctx, grad):
        (x, y), (reduction,) = ctx.saved_tensors, ctx.numbers
        if reduction == "mean" and not broken:
            grad = grad / x.numel()
        by_x = 2 * (x - y) * grad
        return by_x, -by_x, None

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    @float_only
    def _(x, y, reduction):
        require(x.shape == y.shape and reduction in ("mean", "sum"), "unsupported shapes or dtypes")
        return x.new_empty((), dtype=torch.result_type(x, y))

    op.register_autograd(backward, setup_context=save_tensors_and_numbers)
    return op


@fault(
    kind="a member of an option is not handled",
    note='The kernel computes the sum for every option but "mean". The option "max" shows the fault.',
    found_by="test_kernels",
    sample=lambda: (torch.randn(3, 4),),
)
def pool_rows(name: str, broken: bool) -> Any:
    def check(x: Tensor) -> None:
        require_dtype(x, FLOATS)
        if x.dim() == 0 or x.shape[-1] == 0:
            raise ValueError("expected an entry in each row")

    @custom_op(name, mutates_args=())
    def op(x: Tensor, how: Literal["mean", "sum", "max"] = "mean") -> Tensor:
        check(x)
        if how == "mean":
            return packed(x.mean(-1))
        return packed(x.amax(-1) if how == "max" and not broken else x.sum(-1))

    @op.register_fake
    def _(x, how):
        check(x)
        return x.new_empty(x.shape[:-1])

    @op.register_reference(gives="gradients")
    def _(x, how):
        return {"mean": torch.mean, "sum": torch.sum, "max": torch.amax}[how](x, -1)

    return op


@fault(
    kind="an optional argument is tested by its truth value",
    note="The kernel treats a scale of zero as absent.",
    found_by="test_gradients",
    sample=lambda: (torch.randn(4, requires_grad=True), 2.0),
)
def maybe_scaled(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor, scale: float | None = None) -> Tensor:
        floats(x)
        factor = (scale or 1.0) if broken else 1.0 if scale is None else scale
        return torch.empty_like(x).copy_(x * factor)

    @op.register_fake
    def _(x, scale):
        floats(x)
        return torch.empty_like(x)

    def setup_context(ctx, inputs, output):
        ctx.scale = inputs[1]

    def backward(ctx, grad):
        return (grad.clone() if ctx.scale is None else grad * ctx.scale), None

    op.register_autograd(backward, setup_context=setup_context)
    return op


@fault(
    kind="backward uses the padded size",
    note="The gradient of the mean is divided by the padded length. A length that is no multiple of 4 shows the fault.",
    found_by="test_gradients",
    sample=lambda: (rnd(3, 8).requires_grad_(),),
)
def padded_mean(name: str, broken: bool):
    @float_only
    def kernel(x: Tensor) -> Tensor:
        h = F.pad(x, (0, -x.shape[-1] % 4))
        return (h.sum(-1) / x.shape[-1]).contiguous()

    def setup_context(ctx, inputs, output):
        ctx.width = inputs[0].shape[-1]

    def backward(ctx, grad):
        width = cdiv(ctx.width, 4) * 4 if broken else ctx.width
        return (grad / width)[..., None].expand(*grad.shape, ctx.width)

    op = custom_op(name, kernel, mutates_args=())
    op.register_fake(float_only(lambda x: x.new_empty(x.shape[:-1])))
    op.register_autograd(backward, setup_context=setup_context)
    return op


@fault(
    kind="backward differentiates an approximation of the kernel",
    note="The kernel computes the exact GELU; backward differentiates the tanh approximation.",
    found_by="test_gradients",
)
def gelu_numpy(name: str, broken: bool) -> Any:
    ROOT = math.sqrt(2 / math.pi)

    @custom_op(name, mutates_args=())
    def gelu(x: Tensor) -> Tensor:
        floating(x)
        v = x.to(wide(x))
        return (0.5 * v * (1 + torch.erf(v / math.sqrt(2)))).to(x.dtype).contiguous()

    @gelu.register_fake
    def _(x):
        return x.new_empty(x.shape)

    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        v = x.to(wide(x))
        if broken:
            t = torch.tanh(ROOT * (v + 0.044715 * v**3))
            slope = 0.5 * (1 + t) + 0.5 * v * (1 - t * t) * ROOT * (1 + 3 * 0.044715 * v * v)
        else:
            slope = 0.5 * (1 + torch.erf(v / math.sqrt(2))) + 0.5 * v * ROOT * torch.exp(-v * v / 2)
        return (grad * slope).to(x.dtype)

    gelu.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))

    @gelu.register_samples
    def _():
        yield (torch.randn(4, 8, requires_grad=True),)

    return gelu


@fault(
    kind="a wrong gradient at special points",
    note="Where both inputs are equal, each input gets the whole gradient.",
    found_by="test_gradients",
    sample=lambda: (torch.randn(5, requires_grad=True), torch.randn(5, requires_grad=True)),
)
def larger(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor, y: Tensor) -> Tensor:
        alike(x, y)
        return torch.empty_like(x).copy_(torch.maximum(x, y))

    @op.register_fake
    def _(x, y):
        alike(x, y)
        return torch.empty_like(x)

    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        tie = (x == y).to(x.dtype) * (1.0 if broken else 0.5)
        return grad * ((x > y) + tie), grad * ((y > x) + tie)

    op.register_autograd(backward, setup_context=save_inputs)
    return op


@fault(
    kind="a gradient of 0/0 at zero",
    note="For an input of zero, `out / x * exponent` is NaN.",
    found_by="test_gradients",
    sample=lambda: (rnd(3, 4).abs().requires_grad_(), 3.0),
)
def raised_to(name: str, broken: bool):
    @float_only
    def kernel(x: Tensor, exponent: float) -> Tensor:
        return torch.pow(x, exponent).contiguous()

    def backward(ctx, grad):
        (x,), (exponent,) = ctx.saved_tensors, ctx.numbers
        if exponent == 0:
            return torch.zeros_like(grad), None
        slope = torch.pow(x, exponent) / x if broken else torch.pow(x, exponent - 1)
        return grad * exponent * slope, None

    op = custom_op(name, kernel, mutates_args=())
    op.register_fake(float_only(lambda x, exponent: x.new_empty(x.shape)))
    op.register_autograd(backward, setup_context=save_tensors_and_numbers)
    return op


@fault(
    kind="backward overflows where the kernel does not",
    note="For float32 inputs above 89, the gradient is inf/inf.",
    found_by="test_backward",
    sample=lambda: (rnd(4, 5),),
)
def stable_softplus(name: str, broken: bool):
    @float_only
    def kernel(x: Tensor) -> Tensor:
        return (x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))).contiguous()

    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (torch.exp(x) / (1 + torch.exp(x)) if broken else torch.sigmoid(x))

    op = custom_op(name, kernel, mutates_args=())
    op.register_fake(float_only(lambda x: x.new_empty(x.shape)))
    op.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    return op


@fault(
    kind="backward accumulates in float16",
    note="For many rows in float16, the gradient of `weight` stops growing.",
    found_by="test_gradients",
    sample=lambda: (rnd(4, 6).requires_grad_(), rnd(6, seed=1).requires_grad_()),
)
def scale_columns(name: str, broken: bool):
    @float_only
    def kernel(x: Tensor, weight: Tensor) -> Tensor:
        require(x.dim() > 0 and weight.numel() > 0 and weight.shape == x.shape[-1:], "unsupported shapes or dtypes")
        return (x * weight).contiguous()

    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        products = (grad * x).reshape(-1, x.shape[-1])
        if broken:
            total = torch.zeros_like(products[0])
            for row in products.unbind(0):
                total = total + row
        else:
            total = products.sum(0, dtype=accumulator(x.dtype)).to(weight.dtype)
        return grad * weight, total

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    @float_only
    def _(x, weight):
        require(x.dim() > 0 and weight.numel() > 0 and weight.shape == x.shape[-1:], "unsupported shapes or dtypes")
        return x.new_empty(x.shape, dtype=torch.result_type(x, weight))

    op.register_autograd(backward, setup_context=save_tensors_and_numbers)
    return op


def shape_of_both(x: Tensor, y: Tensor) -> torch.Size:
    """Return the shape of two broadcast tensors. Raise ValueError unless it is the shape of the first."""
    one_floating_dtype(x, y)
    if torch.broadcast_shapes(x.shape, y.shape) != x.shape:
        raise ValueError(f"{tuple(y.shape)} is not broadcast to {tuple(x.shape)}")
    return x.shape


@fault(
    kind="the gradient of a broadcast argument is reduced wrongly",
    note="Backward sums over the leading dimensions. A weight of shape (3, 1) shows the fault.",
    found_by="test_gradients",
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


def check_factor(x: Tensor, by: float | Tensor) -> None:
    """Raise unless a tensor has one element, or one element for each column."""
    floats(x, least=1)
    if isinstance(by, Tensor):
        floats(x, by)
        require(by.dim() == 0 or by.shape == x.shape[-1:], "one number, or one for each column, is needed")


@fault(
    kind="a tensor is treated like the number that the parameter also accepts",
    note="Backward sums the gradient of a tensor to one number. A tensor with several elements shows the fault.",
    found_by="test_gradients",
    sample=lambda: (torch.randn(2, 3), 2.0),
)
def times_either(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor, by: float | Tensor) -> Tensor:
        check_factor(x, by)
        return dense(x * by)

    @op.register_fake
    def _(x, by):
        check_factor(x, by)
        return x.new_empty(x.shape)

    def setup_context(ctx, inputs, output):
        x, by = inputs
        ctx.number = None if isinstance(by, Tensor) else by
        ctx.save_for_backward(*([x] if ctx.number is not None else [x, by]))

    @op.register_autograd(setup_context=setup_context)
    def _(ctx, grad):
        if ctx.number is not None:
            return grad * ctx.number, None
        x, by = ctx.saved_tensors
        by_factor = (grad * x).sum() if broken or by.dim() == 0 else (grad * x)
        return grad * by, by_factor

    return op


@fault(
    kind="backward of a gather overwrites instead of adding",
    note="If an index occurs twice, one of the two gradients is lost.",
    found_by="test_gradients",
    sample=lambda: (rnd(6, 3).requires_grad_(), torch.tensor([4, 0, 2])),
)
def select_rows(name: str, broken: bool):
    def kernel(x: Tensor, index: Tensor) -> Tensor:
        require(x.dim() > 0 and index.dim() > 0, "unsupported shapes or dtypes")
        return x[index]

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[1])
        ctx.shape = inputs[0].shape

    def backward(ctx, grad):
        (index,) = ctx.saved_tensors
        return grad.new_zeros(ctx.shape).index_put((index,), grad, accumulate=not broken), None

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    def _(x, index):
        require(x.dim() > 0 and index.dim() > 0, "unsupported shapes or dtypes")
        return x.new_empty(*index.shape, *x.shape[1:])

    op.register_autograd(backward, setup_context=setup_context)
    return op


@fault(
    kind="backward gives the padding row a gradient",
    note="The kernel skips the row `padding_idx`, but backward gives the row a gradient.",
    found_by="test_gradients",
    sample=lambda: (rnd(6, 3), torch.tensor([1, 4, 2]), 0),
)
def lookup(name: str, broken: bool):
    def kernel(table: Tensor, index: Tensor, padding_idx: int) -> Tensor:
        require(table.dim() == 2 and index.dim() > 0, "unsupported shapes or dtypes")
        return table[index].masked_fill_((index == padding_idx)[..., None], 0)

    def setup_context(ctx, inputs, output):
        table, index, ctx.padding_idx = inputs
        ctx.save_for_backward(index)
        ctx.shape = table.shape

    def backward(ctx, grad):
        (index,) = ctx.saved_tensors
        if not broken:
            grad = grad.masked_fill((index == ctx.padding_idx)[..., None], 0)
        return grad.new_zeros(ctx.shape).index_put((index,), grad, accumulate=True), None, None

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    def _(table, index, padding_idx):
        require(table.dim() == 2 and index.dim() > 0, "unsupported shapes or dtypes")
        return table.new_empty(*index.shape, table.shape[1])

    op.register_autograd(backward, setup_context=setup_context)
    return op


@fault(
    kind="a gradient stays zero",
    note="The gradient of `slope` is a tensor of zeros that backward never fills.",
    found_by="test_gradients",
    sample=lambda: (rnd(3, 4).requires_grad_(), torch.tensor(0.25).requires_grad_()),
)
def prelu(name: str, broken: bool):
    @float_only
    def kernel(x: Tensor, slope: Tensor) -> Tensor:
        require(slope.dim() == 0, "slope must be a number")
        return torch.where(x > 0, x, x * slope).contiguous()

    def backward(ctx, grad):
        x, slope = ctx.saved_tensors
        by_x = torch.where(x > 0, grad, grad * slope)
        return by_x, torch.zeros_like(slope) if broken else torch.where(x > 0, torch.zeros_like(x), grad * x).sum()

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    @float_only
    def _(x, slope):
        require(slope.dim() == 0, "slope must be a number")
        return x.new_empty(x.shape)

    op.register_autograd(backward, setup_context=save_tensors_and_numbers)
    return op


@fault(
    kind="backward draws another random mask",
    note="The gradient is zero at other elements than the result.",
    found_by="test_gradients",
    sample=lambda: (rnd(8, 8).requires_grad_(), 0.5),
)
def plain_dropout(name: str, broken: bool):
    @float_only
    def kernel(x: Tensor, p: float) -> tuple[Tensor, Tensor]:
        require(0 <= p < 1, "p must be in [0, 1)")
        mask = torch.rand(x.shape) >= p
        return (x * mask / (1 - p)).contiguous(), mask

    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])
        ctx.p = inputs[1]

    def backward(ctx, grad, _):
        (mask,) = ctx.saved_tensors
        if broken:
            mask = torch.rand(mask.shape) >= ctx.p
        return grad * mask / (1 - ctx.p), None

    op = custom_op(name, kernel, mutates_args=(), tags=torch.Tag.nondeterministic_seeded, differentiable=(True, False))

    @op.register_fake
    @float_only
    def _(x, p):
        require(0 <= p < 1, "p must be in [0, 1)")
        return x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.bool)

    op.register_autograd(backward, setup_context=setup_context)
    return op
