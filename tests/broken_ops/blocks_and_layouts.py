"""Kernels that work in blocks, and what they take for granted of sizes and strides."""

import numpy as np
import torch
import torch.nn.functional as F
from broken_ops.corpus import fault
from broken_ops.defining import require
from broken_ops.kernel_parts import (
    accumulator,
    cdiv,
    contiguous,
    float_only,
    ints,
    next_power_of_2,
    numpy_only,
    ptr,
    rnd,
)
from torch import Tensor

from customops import custom_op


@fault(
    kind="the last, partial block is not computed",
    note="When the number of outputs is no multiple of 32, the rest of the result is uninitialised memory.",
    sample=lambda: (rnd(4, 64),),
)
def silu_and_mul(name: str, broken: bool):
    block = 32

    @float_only
    def kernel(x: Tensor) -> Tensor:
        require(x.dim() > 0 and x.shape[-1] % 2 == 0, "unsupported shapes or dtypes")
        d = x.shape[-1] // 2
        gate, up = x[..., :d].reshape(-1), x[..., d:].reshape(-1)
        out = torch.empty(gate.numel(), dtype=x.dtype)
        programs = gate.numel() // block if broken else cdiv(gate.numel(), block)
        for pid in range(programs):
            lanes = slice(pid * block, (pid + 1) * block)
            out[lanes] = gate[lanes] * torch.sigmoid(gate[lanes]) * up[lanes]
        return out.view(*x.shape[:-1], d)

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    @float_only
    def _(x):
        require(x.dim() > 0 and x.shape[-1] % 2 == 0, "unsupported shapes or dtypes")
        return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)

    return op


@fault(
    kind="a row longer than the fixed block of 1024",
    note="Rows of more than 1024 columns: the columns after 1024 are neither counted nor written.",
    sample=lambda: (rnd(4, 32),),
)
def block_softmax(name: str, broken: bool):
    @float_only
    def kernel(x: Tensor) -> Tensor:
        require(x.dim() > 0 and x.shape[-1] > 0, "unsupported shapes or dtypes")
        n = x.shape[-1]
        block = 1024 if broken else next_power_of_2(n)
        cols = min(n, block)
        rows = x.reshape(-1, n)
        out = torch.zeros_like(rows, memory_format=torch.contiguous_format)
        for i in range(rows.shape[0]):
            row = rows[i, :cols].to(accumulator(x.dtype))
            e = torch.exp(row - row.max())
            out[i, :cols] = (e / e.sum()).to(x.dtype)
        return out.view(x.shape)

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    @float_only
    def _(x):
        require(x.dim() > 0 and x.shape[-1] > 0, "unsupported shapes or dtypes")
        return x.new_empty(x.shape)

    return op


@fault(
    kind="positions held in int16",
    note="More than 32767 tokens: the positions of the later ones become negative.",
    sample=lambda: (ints(0, 4, 12),),
)
def group_tokens(name: str, broken: bool):
    position = np.int16 if broken else np.int64

    def kernel(expert_ids: Tensor) -> Tensor:
        order = np.argsort(expert_ids.numpy(), kind="stable").astype(position)
        return contiguous(torch.from_numpy(order.astype(np.int64)))

    op = custom_op(name, kernel, mutates_args=())
    op.register_fake(lambda expert_ids: expert_ids.new_empty(expert_ids.shape, dtype=torch.int64))
    return op


@fault(
    kind="squeeze of all dimensions of size 1",
    note="With one token or one expert the kernel returns fewer dimensions than the fake.",
    sample=lambda: (rnd(5, 8), rnd(8, 3, seed=1)),
)
def router_logits(name: str, broken: bool):
    def kernel(x: Tensor, gate: Tensor) -> Tensor:
        require(x.dim() == 2 and gate.dim() == 2 and x.dtype == gate.dtype, "unsupported shapes or dtypes")
        scores = torch.matmul(x.unsqueeze(1), gate)
        return scores.squeeze() if broken else scores.squeeze(1)

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    def _(x, gate):
        require(x.dim() == 2 and gate.dim() == 2 and x.dtype == gate.dtype, "unsupported shapes or dtypes")
        require(x.shape[1] == gate.shape[0], "inner sizes differ")
        return x.new_empty(x.shape[0], gate.shape[1])

    return op


