"""Right ops that look suspicious."""

from __future__ import annotations

from typing import Any

import torch
from broken_ops.corpus import trap
from broken_ops.defining import alike, define, dense, floats, require, save_inputs, writable
from torch import Tensor

from customops import custom_op, get_ctx


@trap(why="The number of rows depends on the data, and may be zero.", sample=lambda: (torch.tensor([0.0, 1.0, -2.0]),))
def nonzero_rows(name: str) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x)
        return dense(x.nonzero())

    @op.register_fake
    def _(x):
        floats(x)
        return x.new_empty((get_ctx().new_dynamic_size(), x.dim()), dtype=torch.int64)

    return op


@trap(
    why="Two returns share a size that depends on the data, and neither has a gradient.",
    sample=lambda: (torch.tensor([5, 1, 5, 2]),),
)
def counted(name: str) -> Any:
    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor) -> tuple[Tensor, Tensor]:
        require(x.dtype == torch.int64, "int64 is needed")
        values, counts = x.unique(return_counts=True)
        return dense(values), dense(counts)

    @op.register_fake
    def _(x):
        require(x.dtype == torch.int64, "int64 is needed")
        size = torch.library.get_ctx().new_dynamic_size()
        return x.new_empty(size), x.new_empty(size)

    return op


@trap(
    why="A random op, tagged as one: two calls differ, and the gradient is that of the mask which was drawn.",
    sample=lambda: (torch.ones(8, requires_grad=True), 0.5),
)
def dropped(name: str) -> Any:
    def check(x, p):
        floats(x)
        require(0 <= p < 1, "a probability below one is needed")

    @custom_op(name, mutates_args=(), tags=torch.Tag.nondeterministic_seeded, differentiable=(True, False))
    def op(x: Tensor, p: float = 0.5) -> tuple[Tensor, Tensor]:
        check(x, p)
        kept = torch.rand(x.shape) >= p
        return torch.empty_like(x).copy_(x * kept / (1 - p)), kept

    @op.register_fake
    def _(x, p):
        check(x, p)
        return torch.empty_like(x), torch.empty(x.shape, dtype=torch.bool, device=x.device)

    def setup_context(ctx, inputs, output):
        ctx.p = inputs[1]
        ctx.save_for_backward(output[1])

    def backward(ctx, grad, _):
        (kept,) = ctx.saved_tensors
        return grad * kept / (1 - ctx.p), None

    op.register_autograd(backward, setup_context=setup_context)
    return op


