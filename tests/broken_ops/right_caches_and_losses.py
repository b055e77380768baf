"""Right ops with caches, with losses and norms, and with writes that are declared."""

from typing import Callable

import torch
import torch.nn.functional as F
from broken_ops.corpus import trap
from broken_ops.defining import require
from broken_ops.kernel_parts import accumulator, contiguous, float_only, next_power_of_2, rnd, save_tensors_and_numbers
from torch import Tensor

from customops import Tag, custom_op


@trap(why="A table cached by all that it depends on.", sample=lambda: (rnd(5, 6),))
def cached_rotary(name: str):
    tables: dict = {}

    def table(length: int, dim: int, base: float) -> tuple[Tensor, Tensor]:
        key = length, dim, base
        if key not in tables:
            with torch.inference_mode(False):
                speed = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
                angle = torch.outer(torch.arange(length, dtype=torch.float64), speed)
                tables[key] = angle.cos(), angle.sin()
        return tables[key]

    @float_only
    def kernel(x: Tensor, base: float = 10000.0) -> Tensor:
        require(x.dim() == 2 and x.shape[1] % 2 == 0, "x must be (length, an even number)")
        require(base > 0, "base must be positive")
        cos, sin = table(x.shape[0], x.shape[1], base)
        h = x.double()
        a, b = h[:, 0::2], h[:, 1::2]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(1).to(x.dtype).contiguous()

    def setup_context(ctx, inputs, output):
        ctx.base = inputs[1]

    def backward(ctx, grad):
        n, dim = grad.shape
        speed = ctx.base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angle = torch.outer(torch.arange(n, dtype=torch.float64), speed)
        cos, sin = angle.cos().to(grad.dtype), angle.sin().to(grad.dtype)
        a, b = grad[:, 0::2], grad[:, 1::2]
        return torch.stack([a * cos + b * sin, b * cos - a * sin], -1).flatten(1), None

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    @float_only
    def _(x, base):
        require(x.dim() == 2 and x.shape[1] % 2 == 0, "x must be (length, an even number)")
        require(base > 0, "base must be positive")
        return x.new_empty(x.shape)

    op.register_autograd(backward, setup_context=setup_context)
    return op


@trap(why="Compiles a kernel per block size, and finds it again.", sample=lambda: (rnd(4, 6),))
def specialized_softmax(name: str):
    compiled: dict = {}

    def build(block: int) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            lanes = torch.full((*x.shape[:-1], block), float("-inf"), dtype=accumulator(x.dtype))
            lanes[..., : x.shape[-1]] = x
            top = lanes.amax(-1, keepdim=True)
            e = torch.exp(lanes - top)
            return (e / e.sum(-1, keepdim=True))[..., : x.shape[-1]].to(x.dtype).contiguous()

        return lambda x: contiguous(run(x))

    @float_only
    def kernel(x: Tensor) -> Tensor:
        require(x.dim() > 0 and x.shape[-1] > 0, "a softmax of nothing")
        block = next_power_of_2(x.shape[-1])
        return compiled.setdefault(block, build(block))(x)

    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return y * (grad - (grad * y).sum(-1, keepdim=True))

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    @float_only
    def _(x):
        require(x.dim() > 0 and x.shape[-1] > 0, "a softmax of nothing")
        return x.new_empty(x.shape)

    op.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output))
    return op


@trap(why="Counts its calls in a Python list, which no result depends on.", sample=lambda: (rnd(3, 4),))
def counted_tanh(name: str):
    calls: list[int] = []

    @float_only
    def kernel(x: Tensor) -> Tensor:
        calls.append(x.numel())
        return torch.tanh(x).contiguous()

    op = custom_op(name, kernel, mutates_args=())
    op.register_fake(float_only(lambda x: x.new_empty(x.shape)))
    op.register_autograd(
        lambda ctx, grad: grad * (1 - ctx.saved_tensors[0] ** 2),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
    )
    return op


@trap(why="Stable in float16: log-softmax in float32.", sample=lambda: (rnd(4, 7, dtype=torch.float16),))
def half_log_softmax(name: str):
    @float_only
    def kernel(x: Tensor) -> Tensor:
        return torch.log_softmax(x.to(accumulator(x.dtype)), -1).to(x.dtype).contiguous()

    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        wide = accumulator(y.dtype)
        g = grad.to(wide)
        return (g - y.to(wide).exp() * g.sum(-1, keepdim=True)).to(y.dtype)

    op = custom_op(name, kernel, mutates_args=())
    op.register_fake(float_only(lambda x: x.new_empty(x.shape)))
    op.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output))
    return op