@fault(
    kind="no rows at all",
    note="Zero rows: the kernel concatenates an empty list and raises, the fake accepts.",
    sample=lambda: (rnd(6, 16),),
)
def token_scales(name: str, broken: bool):
    tile = 4

    @float_only
    def kernel(x: Tensor) -> Tensor:
        require(x.dim() == 2 and x.shape[1] > 0, "unsupported shapes or dtypes")
        rows = x.shape[0]
        if broken:
            parts = [x[i : i + tile].abs().amax(-1, keepdim=True) / 127 for i in range(0, rows, tile)]
            return torch.cat(parts)
        out = x.new_empty(rows, 1)
        for i in range(0, rows, tile):
            out[i : i + tile] = x[i : i + tile].abs().amax(-1, keepdim=True) / 127
        return out

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    @float_only
    def _(x):
        require(x.dim() == 2 and x.shape[1] > 0, "unsupported shapes or dtypes")
        return x.new_empty(x.shape[0], 1)

    return op


@fault(
    kind="tree reduction for powers of two only",
    note="Rows whose length is no power of two: elements are lost in a halving step.",
    sample=lambda: (rnd(3, 8),),
)
def halving_energy(name: str, broken: bool):
    @float_only
    def kernel(x: Tensor) -> Tensor:
        buffer = x.to(accumulator(x.dtype)).square()
        if not broken:
            buffer = F.pad(buffer, (0, next_power_of_2(x.shape[-1]) - x.shape[-1]))
        half = buffer.shape[-1] // 2
        while half > 0:
            buffer[..., :half] += buffer[..., half : 2 * half]
            half //= 2
        return contiguous(buffer[..., 0].to(x.dtype))

    def backward(ctx, grad):
        return 2 * grad[..., None] * ctx.saved_tensors[0]

    op = custom_op(name, kernel, mutates_args=())
    op.register_fake(float_only(lambda x: x.new_empty(x.shape[:-1])))
    op.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    return op


@fault(
    kind="carry between the chunks of a scan",
    note="Rows of more than two chunks of 16: the third chunk gets the sum of the second alone.",
    sample=lambda: (rnd(2, 24),),
)
def chunk_cumsum(name: str, broken: bool):
    chunk = 16

    @float_only
    def kernel(x: Tensor) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype)
        carry = torch.zeros(x.shape[:-1], dtype=x.dtype)
        for start in range(0, x.shape[-1], chunk):
            part = x[..., start : start + chunk].cumsum(-1)
            out[..., start : start + chunk] = part + carry[..., None]
            carry = part[..., -1] if broken else carry + part[..., -1]
        return out

    op = custom_op(name, kernel, mutates_args=())
    op.register_fake(float_only(lambda x: x.new_empty(x.shape)))
    op.register_autograd(lambda ctx, grad: grad.flip(-1).cumsum(-1).flip(-1))
    return op


