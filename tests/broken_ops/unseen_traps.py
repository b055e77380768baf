"""Right ops that a careless checker takes for broken ones."""

from __future__ import annotations

import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
import torch
from broken_ops.corpus import trap
from broken_ops.defining import alike, dense, floats, require, writable
from torch import Tensor

from customops import Tag, custom_op, get_ctx


@trap(
    why="Rows begin every 64 bytes, so that strides are those of no dense tensor; the fake says the same.",
    sample=lambda: (torch.randn(3, 5),),
)
def u_t_aligned_rows(name: str) -> Any:
    def aligned(x, rows, columns):
        each = 64 // x.element_size()
        return x.new_zeros(rows, (columns + each - 1) // each * each)[:, :columns]

    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x, dims=2)
        return aligned(x, *x.shape).copy_(x.cos())

    @op.register_fake
    def _(x):
        floats(x, dims=2)
        return aligned(x, *x.shape)

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @op.register_autograd(setup_context=setup_context)
    def _(ctx, grad):
        (x,) = ctx.saved_tensors
        return -grad * x.sin()

    return op


@trap(
    why="A second call gives something else: the position, which is written and declared, has moved on.",
    sample=lambda: (torch.randn(4), torch.zeros((), dtype=torch.int64)),
)
def u_t_next_element(name: str) -> Any:
    def valid(x, position):
        floats(x, dims=1)
        require(x.shape[0] > 0, "an element is needed")
        require(position.dtype == torch.int64 and position.dim() == 0, "a position is needed")

    @custom_op(name, mutates_args={"position"})
    def op(x: Tensor, position: Tensor) -> Tensor:
        valid(x, position)
        value = dense(x[int(position) % len(x)])
        position.add_(1)
        return value

    @op.register_fake
    def _(x, position):
        valid(x, position)
        return x.new_empty(())

    return op


@trap(
    why="The workspace of the caller is left full of numbers that nobody asked for; it is declared as written.",
    sample=lambda: (torch.randn(3, 4), torch.zeros(6)),
)
def u_t_with_workspace(name: str) -> Any:
    def valid(x, workspace):
        floats(x, workspace)
        require(x.dim() == 2 and workspace.dim() == 1, "a matrix and a vector are needed")
        require(workspace.shape[0] >= x.shape[0], "the workspace is too small")
        writable(workspace)

    @custom_op(name, mutates_args={"workspace"})
    def op(x: Tensor, workspace: Tensor) -> Tensor:
        valid(x, workspace)
        sums = x.square().sum(1)
        workspace[: len(x)] = sums
        return dense(sums.sqrt())

    @op.register_fake
    def _(x, workspace):
        valid(x, workspace)
        return x.new_empty(x.shape[0])

    return op


def bits(seed: int, counter: Tensor) -> Tensor:
    """Numbers of 24 bits that seed and counter determine."""
    low = 2**32 - 1
    mixed = (counter * 0x9E3779B1 + seed % 2**32 * 0x85EBCA77 % 2**32) & low
    mixed = ((mixed ^ (mixed >> 15)) * 0x2C1B3C6D) & low
    return ((mixed ^ (mixed >> 13)) * 0x297A2D39 & low) >> 8


@trap(
    why=(
        "The result looks random, and has no tag: it depends on the seed that is an argument, and so does the gradient."
    ),
    sample=lambda: (torch.randn(4, 6), 5),
)
def u_t_seeded_signs(name: str) -> Any:
    def signs(shape, seed, like):
        numel = 1
        for size in shape:
            numel = numel * size
        odd = bits(seed, torch.arange(numel, device=like.device)) & 1
        return (1 - 2 * odd).to(like.dtype).view(shape)

    @custom_op(name, mutates_args=())
    def op(x: Tensor, seed: int) -> Tensor:
        floats(x)
        return dense(x * signs(x.shape, seed, x))

    @op.register_fake
    def _(x, seed):
        floats(x)
        return x.new_empty(x.shape)

    def setup_context(ctx, inputs, output):
        x, ctx.seed = inputs
        ctx.shape = x.shape

    @op.register_autograd(setup_context=setup_context)
    def _(ctx, grad):
        return grad * signs(ctx.shape, ctx.seed, grad), None

    return op


