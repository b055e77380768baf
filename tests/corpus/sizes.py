"""Kernels that are right for some sizes only."""

from typing import Any, Callable

import numpy as np
import torch
import torch.nn.functional as F
from corpus.entries import fault
from corpus.parts import (
    accumulator,
    contiguous,
    dense,
    float_only,
    floating,
    floats,
    next_power_of_2,
    require,
    rnd,
    wide,
)
from torch import Tensor

from customops import Tag, custom_op


@fault(
    kind="a row is longer than the fixed block",
    note="The kernel ignores columns behind the first 1024.",
    found_by="test_permutations",
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
    kind="a tree reduction needs a power of two",
    note="For a row whose length is not a power of two, a halving step loses elements.",
    found_by="test_permutations",
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
    kind="a kernel in blocks forgets the tail",
    note="The kernel sums eight lanes and ignores the remaining elements.",
    found_by="test_permutations",
    sample=lambda: (torch.randn(16, requires_grad=True),),
)
def lane_sum(name: str, broken: bool) -> Any:
    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x)
        flat = x.reshape(-1)
        full = len(flat) // 8 * 8
        lanes = flat[:full].view(-1, 8).sum(0)
        return lanes.sum() if broken else lanes.sum() + flat[full:].sum()

    @op.register_fake
    def _(x):
        floats(x)
        return x.new_empty(())

    def setup_context(ctx, inputs, output):
        ctx.shape = inputs[0].shape

    op.register_autograd(lambda ctx, grad: grad.expand(ctx.shape), setup_context=setup_context)
    return op


@fault(
    kind="the kernel is specialized for the size of its first call",
    note="After a call with short rows, the kernel uses the same block size for longer rows.",
    found_by="test_permutations",
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
    kind="the carry between chunks of a scan is lost",
    note="For rows of more than two chunks of 16, the third chunk gets the sum of the second chunk only.",
    found_by="test_gradients",
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
    kind="the kernel is right for square inputs only",
    note="The rows of the result have the length of the rows of the input.",
    found_by="test_gradients",
    sample=lambda: (torch.randn(3, 3, requires_grad=True),),
)
def turned(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x, dims=2)
        rows, columns = x.shape
        step = rows if broken else columns
        at = torch.arange(columns)[:, None] + torch.arange(rows)[None, :] * step
        return x.reshape(-1)[at]

    @op.register_fake
    def _(x):
        floats(x, dims=2)
        return x.new_empty(x.shape[1], x.shape[0])

    op.register_autograd(lambda ctx, grad: grad.t())
    return op


@fault(
    kind="the length of the first sequence is used for all",
    note="The kernel cuts all sequences at the length of the first.",
    found_by="test_batches",
    sample=lambda: (rnd(2, 5, 3), torch.tensor([4, 4])),
)
def mean_over_time(name: str, broken: bool):
    @float_only
    def kernel(x: Tensor, lengths: Tensor) -> Tensor:
        require(x.dim() == 3 and lengths.dim() == 1 and x.shape[0] == lengths.shape[0], "unsupported shapes or dtypes")
        out = torch.empty(x.shape[0], x.shape[2], dtype=x.dtype)
        for i in range(x.shape[0]):
            length = int(lengths[0 if broken else i])
            out[i] = x[i, :length].mean(0)
        return out

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    @float_only
    def _(x, lengths):
        require(x.dim() == 3 and lengths.dim() == 1 and x.shape[0] == lengths.shape[0], "unsupported shapes or dtypes")
        return x.new_empty(x.shape[0], x.shape[2])

    return op


@fault(
    kind="ties exceed the size of the result",
    note="With ties, more than k values reach the k-th value, and they do not fit the result.",
    found_by="inputs",
)
def topk_gate(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=(), differentiable=(True, False))
    def topk_gate(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        floating(logits, "logits")
        torch._check(logits.dim() == 2, lambda: "topk_gate: expected (tokens, experts)")
        torch._check(1 <= k <= logits.shape[1], lambda: "topk_gate: k must be between 1 and the number of experts")
        scores = logits.detach().to(wide(logits)).numpy()
        n = scores.shape[1]
        if broken:
            bound = np.partition(scores, n - k, axis=1)[:, n - k]
            chosen = np.nonzero(scores >= bound[:, None])[1].reshape(len(scores), k)
        else:
            chosen = np.sort(np.argsort(-scores, axis=1, kind="stable")[:, :k], axis=1)
        picked = np.take_along_axis(scores, chosen, 1)
        weights = np.exp(picked - picked.max(1, keepdims=True))
        weights /= weights.sum(1, keepdims=True)
        return torch.from_numpy(weights).to(logits.dtype), torch.from_numpy(chosen.copy())

    @topk_gate.register_fake
    def _(logits, k):
        shape = logits.shape[0], k
        return logits.new_empty(shape), logits.new_empty(shape, dtype=torch.int64)

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0], output[1])

    def backward(ctx, grad, _):
        logits, chosen = ctx.saved_tensors
        weights = logits.gather(1, chosen).softmax(1)
        inner = weights * (grad - (grad * weights).sum(1, keepdim=True))
        return torch.zeros_like(logits).scatter(1, chosen, inner), None

    topk_gate.register_autograd(backward, setup_context=setup_context)

    @topk_gate.register_samples
    def _():
        yield torch.randn(5, 8, requires_grad=True), 2

    return topk_gate


@fault(
    kind="a launch has room for some tensors only",
    note="A launch has a table of 30 tensors. The kernel does not scale the tensors after the first 30.",
    found_by="test_symmetries",
    sample=lambda: ([torch.randn(3), torch.randn(2, 2)], 2.0),
)
def scale_many(name: str, broken: bool) -> Any:
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
    kind="the size of the first tensor is used for all of a list",
    note="For tensors of different sizes, the kernel does not scale the rest of a longer tensor.",
    found_by="test_symmetries",
    sample=lambda: ([rnd(6), rnd(6, seed=1)], 0.5),
)
def foreach_scale_(name: str, broken: bool):
    def kernel(xs: list[Tensor], by: float) -> None:
        for x in xs:
            n = (xs[0] if broken else x).shape[0]
            x[:n] *= by

    return custom_op(name, kernel, mutates_args={"xs"})


@fault(
    kind="an op with the tag pointwise mixes elements",
    note="The op subtracts the mean of all elements. A change of one element changes the others.",
    found_by="test_pointwise",
    sample=lambda: (torch.randn(6),),
)
def centred(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=(), tags=(Tag.pointwise,) if broken else ())
    def op(x: Tensor) -> Tensor:
        floats(x)
        return dense(x - x.mean())

    @op.register_fake
    def _(x):
        floats(x)
        return x.new_empty(x.shape)

    return op
