"""Right ops that look suspicious."""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
from broken_ops.aside_parts import FLOATS, HALVES, NUMBERS, packed, require, require_same_dtype
from broken_ops.corpus import trap
from torch import Tensor

from customops import custom_op, get_ctx


@trap(
    why="Two calls differ, and so do finite differences: the op is random and has the tag that says so.",
    sample=lambda: (torch.randn(4, 8, dtype=torch.float64, requires_grad=True),),
)
def aside_tagged_dropout(name: str) -> Any:
    def check(x: Tensor, p: float) -> None:
        require(x, FLOATS)
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


@trap(
    why="The size of the result is unknown to the fake, and none of its sizes is that of the input.",
    sample=lambda: (torch.tensor([-1.0, 2.0, 0.0, 3.0]),),
)
def aside_positive_entries(name: str) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        require(x, FLOATS)
        return packed(x[x > 0])

    @op.register_fake
    def _(x):
        require(x, FLOATS)
        return x.new_empty(get_ctx().new_dynamic_size())

    return op


@trap(
    why="At the entries that are zero, finite differences are half way between the slopes on both sides.",
    sample=lambda: (torch.tensor([[-1.0, 0.0, 2.0], [0.0, 0.0, -3.0]], dtype=torch.float64, requires_grad=True),),
)
def aside_rectify(name: str) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        require(x, FLOATS)
        return packed(x.clamp(min=0))

    @op.register_fake
    def _(x):
        require(x, FLOATS)
        return x.new_empty(x.shape)

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    def backward(ctx, grad):
        return grad.masked_fill(ctx.saved_tensors[0] <= 0, 0)

    op.register_autograd(backward, setup_context=setup_context)
    return op


@trap(
    why="The kernel keeps a table between calls. Its key has all that the table depends on, and nobody writes to it.",
    sample=lambda: (torch.randn(3, 8),),
)
def aside_cached_window(name: str) -> Any:
    @functools.lru_cache(maxsize=16)
    def window(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.hann_window(n, dtype=dtype, device=device)

    def check(x: Tensor) -> None:
        require(x, FLOATS)
        if x.dim() == 0:
            raise ValueError("expected one dimension at least")

    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        check(x)
        return packed(x * window(x.shape[-1], x.dtype, x.device))

    @op.register_fake
    def _(x):
        check(x)
        return x.new_empty(x.shape)

    return op


@trap(
    why="The write is declared and does not happen for the sample, whose values are below the peaks.",
    sample=lambda: (torch.full((4,), 10.0), torch.rand(4)),
)
def aside_raise_peaks(name: str) -> Any:
    @custom_op(name, mutates_args={"peaks"})
    def op(peaks: Tensor, x: Tensor) -> None:
        require(peaks, FLOATS)
        require_same_dtype(peaks, x)
        if peaks.shape != x.shape:
            raise ValueError(f"expected one shape, got {tuple(peaks.shape)} and {tuple(x.shape)}")
        if bool((x > peaks).any()):
            peaks.copy_(torch.maximum(peaks, x))

    @op.register_fake
    def _(peaks, x):
        require(peaks, FLOATS)
        require_same_dtype(peaks, x)
        if peaks.shape != x.shape:
            raise ValueError(f"expected one shape, got {tuple(peaks.shape)} and {tuple(x.shape)}")

    return op


@trap(
    why="Large terms cancel, so that the order of the sum, which depends on the layout, is seen in the result.",
    sample=lambda: (torch.cat([x := torch.randn(4, 500) * 1e4, -x], 1) + 1e-2,),
)
def aside_cancelling_sum(name: str) -> Any:
    def check(x: Tensor) -> None:
        require(x, FLOATS)
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


@trap(
    why="The sample gives nan and infinities, which are what logarithms of such values are.",
    sample=lambda: (torch.tensor([1.0, 0.0, -2.0, 4.0]), torch.tensor([2.0, 3.0, 1.0, 0.0])),
)
def aside_log_ratio(name: str) -> Any:
    def check(x: Tensor, y: Tensor) -> None:
        require(x, FLOATS)
        require_same_dtype(x, y)

    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor, y: Tensor) -> Tensor:
        check(x, y)
        return packed(x.log() - y.log())

    @op.register_fake
    def _(x, y):
        check(x, y)
        return x.new_empty(torch.broadcast_shapes(x.shape, y.shape))

    return op


@trap(
    why="The op takes contiguous matrices of float32, of two rows at least. It refuses all else, and says so.",
    sample=lambda: (torch.randn(3, 4),),
)
def aside_strict_matrix(name: str) -> Any:
    def check(x: Tensor) -> None:
        require(x, (torch.float32,))
        if x.dim() != 2 or x.shape[0] < 2 or not x.is_contiguous():
            raise ValueError("expected a contiguous matrix of two rows at least")

    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        check(x)
        return packed(x[1:] - x[:-1])

    @op.register_fake
    def _(x):
        check(x)
        return x.new_empty(x.shape[0] - 1, x.shape[1])

    return op


@trap(
    why="The strides of the result change with those of the input, in kernel and fake alike.",
    sample=lambda: (torch.randn(2, 3, 4),),
)
def aside_keep_layout(name: str) -> Any:
    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        require(x, FLOATS + HALVES)
        return torch.sin(x, out=torch.empty_like(x))

    @op.register_fake
    def _(x):
        require(x, FLOATS + HALVES)
        return torch.empty_like(x)

    return op


@trap(
    why="Under autocast the result is rounded to bfloat16, and of another dtype: the op asked for it.",
    sample=lambda: (torch.rand(4, 16),),
)
def aside_rounded_energy(name: str) -> Any:
    def check(x: Tensor) -> None:
        require(x, FLOATS + HALVES)
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


@trap(
    why="A second derivative raises, since backward is declared to have none; it writes in place to what it made.",
    sample=lambda: (torch.randn(3, 4, dtype=torch.float64, requires_grad=True),),
)
def aside_once_silu(name: str) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        require(x, FLOATS)
        return packed(x * x.sigmoid())

    @op.register_fake
    def _(x):
        require(x, FLOATS)
        return x.new_empty(x.shape)

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return s.mul_(1 + x * (1 - s)).mul_(grad)

    op.register_autograd(backward, setup_context=setup_context, once_differentiable=True)
    return op


@trap(
    why="The kernel works in a buffer that outlives the call. Each thread has its own, and the result is a copy.",
    sample=lambda: (torch.randint(0, 50, (3, 5)),),
)
def aside_scratch_buffer(name: str) -> Any:
    local = threading.local()
    integers = NUMBERS[4:9]

    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        require(x, integers)
        n = x.numel()
        buffer = getattr(local, "buffer", None)
        if buffer is None or len(buffer) < n:
            with torch.inference_mode(False):
                buffer = local.buffer = torch.empty(2 * n, dtype=torch.int64)
        buffer[:n] = x.reshape(-1)
        buffer[:n].mul_(2)
        return buffer[:n].reshape(x.shape).clone()

    @op.register_fake
    def _(x):
        require(x, integers)
        return x.new_empty(x.shape, dtype=torch.int64)

    return op