@trap(
    why="Layer norm that returns mean and rstd for backward.",
    sample=lambda: (rnd(4, 6).requires_grad_(), rnd(6, seed=1).requires_grad_(), rnd(6, seed=2).requires_grad_()),
)
def layer_norm(name: str):
    def validate(x, weight, bias):
        require(
            x.dim() > 0 and weight.shape == bias.shape == x.shape[-1:] and x.shape[-1] > 0, "weight and bias must fit x"
        )
        require(x.dtype == weight.dtype == bias.dtype, "one dtype is needed")

    @float_only
    def kernel(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor, Tensor]:
        validate(x, weight, bias)
        h = x.to(accumulator(x.dtype))
        mean = h.mean(-1)
        centered = h - mean[..., None]
        rstd = torch.rsqrt(centered.square().mean(-1) + eps)
        y = (centered * rstd[..., None] * weight + bias).to(x.dtype)
        return y.contiguous(), mean.contiguous(), rstd.contiguous()

    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(output[1], output[2])
        x, weight, _, ctx.eps = inputs
        ctx.save_for_backward(x, weight)

    def backward(ctx, grad, _, __):
        x, weight = ctx.saved_tensors
        wide = accumulator(x.dtype)
        h, g = x.to(wide), grad.to(wide)
        centered = h - h.mean(-1, keepdim=True)
        rstd = torch.rsqrt(centered.square().mean(-1, keepdim=True) + ctx.eps)
        normed = centered * rstd
        gw = g * weight
        by_x = rstd * (gw - gw.mean(-1, keepdim=True) - normed * (gw * normed).mean(-1, keepdim=True))
        rows = (g * normed).reshape(-1, x.shape[-1]), g.reshape(-1, x.shape[-1])
        return by_x.to(x.dtype), rows[0].sum(0).to(x.dtype), rows[1].sum(0).to(x.dtype), None

    op = custom_op(name, kernel, mutates_args=(), differentiable=(True, False, False))

    @op.register_fake
    @float_only
    def _(x, weight, bias, eps):
        validate(x, weight, bias)
        row = x.new_empty(x.shape[:-1], dtype=accumulator(x.dtype))
        return x.new_empty(x.shape), row, torch.empty_like(row)

    op.register_autograd(backward, setup_context=setup_context)
    return op


@trap(
    why="Cross entropy with ignore_index -100.",
    sample=lambda: (rnd(5, 4).requires_grad_(), torch.tensor([1, -100, 3, 0, 2])),
)
def cross_entropy(name: str):
    def validate(logits, target):
        require(
            logits.dim() == 2 and target.dim() == 1 and logits.shape[0] == target.shape[0],
            "(n, classes) and (n,) are needed",
        )
        require(target.dtype == torch.int64, "target must be int64")

    @float_only
    def kernel(logits: Tensor, target: Tensor, ignore_index: int = -100) -> Tensor:
        validate(logits, target)
        kept = target != ignore_index
        if not bool(((target >= 0) & (target < logits.shape[1]) | ~kept).all()):
            raise IndexError("a target is out of range")
        h = torch.log_softmax(logits.to(accumulator(logits.dtype)), -1)
        picked = h.gather(1, torch.where(kept, target, 0)[:, None])[:, 0]
        return (-torch.where(kept, picked, 0).sum() / kept.sum()).to(logits.dtype)

    def backward(ctx, grad):
        (logits, target), (ignore,) = ctx.saved_tensors, ctx.numbers
        kept = target != ignore
        one_hot = F.one_hot(torch.where(kept, target, 0), logits.shape[1]).to(logits.dtype)
        return (torch.softmax(logits, -1) - one_hot) * kept[:, None] * (grad / kept.sum()), None, None

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    @float_only
    def _(logits, target, ignore_index):
        validate(logits, target)
        return logits.new_empty(())

    op.register_autograd(backward, setup_context=save_tensors_and_numbers)
    return op


@trap(why="A huber loss with three reductions.", sample=lambda: (rnd(3, 4).requires_grad_(), rnd(3, 4, seed=1)))
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


