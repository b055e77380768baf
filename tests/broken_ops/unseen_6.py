"""Lists of dims, numbers or tensors, random masks and generators, tags, compiled backwards, limits of sizes."""

from __future__ import annotations

import math
from typing import Any

import torch
from broken_ops.corpus import fault
from broken_ops.defining import dense, floats, require
from torch import Tensor

from customops import Tag, custom_op

DIMS = "a list of dims: another order, several, or none"
EITHER = "a parameter that takes a number or a tensor: the tensor is handled like the number"
MASK = "randomness: backward draws another mask from the seed than the kernel did"
GENERATOR = "randomness: a generator that is given is ignored, or set back to its seed"
BACKWARD_OP = "compile: the op that backward calls has a wrong fake, or none"
POINTWISE = "tags: pointwise is promised, and elements are mixed"
LIMIT = "sizes: what exceeds a limit of the launch is silently left out"
SHORT = "sizes: an input shorter than the window of the kernel"


def positive(x: Tensor, dims: list[int]) -> list[int]:
    """The dims counted from the front; refuses those out of range and repeated ones."""
    require(all(-x.dim() <= dim < x.dim() for dim in dims), "a dim is out of range")
    result = [dim % x.dim() for dim in dims]
    require(len(set(result)) == len(result), "a dim is repeated")
    return result


@fault(
    kind=DIMS,
    note=(
        "The fake deletes one size after the other, so that later dims are shifted; two dims in ascending "
        "order show it."
    ),
    sample=lambda: (torch.randn(2, 3, 4), [1]),
)
def u_sum_dims(name: str, broken: bool) -> Any:
    @custom_op(name, schema="(Tensor x, int[] dims) -> Tensor")
    def op(x, dims):
        floats(x)
        for dim in sorted(positive(x, dims), reverse=True):
            x = x.sum(dim)
        return dense(x)

    @op.register_fake
    def _(x, dims):
        floats(x)
        sizes = list(x.shape)
        for dim in positive(x, dims) if broken else sorted(positive(x, dims), reverse=True):
            del sizes[min(dim, len(sizes) - 1)]
        return x.new_empty(sizes)

    return op


@fault(
    kind=DIMS,
    note=(
        "The gradient is permuted by the same dims and not by their inverse; a cycle of three shows it, a "
        "swap does not."
    ),
    sample=lambda: (torch.randn(3, 4), [1, 0]),
)
def u_permuted(name: str, broken: bool) -> Any:
    def valid(x, dims):
        floats(x)
        require(len(dims) == x.dim(), "each dim is needed")
        return positive(x, dims)

    @custom_op(name, schema="(Tensor x, int[] dims) -> Tensor")
    def op(x, dims):
        return dense(x.permute(valid(x, dims)))

    @op.register_fake
    def _(x, dims):
        return x.new_empty([x.shape[dim] for dim in valid(x, dims)])

    def setup_context(ctx, inputs, output):
        x, dims = inputs
        ctx.dims = [dim % x.dim() for dim in dims]

    @op.register_autograd(setup_context=setup_context)
    def _(ctx, grad):
        inverse = sorted(range(len(ctx.dims)), key=ctx.dims.__getitem__)
        return grad.permute(ctx.dims if broken else inverse), None

    return op


def check_factor(x: Tensor, by: float | Tensor) -> None:
    """Refuse a tensor that is neither one number nor one for each column."""
    floats(x, least=1)
    if isinstance(by, Tensor):
        floats(x, by)
        require(by.dim() == 0 or by.shape == x.shape[-1:], "one number, or one for each column, is needed")


@fault(
    kind=EITHER,
    note="The gradient of a tensor is summed to one number; a tensor with a number for each column shows it.",
    sample=lambda: (torch.randn(2, 3), 2.0),
)
def u_times_either(name: str, broken: bool) -> Any:
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


def logistic(value: float) -> float:
    """1 / (1 + exp(-value)), for any number."""
    return 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))


@fault(
    kind=EITHER,
    note="Of a tensor the kernel takes the first number alone; one for each column shows it, as the formula has them.",
    sample=lambda: (torch.randn(2, 3), 0.5),
)
def u_gate_either(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor, by: float | Tensor) -> Tensor:
        check_factor(x, by)
        if broken and isinstance(by, Tensor) and by.numel():
            by = by.reshape(-1)[0].item()
        return dense(x * (by.sigmoid() if isinstance(by, Tensor) else logistic(by)))

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
            return grad * logistic(ctx.number), None
        x, by = ctx.saved_tensors
        gate = by.sigmoid()
        slope = grad * x * gate * (1 - gate)
        return grad * gate, slope.sum() if by.dim() == 0 else slope

    return op


def uniform(seed: int, counter: Tensor) -> Tensor:
    """Numbers in [0, 1) that seed and counter determine, as a counter-based generator gives them."""
    low = 2**32 - 1
    bits = (counter * 0x9E3779B1 + seed % 2**32 * 0x85EBCA77 % 2**32) & low
    for shift, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39)):
        bits = ((bits ^ (bits >> shift)) * factor) & low
    return (bits ^ (bits >> 15)).to(torch.float64) / 2**32