@trap(
    why=(
        "The kernel keeps a table from call to call: one for each size, in NumPy, whatever the mode, and never written."
    ),
    sample=lambda: (torch.randn(2, 5),),
)
def u_t_kept_table(name: str) -> Any:
    @functools.lru_cache(maxsize=16)
    def table(count):
        angles = np.cos(np.arange(count, dtype=np.float64))
        angles.setflags(write=False)
        return angles

    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x, dims=2)
        return dense(x * torch.tensor(table(x.shape[1]), dtype=x.dtype, device=x.device))

    @op.register_fake
    def _(x):
        floats(x, dims=2)
        return x.new_empty(x.shape)

    @op.register_autograd
    def _(ctx, grad):
        return grad * torch.arange(grad.shape[1], dtype=torch.float64, device=grad.device).cos().to(grad.dtype)

    return op


@trap(
    why="The sample is at the kinks of the function, where finite differences are between the two slopes.",
    sample=lambda: (torch.tensor([0.0, 1.0, -1.0, 2.0]),),
)
def u_t_hinges(name: str) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x)
        return dense(torch.relu(x) + torch.relu(x - 1) - torch.relu(-1 - x))

    @op.register_fake
    def _(x):
        floats(x)
        return x.new_empty(x.shape)

    @op.register_autograd_from
    def _(x):
        return torch.relu(x) + torch.relu(x - 1) - torch.relu(-1 - x)

    return op


@trap(
    why="Outside of its domain the result is NaN, as that of torch.log and torch.sqrt is.",
    sample=lambda: (torch.rand(4) + 0.5,),
)
def u_t_log_root(name: str) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x)
        return dense(x.log() * x.sqrt())

    @op.register_fake
    def _(x):
        floats(x)
        return x.new_empty(x.shape)

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @op.register_autograd(setup_context=setup_context)
    def _(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (1 + x.log() / 2) / x.sqrt()

    return op


@trap(
    why="The order of the additions follows the memory, so that the last digits depend on the layout.",
    sample=lambda: (torch.randn(16, 33),),
)
def u_t_memory_order_sum(name: str) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x, dims=2)
        order = x.t() if x.stride(0) < x.stride(1) else x
        return dense(order.reshape(-1).square().cumsum(0)[-1] if x.numel() else x.new_zeros(()))

    @op.register_fake
    def _(x):
        floats(x, dims=2)
        return x.new_empty(())

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @op.register_autograd(setup_context=setup_context)
    def _(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad

    return op


@trap(
    why=(
        "What out held is not read, and out may be x itself, as inplace= says: each element is read before it "
        "is written."
    ),
    sample=lambda: (torch.randn(3, 4), 0.5),
)
def u_t_out_over_x(name: str) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor, by: float) -> Tensor:
        floats(x)
        return dense(torch.tanh(x * by))

    @op.register_fake
    def _(x, by):
        floats(x)
        return x.new_empty(x.shape)

    @op.register_out(inplace=("x",))
    def _(x, by, *, out):
        floats(x)
        torch.mul(x, by, out=out)
        out.tanh_()

    return op


@trap(
    why="How much comes out depends on the values, and may be nothing; equal neighbours give none.",
    sample=lambda: (torch.tensor([3.0, -1.0, 3.0, 0.5]),),
)
def u_t_local_maxima(name: str) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> tuple[Tensor, Tensor]:
        floats(x, dims=1)
        inner = x[1:-1]
        where = torch.nonzero((inner > x[:-2]) & (inner > x[2:]))[:, 0] + 1 if len(x) > 2 else x.new_zeros(0).long()
        return dense(x[where]), dense(where)

    @op.register_fake
    def _(x):
        floats(x, dims=1)
        count = get_ctx().new_dynamic_size()
        return x.new_empty(count), x.new_empty(count, dtype=torch.int64)

    return op


