"""Gradients: of indices, of optional results, in second calls, below transforms and hooks."""

from __future__ import annotations

from typing import Any

import torch
from broken_ops.corpus import fault
from broken_ops.defining import dense, floats, require
from torch import Tensor

from customops import custom_op

INDICES = "indices: backward takes repeated or unsorted ones for distinct and sorted ones"
PADDING = "indices: minus one is padding for the kernel, and the last row for backward"
ONCE = "backward can run only once: it uses up what ctx holds"
GRAD = "backward adds to .grad by itself"
OPTIONAL = "optional results: the gradient of one that is asked for is left out"
VALUES = "backward or setup_context looks at values, so that jacrev, vmap(grad) or compile fail"
HOOKS = "saved tensors: what hooks put in their place (offloading) is mistaken for the tensor that was saved"


def within(index: Tensor, count: int, least: int = 0) -> None:
    """Refuse indices outside the range."""
    require(bool(((index >= least) & (index < count)).all()), "an index is out of range")


@fault(
    kind=INDICES,
    note="The gradient is assigned to the rows, so that of a row picked twice one contribution is lost.",
    sample=lambda: (torch.randn(4, 3), torch.tensor([2, 0, 3])),
)
def u_gather_rows(name: str, broken: bool) -> Any:
    def valid(x, index):
        floats(x, dims=2)
        require(index.dtype == torch.int64 and index.dim() == 1, "a vector of int64 is needed")

    @custom_op(name, mutates_args=())
    def op(x: Tensor, index: Tensor) -> Tensor:
        valid(x, index)
        within(index, len(x))
        return dense(x[index])

    @op.register_fake
    def _(x, index):
        valid(x, index)
        return x.new_empty(len(index), x.shape[1])

    def setup_context(ctx, inputs, output):
        x, index = inputs
        ctx.shape = x.shape
        ctx.save_for_backward(index)

    @op.register_autograd(setup_context=setup_context)
    def _(ctx, grad):
        (index,) = ctx.saved_tensors
        zeros = grad.new_zeros(ctx.shape)
        return zeros.index_copy(0, index, grad) if broken else zeros.index_add(0, index, grad), None

    return op


@fault(
    kind=INDICES,
    note="Backward repeats the gradient by the lengths of the segments, right for sorted ids; unsorted ones show it.",
    sample=lambda: (torch.randn(5, 2), torch.tensor([0, 0, 1, 2, 2]), 3),
)
def u_segment_sum(name: str, broken: bool) -> Any:
    def valid(x, ids, count):
        floats(x, dims=2)
        require(ids.dtype == torch.int64 and ids.dim() == 1, "a vector of int64 is needed")
        require(len(ids) == len(x), "an id for each row is needed")
        require(0 <= count <= 2**20, "a count of 0 to 2**20 is needed")

    @custom_op(name, mutates_args=())
    def op(x: Tensor, ids: Tensor, count: int) -> Tensor:
        valid(x, ids, count)
        within(ids, count)
        return x.new_zeros(count, x.shape[1]).index_add_(0, ids, x)

    @op.register_fake
    def _(x, ids, count):
        valid(x, ids, count)
        return x.new_empty(count, x.shape[1])

    def setup_context(ctx, inputs, output):
        _, ids, ctx.count = inputs
        ctx.save_for_backward(ids)

    @op.register_autograd(setup_context=setup_context)
    def _(ctx, grad):
        (ids,) = ctx.saved_tensors
        if broken:
            lengths = ids.new_zeros(ctx.count).index_add(0, ids, torch.ones_like(ids))
            ids = torch.repeat_interleave(lengths, output_size=len(ids))
        return grad.index_select(0, ids), None, None

    return op


@fault(
    kind=PADDING,
    note="A slot of -1 gives zeros, and its gradient goes to the last row; the sample has no such slot.",
    sample=lambda: (torch.randn(4, 3), torch.tensor([1, 3, 0])),
)
def u_slots(name: str, broken: bool) -> Any:
    def valid(x, slots):
        floats(x, dims=2)
        require(slots.dtype == torch.int64 and slots.dim() == 1, "a vector of int64 is needed")

    @custom_op(name, mutates_args=())
    def op(x: Tensor, slots: Tensor) -> Tensor:
        """x[slots[i]], and zeros for a slot of -1."""
        valid(x, slots)
        within(slots, len(x), least=-1)
        out = x.new_zeros(len(slots), x.shape[1])
        kept = slots >= 0
        out[kept] = x[slots[kept]]
        return out

    @op.register_fake
    def _(x, slots):
        valid(x, slots)
        return x.new_empty(len(slots), x.shape[1])

    def setup_context(ctx, inputs, output):
        x, slots = inputs
        ctx.shape = x.shape
        ctx.save_for_backward(slots)

    @op.register_autograd(setup_context=setup_context)
    def _(ctx, grad):
        (slots,) = ctx.saved_tensors
        rows, columns = ctx.shape
        if broken:
            return grad.new_zeros(rows, columns).index_add(0, torch.where(slots < 0, slots + rows, slots), grad), None
        padded = grad.new_zeros(rows + 1, columns).index_add(0, torch.where(slots < 0, rows, slots), grad)
        return padded[:rows], None

    return op