@fault(
    kind=MASK,
    note="The kernel numbers its draws in blocks of 8 columns, backward in blocks of 16: equal up to 8 columns.",
    sample=lambda: (torch.randn(4, 8), 0.5, 7),
)
def u_block_dropout(name: str, broken: bool) -> Any:
    def valid(x, p):
        floats(x, dims=2)
        require(0 <= p < 1, "a probability below one is needed")

    def kept(rows, columns, block, p, seed, device):
        column = torch.arange(columns, device=device)
        row = torch.arange(rows, device=device)[:, None]
        return uniform(seed, column // block * 1_000_003 + row * 1024 + column % block) >= p

    @custom_op(name, mutates_args=())
    def op(x: Tensor, p: float, seed: int) -> Tensor:
        valid(x, p)
        return dense(torch.where(kept(*x.shape, 8, p, seed, x.device), x / (1 - p), 0.0))

    @op.register_fake
    def _(x, p, seed):
        valid(x, p)
        return x.new_empty(x.shape)

    def setup_context(ctx, inputs, output):
        x, ctx.p, ctx.seed = inputs
        ctx.shape = x.shape

    @op.register_autograd(setup_context=setup_context)
    def _(ctx, grad):
        mask = kept(*ctx.shape, 16 if broken else 8, ctx.p, ctx.seed, grad.device)
        return torch.where(mask, grad / (1 - ctx.p), 0.0), None, None

    return op


@fault(
    kind=MASK,
    note="Backward compares with the probability in steps of a sixteenth: equal for p = 0.5, another mask for p = 0.3.",
    sample=lambda: (torch.randn(6, 8), 0.5, 11),
)
def u_coarse_dropout(name: str, broken: bool) -> Any:
    def valid(x, p):
        floats(x)
        require(0 <= p < 1, "a probability below one is needed")

    def draws(shape, seed, device):
        return uniform(seed, torch.arange(math.prod(shape), device=device)).view(shape)

    @custom_op(name, mutates_args=())
    def op(x: Tensor, p: float, seed: int) -> Tensor:
        valid(x, p)
        return dense(torch.where(draws(x.shape, seed, x.device) >= p, x / (1 - p), 0.0))

    @op.register_fake
    def _(x, p, seed):
        valid(x, p)
        return x.new_empty(x.shape)

    def setup_context(ctx, inputs, output):
        x, ctx.p, ctx.seed = inputs
        ctx.shape = x.shape

    @op.register_autograd(setup_context=setup_context)
    def _(ctx, grad):
        numbers = draws(ctx.shape, ctx.seed, grad.device)
        mask = (numbers * 16).floor() >= math.floor(ctx.p * 16) if broken else numbers >= ctx.p
        return torch.where(mask, grad / (1 - ctx.p), 0.0), None, None

    return op


@fault(
    kind=GENERATOR,
    note="The noise comes from the default generator, also if one is given; two generators of one seed show it.",
    sample=lambda: (torch.randn(4),),
)
def u_noisy(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=(), tags=Tag.nondeterministic_seeded)
    def op(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        floats(x)
        used = None if broken else generator
        return dense(x + torch.rand(x.shape, generator=used, dtype=x.dtype, device=x.device))

    @op.register_fake
    def _(x, generator):
        floats(x)
        return x.new_empty(x.shape)

    return op


@fault(
    kind=GENERATOR,
    note="A generator that is given is copied by its seed, so that each call draws the same numbers from it.",
    sample=lambda: (torch.randn(4),),
)
def u_jittered(name: str, broken: bool) -> Any:
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
    kind=BACKWARD_OP,
    note="The backward op sums the gradient of the bias, its fake says it does not; compiled training steps are wrong.",
    sample=lambda: (torch.randn(3, 4), torch.randn(4)),
)
def u_biased_sine(name: str, broken: bool) -> Any:
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


@fault(
    kind=BACKWARD_OP,
    note="The op has a fake, and the op that its formula calls has none; a compiled training step shows it.",
    sample=lambda: (torch.randn(5),),
)
def u_own_silu(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x)
        return dense(x * x.sigmoid())

    @op.register_fake
    def _(x):
        floats(x)
        return x.new_empty(x.shape)

    @custom_op(f"{name}_backward", mutates_args=())
    def op_backward(grad: Tensor, x: Tensor) -> Tensor:
        s = x.sigmoid()
        return dense(grad * s * (1 + x * (1 - s)))

    if not broken:

        @op_backward.register_fake
        def _(grad, x):
            return x.new_empty(x.shape)

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @op.register_autograd(setup_context=setup_context)
    def _(ctx, grad):
        return op_backward(grad, *ctx.saved_tensors)

    return op


@fault(
    kind=POINTWISE,
    note="The mean of all elements is taken off each, which an op with the tag may not do; change one element.",
    sample=lambda: (torch.randn(6),),
)
def u_centred(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=(), tags=(Tag.pointwise,) if broken else ())
    def op(x: Tensor) -> Tensor:
        floats(x)
        return dense(x - x.mean())

    @op.register_fake
    def _(x):
        floats(x)
        return x.new_empty(x.shape)

    return op


@fault(
    kind=POINTWISE,
    note="Each element is limited by the largest of its row, and the op says that it is pointwise.",
    sample=lambda: (torch.randn(3, 4), torch.rand(3, 4)),
)
def u_scaled_by_row(name: str, broken: bool) -> Any:
    def valid(x, y):
        floats(x, y)
        require(x.dim() == 2 and x.shape == y.shape, "two matrices of one shape are needed")
        require(x.shape[1] > 0, "a column is needed")

    @torch.library.custom_op(name, mutates_args=(), tags=(torch.Tag.pointwise,) if broken else ())
    def op(x: Tensor, y: Tensor) -> Tensor:
        valid(x, y)
        return dense(x * y / (1 + y.abs().amax(1, keepdim=True)))

    @op.register_fake
    def _(x, y):
        valid(x, y)
        return x.new_empty(x.shape)

    return op


@fault(
    kind=LIMIT,
    note="A block has 1024 threads, one for each column; columns beyond that stay zero.",
    sample=lambda: (torch.randn(2, 16),),
)
def u_thread_per_column(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x, dims=2)
        threads = min(x.shape[1], 1024) if broken else x.shape[1]
        result = x.new_zeros(x.shape)
        result[:, :threads] = x[:, :threads].cos()
        return result

    @op.register_fake
    def _(x):
        floats(x, dims=2)
        return x.new_empty(x.shape)

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @op.register_autograd(setup_context=setup_context)
    def _(ctx, grad):
        (x,) = ctx.saved_tensors
        return -grad * x.sin()

    return op


@fault(
    kind=LIMIT,
    note="A launch has a table of 30 tensors, as apex has; those after the first 30 of a list are not scaled.",
    sample=lambda: ([torch.randn(3), torch.randn(2, 2)], 2.0),
)
def u_scale_many(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def op(xs: list[Tensor], by: float) -> list[Tensor]:
        for x in xs:
            floats(x)
        results = [dense(x) for x in xs]
        for result in results[:30] if broken else results:
            result.mul_(by)
        return results

    @op.register_fake
    def _(xs, by):
        for x in xs:
            floats(x)
        return [x.new_empty(x.shape) for x in xs]

    def setup_context(ctx, inputs, output):
        _, ctx.by = inputs

    @op.register_autograd(setup_context=setup_context)
    def _(ctx, grads):
        return [grad * ctx.by for grad in grads], None

    return op


@fault(
    kind=SHORT,
    note=(
        "The state is the end of the input, too short if the input is shorter than the window, and all of it "
        "for width 1."
    ),
    sample=lambda: (torch.randn(6), 3),
)
def u_causal_sum(name: str, broken: bool) -> Any:
    def valid(x, width):
        floats(x, dims=1)
        require(1 <= width <= 1024, "a width of 1 to 1024 is needed")

    @custom_op(name, mutates_args=())
    def op(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
        valid(x, width)
        padded = torch.cat([x.new_zeros(width - 1), x])
        total = x.new_zeros(len(x))
        for first in range(width):
            total += padded[first : first + len(x)]
        return total, dense(x[-(width - 1) :] if broken else padded[len(x) :])

    @op.register_fake
    def _(x, width):
        valid(x, width)
        return x.new_empty(x.shape), x.new_empty(width - 1)

    return op


@fault(
    kind=SHORT,
    note="Backward reflects an index at the ends once; a radius beyond the length of the input needs it more often.",
    sample=lambda: (torch.randn(7), 2),
)
def u_reflected_sum(name: str, broken: bool) -> Any:
    def valid(x, radius):
        floats(x, dims=1)
        require(0 <= radius <= 1024, "a radius of 0 to 1024 is needed")
        require(x.shape[0] > 0, "an element is needed")

    def reflected(index, length):
        index = index % max(2 * (length - 1), 1)
        return torch.where(index < length, index, 2 * (length - 1) - index)

    def reflected_once(index, length):
        return (length - 1 - (length - 1 - index.abs()).abs()).clamp(min=0)

    @custom_op(name, mutates_args=())
    def op(x: Tensor, radius: int) -> Tensor:
        """The sum of the elements not farther than the radius, where the input is reflected at its ends."""
        valid(x, radius)
        index = torch.arange(len(x), device=x.device)
        total = x.new_zeros(len(x))
        for shift in range(-radius, radius + 1):
            total += x[reflected(index + shift, len(x))]
        return total

    @op.register_fake
    def _(x, radius):
        valid(x, radius)
        return x.new_empty(x.shape)

    def setup_context(ctx, inputs, output):
        x, ctx.radius = inputs
        ctx.length = x.shape[0]

    @op.register_autograd(setup_context=setup_context)
    def _(ctx, grad):
        index = torch.arange(ctx.length, device=grad.device)
        total = torch.zeros_like(grad)
        for shift in range(-ctx.radius, ctx.radius + 1):
            where = (reflected_once if broken else reflected)(index + shift, ctx.length)
            total = total.index_add(0, where, grad)
        return total, None

    return op
