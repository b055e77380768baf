"""Right ops on indices, ties and packed integers, and in the space of frequencies."""

import numba
import numpy as np
import torch
from broken_ops.corpus import trap
from broken_ops.defining import require
from broken_ops.kernel_parts import accumulator, contiguous, float_only, ints, rnd, save_tensors_and_numbers
from torch import Tensor

from customops import custom_op, get_ctx


@trap(
    why="An index of -1 is padding, and gives a row of zeros.",
    sample=lambda: (rnd(5, 3).requires_grad_(), torch.tensor([[0, 2, -1], [4, -1, -1]])),
)
def padded_embedding(name: str):
    def kernel(table: Tensor, index: Tensor) -> Tensor:
        require(table.dim() == 2, "unsupported shapes or dtypes")
        if index.numel() and not bool(((index >= -1) & (index < table.shape[0])).all()):
            raise IndexError("an index is out of range")
        if table.shape[0] == 0:
            return table.new_zeros(*index.shape, table.shape[1])
        rows = table[index.clamp(min=0)]
        return torch.where(index[..., None] >= 0, rows, torch.zeros((), dtype=table.dtype)).contiguous()

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[1])
        ctx.shape = inputs[0].shape

    def backward(ctx, grad):
        (index,) = ctx.saved_tensors
        real = torch.where(index[..., None] >= 0, grad, torch.zeros((), dtype=grad.dtype))
        flat = real.reshape(-1, ctx.shape[1])
        return grad.new_zeros(ctx.shape).index_add(0, index.clamp(min=0).reshape(-1), flat), None

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    def _(table, index):
        require(table.dim() == 2, "unsupported shapes or dtypes")
        return table.new_empty(*index.shape, table.shape[1])

    op.register_autograd(backward, setup_context=setup_context)
    return op


@trap(why="argmax with ties: the first one.", sample=lambda: (ints(0, 3, 4, 6),))
def first_argmax(name: str):
    def kernel(x: Tensor) -> Tensor:
        require(x.dim() > 0 and x.shape[-1] > 0, "a maximum of nothing")
        top = x.amax(-1, keepdim=True)
        n = x.shape[-1]
        place = torch.where(x == top, torch.arange(n), n - 1 + torch.zeros((), dtype=torch.int64))
        return place.amin(-1).contiguous()

    op = custom_op(name, kernel, mutates_args=(), differentiable=False)

    @op.register_fake
    def _(x):
        require(x.dim() > 0 and x.shape[-1] > 0, "a maximum of nothing")
        return x.new_empty(x.shape[:-1], dtype=torch.int64)

    return op


@trap(why="Top-k with ties, by a stable sort.", sample=lambda: (rnd(3, 8), 3))
def stable_topk(name: str):
    def validate(x, k):
        require(x.dim() > 0 and 0 <= k <= x.shape[-1], "k is out of range")

    def kernel(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        validate(x, k)
        values, index = torch.sort(x, dim=-1, descending=True, stable=True)
        return contiguous(values[..., :k].clone()), contiguous(index[..., :k].to(torch.int32))

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output[1])
        ctx.n = inputs[0].shape[-1]

    def backward(ctx, grad, _):
        index = ctx.saved_tensors[0].long()
        return grad.new_zeros(*index.shape[:-1], ctx.n).scatter(-1, index, grad), None

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    def _(x, k):
        validate(x, k)
        return x.new_empty(*x.shape[:-1], k), x.new_empty(*x.shape[:-1], k, dtype=torch.int32)

    op.register_autograd(backward, setup_context=setup_context)
    return op


@trap(why="A size that depends on data.", sample=lambda: (rnd(4, 5), 0.0))
def values_above(name: str):
    def kernel(x: Tensor, threshold: float) -> Tensor:
        return x[x > threshold].contiguous()

    op = custom_op(name, kernel, mutates_args=(), differentiable=False)

    @op.register_fake
    def _(x, threshold):
        return x.new_empty(get_ctx().new_dynamic_size())

    return op


