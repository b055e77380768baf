"""State between calls, random numbers, threads and modes."""

from typing import Any

import numpy as np
import torch
from corpus.entries import fault
from corpus.parts import FLOATS, dense, float_only, floats, packed, require, require_dtype, rnd
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from customops import Tag, custom_op


@fault(
    kind="a global setting stays changed",
    note="The kernel sets the number of threads to one and never restores it.",
    found_by="test_state",
    sample=lambda: (torch.randn(4, 4),),
)
def column_sums(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x, dims=2)
        if broken:
            torch.set_num_threads(1)
        return x.new_empty(x.shape[1]).copy_(x.sum(0))

    @op.register_fake
    def _(x):
        floats(x, dims=2)
        return x.new_empty(x.shape[1])

    return op


@fault(
    kind="denormal numbers are switched off for the process",
    note="After a call, the operations of torch flush denormal numbers to zero.",
    found_by="test_state",
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
    kind="a call keeps its arguments alive",
    note="The kernel appends each input to a list for debugging, and the memory is never freed.",
    found_by="test_state",
    sample=lambda: (torch.randn(4),),
)
def logged_sine(name: str, broken: bool) -> Any:
    seen: list[Tensor] = []

    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x)
        if broken:
            seen.append(x)
        return dense(x.sin())

    @op.register_fake
    def _(x):
        floats(x)
        return x.new_empty(x.shape)

    return op


@fault(
    kind="a cache is keyed by an address",
    note="After an in-place update of the weight, the kernel uses the packed copy of the old value.",
    found_by="test_state",
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
    kind="a result lies in a workspace",
    note="A second call of the same shape changes the result of the first call.",
    found_by="test_state",
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
    kind="the result depends on the default dtype",
    note="The kernel creates its ramp with the default dtype of torch.",
    found_by="test_state",
    sample=lambda: (torch.randn(3, 4),),
)
def ramped(name: str, broken: bool) -> Any:
    def valid(x):
        require(x.dtype == torch.float32 and x.dim() == 2, "a matrix of float32 is needed")

    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        valid(x)
        ramp = torch.linspace(0.1, 1.0, x.shape[1], dtype=None if broken else x.dtype, device=x.device)
        return dense(x * ramp)

    @op.register_fake
    def _(x):
        valid(x)
        return x.new_empty(x.shape)

    return op


@fault(
    kind="the result depends on inference mode",
    note="The kernel uses an approximation in inference mode only.",
    found_by="test_state",
    sample=lambda: (torch.randn(3, 4),),
)
def smooth_gate(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        require_dtype(x, FLOATS)
        fast = broken and torch.is_inference_mode_enabled()
        return packed(torch.nn.functional.gelu(x, approximate="tanh" if fast else "none"))

    @op.register_fake
    def _(x):
        require_dtype(x, FLOATS)
        return x.new_empty(x.shape)

    return op


@fault(
    kind="the result depends on requires_grad",
    note="If `x` requires grad, the kernel computes another formula.",
    found_by="test_gradients",
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


@fault(
    kind="the kernel seeds the global generator",
    note="Each call sets the seed of torch, so that numbers drawn after it are always the same.",
    found_by="test_state",
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
    kind="no seed of torch determines the random numbers",
    note="With the same `torch.manual_seed` before each call, two calls differ.",
    found_by="test_determinism",
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
    kind="a given generator is not advanced",
    note="The kernel copies the generator by its seed, so that each call draws the same numbers.",
    found_by="test_determinism",
    sample=lambda: (torch.randn(4),),
)
def jittered(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=(), tags=Tag.nondeterministic_seeded)
    def op(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        floats(x)
        if broken and generator is not None:
            generator = torch.Generator(generator.device).manual_seed(generator.initial_seed())
        return dense(x * torch.rand(x.shape, generator=generator, dtype=x.dtype, device=x.device))

    @op.register_fake
    def _(x, generator):
        floats(x)
        return x.new_empty(x.shape)

    return op


@fault(
    kind="a random op lacks the tag",
    note="Two calls with equal arguments differ, and a compiler merges them.",
    found_by="test_determinism",
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
    kind="threads share a changed setting",
    note="The kernel changes the default dtype to compute tables. A concurrent call of another dtype shows the fault.",
    found_by="test_threads",
    sample=lambda: (torch.randn(12),),
)
def harmonics(name: str, broken: bool) -> Any:
    def table(x: Tensor, dtype: torch.dtype | None) -> Tensor:
        waves = [torch.linspace(0, order, len(x), dtype=dtype).sin() for order in range(1, 16)]
        return torch.stack(waves).sum(0)

    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x, dims=1)
        if not broken:
            return (x * table(x, x.dtype)).to(x.dtype)
        before = torch.get_default_dtype()
        torch.set_default_dtype(x.dtype)
        try:
            return (x * table(x, None)).to(x.dtype)
        finally:
            torch.set_default_dtype(before)

    @op.register_fake
    def _(x):
        floats(x, dims=1)
        return x.new_empty(len(x))

    return op


@fault(
    kind="the kernel needs autograd in inference mode",
    note="The kernel computes its slope with enable_grad(), which records no graph in inference mode.",
    found_by="test_modes",
    sample=lambda: (torch.randn(4),),
)
def loss_and_slope(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> tuple[Tensor, Tensor]:
        floats(x, dims=1)
        if not broken:
            return dense((x**3).sum()), dense(3 * x * x)
        with torch.enable_grad():
            leaf = x.detach().clone().requires_grad_()
            loss = (leaf**3).sum()
            (slope,) = torch.autograd.grad(loss, leaf)
        return dense(loss.detach()), dense(slope)

    @op.register_fake
    def _(x):
        floats(x, dims=1)
        return x.new_empty(()), x.new_empty(x.shape)

    return op


class Through(TorchDispatchMode):
    """A mode that calls each function unchanged."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@fault(
    kind="a rule for a mode drops keyword arguments",
    note="The rule for the torch dispatch mode calls the op without its keyword arguments.",
    found_by="test_modes",
    sample=lambda: (torch.randn(4),),
)
def tilted(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor, *, slope: float = 1.0) -> Tensor:
        floats(x, dims=1)
        return x + slope * torch.arange(len(x), dtype=x.dtype)

    @op.register_fake
    def _(x, *, slope):
        floats(x, dims=1)
        return x.new_empty(len(x))

    @op.register_torch_dispatch(Through)
    def _(mode, func, types, args, kwargs):
        return func(*args) if broken else func(*args, **kwargs)

    return op