@fault(
    kind="rows counted by the first dimension alone",
    note="An input of three dimensions: only the first shape[0] of its rows are normalised.",
    sample=lambda: (rnd(4, 16), rnd(16, seed=1)),
)
def fused_layer_norm(name: str, broken: bool):
    @float_only
    def kernel(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
        require(weight.shape == x.shape[-1:], "unsupported shapes or dtypes")
        flat = x.reshape(-1, x.shape[-1])
        out = torch.zeros(flat.shape, dtype=x.dtype)
        rows = x.shape[0] if broken else flat.shape[0]
        for i in range(rows):
            row = flat[i].to(accumulator(x.dtype))
            centered = row - row.mean()
            out[i] = (centered * torch.rsqrt(centered.square().mean() + eps) * weight).to(x.dtype)
        return out.view(x.shape)

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    @float_only
    def _(x, weight, eps):
        require(weight.shape == x.shape[-1:], "unsupported shapes or dtypes")
        return x.new_empty(x.shape)

    return op


@fault(
    kind="the second operand is assumed to be contiguous",
    note="y of another layout than x: its elements are paired with the wrong ones of x.",
    sample=lambda: (rnd(4, 6), rnd(4, 6, seed=1)),
)
def add_relu(name: str, broken: bool):
    def kernel(x: Tensor, y: Tensor) -> Tensor:
        if x.shape != y.shape:
            raise ValueError("x and y must have the same shape")
        x = x.contiguous()
        if not broken:
            y = y.contiguous()
        n = x.numel()
        out = torch.empty(x.shape, dtype=x.dtype)
        ptr(out)[:n] = torch.relu(ptr(x)[:n] + ptr(y)[:n])
        return out

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    def _(x, y):
        if x.shape != y.shape:
            raise ValueError("x and y must have the same shape")
        return x.new_empty(x.shape)

    return op


@fault(
    kind="only the stride of rows is read, that of columns is taken for 1",
    note="A transposed x: neighbours in memory are taken for neighbours in the row.",
    sample=lambda: (rnd(4, 4), rnd(4, seed=1)),
)
def strided_rms_norm(name: str, broken: bool):
    @float_only
    def kernel(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
        require(weight.shape == x.shape[-1:], "unsupported shapes or dtypes")
        if x.dim() != 2:
            raise ValueError("x must be a matrix")
        if not broken and x.stride(1) != 1:
            x = x.contiguous()
        rows, n = x.shape
        out = torch.empty(rows, n, dtype=x.dtype)
        memory, step = ptr(x), x.stride(0)
        for i in range(rows):
            row = memory[i * step : i * step + n].to(accumulator(x.dtype))
            out[i] = row * torch.rsqrt(row.square().mean() + eps) * weight
        return out

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    @float_only
    def _(x, weight, eps):
        require(weight.shape == x.shape[-1:], "unsupported shapes or dtypes")
        if x.dim() != 2:
            raise ValueError("x must be a matrix")
        return x.new_empty(x.shape)

    return op


@fault(
    kind="storage offset ignored",
    note="x[1:]: the kernel reads from the start of the storage (as with the byte_offset of DLPack).",
    sample=lambda: (rnd(4, 5), 0.5),
)
def leaky_at_offset(name: str, broken: bool):
    @float_only
    def kernel(x: Tensor, slope: float) -> Tensor:
        base = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
        values = base.as_strided(x.shape, x.stride(), 0 if broken else x.storage_offset())
        return torch.where(values > 0, values, values * slope).contiguous()

    op = custom_op(name, kernel, mutates_args=())
    op.register_fake(float_only(lambda x, slope: x.new_empty(x.shape)))
    return op


@fault(
    kind="channels_last memory read as NCHW",
    note="x in channels_last: the guard lets it pass, and planes are averaged across channels.",
    sample=lambda: (rnd(2, 3, 4, 4),),
)
def global_avg_pool(name: str, broken: bool):
    @float_only
    def kernel(x: Tensor) -> Tensor:
        require(x.dim() == 4, "unsupported shapes or dtypes")
        fine = x.is_contiguous() or (broken and x.is_contiguous(memory_format=torch.channels_last))
        if not fine:
            x = x.contiguous()
        n, c, h, w = x.shape
        return ptr(x)[: x.numel()].view(n, c, h * w).mean(-1)

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    @float_only
    def _(x):
        require(x.dim() == 4, "unsupported shapes or dtypes")
        return x.new_empty(x.shape[0], x.shape[1])

    return op


@fault(
    kind="a write to a contiguous copy of the argument",
    note="q not contiguous: its copy is rotated, and the argument stays as it was.",
    sample=lambda: (rnd(3, 8), rnd(3, 4, seed=1), rnd(3, 4, seed=2)),
)
def apply_rotary_(name: str, broken: bool):
    def kernel(q: Tensor, cos: Tensor, sin: Tensor) -> None:
        packed = q.contiguous()
        half = packed.shape[-1] // 2
        a, b = packed[..., :half].clone(), packed[..., half:].clone()
        packed[..., :half] = a * cos - b * sin
        packed[..., half:] = b * cos + a * sin
        if not broken and packed is not q:
            q.copy_(packed)

    op = custom_op(name, kernel, mutates_args={"q"})
    return op


@fault(
    kind="a result like x is filled in row order",
    note="A transposed x: the result has the strides of x, but is written as if contiguous.",
    sample=lambda: (rnd(4, 6),),
)
def hard_swish(name: str, broken: bool):
    @float_only
    def kernel(x: Tensor) -> Tensor:
        packed = x.contiguous()
        n = x.numel()
        out = torch.empty_like(x if broken else packed)
        values = ptr(packed)[:n]
        ptr(out)[:n] = values * torch.clamp(values + 3, 0, 6) / 6
        return out

    op = custom_op(name, kernel, mutates_args=())
    op.register_fake(float_only(torch.empty_like if broken else lambda x: x.new_empty(x.shape)))
    return op


@fault(
    kind="the fake promises the strides of x",
    note="A transposed x: the kernel returns a contiguous result, the fake one with the strides of x.",
    sample=lambda: (rnd(4, 6),),
)
def np_sinc(name: str, broken: bool):
    @numpy_only
    def kernel(x: Tensor) -> Tensor:
        return contiguous(
            torch.from_numpy(np.ascontiguousarray(np.sinc(x.numpy())).astype(x.numpy().dtype)).view(x.shape)
        )

    op = custom_op(name, kernel, mutates_args=())
    op.register_fake(numpy_only(torch.empty_like if broken else lambda x: x.new_empty(x.shape)))
    return op