@trap(
    why="Non-maximum suppression: the number of boxes depends on data.",
    sample=lambda: (torch.cat([rnd(6, 2).abs(), rnd(6, 2).abs() + 2], 1), rnd(6, seed=1).sigmoid(), 0.5),
)
def nms(name: str):
    def validate(boxes, scores):
        require(boxes.dim() == 2 and boxes.shape[1] == 4 and scores.dim() == 1, "(n, 4) and (n,) are needed")
        require(boxes.shape[0] == scores.shape[0], "a score for each box is needed")

    @float_only
    def kernel(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
        validate(boxes, scores)
        b = boxes.double()
        area = (b[:, 2] - b[:, 0]).clamp(min=0) * (b[:, 3] - b[:, 1]).clamp(min=0)
        kept: list[int] = []
        for i in torch.sort(scores, descending=True, stable=True).indices.tolist():
            low = torch.maximum(b[i, :2], b[kept, :2])
            high = torch.minimum(b[i, 2:], b[kept, 2:])
            inter = (high - low).clamp(min=0).prod(-1)
            union = area[i] + area[kept] - inter
            if not bool((inter > threshold * union).any()):
                kept.append(i)
        return torch.tensor(kept, dtype=torch.int64)

    op = custom_op(name, kernel, mutates_args=(), differentiable=False)

    @op.register_fake
    @float_only
    def _(boxes, scores, threshold):
        validate(boxes, scores)
        return boxes.new_empty(get_ctx().new_dynamic_size(), dtype=torch.int64)

    return op


@trap(
    why="Segments that must be sorted, which the kernel checks.",
    sample=lambda: (rnd(6, 3).requires_grad_(), torch.tensor([0, 0, 1, 3, 3, 3]), 4),
)
def segment_mean(name: str):
    def validate(x, segment, count):
        require(
            x.dim() == 2 and segment.dim() == 1 and x.shape[0] == segment.shape[0] and count >= 0,
            "(n, d) and (n,) are needed",
        )

    @float_only
    def kernel(x: Tensor, segment: Tensor, count: int) -> Tensor:
        validate(x, segment, count)
        if segment.numel():
            if bool((segment[1:] < segment[:-1]).any()) or int(segment[0]) < 0 or int(segment[-1]) >= count:
                raise ValueError("segments must be sorted, and below count")
        h = x.to(accumulator(x.dtype))
        total = torch.zeros(count, x.shape[1], dtype=h.dtype).index_add_(0, segment.long(), h)
        size = torch.bincount(segment.long(), minlength=count)
        return (total / size.clamp(min=1)[:, None]).to(x.dtype)

    def backward(ctx, grad):
        (_, segment), (count,) = ctx.saved_tensors, ctx.numbers
        size = torch.zeros(count, dtype=torch.int64).index_add(
            0, segment.long(), torch.ones_like(segment, dtype=torch.int64)
        )
        return (grad / size.clamp(min=1)[:, None].to(grad.dtype))[segment.long()], None, None

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    @float_only
    def _(x, segment, count):
        validate(x, segment, count)
        return x.new_empty(count, x.shape[1])

    op.register_autograd(backward, setup_context=save_tensors_and_numbers)
    return op


@numba.njit
def _histogram(values, out):
    for v in values:
        if 0 <= v < len(out):
            out[v] += 1


@trap(why="A histogram in numba: values outside are left out.", sample=lambda: (ints(0, 5, 20), 5))
def histogram_of_integers(name: str):
    def kernel(x: Tensor, bins: int) -> Tensor:
        require(
            x.dtype in (torch.int32, torch.int64) and x.dim() == 1 and bins >= 0, "one dimension of integers is needed"
        )
        out = np.zeros(bins, dtype=np.int64)
        _histogram(x.numpy(), out)
        return torch.from_numpy(out)

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    def _(x, bins):
        require(
            x.dtype in (torch.int32, torch.int64) and x.dim() == 1 and bins >= 0, "one dimension of integers is needed"
        )
        return x.new_empty(bins, dtype=torch.int64)

    return op


@trap(
    why="Routes tokens to experts: ties, integers and weights that are normalised.",
    sample=lambda: (rnd(5, 4).requires_grad_(), 2),
)
def route(name: str):
    def validate(logits, k):
        require(logits.dim() == 2 and 1 <= k <= logits.shape[1], "k is out of range")

    @float_only
    def kernel(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        validate(logits, k)
        order = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :k]
        picked = logits.gather(1, order)
        return torch.softmax(picked, -1).contiguous(), contiguous(order.to(torch.int32))

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*output)
        ctx.experts = inputs[0].shape[1]

    def backward(ctx, grad, _):
        weights, order = ctx.saved_tensors
        by_picked = weights * (grad - (grad * weights).sum(-1, keepdim=True))
        return grad.new_zeros(grad.shape[0], ctx.experts).scatter(1, order.long(), by_picked), None

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    @float_only
    def _(logits, k):
        validate(logits, k)
        return logits.new_empty(logits.shape[0], k), logits.new_empty(logits.shape[0], k, dtype=torch.int32)

    op.register_autograd(backward, setup_context=setup_context)
    return op


@trap(why="Stable argsort of numbers that may be equal.", sample=lambda: (ints(0, 4, 3, 6),))
def stable_argsort(name: str):
    def kernel(x: Tensor) -> Tensor:
        return torch.sort(x, dim=-1, stable=True).indices.contiguous()

    op = custom_op(name, kernel, mutates_args=(), differentiable=False)
    op.register_fake(lambda x: x.new_empty(x.shape, dtype=torch.int64))
    return op