@trap(
    why="Second derivatives are refused, by once_differentiable, and the backward works in place on its own memory.",
    sample=lambda: (torch.randn(5),),
)
def u_t_once(name: str) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x)
        return dense(torch.sin(x) * x)

    @op.register_fake
    def _(x):
        floats(x)
        return x.new_empty(x.shape)

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @op.register_autograd(setup_context=setup_context, once_differentiable=True)
    def _(ctx, grad):
        (x,) = ctx.saved_tensors
        slope = x.cos() * x
        slope += x.sin()
        return slope * grad

    return op


@trap(
    why=(
        "Tensors that are not contiguous, and widths that are no multiple of four, are refused: by kernel and "
        "fake alike."
    ),
    sample=lambda: (torch.randn(3, 8),),
)
def u_t_strict(name: str) -> Any:
    def valid(x):
        floats(x, dims=2)
        require(x.is_contiguous(), "a contiguous tensor is needed")
        require(x.shape[1] % 4 == 0, "a width that is a multiple of four is needed")

    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        valid(x)
        return dense(x.view(x.shape[0], x.shape[1] // 4, 4).flip(2).reshape(x.shape))

    @op.register_fake
    def _(x):
        valid(x)
        return x.new_empty(x.shape)

    @op.register_vmap
    def _(info, in_dims, x):
        x = x.movedim(in_dims[0], 0)
        batch, rows, columns = x.shape
        return op(x.reshape(batch * rows, columns).contiguous()).view(batch, rows, columns), 0

    return op


@trap(
    why="Four threads of its own do the work, and a lock guards their pool; all have ended when it returns.",
    sample=lambda: (torch.randn(7, 3),),
)
def u_t_threaded_rows(name: str) -> Any:
    lock = threading.Lock()

    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x, dims=2)
        source = dense(x).detach().numpy()
        target = np.empty_like(source)

        def work(rows):
            np.exp(source[rows], out=target[rows])

        with lock, ThreadPoolExecutor(4) as pool:
            list(pool.map(work, [slice(first, None, 4) for first in range(4)]))
        return dense(torch.from_numpy(target))

    @op.register_fake
    def _(x):
        floats(x, dims=2)
        return x.new_empty(x.shape)

    return op


@trap(
    why="The gradient is zero, and that is right: the result is a step function; it is returned as zeros, expanded.",
    sample=lambda: (torch.tensor([0.3, 1.7, -2.4]),),
)
def u_t_steps(name: str) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x)
        return dense(x.floor())

    @op.register_fake
    def _(x):
        floats(x)
        return x.new_empty(x.shape)

    @op.register_autograd
    def _(ctx, grad):
        return grad.new_zeros(()).expand(grad.shape)

    return op


@trap(
    why="The weight has no effect in one of the two modes, that of the sample, and its gradient is zero there.",
    sample=lambda: (torch.randn(2, 3), torch.randn(3), "plain"),
)
def u_t_unused_weight(name: str) -> Any:
    def valid(x, weight):
        floats(x, weight, least=1)
        require(x.shape[-1:] == weight.shape, "a weight for each column is needed")

    @custom_op(name, mutates_args=())
    def op(x: Tensor, weight: Tensor, mode: Literal["plain", "weighted"]) -> Tensor:
        valid(x, weight)
        return dense(x.sin() * weight if mode == "weighted" else x.sin())

    @op.register_fake
    def _(x, weight, mode):
        valid(x, weight)
        return x.new_empty(x.shape)

    def setup_context(ctx, inputs, output):
        x, weight, ctx.mode = inputs
        ctx.save_for_backward(x, weight)

    @op.register_autograd(setup_context=setup_context)
    def _(ctx, grad):
        x, weight = ctx.saved_tensors
        if ctx.mode == "plain":
            return grad * x.cos(), torch.zeros_like(weight), None
        return grad * x.cos() * weight, grad * x.sin(), None

    return op


