"""Constants, modes and errors: what a call leaves behind for the next one, and what surrounds it."""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
from broken_ops.corpus import fault
from broken_ops.defining import dense, floats, require, writable
from torch import Tensor

from customops import custom_op

MODE = "a constant that is made once belongs to the mode of the first call (inference, fake tensors)"
DEFAULT = "the kernel depends on torch's default dtype"
INFERENCE = "inference mode: the op asks for what inference tensors do not have"
RAISES = "a call that raises has written already, or leaves the op unusable"
ALIVE = "resources: a call keeps its arguments or results alive"


def cosines(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A table of angles."""
    return torch.arange(count, dtype=dtype, device=device).cos()


@fault(
    kind=MODE,
    note="The table is made in the first call; one made in inference mode cannot be saved for backward by later calls.",
    sample=lambda: (torch.randn(2, 4),),
)
def u_rotate_by_table(name: str, broken: bool) -> Any:
    table = functools.lru_cache(maxsize=None)(cosines) if broken else cosines

    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x, dims=2)
        return dense(x * table(x.shape[1], x.dtype, x.device))

    @op.register_fake
    def _(x):
        floats(x, dims=2)
        return x.new_empty(x.shape)

    def setup_context(ctx, inputs, output):
        (x,) = inputs
        ctx.save_for_backward(table(x.shape[1], x.dtype, x.device))

    @op.register_autograd(setup_context=setup_context)
    def _(ctx, grad):
        (saved,) = ctx.saved_tensors
        return grad * saved.detach()

    return op


@fault(
    kind=MODE,
    note="The formula makes its table once; if that was while a compiler traced it, it is a fake tensor from then on.",
    sample=lambda: (torch.randn(5),),
)
def u_windowed(name: str, broken: bool) -> Any:
    table = functools.lru_cache(maxsize=None)(cosines) if broken else cosines

    @custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x, dims=1)
        return dense(x * cosines(x.shape[0], x.dtype, x.device))

    @op.register_fake
    def _(x):
        floats(x, dims=1)
        return x.new_empty(x.shape)

    @op.register_autograd
    def _(ctx, grad):
        return grad * table(grad.shape[0], grad.dtype, grad.device)

    return op


@fault(
    kind=DEFAULT,
    note="The ramp has torch's default dtype; set_default_dtype, as loaders of models call it, changes the result's.",
    sample=lambda: (torch.randn(3, 4),),
)
def u_ramped(name: str, broken: bool) -> Any:
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
    kind=DEFAULT,
    note="Dividing integers gives torch's default dtype; the fake says float32.",
    sample=lambda: (torch.tensor([[3, 1], [4, 1]]),),
)
def u_shares(name: str, broken: bool) -> Any:
    def valid(counts):
        require(counts.dtype == torch.int64 and counts.dim() == 2, "a matrix of int64 is needed")

    @torch.library.custom_op(name, mutates_args=())
    def op(counts: Tensor) -> Tensor:
        valid(counts)
        totals = counts.sum(1, keepdim=True).clamp(min=1)
        if broken:
            return dense(counts / totals)
        return dense(counts.to(torch.float32) / totals.to(torch.float32))

    @op.register_fake
    def _(counts):
        valid(counts)
        return counts.new_empty(counts.shape, dtype=torch.float32)

    return op


@fault(
    kind=INFERENCE,
    note="The packed weight is kept on the weight with its version, which a weight made in inference mode lacks.",
    sample=lambda: (torch.randn(2, 3), torch.randn(4, 3)),
)
def u_packed_linear(name: str, broken: bool) -> Any:
    def valid(x, weight):
        floats(x, weight)
        require(x.dim() == 2 and weight.dim() == 2 and x.shape[1] == weight.shape[1], "matrices that fit are needed")

    def pack(weight):
        return dense(weight.t())

    def packed(weight):
        kept = getattr(weight, "_u_packed", None)
        if kept is None or kept[0] != weight._version:
            kept = weight._u_packed = weight._version, pack(weight)
        return kept[1]

    @custom_op(name, mutates_args=())
    def op(x: Tensor, weight: Tensor) -> Tensor:
        valid(x, weight)
        return dense(x @ (packed(weight) if broken else pack(weight)))

    @op.register_fake
    def _(x, weight):
        valid(x, weight)
        return x.new_empty(x.shape[0], weight.shape[0])

    return op


@fault(
    kind=INFERENCE,
    note=(
        "The kernel takes its slope from a graph of its own, by enable_grad(), which records nothing in inference mode."
    ),
    sample=lambda: (torch.randn(4),),
)
def u_loss_and_slope(name: str, broken: bool) -> Any:
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


@fault(
    kind=RAISES,
    note=(
        "Each parameter is looked at when its turn comes; if a later one does not fit, earlier ones have been stepped."
    ),
    sample=lambda: ([torch.randn(3), torch.randn(2)], [torch.randn(3), torch.randn(2)], 0.1),
)
def u_step_all(name: str, broken: bool) -> Any:
    def one(param, grad):
        floats(param, grad)
        require(param.shape == grad.shape, "a parameter and its gradient differ in shape")
        writable(param)

    def valid(params, grads):
        require(len(params) == len(grads), "a gradient for each parameter is needed")
        for param, grad in zip(params, grads, strict=True):
            one(param, grad)

    @custom_op(name, mutates_args={"params"})
    def op(params: list[Tensor], grads: list[Tensor], rate: float) -> None:
        if not broken:
            valid(params, grads)
        require(len(params) == len(grads), "a gradient for each parameter is needed")
        steps = [grad * rate for grad in grads]
        for param, step in zip(params, steps, strict=True):
            one(param, step)
            param.sub_(step)

    @op.register_fake
    def _(params, grads, rate):
        valid(params, grads)

    return op


@fault(
    kind=RAISES,
    note="A flag says that the workspace is in use; a call that raises leaves it set, and all later calls are refused.",
    sample=lambda: (torch.randn(4, 3), torch.tensor([1, 0, 3])),
)
def u_busy_rows(name: str, broken: bool) -> Any:
    lock = threading.Lock()

    def valid(x, index):
        floats(x, dims=2)
        require(index.dtype == torch.int64 and index.dim() == 1, "a vector of int64 is needed")

    def rows(x, index):
        require(bool(((index >= 0) & (index < len(x))).all()), "an index is out of range")
        return dense(x[index])

    @custom_op(name, mutates_args=())
    def op(x: Tensor, index: Tensor) -> Tensor:
        valid(x, index)
        if not broken:
            with lock:
                return rows(x, index)
        if not lock.acquire(timeout=0.05):
            raise RuntimeError("the workspace is in use")
        result = rows(x, index)
        lock.release()
        return result

    @op.register_fake
    def _(x, index):
        valid(x, index)
        return x.new_empty(index.shape[0], x.shape[1])

    return op


@fault(
    kind=ALIVE,
    note="Each input is appended to a list for debugging, and its memory is never freed.",
    sample=lambda: (torch.randn(4),),
)
def u_logged_sine(name: str, broken: bool) -> Any:
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
    kind=ALIVE,
    note="A helper with lru_cache gets the tensor itself for the sake of its width, and the cache keeps the tensor.",
    sample=lambda: (torch.randn(2, 3),),
)
def u_cached_width(name: str, broken: bool) -> Any:
    def divisor(x):
        return max(x.shape[1], 1)

    width = functools.lru_cache(maxsize=128)(divisor) if broken else divisor

    @torch.library.custom_op(name, mutates_args=())
    def op(x: Tensor) -> Tensor:
        floats(x, dims=2)
        return dense(x.sum(1) / width(x))

    @op.register_fake
    def _(x):
        floats(x, dims=2)
        return x.new_empty(x.shape[0])

    return op