@trap(
    why="Reads a paged cache: pages beyond the length are not looked at.",
    sample=lambda: (rnd(6, 4, 3), torch.tensor([[4, 1], [2, -1]]), torch.tensor([7, 3])),
)
def paged_mean(name: str):
    @float_only
    def kernel(cache: Tensor, pages: Tensor, lengths: Tensor) -> Tensor:
        size = cache.shape[1]
        out = torch.zeros(pages.shape[0], cache.shape[2], dtype=cache.dtype)
        for i, length in enumerate(lengths.tolist()):
            if length <= 0:
                continue
            needed = pages[i, : -(-length // size)].tolist()
            if len(needed) * size < length or any(not 0 <= page < cache.shape[0] for page in needed):
                raise IndexError("a page is missing or out of range")
            tokens = cache[needed].reshape(-1, cache.shape[2])[:length]
            out[i] = tokens.to(accumulator(cache.dtype)).mean(0).to(cache.dtype)
        return out

    op = custom_op(name, kernel, mutates_args=(), differentiable=False)
    op.register_fake(float_only(lambda cache, pages, lengths: cache.new_empty(pages.shape[0], cache.shape[2])))
    return op


@trap(why="Quantises to int8 with a scale for each row; ties and zero rows.", sample=lambda: (rnd(4, 8),))
def quantize_rows(name: str):
    @float_only
    def kernel(x: Tensor) -> tuple[Tensor, Tensor]:
        require(x.dim() == 2 and x.shape[1] > 0, "a matrix is needed")
        h = x.to(accumulator(x.dtype))
        scale = h.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
        return torch.clamp(torch.round(h / scale), -127, 127).to(torch.int8).contiguous(), contiguous(scale.float())

    op = custom_op(name, kernel, mutates_args=(), differentiable=False)

    @op.register_fake
    @float_only
    def _(x):
        require(x.dim() == 2 and x.shape[1] > 0, "a matrix is needed")
        return x.new_empty(x.shape, dtype=torch.int8), x.new_empty(x.shape[0], 1, dtype=torch.float32)

    return op


@trap(why="Unpacks two 4-bit numbers from a byte.", sample=lambda: (ints(0, 256, 3, 4, dtype=torch.uint8),))
def unpack_int4(name: str):
    def kernel(packed: Tensor) -> Tensor:
        require(packed.dtype == torch.uint8 and packed.dim() > 0, "uint8 is needed")
        low, high = (packed & 15).to(torch.int8) - 8, (packed >> 4).to(torch.int8) - 8
        return torch.stack([low, high], -1).flatten(-2).contiguous()

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    def _(packed):
        require(packed.dtype == torch.uint8 and packed.dim() > 0, "uint8 is needed")
        return packed.new_empty(*packed.shape[:-1], 2 * packed.shape[-1], dtype=torch.int8)

    return op


@trap(
    why="An int8 product with int32 sums.",
    sample=lambda: (ints(-128, 128, 4, 8, dtype=torch.int8), ints(-128, 128, 8, 3, seed=1, dtype=torch.int8)),
)
def int8_matmul(name: str):
    def validate(a, b):
        require(a.dtype == torch.int8 and b.dtype == torch.int8, "int8 is needed")
        require(a.dim() == 2 and b.dim() == 2 and a.shape[1] == b.shape[0], "inner sizes differ")

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        validate(a, b)
        return torch.from_numpy(a.numpy().astype(np.int32) @ b.numpy().astype(np.int32))

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    def _(a, b):
        validate(a, b)
        return a.new_empty(a.shape[0], b.shape[1], dtype=torch.int32)

    return op


@trap(why="Stochastic-free rounding to bfloat16 and back.", sample=lambda: (rnd(3, 5),))
def through_bfloat16(name: str):
    @float_only
    def kernel(x: Tensor) -> Tensor:
        return x.to(torch.bfloat16, copy=True).to(x.dtype).contiguous()

    op = custom_op(name, kernel, mutates_args=())
    op.register_fake(float_only(lambda x: x.new_empty(x.shape)))
    op.register_autograd(lambda ctx, grad: grad)
    return op


@trap(
    why="An FFT filter: complex inside, real outside.",
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


@trap(
    why="A product of complex numbers, with conjugates in the gradient.",
    sample=lambda: (torch.complex(rnd(3, 4), rnd(3, 4, seed=1)), torch.complex(rnd(3, 4, seed=2), rnd(3, 4, seed=3))),
)
def product_of_complex(name: str):
    def validate(x, y):
        require(x.shape == y.shape and x.dtype == y.dtype and x.is_complex(), "two complex tensors alike are needed")

    def kernel(x: Tensor, y: Tensor) -> Tensor:
        validate(x, y)
        return (x * y).contiguous()

    op = custom_op(name, kernel, mutates_args=())

    @op.register_fake
    def _(x, y):
        validate(x, y)
        return x.new_empty(x.shape)

    op.register_autograd(
        lambda ctx, grad: (grad * ctx.saved_tensors[1].conj(), grad * ctx.saved_tensors[0].conj()),
        setup_context=save_tensors_and_numbers,
    )
    return op