@fault(
    kind=PADDING,
    note="An id of -1 adds nothing to the bag; the gradient of its weight is computed from the last row all the same.",
    sample=lambda: (torch.randn(4, 3), torch.tensor([[0, 2], [3, 1]]), torch.rand(2, 2)),
)
def u_weighted_bag(name: str, broken: bool) -> Any:
    def valid(table, ids, weights):
        floats(table, weights)
        require(table.dim() == 2 and ids.dim() == 2, "two dimensions are needed")
        require(len(table) > 0, "an empty table")
        require(ids.dtype == torch.int64 and ids.shape == weights.shape, "an int64 id for each weight is needed")

    def picked(table, ids):
        rows = table.index_select(0, ids.clamp(min=0).reshape(-1)).reshape(*ids.shape, table.shape[1])
        return torch.where((ids >= 0).unsqueeze(-1), rows, 0.0)

    @custom_op(name, mutates_args=())
    def op(table: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The weighted sums of rows of the table, without those whose id is -1."""
        valid(table, ids, weights)
        within(ids, len(table), least=-1)
        kept = torch.where(ids >= 0, weights, 0.0)
        return dense((picked(table, ids) * kept.unsqueeze(-1)).sum(1))

    @op.register_fake
    def _(table, ids, weights):
        valid(table, ids, weights)
        return table.new_empty(len(ids), table.shape[1])

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @op.register_autograd(setup_context=setup_context)
    def _(ctx, grad):
        table, ids, weights = ctx.saved_tensors
        rows, columns = table.shape
        kept = torch.where(ids >= 0, weights, 0.0)
        spread = (grad.unsqueeze(1) * kept.unsqueeze(-1)).reshape(ids.numel(), columns)
        where = torch.where(ids < 0, rows, ids).reshape(-1)
        by_table = grad.new_zeros(rows + 1, columns).index_add(0, where, spread)[:rows]
        if broken:
            wrapped = torch.where(ids < 0, ids + rows, ids)
            chosen = table.index_select(0, wrapped.reshape(-1)).reshape(*ids.shape, columns)
        else:
            chosen = picked(table, ids)
        return by_table, None, (grad.unsqueeze(1) * chosen).sum(-1)

    return op


@fault(
    kind=ONCE,
    note="Backward pops the lengths from a list on ctx; a second backward with retain_graph=True finds it empty.",
    sample=lambda: (torch.randn(3, 2), torch.randn(2, 2)),
)
def u_join(name: str, broken: bool) -> Any:
    def valid(x, y):
        floats(x, y)
        require(x.dim() == 2 and y.dim() == 2 and x.shape[1] == y.shape[1], "rows of one length are needed")

    @custom_op(name, mutates_args=())
    def op(x: Tensor, y: Tensor) -> Tensor:
        valid(x, y)
        return dense(torch.cat([x, y]))

    @op.register_fake
    def _(x, y):
        valid(x, y)
        return x.new_empty(x.shape[0] + y.shape[0], x.shape[1])

    def setup_context(ctx, inputs, output):
        ctx.lengths = [each.shape[0] for each in inputs]

    @op.register_autograd(setup_context=setup_context)
    def _(ctx, grad):
        if broken:
            second, first = ctx.lengths.pop(), ctx.lengths.pop()
        else:
            first, second = ctx.lengths
        return grad[:first], grad[first : first + second]

    return op


@fault(
    kind=ONCE,
    note=(
        "Backward counts the exponent on ctx down; the second backward over a graph that is kept gives "
        "another gradient."
    ),
    sample=lambda: (torch.rand(4) + 0.5, 3),
)
def u_power(name: str, broken: bool) -> Any:
    def valid(x, exponent):
        floats(x)
        require(1 <= exponent <= 64, "an exponent of 1 to 64 is needed")

    @custom_op(name, mutates_args=())
    def op(x: Tensor, exponent: int) -> Tensor:
        valid(x, exponent)
        result = dense(x)
        for _ in range(exponent - 1):
            result *= x
        return result

    @op.register_fake
    def _(x, exponent):
        valid(x, exponent)
        return x.new_empty(x.shape)

    def setup_context(ctx, inputs, output):
        x, ctx.exponent = inputs
        ctx.left = ctx.exponent
        ctx.save_for_backward(x)

    @op.register_autograd(setup_context=setup_context)
    def _(ctx, grad):
        (x,) = ctx.saved_tensors
        grad = grad * ctx.exponent
        if broken:
            while ctx.left > 1:
                grad = grad * x
                ctx.left -= 1
        else:
            for _ in range(ctx.exponent - 1):
                grad = grad * x
        return grad, None

    return op


@fault(
    kind=GRAD,
    note=(
        "If the weight has a .grad, backward adds to it and returns zeros; autograd.grad shows it, with a .grad there."
    ),
    sample=lambda: (torch.randn(3, 4), torch.randn(2, 4)),
)
def u_linear_wgrad(name: str, broken: bool) -> Any:
    def valid(x, weight):
        floats(x, weight)
        require(x.dim() == 2 and weight.dim() == 2 and x.shape[1] == weight.shape[1], "matrices that fit are needed")

    @custom_op(name, mutates_args=())
    def op(x: Tensor, weight: Tensor) -> Tensor:
        valid(x, weight)
        return dense(x @ weight.t())

    @op.register_fake
    def _(x, weight):
        valid(x, weight)
        return x.new_empty(x.shape[0], weight.shape[0])

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @op.register_autograd(setup_context=setup_context)
    def _(ctx, grad):
        x, weight = ctx.saved_tensors
        by_weight = grad.t() @ x
        if broken and weight.is_leaf and weight.grad is not None:
            weight.grad.add_(by_weight.detach())
            by_weight = torch.zeros_like(by_weight)
        return grad @ weight, by_weight

    return op


@fault(
    kind=GRAD,
    note="Backward adds to a .grad that is there, and returns the gradient as well: the second step's counts twice.",
    sample=lambda: (torch.randn(3, 2), torch.randn(2)),
)
def u_bias_sine(name: str, broken: bool) -> Any:
    def valid(x, bias):
        floats(x, bias)
        require(x.dim() == 2 and bias.dim() == 1 and x.shape[1] == len(bias), "a bias for each column is needed")

    @custom_op(name, mutates_args=())
    def op(x: Tensor, bias: Tensor) -> Tensor:
        valid(x, bias)
        return dense((x + bias).sin())

    @op.register_fake
    def _(x, bias):
        valid(x, bias)
        return x.new_empty(x.shape)

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @op.register_autograd(setup_context=setup_context)
    def _(ctx, grad):
        x, bias = ctx.saved_tensors
        slope = grad * (x + bias).cos()
        by_bias = slope.sum(0)
        if broken and bias.is_leaf and bias.grad is not None:
            bias.grad.add_(by_bias.detach())  # as a fused kernel does, of which the caller knows nothing
        return slope, by_bias

    return op


@fault(
    kind=OPTIONAL,
    note="The log-sum-exp is returned on request, and backward ignores its gradient, as flash attention did.",
    sample=lambda: (torch.randn(3, 4),),
)
def u_softmax_lse(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor, want_lse: bool = False) -> tuple[Tensor, Tensor | None]:
        floats(x, dims=2)
        require(x.shape[1] > 0, "a column is needed")
        return dense(x.softmax(-1)), dense(x.logsumexp(-1)) if want_lse else None

    @op.register_fake
    def _(x, want_lse):
        floats(x, dims=2)
        require(x.shape[1] > 0, "a column is needed")
        return x.new_empty(x.shape), x.new_empty(x.shape[0]) if want_lse else None

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    @op.register_autograd(setup_context=setup_context)
    def _(ctx, grad, grad_lse):
        (x,) = ctx.saved_tensors
        p = x.softmax(-1)
        result = p * (grad - (grad * p).sum(-1, keepdim=True))
        if grad_lse is not None and not broken:
            result = result + p * grad_lse.unsqueeze(-1)
        return result, None

    return op


@fault(
    kind=OPTIONAL,
    note="The row norms can be asked for, and have a gradient that backward does not use.",
    sample=lambda: (torch.rand(3, 4) + 0.5, 0.1),
)
def u_normalize_rows(name: str, broken: bool) -> Any:
    def valid(x, eps):
        floats(x, dims=2)
        require(eps > 0, "a positive eps is needed")

    def norm(x, eps):
        return (x.square().sum(-1) + eps).sqrt()

    @custom_op(name, mutates_args=())
    def op(x: Tensor, eps: float, want_norm: bool = False) -> tuple[Tensor, Tensor | None]:
        valid(x, eps)
        norms = norm(x, eps)
        return dense(x / norms.unsqueeze(-1)), dense(norms) if want_norm else None

    @op.register_fake
    def _(x, eps, want_norm):
        valid(x, eps)
        return x.new_empty(x.shape), x.new_empty(x.shape[0]) if want_norm else None

    def setup_context(ctx, inputs, output):
        x, ctx.eps, ctx.want_norm = inputs
        ctx.save_for_backward(x)

    @op.register_autograd(setup_context=setup_context)
    def _(ctx, grad, grad_norm):
        (x,) = ctx.saved_tensors
        norms = norm(x, ctx.eps).unsqueeze(-1)
        unit = x / norms
        result = (grad - unit * (grad * unit).sum(-1, keepdim=True)) / norms
        if grad_norm is not None and not broken:
            result = result + unit * grad_norm.unsqueeze(-1)
        return result, None, None

    return op


@fault(
    kind=VALUES,
    note=(
        "Backward has a shortcut for a gradient of zeros, a branch on data: jacrev, is_grads_batched and compile fail."
    ),
    sample=lambda: (torch.randn(4),),
)
def u_quick_cube(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x)
        return dense(x * x * x)

    @op.register_fake
    def _(x):
        floats(x)
        return x.new_empty(x.shape)

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @op.register_autograd(setup_context=setup_context)
    def _(ctx, grad):
        (x,) = ctx.saved_tensors
        if broken and not grad.any():
            return grad
        return 3 * x * x * grad

    return op


@fault(
    kind=VALUES,
    note="setup_context counts what the mask keeps by int(); per-sample gradients and compiled training steps fail.",
    sample=lambda: (torch.randn(5), torch.tensor([True, False, True, True, False])),
)
def u_masked_mean(name: str, broken: bool) -> Any:
    def valid(x, mask):
        floats(x, dims=1)
        require(mask.dtype == torch.bool and mask.shape == x.shape, "a mask of the same shape is needed")

    @custom_op(name, mutates_args=())
    def op(x: Tensor, mask: Tensor) -> Tensor:
        valid(x, mask)
        return dense(torch.where(mask, x, 0.0).sum() / mask.sum().clamp(min=1))

    @op.register_fake
    def _(x, mask):
        valid(x, mask)
        return x.new_empty(())

    def setup_context(ctx, inputs, output):
        _, mask = inputs
        ctx.count = max(int(mask.sum()), 1) if broken else None
        ctx.save_for_backward(mask)

    @op.register_autograd(setup_context=setup_context)
    def _(ctx, grad):
        (mask,) = ctx.saved_tensors
        count = mask.sum().clamp(min=1) if ctx.count is None else ctx.count
        return torch.where(mask, grad / count, 0.0), None

    return op


@fault(
    kind=HOOKS,
    note="setup_context leaves the count on the saved tensor as a Python attribute, which a tensor from a hook lacks.",
    sample=lambda: (torch.randn(4, 3),),
)
def u_annotated_mean(name: str, broken: bool) -> Any:
    def valid(x):
        floats(x, dims=2)
        require(x.shape[0] > 0, "a row is needed")

    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        valid(x)
        return dense(x.sin().mean(0))

    @op.register_fake
    def _(x):
        valid(x)
        return x.new_empty(x.shape[1])

    def setup_context(ctx, inputs, output):
        (x,) = inputs
        (x if broken else ctx)._rows = x.shape[0]
        ctx.save_for_backward(x)

    @op.register_autograd(setup_context=setup_context)
    def _(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x.cos() / (x if broken else ctx)._rows

    return op


@fault(
    kind=HOOKS,
    note="Saved is the first half of the packed input; backward finds the second behind it in memory, not below hooks.",
    sample=lambda: (torch.randn(2, 3),),
)
def u_packed_gate(name: str, broken: bool) -> Any:
    def valid(packed):
        floats(packed, dims=2)
        require(packed.shape[0] == 2, "two rows are needed")

    @custom_op(name, mutates_args=())
    def op(packed: Tensor) -> Tensor:
        valid(packed)
        return dense(packed[0] * packed[1].sin())

    @op.register_fake
    def _(packed):
        valid(packed)
        return packed.new_empty(packed.shape[1])

    def setup_context(ctx, inputs, output):
        (packed,) = inputs
        ctx.save_for_backward(packed[0] if broken else packed)
        ctx.distance = packed.stride(0)

    @op.register_autograd(setup_context=setup_context, once_differentiable=True)
    def _(ctx, grad):
        (saved,) = ctx.saved_tensors
        if broken:
            x = saved
            y = torch.as_strided(x, x.shape, x.stride(), x.storage_offset() + ctx.distance)
        else:
            x, y = saved
        return torch.stack([grad * y.sin(), grad * x * y.cos()])

    return op
