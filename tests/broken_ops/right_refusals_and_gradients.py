"""Right ops that refuse inputs, draw random numbers, or have a gradient of their own choice."""

import math

import torch
from broken_ops.corpus import trap
from broken_ops.defining import require
from broken_ops.kernel_parts import accumulator, float_only, rnd, save_tensors_and_numbers
from torch import Tensor

from customops import custom_op


@trap(why="Refuses a last size that is no multiple of 16, in kernel and fake.", sample=lambda: (rnd(4, 32),))
def group_absmax(name: str):
    def validate(x):
        require(x.shape[-1] % 16 == 0, "the last size must be a multiple of 16")

    @float_only
    def kernel(x: Tensor) -> Tensor:
        validate(x)
        return x.reshape(*x.shape[:-1], x.shape[-1] // 16, 16).abs().amax(-1).contiguous()

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    @float_only
    def _(x):
        validate(x)
        return x.new_empty(*x.shape[:-1], x.shape[-1] // 16)

    return op


@trap(why="Refuses inputs that are not contiguous, in kernel and fake.", sample=lambda: (rnd(4, 8), rnd(8, seed=1)))
def strict_rms_norm(name: str):
    def validate(x, weight):
        require(x.is_contiguous() and weight.is_contiguous(), "x and weight must be contiguous")
        require(
            weight.dim() == 1 and x.dim() >= 1 and x.shape[-1] == weight.shape[0], "weight must fit the last dimension"
        )
        require(x.dtype == weight.dtype, "x and weight must have one dtype")

    @float_only
    def kernel(x: Tensor, weight: Tensor) -> Tensor:
        validate(x, weight)
        h = x.to(accumulator(x.dtype))
        return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6) * weight).to(x.dtype)

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    @float_only
    def _(x, weight):
        validate(x, weight)
        return x.new_empty(x.shape)

    return op


@trap(
    why="Head sizes of 8, 16 and 32 alone, in kernel and fake.",
    sample=lambda: (rnd(2, 3, 8), rnd(2, 5, 8, seed=1), rnd(2, 5, 8, seed=2)),
)
def head_attention(name: str):
    def validate(q, k, v):
        require(q.dim() == k.dim() == v.dim() == 3 and k.shape == v.shape, "q, k and v must be (heads, tokens, size)")
        require(q.shape[0] == k.shape[0] and q.shape[2] == k.shape[2], "q and k do not fit")
        require(q.shape[2] in (8, 16, 32), "the size of a head must be 8, 16 or 32")
        require(q.dtype == k.dtype == v.dtype, "q, k and v must have one dtype")
        require(k.shape[1] > 0, "there must be a key")

    @float_only
    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        validate(q, k, v)
        h = accumulator(q.dtype)
        scores = torch.matmul(q.to(h), k.to(h).transpose(1, 2)) / math.sqrt(q.shape[2])
        return torch.matmul(torch.softmax(scores, -1), v.to(h)).to(q.dtype).contiguous()

    def backward(ctx, grad):
        q, k, v = ctx.saved_tensors
        scale = 1 / math.sqrt(q.shape[2])
        p = torch.softmax(q @ k.transpose(1, 2) * scale, -1)
        by_p = grad @ v.transpose(1, 2)
        by_s = p * (by_p - (by_p * p).sum(-1, keepdim=True)) * scale
        return by_s @ k, by_s.transpose(1, 2) @ q, p.transpose(1, 2) @ grad

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    @float_only
    def _(q, k, v):
        validate(q, k, v)
        return q.new_empty(q.shape)

    op.register_autograd(backward, setup_context=save_tensors_and_numbers)
    return op


@trap(
    why="float16 and bfloat16 only, as tensor-core kernels are.",
    sample=lambda: (rnd(4, 8, dtype=torch.float16), rnd(8, 4, seed=1, dtype=torch.float16)),
)
def half_gemm(name: str):
    def validate(a, b):
        require(a.dtype == b.dtype and a.dtype in (torch.float16, torch.bfloat16), "float16 or bfloat16 is needed")
        require(a.dim() == 2 and b.dim() == 2 and a.shape[1] == b.shape[0], "inner sizes differ")

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        validate(a, b)
        return (a.float() @ b.float()).to(a.dtype)

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    def _(a, b):
        validate(a, b)
        return a.new_empty(a.shape[0], b.shape[1])

    return op