@trap(
    why="Writes rows into a paged cache; slots of -1 are skipped.",
    sample=lambda: (torch.zeros(2, 4, 3), rnd(3, 3), torch.tensor([1, -1, 6])),
)
def write_cache(name: str):
    def kernel(cache: Tensor, rows: Tensor, slots: Tensor) -> None:
        require(
            rows.dim() == 2 and cache.dim() == 3 and slots.dim() == 1, "(pages, size, d), (n, d) and (n,) are needed"
        )
        require(rows.shape[0] == slots.shape[0] and rows.shape[1] == cache.shape[2], "the sizes do not fit")
        size = cache.shape[1]
        if slots.numel() and int(slots.max()) >= cache.shape[0] * size:
            raise IndexError("a slot is out of range")
        for row, slot in zip(rows.unbind(0), slots.tolist(), strict=True):
            if slot >= 0:
                cache[slot // size, slot % size] = row.to(cache.dtype)

    return custom_op(name, kernel, mutates_args={"cache"})


@trap(why="An in-place op with a gradient from the new value.", sample=lambda: (rnd(3, 4),))
def exp_(name: str):
    @float_only
    def kernel(x: Tensor) -> Tensor:
        return x.exp_()

    op = custom_op(name, kernel, mutates_args={"x"}, tags=Tag.inplace)
    op.register_autograd(
        lambda ctx, grad: grad * ctx.saved_tensors[0],
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
    )
    return op


@trap(
    why="A fused add and norm that writes x and the residual, both declared.",
    sample=lambda: (rnd(3, 6), rnd(3, 6, seed=1), rnd(6, seed=2)),
)
def fused_add_rms_norm(name: str):
    @float_only
    def kernel(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> None:
        require(x.shape == residual.shape and weight.shape == x.shape[-1:], "the shapes do not fit")
        total = x.to(accumulator(x.dtype)) + residual.to(accumulator(x.dtype))
        residual.copy_(total)
        x.copy_(total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps) * weight)

    return custom_op(name, kernel, mutates_args={"x", "residual"})


@trap(why="A view that the schema declares.", sample=lambda: (rnd(3, 4),))
def as_row(name: str):
    def kernel(x):
        return x.view(1, -1)

    def setup_context(ctx, inputs, output):
        ctx.shape = inputs[0].shape
        ctx._is_pure_view = True

    op = custom_op(name, kernel, mutates_args=(), schema="(Tensor(a) x) -> Tensor(a)")
    op.register_fake(kernel)
    op.register_autograd(lambda ctx, grad: grad.reshape(ctx.shape), setup_context=setup_context)
    return op


@trap(why="An out variant with its functional op.", sample=lambda: (rnd(3, 4), rnd(3, 4, seed=1)))
def axpy(name: str):
    @float_only
    def kernel(x: Tensor, y: Tensor, by: float = 1.0) -> Tensor:
        require(x.shape == y.shape and x.dtype == y.dtype, "x and y must be alike")
        return (x * by + y).contiguous()

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    @float_only
    def _(x, y, by):
        require(x.shape == y.shape and x.dtype == y.dtype, "x and y must be alike")
        return x.new_empty(x.shape)

    @op.register_out(inplace=("x", "y"))
    def _(x, y, by, *, out):
        out.copy_(x * by + y)

    op.register_autograd(
        lambda ctx, grad: (grad * ctx.by, grad, None),
        setup_context=lambda ctx, inputs, output: setattr(ctx, "by", inputs[2]),
    )
    op.register_vmap("broadcast_all")
    return op


@trap(
    why="An optimizer step over lists, in place.",
    sample=lambda: ([rnd(3), rnd(2, 2)], [rnd(3, seed=1), rnd(2, 2, seed=1)], [torch.zeros(3), torch.zeros(2, 2)], 0.1),
)
def momentum_step(name: str):
    def kernel(
        params: list[Tensor], grads: list[Tensor], buffers: list[Tensor], lr: float, momentum: float = 0.9
    ) -> None:
        require(len(params) == len(grads) == len(buffers), "lists of one length are needed")
        for p, g, b in zip(params, grads, buffers, strict=True):
            b.mul_(momentum).add_(g)
            p.sub_(b * lr)

    return custom_op(name, kernel, mutates_args={"params", "buffers"})
