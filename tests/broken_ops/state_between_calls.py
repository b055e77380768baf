"""Randomness, caches, scratch buffers and settings that outlive a call."""

import threading
from contextlib import nullcontext
from typing import Callable, Optional

import numpy as np
import torch
from broken_ops.corpus import fault
from broken_ops.defining import require
from broken_ops.kernel_parts import cdiv, float_only, next_power_of_2, rnd
from torch import Tensor

from customops import custom_op


@fault(
    kind="random numbers without the tag",
    note="Two calls with equal arguments differ, and the compiler merges them.",
    sample=lambda: (rnd(3, 4), 0.5),
)
def stochastic_round(name: str, broken: bool):
    @float_only
    def numpy_kernel(x: Tensor, step: float) -> Tensor:
        noise = torch.from_numpy(np.random.default_rng().random(x.shape))
        return (torch.floor(x / step + noise.to(x.dtype)) * step).contiguous()

    @float_only
    def kernel(x: Tensor, step: float) -> Tensor:
        noise = torch.rand(x.shape, dtype=torch.float64)
        return (torch.floor(x / step + noise.to(x.dtype)) * step).contiguous()

    op = custom_op(
        name,
        numpy_kernel if broken else kernel,
        mutates_args=(),
        **({} if broken else {"tags": torch.Tag.nondeterministic_seeded}),
    )
    op.register_fake(float_only(lambda x, step: x.new_empty(x.shape)))
    return op


@fault(
    kind="random numbers that no seed of torch determines",
    note="torch.manual_seed before two calls: they differ.",
    sample=lambda: (rnd(3, 4), 0.1),
)
def jitter(name: str, broken: bool):
    generator = np.random.default_rng()

    @float_only
    def kernel(x: Tensor, by: float) -> Tensor:
        noise = torch.from_numpy(generator.standard_normal(x.shape)) if broken else torch.randn(x.shape)
        return (x + by * noise.to(x.dtype)).contiguous()

    op = custom_op(name, kernel, mutates_args=(), tags=torch.Tag.nondeterministic_seeded)
    op.register_fake(float_only(lambda x, by: x.new_empty(x.shape)))
    return op