@trap(why="A random factory: it has no tensor to derive inputs from.", sample=lambda: (3, 4))
def random_signs(name: str) -> Any:
    @torch.library.custom_op(name, mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
    def op(rows: int, columns: int) -> Tensor:
        require(rows >= 0 and columns >= 0, "sizes are not negative")
        return torch.randint(0, 2, (rows, columns), dtype=torch.int8) * 2 - 1

    @op.register_fake
    def _(rows, columns):
        require(rows >= 0 and columns >= 0, "sizes are not negative")
        return torch.empty(rows, columns, dtype=torch.int8)

    return op


@trap(
    why="In place, with a gradient that needs the value from before; leaves that require grad are refused.",
    sample=lambda: (torch.randn(4), torch.randn(4)),
)
def multiply_(name: str) -> Any:
    @custom_op(name, mutates_args={"x"}, tags=torch.Tag.inplace)
    def op(x: Tensor, by: Tensor) -> Tensor:
        alike(x, by)
        writable(x)
        return x.copy_(x * by)

    def backward(ctx, grad):
        x, by = ctx.saved_tensors
        return grad * by, grad * x

    op.register_autograd(backward, setup_context=save_inputs, originals="x")
    return op


@trap(why="A view, which the schema declares; other layouts are refused by torch.", sample=lambda: (torch.randn(2, 3),))
def flattened(name: str) -> Any:
    @custom_op(name, mutates_args=(), schema="(Tensor(a) x) -> Tensor(a)")
    def op(x):
        return x.view(-1)

    @op.register_fake
    def _(x):
        return x.view(-1)

    def setup_context(ctx, inputs, output):
        ctx.shape = inputs[0].shape
        ctx._is_pure_view = True

    op.register_autograd(lambda ctx, grad: grad.reshape(ctx.shape), setup_context=setup_context)
    return op


@trap(why="Integers that wrap around on purpose, as a hash does.", sample=lambda: (torch.arange(5),))
def hashed(name: str) -> Any:
    def kernel(x):
        require(x.dtype == torch.int64, "int64 is needed")
        return torch.empty_like(x).copy_((x ^ (x >> 7)) * 0x5BD1E995 + 0x1B873593)

    def fake(x):
        require(x.dtype == torch.int64, "int64 is needed")
        return torch.empty_like(x)

    return define(name, "(Tensor x) -> Tensor", kernel, fake=fake)


@trap(why="Odd sizes are refused, by the kernel and by the fake.", sample=lambda: (torch.randn(2, 4),))
def swapped_halves(name: str) -> Any:
    def check(x):
        floats(x, least=1)
        require(x.shape[-1] % 2 == 0, "an even size is needed")

    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        check(x)
        left, right = x.chunk(2, -1) if x.shape[-1] else (x, x[..., :0])
        return torch.cat([right, left], -1).clone(memory_format=torch.contiguous_format)

    @op.register_fake
    def _(x):
        check(x)
        return x.new_empty(x.shape)

    op.register_autograd(lambda ctx, grad: torch.cat([*grad.chunk(2, -1)][::-1], -1))
    return op


@trap(why="All dtypes but float32 are refused.", sample=lambda: (torch.rand(5, requires_grad=True),))
def rooted(name: str) -> Any:
    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        require(x.dtype == torch.float32, "float32 is needed")
        return torch.empty_like(x).copy_((x * x + 1).sqrt())

    @op.register_fake
    def _(x):
        require(x.dtype == torch.float32, "float32 is needed")
        return torch.empty_like(x)

    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x / (x * x + 1).sqrt()

    op.register_autograd(backward, setup_context=save_inputs)
    return op


@trap(why="The result is in fp8, of which torch compares and adds little.", sample=lambda: (torch.randn(3, 4),))
def to_fp8(name: str) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> tuple[Tensor, Tensor]:
        floats(x, dims=2)
        scale = dense((x.abs().sum(1) / 448 + 1e-6).float())
        return dense((x / scale[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)), scale

    @op.register_fake
    def _(x):
        floats(x, dims=2)
        return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), x.new_empty(len(x), dtype=torch.float32)

    return op


@trap(why="At zero the gradient is zero, where a difference quotient is one half.", sample=lambda: (torch.zeros(4),))
def rectified(name: str) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x)
        return torch.empty_like(x).copy_(x.relu())

    @op.register_fake
    def _(x):
        floats(x)
        return torch.empty_like(x)

    op.register_autograd(lambda ctx, grad: grad * (ctx.saved_tensors[0] > 0), setup_context=save_inputs)
    return op


@trap(
    why="Where several values are the largest the gradient goes to the first of them.",
    sample=lambda: (torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]], requires_grad=True),),
)
def row_maxima(name: str) -> Any:
    def check(x):
        floats(x, dims=2)
        require(x.shape[1] > 0, "a column is needed")

    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor) -> tuple[Tensor, Tensor]:
        check(x)
        at = x.argmax(1)
        return dense(x.gather(1, at[:, None])[:, 0]), dense(at)

    @op.register_fake
    def _(x):
        check(x)
        return x.new_empty(len(x)), x.new_empty(len(x), dtype=torch.int64)

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output[1])
        ctx.mark_non_differentiable(output[1])
        ctx.shape = inputs[0].shape

    def backward(ctx, grad, _):
        (at,) = ctx.saved_tensors
        return grad.new_zeros(ctx.shape).scatter(1, at[:, None], grad[:, None])

    op.register_autograd(backward, setup_context=setup_context)
    return op


