"""Batching rules that mix, lose or misplace the batch."""

from typing import Any

import numpy as np
import torch
from corpus.entries import fault
from corpus.parts import (
    FLOATS,
    contiguous,
    dense,
    float_only,
    floating,
    floats,
    numpy_only,
    one_floating_dtype,
    packed,
    require,
    require_dtype,
    rnd,
    wide,
    writable,
)
from torch import Tensor

from customops import custom_op


@fault(
    kind="the rule ignores in_dims",
    note="With in_dims other than 0, the rule takes the wrong dimension for the batch.",
    found_by="test_vmap",
    sample=lambda: (rnd(4, 4),),
)
def causal_mean(name: str, broken: bool):
    @float_only
    def kernel(x: Tensor) -> Tensor:
        count = torch.arange(1, x.shape[-1] + 1, dtype=x.dtype)
        return (x.cumsum(-1) / count).contiguous()

    op = custom_op(name, kernel, mutates_args=())
    op.register_fake(float_only(lambda x: x.new_empty(x.shape)))

    @op.register_vmap
    def _(info, in_dims, x):
        return op(x if broken else x.movedim(in_dims[0], 0)), 0

    return op


@fault(
    kind="the rule expects all arguments to be batched",
    note="The rule moves a dimension of the weight even if it is not batched. in_dims=(0, None) shows the fault.",
    found_by="test_vmap",
    sample=lambda: (torch.randn(2, 3), torch.randn(3)),
)
def column_weights(name: str, broken: bool):
    def check(x: Tensor, weight: Tensor) -> None:
        one_floating_dtype(x, weight)
        if x.dim() < 1 or torch.broadcast_shapes(x.shape, weight.shape) != x.shape:
            raise ValueError("the weight is not broadcast to x")

    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor, weight: Tensor) -> Tensor:
        check(x, weight)
        return dense(x * weight)

    @op.register_fake
    def _(x, weight):
        check(x, weight)
        return x.new_empty(x.shape)

    @op.register_vmap
    def _(info, in_dims, x, weight):
        x_dim, weight_dim = in_dims
        x = x.expand(info.batch_size, *x.shape) if x_dim is None else x.movedim(x_dim, 0)
        if weight_dim is not None or broken:
            weight = weight.movedim(weight_dim, 0)
            weight = weight[(slice(None), *[None] * (x.dim() - weight.dim()))]
        return op(x, weight), 0

    return op


def check_dim(x: Tensor, dim: int, batched: int = 0) -> None:
    floats(x)
    dims = x.dim() - batched
    require(-dims <= dim < dims, "there is no such dimension")


@fault(
    kind="the rule does not shift a dim argument",
    note="The rule passes `dim` on unchanged, so that dim=0 reverses the batch.",
    found_by="test_vmap",
    sample=lambda: (torch.randn(3, 4), -1),
)
def reversed_along(name: str, broken: bool) -> Any:
    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor, dim: int) -> Tensor:
        check_dim(x, dim)
        return torch.empty_like(x).copy_(x.flip(dim))

    @op.register_fake
    def _(x, dim):
        check_dim(x, dim)
        return torch.empty_like(x)

    @op.register_vmap
    def _(info, in_dims, x, dim):
        check_dim(x, dim, batched=1)
        return op(x.movedim(in_dims[0], 0), dim if broken else dim % (x.dim() - 1) + 1), 0

    return op


