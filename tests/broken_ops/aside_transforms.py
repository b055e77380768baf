"""Batching rules that mix the elements of a batch, and ops that are wrong under autocast, no_grad or inference mode."""

from __future__ import annotations

from typing import Any

import torch
from broken_ops.aside_parts import FLOATS, HALVES, packed, require, require_same_dtype
from broken_ops.corpus import fault
from torch import Tensor

from customops import custom_op

MIXED = "the vmap rule reduces over the batch"
CAST = "the autocast rule and the op do not go together"
AMBIENT = "the kernel depends on autocast or grad mode"


def wide(x: Tensor) -> torch.dtype:
    """The dtype in which sums and angles of a tensor are computed."""
    return torch.promote_types(x.dtype, torch.float32)


@fault(
    kind=MIXED,
    note="The rule takes mean and deviation of the whole batch. Two different elements show it.",
    sample=lambda: (torch.randn(4, 3),),
)
def aside_standardize(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor, eps: float = 1e-3) -> Tensor:
        require(x, FLOATS)
        centred = x - x.mean()
        return packed(centred * (centred.square().mean() + eps).rsqrt())

    @op.register_fake
    def _(x, eps):
        require(x, FLOATS)
        return x.new_empty(x.shape)

    @op.register_vmap
    def _(info, in_dims, x, eps):
        if broken:
            return op(x, eps), in_dims[0]
        x = x.movedim(in_dims[0], 0)
        rows = x.flatten(1) if x.dim() > 1 else x.unsqueeze(1)
        centred = rows - rows.mean(1, keepdim=True)
        return (centred * (centred.square().mean(1, keepdim=True) + eps).rsqrt()).reshape(x.shape), 0

    return op


@fault(
    kind=MIXED,
    note="The rule has the softmax of the kernel, along dimension 0, which is the batch there. It shows for any batch.",
    sample=lambda: (torch.randn(4), torch.randn(5, 4)),
)
def aside_attend(name: str, broken: bool) -> Any:
    def check(query: Tensor, keys: Tensor, batched: tuple[bool, bool] = (False, False)) -> None:
        require(query, FLOATS)
        require_same_dtype(query, keys)
        one, all_ = query.shape[batched[0] :], keys.shape[batched[1] :]
        if len(one) != 1 or len(all_) != 2 or one[0] != all_[1]:
            raise ValueError(f"expected (d,) and (n, d), got {tuple(one)} and {tuple(all_)}")

    def average(query: Tensor, keys: Tensor, dim: int) -> Tensor:
        weights = (keys * query.unsqueeze(-2)).sum(-1).softmax(dim)
        return (weights.unsqueeze(-1) * keys).sum(-2)

    @custom_op(name, mutates_args=())
    def op(query: Tensor, keys: Tensor) -> Tensor:
        check(query, keys)
        return packed(average(query, keys, 0))

    @op.register_fake
    def _(query, keys):
        check(query, keys)
        return query.new_empty(query.shape)

    @op.register_vmap
    def _(info, in_dims, query, keys):
        if in_dims[0] is not None:
            query = query.movedim(in_dims[0], 0)
        if in_dims[1] is not None:
            keys = keys.movedim(in_dims[1], 0)
        check(query, keys, (in_dims[0] is not None, in_dims[1] is not None))
        return average(query, keys, 0 if broken else -1), 0

    return op


@fault(
    kind=MIXED,
    note="The rule limits the norm of the whole batch. It shows if the batch is over the limit and an element is not.",
    sample=lambda: (torch.randn(6), 2.0),
)
def aside_limit_norm(name: str, broken: bool) -> Any:
    def scale(norm: Tensor, limit: float) -> Tensor:
        return (limit / norm.clamp(min=1e-12)).clamp(max=1.0)

    def check(x: Tensor, limit: float) -> None:
        require(x, FLOATS)
        if not limit > 0:
            raise ValueError(f"expected a positive limit, got {limit}")

    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor, limit: float = 1.0) -> Tensor:
        check(x, limit)
        return packed(x * scale(x.norm(), limit))

    @op.register_fake
    def _(x, limit=1.0):
        check(x, limit)
        return x.new_empty(x.shape)

    @op.register_vmap
    def _(info, in_dims, x, limit=1.0):
        check(x, limit)
        x = x.movedim(in_dims[0], 0)
        if broken:
            return x * scale(x.norm(), limit), 0
        rows = x.flatten(1) if x.dim() > 1 else x.unsqueeze(1)
        return (rows * scale(rows.norm(dim=1, keepdim=True), limit)).reshape(x.shape), 0

    return op


