"""Right ops whose results look wrong."""

from typing import Any

import torch
from corpus.entries import right_op
from corpus.parts import (
    FLOATS,
    HALVES,
    accumulator,
    dense,
    float_only,
    like_single,
    packed,
    require,
    require_dtype,
    rnd,
    save_tensors_and_numbers,
    single,
)
from torch import Tensor

from customops import custom_op


@right_op(
    why="Large terms cancel, so that the order of the sum, which depends on the layout, shows in the result.",
    witness={
        "checks/_runs.py: _is_rounding": "test_layouts",
    },
    sample=lambda: (torch.cat([x := torch.randn(4, 500) * 1e4, -x], 1) + 1e-2,),
)
def cancelling_sum(name: str) -> Any:
    def check(x: Tensor) -> None:
        require_dtype(x, FLOATS)
        if x.dim() == 0:
            raise ValueError("expected one dimension at least")

    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        check(x)
        return packed(x.sum(-1))

    @op.register_fake
    def _(x):
        check(x)
        return x.new_empty(x.shape[:-1])

    def setup_context(ctx, inputs, output):
        ctx.size = inputs[0].shape[-1]

    def backward(ctx, grad):
        return grad.unsqueeze(-1).expand(*grad.shape, ctx.size)

    op.register_autograd(backward, setup_context=setup_context)
    return op


@right_op(
    why="Products of many numbers in another order differ in more than the last digits.",
    witness={
        "checks/laws.py: _agrees": "test_permutations",
    },
    sample=lambda: (rnd(3, 5).requires_grad_(),),
)
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

    op.register_reference(lambda x: torch.cumprod(x, -1), gives="gradients")
    return op