@trap(
    why="int32 stays int32 and int64 stays int64, unlike in torch.sum; the sums wrap as torch's own of that type do.",
    sample=lambda: (torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32),),
)
def u_t_narrow_sums(name: str) -> Any:
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


@trap(
    why=(
        "It draws from the generator that is given, whose state moves on, and has the tag: two calls differ, "
        "and should."
    ),
    sample=lambda: (torch.randn(6), 0.1),
)
def u_t_drawn_noise(name: str) -> Any:
    @custom_op(name, mutates_args=(), tags=Tag.nondeterministic_seeded)
    def op(x: Tensor, scale: float, generator: torch.Generator | None = None) -> Tensor:
        floats(x)
        noise = torch.randn(x.shape, generator=generator, dtype=x.dtype, device=x.device)
        return dense(x + scale * noise)

    @op.register_fake
    def _(x, scale, generator):
        floats(x)
        return x.new_empty(x.shape)

    @op.register_autograd
    def _(ctx, grad):
        return grad, None, None

    return op


@trap(
    why=(
        "The batching rule returns a result without a batch for one of two returns, which no batched tensor "
        "has a part in."
    ),
    sample=lambda: (torch.randn(3), torch.randn(4)),
)
def u_t_half_batched(name: str) -> Any:
    def valid(x, y):
        floats(x, y)

    @custom_op(name, mutates_args=())
    def op(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        valid(x, y)
        return dense(x.sin()), dense(y.cos())

    @op.register_fake
    def _(x, y):
        valid(x, y)
        return x.new_empty(x.shape), y.new_empty(y.shape)

    @op.register_vmap
    def _(info, in_dims, x, y):
        return op(x, y), in_dims

    return op


@trap(
    why="A number of elements comes back as an int, which compilers see as a symbol; it follows from the shape alone.",
    sample=lambda: (torch.randn(5, 3), 4),
)
def u_t_padded_count(name: str) -> Any:
    def valid(x, multiple):
        floats(x, dims=2)
        require(0 < multiple <= 1024, "a multiple of 1 to 1024 is needed")

    @custom_op(name, mutates_args=())
    def op(x: Tensor, multiple: int) -> tuple[Tensor, int]:
        valid(x, multiple)
        missing = -len(x) % multiple
        return dense(torch.nn.functional.pad(x, (0, 0, 0, missing))), missing

    @op.register_fake
    def _(x, multiple):
        valid(x, multiple)
        missing = (multiple - x.shape[0] % multiple) % multiple
        return x.new_empty(x.shape[0] + missing, x.shape[1]), missing

    return op


@trap(
    why=(
        "A second call gives something else, since the members of a list are written, as declared; what is "
        "refused comes first."
    ),
    sample=lambda: ([torch.zeros(3), torch.zeros(2)], [torch.randn(3), torch.randn(2)], 0.9),
)
def u_t_momentum(name: str) -> Any:
    def valid(buffers, grads):
        require(len(buffers) == len(grads), "a buffer for each gradient is needed")
        for buffer, grad in zip(buffers, grads, strict=True):
            alike(buffer, grad)
            writable(buffer)

    @custom_op(name, mutates_args={"buffers"})
    def op(buffers: list[Tensor], grads: list[Tensor], decay: float) -> None:
        valid(buffers, grads)
        news = [buffer * decay + grad for buffer, grad in zip(buffers, grads, strict=True)]
        for buffer, new in zip(buffers, news, strict=True):
            buffer.copy_(new)

    @op.register_fake
    def _(buffers, grads, decay):
        valid(buffers, grads)

    return op
