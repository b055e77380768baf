"""What backward is given and what it saves, forward mode, and rules of vmap and autocast."""

from typing import Optional

import numpy as np
import torch
import torch.nn.functional as F
from broken_ops.corpus import fault
from broken_ops.defining import require
from broken_ops.kernel_parts import accumulator, cdiv, contiguous, float_only, numpy_only, rnd, save_tensors_and_numbers
from torch import Tensor

from customops import Tag, custom_op


@fault(
    kind="backward of a gather overwrites instead of adding",
    note="An index that occurs twice: one of the two gradients is lost.",
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
    kind="a tensor kept for backward without save_for_backward",
    note="The result is changed in place before backward: no error, and a wrong gradient.",
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
    kind="no conjugate in the gradient of a complex product",
    note="Complex inputs: the gradient is the conjugate of the right one.",
    sample=lambda: (rnd(3, 4).requires_grad_(), rnd(3, 4, seed=1).requires_grad_()),
)
def modulate(name: str, broken: bool):
    def kernel(x: Tensor, carrier: Tensor) -> Tensor:
        return (x * carrier).contiguous()

    def backward(ctx, grad):
        x, carrier = ctx.saved_tensors
        if broken:
            return grad * carrier, grad * x
        return grad * carrier.conj(), grad * x.conj()

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    def _(x, carrier):
        return x.new_empty(torch.broadcast_shapes(x.shape, carrier.shape), dtype=torch.result_type(x, carrier))

    op.register_autograd(backward, setup_context=save_tensors_and_numbers)
    return op


@fault(
    kind="a wrong formula for forward mode",
    note="torch.func.jvp: the tangent lacks the factor 2, the backward is right.",
    sample=lambda: (rnd(3, 4).requires_grad_(),),
)
def gaussian(name: str, broken: bool):
    @float_only
    def kernel(x: Tensor) -> Tensor:
        return torch.exp(-x * x).contiguous()

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0])

    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return -2 * x * torch.exp(-x * x) * grad

    def jvp(ctx, tangent):
        (x,) = ctx.saved_tensors
        return -(1 if broken else 2) * x * torch.exp(-x * x) * tangent

    op = custom_op(name, kernel, mutates_args=())
    op.register_fake(float_only(lambda x: x.new_empty(x.shape)))
    op.register_autograd(backward, setup_context=setup_context)
    op.register_jvp(jvp)
    return op