@trap(why="Refuses an empty dimension to reduce, in kernel and fake.", sample=lambda: (rnd(3, 5),))
def largest(name: str):
    @float_only
    def kernel(x: Tensor) -> Tensor:
        require(x.dim() > 0 and x.shape[-1] > 0, "a maximum of nothing")
        return x.amax(-1).contiguous()

    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        index = x.argmax(-1, keepdim=True)
        return torch.zeros_like(x).scatter(-1, index, grad.unsqueeze(-1))

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    @float_only
    def _(x):
        require(x.dim() > 0 and x.shape[-1] > 0, "a maximum of nothing")
        return x.new_empty(x.shape[:-1])

    op.register_autograd(backward, setup_context=save_tensors_and_numbers)
    return op


@trap(
    why="A straight-through estimator: rounds, and passes the gradient.", sample=lambda: (rnd(3, 4).requires_grad_(),)
)
def round_ste(name: str):
    @float_only
    def kernel(x: Tensor) -> Tensor:
        return torch.round(x).contiguous()

    op = custom_op(name, kernel, mutates_args=())
    op.register_fake(float_only(lambda x: x.new_empty(x.shape)))
    op.register_autograd(lambda ctx, grad: grad)
    return op


@trap(why="The sign has the gradient zero.", sample=lambda: (rnd(3, 4).requires_grad_(),))
def hard_sign(name: str):
    @float_only
    def kernel(x: Tensor) -> Tensor:
        return torch.sign(x).contiguous()

    op = custom_op(name, kernel, mutates_args=())
    op.register_fake(float_only(lambda x: x.new_empty(x.shape)))
    op.register_autograd(lambda ctx, grad: torch.zeros_like(grad))
    return op


@trap(
    why="Fake quantisation: rounds, with a straight-through gradient inside the range.",
    sample=lambda: (rnd(3, 4).requires_grad_(), 0.1),
)
def fake_quantize(name: str):
    @float_only
    def kernel(x: Tensor, scale: float) -> Tensor:
        return (torch.clamp(torch.round(x / scale), -128, 127) * scale).contiguous()

    def backward(ctx, grad):
        (x,), (scale,) = ctx.saved_tensors, ctx.numbers
        level = torch.round(x / scale)
        return grad * ((level >= -128) & (level <= 127)), None

    op = custom_op(name, kernel, mutates_args=())
    op.register_fake(float_only(lambda x, scale: x.new_empty(x.shape)))
    op.register_autograd(backward, setup_context=save_tensors_and_numbers)
    return op


@trap(
    why="Gradient reversal: the identity, with the gradient negated.", sample=lambda: (rnd(3, 4).requires_grad_(), 0.5)
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


@trap(why="A gradient that is clipped on purpose.", sample=lambda: (rnd(3, 4).requires_grad_(),))
def clip_gradient(name: str):
    def kernel(x: Tensor) -> Tensor:
        return x.clone(memory_format=torch.contiguous_format)

    op = custom_op(name, kernel, mutates_args=())
    op.register_fake(lambda x: x.new_empty(x.shape))
    op.register_autograd(lambda ctx, grad: grad.clamp(-1, 1))
    return op


@trap(why="A backward that cannot be differentiated, and says so.", sample=lambda: (rnd(3, 4).requires_grad_(),))
def silu_once(name: str):
    @float_only
    def kernel(x: Tensor) -> Tensor:
        return (x * torch.sigmoid(x)).contiguous()

    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return s.mul_(1 + x * (1 - s)).mul_(grad)

    op = custom_op(name, kernel, mutates_args=())
    op.register_fake(float_only(lambda x: x.new_empty(x.shape)))
    op.register_autograd(backward, setup_context=save_tensors_and_numbers, once_differentiable=True)
    return op


@trap(why="A kink at zero: relu6 with one-sided gradients.", sample=lambda: (rnd(3, 4).requires_grad_(),))
def relu6(name: str):
    @float_only
    def kernel(x: Tensor) -> Tensor:
        return torch.clamp(x, 0, 6).contiguous()

    op = custom_op(name, kernel, mutates_args=())
    op.register_fake(float_only(lambda x: x.new_empty(x.shape)))
    op.register_autograd(
        lambda ctx, grad: grad * ((ctx.saved_tensors[0] > 0) & (ctx.saved_tensors[0] < 6)),
        setup_context=save_tensors_and_numbers,
    )
    return op


@trap(why="A result without gradient beside one with.", sample=lambda: (rnd(3, 6).requires_grad_(),))
def max_with_index(name: str):
    @float_only
    def kernel(x: Tensor) -> tuple[Tensor, Tensor]:
        require(x.dim() > 0 and x.shape[-1] > 0, "a maximum of nothing")
        index = x.argmax(-1)
        return x.gather(-1, index.unsqueeze(-1)).squeeze(-1).contiguous(), index.contiguous()

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output[1])
        ctx.n = inputs[0].shape[-1]

    def backward(ctx, grad, _):
        (index,) = ctx.saved_tensors
        return grad.new_zeros(*index.shape, ctx.n).scatter(-1, index.unsqueeze(-1), grad.unsqueeze(-1))

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    @float_only
    def _(x):
        require(x.dim() > 0 and x.shape[-1] > 0, "a maximum of nothing")
        return x.new_empty(x.shape[:-1]), x.new_empty(x.shape[:-1], dtype=torch.int64)

    op.register_autograd(backward, setup_context=setup_context)
    return op