@right_op(
    why="The result keeps the memory format of its input.",
    witness={
        "checks/repeat.py: _check_shapes": "test_state",
    },
    sample=lambda: (rnd(2, 3, 4, 4),),
)
def keeps_layout(name: str):
    @float_only
    def kernel(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        out.copy_(x * torch.sigmoid(x))
        return out

    op = custom_op(name, kernel, mutates_args=())
    op.register_fake(float_only(torch.empty_like))
    return op


@right_op(
    why="NaN spreads over a row of the result.",
    witness={
        "checks/laws.py: _Unordered._check_places_of_nan": "test_permutations",
    },
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


@right_op(
    why="Points outside of the image give zero, so that a symmetry of one sample does not hold for others.",
    witness={
        "checks/laws.py: _check_values": "test_symmetries",
        "checks/laws.py: _is_law_of_all": "test_symmetries",
    },
    sample=lambda: (rnd(2, 5, 5), torch.rand(4, 2, generator=torch.Generator().manual_seed(0)) * 4),
)
def bilinear(name: str):
    def validate(image, points):
        require(image.dim() == 3 and points.dim() == 2 and points.shape[1] == 2, "(c, h, w) and (n, 2) are needed")
        require(
            image.dtype in (torch.float32, torch.float64) and points.dtype == image.dtype,
            "float32 or float64 is needed",
        )

    def corners(image, points):
        h, w = image.shape[1:]
        base = torch.floor(points)
        part = points - base
        for dx, dy in ((0, 0), (0, 1), (1, 0), (1, 1)):
            place = base + torch.tensor([dx, dy], dtype=points.dtype)
            inside = ((place >= 0) & (place < torch.tensor([w, h]))).all(-1)
            x, y = torch.where(inside[:, None], place, 0).long().unbind(-1)
            wx = part[:, 0] if dx else 1 - part[:, 0]
            wy = part[:, 1] if dy else 1 - part[:, 1]
            yield torch.where(inside, image[:, y, x], 0), wx, wy, (1 if dx else -1), (1 if dy else -1), inside, y, x

    def kernel(image: Tensor, points: Tensor) -> Tensor:
        validate(image, points)
        out = torch.zeros(image.shape[0], points.shape[0], dtype=image.dtype)
        if image.shape[1] == 0 or image.shape[2] == 0:
            return out
        for value, wx, wy, _, _, inside, *_ in corners(image, points):
            out += torch.where(inside, value * (wx * wy), 0)
        return out

    def backward(ctx, grad):
        image, points = ctx.saved_tensors
        by_image, by_points = torch.zeros_like(image), torch.zeros_like(points)
        for value, wx, wy, sx, sy, inside, y, x in corners(image, points):
            by_image = by_image.index_put(
                (torch.arange(image.shape[0])[:, None], y[None], x[None]),
                torch.where(inside, grad * (wx * wy), 0),
                accumulate=True,
            )
            along = torch.where(inside, (grad * value).sum(0), 0)
            by_points = by_points + torch.stack([along * sx * wy, along * sy * wx], -1)
        return by_image, by_points

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    def _(image, points):
        validate(image, points)
        return image.new_empty(image.shape[0], points.shape[0])

    op.register_autograd(backward, setup_context=save_tensors_and_numbers)
    return op


@right_op(
    why="The sums of int32 stay int32, and wrap, unlike those of torch.sum.",
    witness={
        "checks/precision.py: _compare_with_wide_integers": "test_precision",
    },
    sample=lambda: (torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32),),
)
def t_narrow_sums(name: str) -> Any:
    def valid(x):
        require(x.dtype in (torch.int32, torch.int64) and x.dim() == 2, "a matrix of int32 or int64 is needed")

    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        valid(x)
        return dense(x.sum(1, dtype=x.dtype))

    @op.register_fake
    def _(x):
        valid(x)
        return x.new_empty(x.shape[0])

    return op


@right_op(
    why="Two kernels add in different orders, and differ in the last digits.",
    witness={
        "checks/kernels.py: _kernel_for_all": "test_kernels",
    },
    sample=lambda: (torch.randn(257),),
)
def sum_in_pairs(name: str):
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        single(x)
        return x.sum()

    @op.register_kernel("cpu")
    def _(x):
        single(x)
        values = x.flatten()
        while len(values) > 1:
            values = torch.cat([values[: len(values) // 2 * 2].view(-1, 2).sum(1), values[len(values) // 2 * 2 :]])
        return dense(values.sum())

    @op.register_fake
    def _(x):
        single(x)
        return x.new_empty(())

    return op


@right_op(
    why="Under autocast, the result is rounded to bfloat16, as the op requests.",
    witness={
        "checks/autocast.py: check": "test_autocast",
    },
    sample=lambda: (torch.rand(4, 16),),
)
def rounded_energy(name: str) -> Any:
    def check(x: Tensor) -> None:
        require_dtype(x, FLOATS + HALVES)
        if x.dim() == 0:
            raise ValueError("expected one dimension at least")

    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        check(x)
        return packed(x.to(torch.promote_types(x.dtype, torch.float32)).square().sum(-1).to(x.dtype))

    @op.register_fake
    def _(x):
        check(x)
        return x.new_empty(x.shape[:-1])

    op.register_autocast("cpu", torch.bfloat16)
    return op


@right_op(
    why="`rfft` raises for some inputs, whatever their layout.",
    witness={
        "checking/_faults.py: _takes_contiguous": "inputs",
    },
    sample=lambda: (rnd(3, 8).requires_grad_(), rnd(5, seed=1).abs()),
)
def fft_filter(name: str):
    def validate(x, response):
        require(x.dtype in (torch.float32, torch.float64) and response.dtype == x.dtype, "float32 or float64 is needed")
        require(
            x.dim() > 0 and x.shape[-1] > 0 and response.shape == (x.shape[-1] // 2 + 1,),
            "response must have n // 2 + 1 elements",
        )

    def kernel(x: Tensor, response: Tensor) -> Tensor:
        validate(x, response)
        return torch.fft.irfft(torch.fft.rfft(x) * response, n=x.shape[-1]).contiguous()

    def backward(ctx, grad):
        x, response = ctx.saved_tensors
        n = x.shape[-1]
        by_x = torch.fft.irfft(torch.fft.rfft(grad) * response, n=n)
        weight = torch.full_like(response, 2.0 / n)
        weight[0] = 1.0 / n
        if n % 2 == 0:
            weight[-1] = 1.0 / n
        products = (torch.fft.rfft(grad) * torch.fft.rfft(x).conj()).real
        return by_x, products.reshape(-1, products.shape[-1]).sum(0) * weight

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    def _(x, response):
        validate(x, response)
        return x.new_empty(x.shape)

    op.register_autograd(backward, setup_context=save_tensors_and_numbers)
    return op


@right_op(
    why="The op rounds at random, and has the tag for that.",
    witness={
        "checks/_derivatives.py: formula_may_fail": "test_grad_modes",
        "checks/repeat.py: check_determinism": "test_determinism",
        "checks/repeat.py: _check_seed": "test_determinism",
        "checks/vmap.py: _check_randomness": "test_vmap",
    },
    sample=lambda: (torch.randn(64),),
)
def stochastic_rounding(name: str):
    @custom_op(name, mutates_args=(), tags=torch.Tag.nondeterministic_seeded)
    def op(x: Tensor) -> Tensor:
        single(x)
        return dense((x + torch.rand(x.shape, dtype=x.dtype)).floor())

    op.register_fake(like_single)
    return op


@right_op(
    why="Two calls differ, because the op is random and has the tag for that.",
    witness={
        "checks/vmap.py: _check_randomness": "test_vmap",
    },
    sample=lambda: (torch.randn(4, 8, dtype=torch.float64, requires_grad=True),),
)
def tagged_dropout(name: str) -> Any:
    def check(x: Tensor, p: float) -> None:
        require_dtype(x, FLOATS)
        if not 0 <= p < 1:
            raise ValueError(f"expected a probability below 1, got {p}")

    @custom_op(name, mutates_args=(), tags=torch.Tag.nondeterministic_seeded, differentiable=(True, False))
    def op(x: Tensor, p: float = 0.5) -> tuple[Tensor, Tensor]:
        check(x, p)
        keep = torch.rand(x.shape, device=x.device) >= p
        return packed(torch.where(keep, x / (1 - p), 0.0)), keep

    @op.register_fake
    def _(x, p):
        check(x, p)
        return x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.bool)

    def setup_context(ctx, inputs, output):
        ctx.p = inputs[1]
        ctx.save_for_backward(output[1])

    def backward(ctx, grad, _):
        return grad * ctx.saved_tensors[0] / (1 - ctx.p), None

    op.register_autograd(backward, setup_context=setup_context)
    op.register_vmap("sequential")
    return op


@right_op(
    why="The op draws integers, and has the tag for that.",
    witness={
        "checking/_faults.py: fault_of_call": "inputs",
    },
    sample=lambda: (rnd(3, 8), 0.8),
)
def sample_tokens(name: str):
    @float_only
    def kernel(logits: Tensor, temperature: float) -> Tensor:
        p = torch.softmax(logits.to(torch.float64) / max(temperature, 1e-6), -1)
        noise = -torch.log(torch.rand(p.shape, dtype=torch.float64).clamp(min=1e-300))
        return (p / noise).argmax(-1)

    op = custom_op(name, kernel, mutates_args=(), tags=torch.Tag.nondeterministic_seeded, differentiable=False)
    op.register_fake(float_only(lambda logits, temperature: logits.new_empty(logits.shape[:-1], dtype=torch.int64)))
    return op


@right_op(
    why="An optimizer step writes to its arguments, so that each call differs from the one before.",
    witness={
        "checks/repeat.py: _check_reused": "test_state",
    },
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