@fault(
    kind="backward of a dropout draws another mask",
    note="The gradient is zero at other places than the result.",
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


@fault(
    kind="a loop variable bound late",
    note="Several tensors of different values: all gradients are made of the last tensor.",
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
    kind="backward of an in-place op uses the overwritten value",
    note="The gradient of square_ is 2 * x**2 instead of 2 * x.",
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
    kind="a result without gradient is not expected by backward",
    note="Only one of the results is used: the gradient of the other is None, and backward raises.",
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
    kind="gradient of rows summed in float16",
    note="Many rows in float16: the gradient of weight stops to grow.",
    sample=lambda: (rnd(4, 6).requires_grad_(), rnd(6, seed=1).requires_grad_()),
)
def scale_columns(name: str, broken: bool):
    @float_only
    def kernel(x: Tensor, weight: Tensor) -> Tensor:
        require(x.dim() > 0 and weight.shape == x.shape[-1:], "unsupported shapes or dtypes")
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
        require(x.dim() > 0 and weight.shape == x.shape[-1:], "unsupported shapes or dtypes")
        return x.new_empty(x.shape, dtype=torch.result_type(x, weight))

    op.register_autograd(backward, setup_context=save_tensors_and_numbers)
    return op


@fault(
    kind="a gradient divided by the width that is padded",
    note="A length that is no multiple of 4: the gradient of the mean is divided by the padded length.",
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
    kind="a vmap rule that ignores in_dims",
    note="vmap over another dimension than 0: the wrong one is taken for the batch.",
    sample=lambda: (rnd(4, 4),),
)
def causal_mean(name: str, broken: bool):
    @float_only
    def kernel(x: Tensor) -> Tensor:
        count = torch.arange(1, x.shape[-1] + 1, dtype=x.dtype)
        return (x.cumsum(-1) / count).contiguous()

    op = custom_op(name, kernel, mutates_args=())
    op.register_fake(float_only(lambda x: x.new_empty(x.shape)))

    @op.register_vmap
    def _(info, in_dims, x):
        return op(x if broken else x.movedim(in_dims[0], 0)), 0

    return op


@fault(
    kind="a vmap rule for one batched argument",
    note="weight is batched, too: it is broadcast against the last dimensions, without its batch.",
    sample=lambda: (rnd(4, 4), rnd(4, seed=1)),
)
def weighted_tanh(name: str, broken: bool):
    @float_only
    def kernel(x: Tensor, weight: Tensor) -> Tensor:
        return (torch.tanh(x) * weight).contiguous()

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    @float_only
    def _(x, weight):
        shape = torch.broadcast_shapes(x.shape, weight.shape)
        return x.new_empty(shape, dtype=torch.result_type(x, weight))

    @op.register_vmap
    def _(info, in_dims, x, weight):
        x_dim, weight_dim = in_dims
        if broken:
            return op(x if x_dim is None else x.movedim(x_dim, 0), weight), 0

        def batched(t: Tensor, dim: Optional[int], ndim: int) -> Tensor:
            t = t.unsqueeze(0) if dim is None else t.movedim(dim, 0)
            return t.reshape(t.shape[0], *[1] * (ndim - t.dim() + 1), *t.shape[1:])

        ndim = max(x.dim() - (x_dim is not None), weight.dim() - (weight_dim is not None))
        return op(batched(x, x_dim, ndim), batched(weight, weight_dim, ndim)), 0

    return op


@fault(
    kind="a vmap rule that shares a statistic over the batch",
    note="Under vmap the maximum is that of the whole batch instead of each element.",
    sample=lambda: (rnd(4, 4),),
)
def absmax_scale(name: str, broken: bool):
    @float_only
    def kernel(x: Tensor, per_batch: bool = False) -> Tensor:
        require(x.numel() > 0, "unsupported shapes or dtypes")
        size = x.abs()
        if per_batch:
            top = size.flatten(1).amax(1).view(-1, *[1] * (x.dim() - 1))
        else:
            top = size.max()
        return (x / top.clamp(min=torch.finfo(x.dtype).tiny)).contiguous()

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    @float_only
    def _(x, per_batch):
        require(x.numel() > 0, "unsupported shapes or dtypes")
        return x.new_empty(x.shape)

    @op.register_vmap
    def _(info, in_dims, x, per_batch):
        x = x.movedim(in_dims[0], 0)
        if broken:
            return op(x, per_batch), 0
        if per_batch:
            merged = x.flatten(0, 1)
            return op(merged, True).view(x.shape), 0
        return op(x, True), 0

    return op


@fault(
    kind="a vmap rule that calls the kernel instead of the op",
    note="Nested vmap, or vmap of a gradient: the kernel gets a batched tensor and raises.",
    sample=lambda: (rnd(3, 4),),
)
def np_sign_root(name: str, broken: bool):
    @numpy_only
    def kernel(x: Tensor) -> Tensor:
        a = x.detach().numpy()
        return contiguous(torch.from_numpy(np.asarray(np.sign(a) * np.sqrt(np.abs(a)), order="C")))

    op = custom_op(name, kernel, mutates_args=())
    op.register_fake(numpy_only(lambda x: x.new_empty(x.shape)))

    @op.register_vmap
    def _(info, in_dims, x):
        x = x.movedim(in_dims[0], 0)
        return (kernel if broken else op)(x), 0

    return op


@fault(
    kind="autocast of an argument that needs its precision",
    note="Under autocast: positions above 256 are rounded to bfloat16, and the angles are wrong.",
    sample=lambda: (rnd(4, 6), torch.arange(4.0)),
)
def rotate_by(name: str, broken: bool):
    @float_only
    def kernel(x: Tensor, position: Tensor) -> Tensor:
        require(
            x.dim() == 2 and position.dim() == 1 and x.shape[0] == position.shape[0], "unsupported shapes or dtypes"
        )
        half = x.shape[-1] // 2
        require(x.shape[-1] == 2 * half, "the last size must be even")
        speed = 100.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = position[:, None].double() * speed
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    @float_only
    def _(x, position):
        require(
            x.dim() == 2 and position.dim() == 1 and x.shape[0] == position.shape[0], "unsupported shapes or dtypes"
        )
        require(x.shape[-1] % 2 == 0, "the last size must be even")
        return x.new_empty(x.shape)

    if broken:
        op.register_autocast("cpu", torch.bfloat16)
    return op