@fault(
    kind="the rule reduces over the batch",
    note="The rule computes mean and deviation over the whole batch. Two different elements show the fault.",
    found_by="test_vmap",
    sample=lambda: (torch.randn(4, 3),),
)
def standardize(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor, eps: float = 1e-3) -> Tensor:
        require_dtype(x, FLOATS)
        centred = x - x.mean()
        return packed(centred * (centred.square().mean() + eps).rsqrt())

    @op.register_fake
    def _(x, eps):
        require_dtype(x, FLOATS)
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
    kind='the strategy "broadcast" is chosen for a reduction',
    note="All elements of the batch share one scale.",
    found_by="test_vmap",
)
def fake_quantize_tensor(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def fake_quantize_tensor(x: Tensor, bits: int = 8) -> Tensor:
        floating(x)
        torch._check(2 <= bits <= 8, lambda: "fake_quantize_tensor: bits must be between 2 and 8")
        if x.numel() == 0:
            return torch.empty(x.shape, dtype=x.dtype)
        v, top = x.to(wide(x)), 2 ** (bits - 1) - 1
        scale = (v.abs().max() / top).clamp_min(1e-12)
        return (torch.round(v / scale) * scale).to(x.dtype).contiguous()

    @fake_quantize_tensor.register_fake
    def _(x, bits):
        return x.new_empty(x.shape)

    fake_quantize_tensor.register_autograd(lambda ctx, grad: (grad, None))
    fake_quantize_tensor.register_vmap("broadcast_all" if broken else "sequential")

    @fake_quantize_tensor.register_samples
    def _():
        yield torch.randn(3, 5, requires_grad=True), 8
        yield torch.randn(4, 6), 4

    return fake_quantize_tensor


def batched_first(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """Return the tensor with the batch as the first dimension, expanded if it is not batched."""
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


@fault(
    kind="indices are not shifted to the rows of their element",
    note="All elements of the batch pick from the rows of the first element.",
    found_by="test_vmap",
    sample=lambda: (torch.randn(4, 3), torch.tensor([2, 0])),
)
def pick_clamped(name: str, broken: bool) -> Any:
    def valid(x, index):
        floats(x, dims=2)
        require(x.shape[0] > 0, "a row is needed")
        require(index.dtype == torch.int64 and index.dim() == 1, "a vector of int64 is needed")

    @custom_op(name, mutates_args=())
    def op(x: Tensor, index: Tensor) -> Tensor:
        valid(x, index)
        return dense(x[index.clamp(0, x.shape[0] - 1)])

    @op.register_fake
    def _(x, index):
        valid(x, index)
        return x.new_empty(index.shape[0], x.shape[1])

    @op.register_vmap
    def _(info, in_dims, x, index):
        size = info.batch_size
        x, index = (batched_first(each, dim, size) for each, dim in zip((x, index), in_dims, strict=True))
        rows, columns, count = x.shape[1], x.shape[2], index.shape[1]
        if size == 0:
            return x.new_empty(0, count, columns), 0
        index = index.clamp(0, rows - 1)
        if not broken:
            index = index + rows * torch.arange(size, device=index.device)[:, None]
        picked = op(x.reshape(size * rows, columns), index.reshape(size * count))
        return picked.view(size, count, columns), 0

    return op


@fault(
    kind="the rule squeezes the batch",
    note="The rule squeezes the result. A batch of size one shows the fault.",
    found_by="test_vmap",
    sample=lambda: (torch.randn(4),),
)
def batched_energy(name: str, broken: bool):
    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        one_floating_dtype(x)
        return x.square().sum()

    @op.register_fake
    def _(x):
        one_floating_dtype(x)
        return x.new_empty(())

    @op.register_vmap
    def _(info, in_dims, x):
        size = info.batch_size
        rows = x.movedim(in_dims[0], 0).reshape(size, x.numel() // size if size else 0)
        sums = rows.square().sum(-1, keepdim=True)
        return sums.squeeze() if broken else sums.squeeze(-1), 0

    return op


@fault(
    kind="the rule of an op that writes passes a copy",
    note="The rule makes the batch contiguous. For in_dims other than 0, the write goes to the copy.",
    found_by="test_vmap",
    sample=lambda: (torch.randn(3), 2.0),
)
def batched_scale(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args={"x"})
    def op(x: Tensor, by: float) -> None:
        floats(x)
        writable(x)
        x.mul_(by)

    @op.register_fake
    def _(x, by):
        floats(x)
        writable(x)

    @op.register_vmap
    def _(info, in_dims, x, by):
        x = x.movedim(in_dims[0], 0)
        op(x.contiguous() if broken else x, by)
        return None, None

    return op


@fault(
    kind="the rule calls the kernel instead of the op",
    note="In nested vmap, the kernel gets a batched tensor and raises.",
    found_by="test_vmap",
    sample=lambda: (rnd(3, 4),),
)
def np_sign_root(name: str, broken: bool):
    @numpy_only
    def kernel(x: Tensor) -> Tensor:
        a = x.detach().numpy()
        return contiguous(torch.from_numpy(np.asarray(np.sign(a) * np.sqrt(np.abs(a)), order="C")))

    op = custom_op(name, kernel, mutates_args=())
    op.register_fake(numpy_only(lambda x: x.new_empty(x.shape)))

    @op.register_vmap
    def _(info, in_dims, x):
        x = x.movedim(in_dims[0], 0)
        return (kernel if broken else op)(x), 0

    return op


@fault(
    kind="the rule drops a keyword-only argument",
    note="The rule does not pass on the keyword-only argument.",
    found_by="test_vmap",
    sample=lambda: (torch.randn(5),),
)
def bent(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=())
    def op(x: Tensor, *, power: float = 1.0) -> Tensor:
        floats(x)
        return torch.empty_like(x).copy_(x.abs() ** power)

    @op.register_fake
    def _(x, *, power):
        floats(x)
        return torch.empty_like(x)

    @op.register_vmap
    def _(info, in_dims, x, *, power):
        return (op(x) if broken else op(x, power=power)), in_dims[0]

    return op


@fault(
    kind="the rule of a random op ignores info.randomness",
    note='The rule draws different noise for each element, also for randomness="same".',
    found_by="test_vmap",
    sample=lambda: (torch.zeros(64), 0.5),
)
def noisy(name: str, broken: bool) -> Any:
    @custom_op(name, mutates_args=(), tags=torch.Tag.nondeterministic_seeded)
    def op(x: Tensor, amount: float) -> Tensor:
        floats(x)
        return torch.empty_like(x).copy_(x + amount * torch.randn(x.shape, dtype=x.dtype))

    @op.register_fake
    def _(x, amount):
        floats(x)
        return torch.empty_like(x)

    @op.register_vmap
    def _(info, in_dims, x, amount):
        require(info.randomness != "error", 'a random op needs randomness="different" or "same"')
        at = in_dims[0]
        x = x.expand(info.batch_size, *x.shape) if at is None else x.movedim(at, 0)
        if info.randomness == "same" and not broken:
            return x + op(x.new_zeros(x.shape[1:]), amount), 0
        return op(x, amount), 0

    return op