@fault(
    kind=CAST,
    note="The kernel returns float32 at least, the fake the dtype of x. Autocast, or bfloat16 inputs, show it.",
    sample=lambda: (torch.randn(3, 8),),
)
def aside_row_energy(name: str, broken: bool) -> Any:
    def check(x: Tensor) -> None:
        require(x, FLOATS + HALVES)
        if x.dim() == 0:
            raise ValueError("expected one dimension at least")

    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        check(x)
        return packed(x.to(wide(x)).square().sum(-1))

    @op.register_fake
    def _(x):
        check(x)
        return x.new_empty(x.shape[:-1], dtype=x.dtype if broken else wide(x))

    op.register_autocast("cpu", torch.bfloat16)
    return op


@fault(
    kind=CAST,
    note="Autocast casts to float16, in which sums of squares of pixel values overflow. It shows for the sample.",
    sample=lambda: (torch.rand(5, 8) * 255,),
)
def aside_pixel_energy(name: str, broken: bool) -> Any:
    def check(x: Tensor) -> None:
        require(x, FLOATS + HALVES)
        if x.dim() == 0:
            raise ValueError("expected one dimension at least")

    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        check(x)
        return packed(x.to(wide(x)).square().sum(-1).to(x.dtype))

    @op.register_fake
    def _(x):
        check(x)
        return x.new_empty(x.shape[:-1])

    op.register_autocast("cpu", torch.float16 if broken else torch.float32)
    return op


@fault(
    kind=CAST,
    note="Autocast rounds positions to bfloat16, which has no odd numbers over 256. Far positions show it.",
    sample=lambda: (torch.arange(8.0), 0.5),
)
def aside_position_angles(name: str, broken: bool) -> Any:
    @torch.library.custom_op(name, mutates_args=())
    def op(positions: Tensor, frequency: float) -> Tensor:
        require(positions, FLOATS + HALVES)
        return packed((positions.to(wide(positions)) * frequency).cos().to(positions.dtype))

    @op.register_fake
    def _(positions, frequency):
        require(positions, FLOATS + HALVES)
        return positions.new_empty(positions.shape)

    torch.library.register_autocast(op, "cpu", torch.bfloat16 if broken else torch.float32)
    return op


@fault(
    kind=AMBIENT,
    note="The kernel multiplies matrices under the autocast of its caller. Autocast gives bfloat16, the fake float32.",
    sample=lambda: (torch.randn(3, 4), torch.randn(4, 5)),
)
def aside_project(name: str, broken: bool) -> Any:
    def check(x: Tensor, weight: Tensor) -> None:
        require(x, FLOATS)
        require_same_dtype(x, weight)
        if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[0]:
            raise ValueError(f"expected matrices that fit, got {tuple(x.shape)} and {tuple(weight.shape)}")

    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor, weight: Tensor) -> Tensor:
        check(x, weight)
        if broken:
            return packed(x @ weight)
        with torch.autocast(x.device.type, enabled=False):
            return packed(x @ weight)

    @op.register_fake
    def _(x, weight):
        check(x, weight)
        return x.new_empty(x.shape[0], weight.shape[1])

    return op


@fault(
    kind=AMBIENT,
    note="The kernel takes an approximation in inference mode, and in no other.",
    sample=lambda: (torch.randn(3, 4),),
)
def aside_smooth_gate(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        require(x, FLOATS)
        fast = broken and torch.is_inference_mode_enabled()
        return packed(torch.nn.functional.gelu(x, approximate="tanh" if fast else "none"))

    @op.register_fake
    def _(x):
        require(x, FLOATS)
        return x.new_empty(x.shape)

    return op


@fault(
    kind=AMBIENT,
    note="The kernel takes grad mode for training. Inputs that require grad, and no_grad, turn it off.",
    sample=lambda: (torch.randn(5, 3), torch.zeros(3)),
)
def aside_centre_columns(name: str, broken: bool) -> Any:
    def check(x: Tensor, running: Tensor) -> None:
        require(x, FLOATS)
        require_same_dtype(x, running)
        if x.dim() != 2 or running.dim() != 1 or running.shape[0] != x.shape[1]:
            raise ValueError(f"expected (n, d) and (d,), got {tuple(x.shape)} and {tuple(running.shape)}")

    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor, running: Tensor, training: bool = True) -> Tensor:
        check(x, running)
        if broken:
            training = training and torch.is_grad_enabled()
        return packed(x - (x.mean(0) if training else running))

    @op.register_fake
    def _(x, running, training=True):
        check(x, running)
        return x.new_empty(x.shape)

    def setup_context(ctx, inputs, output):
        ctx.training = inputs[2]

    def backward(ctx, grad):
        if ctx.training:
            return grad - grad.mean(0), grad.new_zeros(grad.shape[1]), None
        return grad, -grad.sum(0), None

    op.register_autograd(backward, setup_context=setup_context)
    return op