@trap(why="Sorting: the gradient jumps where two values are equal.", sample=lambda: (torch.tensor([2.0, 1.0, 1.0]),))
def sorted_values(name: str) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> tuple[Tensor, Tensor]:
        floats(x, dims=1)
        values, order = x.sort(stable=True)
        return dense(values), dense(order)

    @op.register_fake
    def _(x):
        floats(x, dims=1)
        return x.new_empty(len(x)), x.new_empty(len(x), dtype=torch.int64)

    def backward(ctx, grad, _):
        return torch.zeros_like(grad).scatter(0, ctx.saved_tensors[0], grad)

    op.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1]))
    return op


@trap(why="Complex inputs: the gradient is conjugated.", sample=lambda: (torch.randn(3, dtype=torch.cfloat),) * 2)
def complex_product(name: str) -> Any:
    def check(x, y):
        require(x.dtype == y.dtype and x.is_complex(), "two complex tensors are needed")
        require(x.dtype in (torch.complex64, torch.complex128), "complex64 or complex128 is needed")
        require(x.shape == y.shape, "one shape is needed")

    @custom_op(name, mutates_args=())
    def op(x: Tensor, y: Tensor) -> Tensor:
        check(x, y)
        return torch.empty_like(x).copy_(x * y)

    @op.register_fake
    def _(x, y):
        check(x, y)
        return torch.empty_like(x)

    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad * y.conj(), grad * x.conj()

    op.register_autograd(backward, setup_context=save_inputs)
    return op


@trap(
    why="The result is bfloat16 by its definition: difference quotients of it are steps.",
    sample=lambda: (torch.randn(6, requires_grad=True), torch.randn(6, requires_grad=True)),
)
def coarse_product(name: str) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor, y: Tensor) -> Tensor:
        alike(x, y)
        return torch.empty_like(x, dtype=torch.bfloat16).copy_(x.bfloat16() * y.bfloat16())

    @op.register_fake
    def _(x, y):
        alike(x, y)
        return torch.empty_like(x, dtype=torch.bfloat16)

    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return (grad * y).to(x.dtype), (grad * x).to(y.dtype)

    op.register_autograd(backward, setup_context=save_inputs)
    return op


@trap(
    why="Sums in float16 by definition, and takes nothing wider.",
    sample=lambda: (torch.rand(9).half(),),
)
def sum_in_half(name: str) -> Any:
    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        require(x.dtype == torch.float16, "float16 is needed")
        sum_ = torch.zeros((), dtype=torch.float16)
        for value in x.reshape(-1):
            sum_ += value
        return sum_

    @op.register_fake
    def _(x):
        require(x.dtype == torch.float16, "float16 is needed")
        return x.new_empty(())

    return op


@trap(why="An input shorter than the window has an empty output.", sample=lambda: (torch.arange(3.0), 5))
def windows(name: str) -> Any:
    def check(x, size):
        floats(x, dims=1)
        require(size > 0, "a positive size is needed")

    @custom_op(name, mutates_args=())
    def op(x: Tensor, size: int) -> Tensor:
        check(x, size)
        count = max(len(x) - size + 1, 0)
        return dense(x.unfold(0, size, 1)) if count else x.new_empty(0, size)

    @op.register_fake
    def _(x, size):
        check(x, size)
        return x.new_empty(max(x.shape[0] - size + 1, 0), size)

    return op


@trap(why="A list comes out, as long as an argument says, possibly empty.", sample=lambda: (torch.randn(3), 2))
def powers(name: str) -> Any:
    def check(x, count):
        floats(x)
        require(0 <= count < 100, "a count is needed")

    @custom_op(name, mutates_args=())
    def op(x: Tensor, count: int) -> list[Tensor]:
        check(x, count)
        return [torch.empty_like(x).copy_(x**power) for power in range(count)]

    @op.register_fake
    def _(x, count):
        check(x, count)
        return [torch.empty_like(x) for _ in range(count)]

    return op