@fault(
    kind="a cache whose key lacks an argument",
    note="A second call of the same length with another base: the table of the first base is used.",
    sample=lambda: (rnd(4, 6), 10000.0),
)
def rotary_positions(name: str, broken: bool):
    tables: dict = {}

    @float_only
    def kernel(x: Tensor, base: float = 10000.0) -> Tensor:
        require(x.dim() == 2, "unsupported shapes or dtypes")
        length, dim = x.shape
        require(dim % 2 == 0, "the last size must be even")
        key = (length, dim, x.dtype) if broken else (length, dim, x.dtype, base)
        if key not in tables:
            speed = base ** (-torch.arange(0, dim // 2, dtype=torch.float64) * 2 / dim)
            angle = torch.outer(torch.arange(length, dtype=torch.float64), speed)
            tables[key] = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        cos, sin = tables[key]
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    @float_only
    def _(x, base):
        require(x.dim() == 2, "unsupported shapes or dtypes")
        require(x.shape[1] % 2 == 0, "the last size must be even")
        return x.new_empty(x.shape)

    return op


@fault(
    kind="a cache keyed by an address",
    note="The weight is updated in place: the packed copy of its old value is used.",
    sample=lambda: (rnd(3, 4), rnd(5, 4, seed=1)),
)
def prepacked_linear(name: str, broken: bool):
    packed: dict = {}

    def pack(weight: Tensor) -> Tensor:
        if not broken:
            return weight.t().contiguous()
        key = (weight.data_ptr(), weight.shape, weight.stride(), weight.dtype)
        if key not in packed:
            packed[key] = weight.t().contiguous()
        return packed[key]

    def kernel(x: Tensor, weight: Tensor) -> Tensor:
        require(x.dim() == 2 and weight.dim() == 2 and x.dtype == weight.dtype, "unsupported shapes or dtypes")
        return x @ pack(weight)

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    def _(x, weight):
        require(x.dim() == 2 and weight.dim() == 2 and x.dtype == weight.dtype, "unsupported shapes or dtypes")
        require(x.shape[1] == weight.shape[1], "inner sizes differ")
        return x.new_empty(x.shape[0], weight.shape[0])

    return op


@fault(
    kind="a result in a workspace that the next call reuses",
    note="A second call of the same shape changes the result of the first.",
    sample=lambda: (rnd(3, 4),),
)
def row_center(name: str, broken: bool):
    buffers: dict = {}

    @float_only
    def kernel(x: Tensor) -> Tensor:
        if broken:
            out = buffers.setdefault((tuple(x.shape), x.dtype), torch.empty(x.shape, dtype=x.dtype))
        else:
            out = torch.empty(x.shape, dtype=x.dtype)
        torch.sub(x, x.mean(-1, keepdim=True), out=out)
        return out

    op = custom_op(name, kernel, mutates_args=())
    op.register_fake(float_only(lambda x: x.new_empty(x.shape)))
    return op


@fault(
    kind="a scratch buffer that is cleared only once",
    note="From the second call of a shape on: the sums of earlier calls are added.",
    sample=lambda: (rnd(3, 8), rnd(8, 4, seed=1)),
)
def split_k_matmul(name: str, broken: bool):
    workspace: dict = {}
    splits = 2

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        require(a.dim() == 2 and b.dim() == 2 and a.dtype == b.dtype, "unsupported shapes or dtypes")
        require(a.shape[1] == b.shape[0], "inner sizes differ")
        key = (a.shape[0], b.shape[1], a.dtype)
        if key not in workspace:
            workspace[key] = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype)
        total = workspace[key]
        if not broken:
            total = torch.zeros_like(total)
        step = cdiv(a.shape[1], splits)
        for s in range(splits):
            total += a[:, s * step : (s + 1) * step] @ b[s * step : (s + 1) * step]
        return total.clone()

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    def _(a, b):
        require(a.dim() == 2 and b.dim() == 2 and a.dtype == b.dtype, "unsupported shapes or dtypes")
        require(a.shape[1] == b.shape[0], "inner sizes differ")
        return a.new_empty(a.shape[0], b.shape[1])

    return op


@fault(
    kind="compiled for the size of the first call",
    note="A call with longer rows after one with short rows: the block size of the first is kept.",
    sample=lambda: (rnd(4, 6),),
)
def row_minimum(name: str, broken: bool):
    compiled: dict = {}

    def build(block: int) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            lanes = torch.full((*x.shape[:-1], block), float("inf"), dtype=x.dtype)
            n = min(block, x.shape[-1])
            lanes[..., :n] = x[..., :n]
            return lanes.amin(-1)

        return run

    @float_only
    def kernel(x: Tensor) -> Tensor:
        require(x.dim() > 0 and x.shape[-1] > 0, "unsupported shapes or dtypes")
        block = next_power_of_2(x.shape[-1])
        key = x.dtype if broken else (x.dtype, block)
        if key not in compiled:
            compiled[key] = build(block)
        return compiled[key](x)

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    @float_only
    def _(x):
        require(x.dim() > 0 and x.shape[-1] > 0, "unsupported shapes or dtypes")
        return x.new_empty(x.shape[:-1])

    return op


@fault(
    kind="the default dtype is left changed",
    note="weight left out: the early return skips the reset, and torch's default dtype stays float64.",
    sample=lambda: (rnd(3, 4), rnd(4, seed=1)),
)
def precise_norm(name: str, broken: bool):
    def enter() -> torch.dtype:
        before = torch.get_default_dtype()
        if broken:
            torch.set_default_dtype(torch.float64)
        return before

    @float_only
    def kernel(x: Tensor, weight: Optional[Tensor] = None) -> Tensor:
        require(x.dim() > 0 and (weight is None or weight.shape == x.shape[-1:]), "unsupported shapes or dtypes")
        before = enter()
        h = x.double()
        y = h / (h.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        if weight is None:
            return y.to(x.dtype).contiguous()
        y = y * weight.double()
        if broken:
            torch.set_default_dtype(before)
        return y.to(x.dtype).contiguous()

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    @float_only
    def _(x, weight):
        require(x.dim() > 0 and (weight is None or weight.shape == x.shape[-1:]), "unsupported shapes or dtypes")
        return x.new_empty(x.shape)

    return op


@fault(
    kind="the global generator is seeded",
    note="Each call sets the state of torch's generator: numbers drawn after it are always the same.",
    sample=lambda: (rnd(4, 8), 3),
)
def random_projection(name: str, broken: bool):
    @float_only
    def kernel(x: Tensor, size: int, seed: int = 0) -> Tensor:
        if broken:
            torch.manual_seed(seed)
            matrix = torch.randn(x.shape[-1], size, dtype=torch.float64, generator=None)
        else:
            generator = torch.Generator().manual_seed(seed)
            matrix = torch.randn(x.shape[-1], size, dtype=torch.float64, generator=generator)
        return x @ matrix.to(x.dtype)

    op = custom_op(name, kernel, mutates_args=())
    op.register_fake(float_only(lambda x, size, seed: x.new_empty(*x.shape[:-1], size)))
    return op


@fault(
    kind="denormal numbers are switched off for the process",
    note="After a call, torch's own operations flush denormals to zero.",
    sample=lambda: (rnd(3, 4),),
)
def fast_tanh(name: str, broken: bool):
    @float_only
    def kernel(x: Tensor) -> Tensor:
        if broken:
            torch.set_flush_denormal(True)
        return torch.tanh(x).contiguous()

    op = custom_op(name, kernel, mutates_args=())
    op.register_fake(float_only(lambda x: x.new_empty(x.shape)))
    return op


@fault(
    kind="a scratch buffer shared by threads",
    note="Calls from several threads write into one scratch, and mix their results.",
    sample=lambda: (rnd(8, 8),),
)
def scratch_softmax(name: str, broken: bool):
    shared: dict = {}
    local = threading.local()

    def scratch(x: Tensor) -> Tensor:
        if broken:
            held = shared
        else:
            held = local.__dict__
        key = (tuple(x.shape), x.dtype)
        if key not in held:
            held[key] = torch.empty(x.shape, dtype=x.dtype)
        return held[key]

    @float_only
    def kernel(x: Tensor) -> Tensor:
        work = scratch(x)
        torch.sub(x, x.amax(-1, keepdim=True), out=work)
        work.exp_()
        work.div_(work.sum(-1, keepdim=True))
        return work.clone()

    op = custom_op(name, kernel, mutates_args=())
    op.register_fake(float_only(lambda x: x.new_empty(x.shape)))
    return op


@fault(
    kind="the result depends on the default dtype",
    note="After torch.set_default_dtype(torch.float64): the result of a float32 call is float64.",
    sample=lambda: (rnd(4, 3), 4),
)
def pad_rows(name: str, broken: bool):
    def kernel(x: Tensor, rows: int) -> Tensor:
        require(x.dim() == 2 and rows >= 0, "unsupported shapes or dtypes")
        out = torch.zeros(x.shape[0] + rows, x.shape[1]) if broken else x.new_zeros(x.shape[0] + rows, x.shape[1])
        out[: x.shape[0]] = x
        return out.to(torch.promote_types(out.dtype, x.dtype))

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    def _(x, rows):
        require(x.dim() == 2 and rows >= 0, "unsupported shapes or dtypes")
        return x.new_empty(x.shape[0] + rows, x.shape[1])

    return op


@fault(
    kind="a table cached while the fake runs",
    note="A call with fake tensors comes first: the cache then holds a tensor without data, and eager calls fail.",
    sample=lambda: (rnd(4, 6),),
)
def hann_windowed(name: str, broken: bool):
    windows: dict = {}

    def window(like: Tensor) -> Tensor:
        key = (int(like.shape[-1]), like.dtype, like.device)
        if key not in windows:
            windows[key] = torch.hann_window(key[0], periodic=False, dtype=torch.float64, device=like.device).to(
                like.dtype
            )
        return windows[key]

    @float_only
    def kernel(x: Tensor) -> Tensor:
        return (x * window(x)).contiguous()

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    @float_only
    def _(x):
        if broken:
            return x.new_empty(*x.shape[:-1], window(x).shape[0])
        return x.new_empty(x.shape)

    return op


@fault(
    kind="a table cached under inference mode",
    note="The first call is under inference_mode: a later one that needs gradients cannot save the table.",
    sample=lambda: (rnd(4, 6),),
)
def decay_rows(name: str, broken: bool):
    tables: dict = {}

    def table(n: int, dtype: torch.dtype) -> Tensor:
        n = int(n)
        if (n, dtype) not in tables:
            with nullcontext() if broken else torch.inference_mode(False):
                tables[n, dtype] = torch.exp(-torch.arange(n, dtype=torch.float64) / 4).to(dtype)
        return tables[n, dtype]

    @float_only
    def kernel(x: Tensor) -> Tensor:
        return (x * table(x.shape[-1], x.dtype)).contiguous()

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(table(inputs[0].shape[-1], inputs[0].dtype))

    op = custom_op(name, kernel, mutates_args=())
    op.register_fake(float_only(lambda x: x.new_empty(x.shape)))
    op.register_autograd(lambda ctx, grad: grad * ctx.saved_tensors[0].detach(), setup_context=setup_context)
    return op


@fault(
    kind="the result depends on whether a gradient is wanted",
    note="x requires grad: the kernel takes another path, with another formula.",
    sample=lambda: (rnd(4, 6),),
)
def quick_gelu(name: str, broken: bool):
    @float_only
    def kernel(x: Tensor) -> Tensor:
        if broken and not x.requires_grad:
            return (x * torch.sigmoid(1.702 * x)).contiguous()
        return (0.5 * x * (1 + torch.erf(x / 2**0.5))).detach().contiguous()

    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        density = torch.exp(-0.5 * x * x) / (2 * torch.pi) ** 0.5
        return grad * (0.5 * (1 + torch.erf(x / 2**0.5)) + x * density)

    op = custom_op(name, kernel, mutates_args=())
    op.register_fake(float_only(lambda x: x.new_empty(x.shape)))
    op.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    return op