@trap(
    why="Dropout with the tag, the mask returned, and a gradient by the mask.",
    sample=lambda: (rnd(6, 6).requires_grad_(), 0.3),
)
def dropout(name: str):
    @float_only
    def kernel(x: Tensor, p: float) -> tuple[Tensor, Tensor]:
        require(0 <= p < 1, "p must be in [0, 1)")
        mask = torch.rand(x.shape, dtype=torch.float64) >= p
        return torch.where(mask, x / (1 - p), torch.zeros((), dtype=x.dtype)).contiguous(), mask

    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])
        ctx.p = inputs[1]

    op = custom_op(name, kernel, mutates_args=(), tags=torch.Tag.nondeterministic_seeded, differentiable=(True, False))

    @op.register_fake
    @float_only
    def _(x, p):
        require(0 <= p < 1, "p must be in [0, 1)")
        return x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.bool)

    op.register_autograd(
        lambda ctx, grad, _: (grad * ctx.saved_tensors[0] / (1 - ctx.p), None), setup_context=setup_context
    )
    return op


@trap(why="Noise from a seed argument: the same in each call, so without the tag.", sample=lambda: (rnd(3, 4), 7))
def seeded_noise(name: str):
    @float_only
    def kernel(x: Tensor, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return (x + torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype)).contiguous()

    op = custom_op(name, kernel, mutates_args=())
    op.register_fake(float_only(lambda x, seed: x.new_empty(x.shape)))
    op.register_autograd(lambda ctx, grad: (grad, None))
    return op


@trap(why="Samples tokens, with the tag and integer results.", sample=lambda: (rnd(3, 8), 0.8))
def sample_tokens(name: str):
    @float_only
    def kernel(logits: Tensor, temperature: float) -> Tensor:
        p = torch.softmax(logits.to(torch.float64) / max(temperature, 1e-6), -1)
        noise = -torch.log(torch.rand(p.shape, dtype=torch.float64).clamp(min=1e-300))
        return (p / noise).argmax(-1)

    op = custom_op(name, kernel, mutates_args=(), tags=torch.Tag.nondeterministic_seeded, differentiable=False)
    op.register_fake(float_only(lambda logits, temperature: logits.new_empty(logits.shape[:-1], dtype=torch.int64)))
    return op


@trap(why="Cumulative product, with zeros in the input.", sample=lambda: (rnd(3, 5).requires_grad_(),))
def cumprod(name: str):
    @float_only
    def kernel(x: Tensor) -> Tensor:
        require(x.dim() > 0, "a dimension is needed")
        return torch.cumprod(x, -1).contiguous()

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    @float_only
    def _(x):
        require(x.dim() > 0, "a dimension is needed")
        return x.new_empty(x.shape)

    op.register_autograd_from(lambda x: torch.cumprod(x, -1))
    return op


@trap(
    why="A selective scan (mamba): gradient by autograd of a loop.",
    sample=lambda: (rnd(2, 6).requires_grad_(), rnd(2, 6, seed=1).sigmoid().requires_grad_()),
)
def linear_scan(name: str):
    def loop(x, decay):
        state, states = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            state = decay[:, t] * state + x[:, t]
            states.append(state)
        return torch.stack(states, 1)

    def validate(x, decay):
        require(
            x.dim() == 2 and x.shape == decay.shape and x.shape[1] > 0 and x.dtype == decay.dtype,
            "two matrices alike are needed",
        )

    @float_only
    def kernel(x: Tensor, decay: Tensor) -> Tensor:
        validate(x, decay)
        h = accumulator(x.dtype)
        return loop(x.to(h), decay.to(h)).to(x.dtype).contiguous()

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    @float_only
    def _(x, decay):
        validate(x, decay)
        return x.new_empty(x.shape)

    op.register_autograd_from(loop)
    return op
