"""Fifteen ops of the kinds that libraries have: a kernel in NumPy, a reference in plain torch, nothing else by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from customops import CustomOpDef, Registry


def array(x: Tensor) -> Any:
    return x.detach().numpy()


def tensor(x: Any, like: Tensor) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(x)).to(like.dtype)


# Kernels, and the plain functions of them ----------------------------------------------------------------------------


def linear(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    y = array(x) @ array(w).T
    return tensor(y if bias is None else y + array(bias), x)


def plain_linear(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, w, bias)


def rms_norm(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    a = array(x)
    return tensor(a / np.sqrt((a * a).mean(-1, keepdims=True) + eps) * array(w), x)


def plain_rms_norm(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    def turn(x: Any) -> Any:
        half = x.shape[-1] // 2
        return x * array(cos) + np.concatenate([-x[..., half:], x[..., :half]], -1) * array(sin)

    return tensor(turn(array(q)), q), tensor(turn(array(k)), k)


def plain_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    def turn(x: Tensor) -> Tensor:
        one, other = x.chunk(2, -1)
        return x * cos + torch.cat([-other, one], -1) * sin

    return turn(q), turn(k)


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """``(batch, heads, length, dim)``; there may be fewer heads of keys and values."""
    group = q.shape[1] // k.shape[1]
    keys, values = (np.repeat(array(x), group, 1) for x in (k, v))
    scores = array(q) @ keys.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    if causal:
        scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return tensor(weights / weights.sum(-1, keepdims=True) @ values, q)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1) @ v


def experts(x: Tensor, w: Tensor, expert: Tensor) -> Tensor:
    """Each row of `x` times the matrix of its expert."""
    return tensor(np.stack([row @ array(w)[i] for row, i in zip(array(x), array(expert), strict=True)]), x)


def plain_experts(x: Tensor, w: Tensor, expert: Tensor) -> Tensor:
    return torch.einsum("nk,nkm->nm", x, w[expert])


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    a = array(logits)
    a = a - a.max(-1, keepdims=True)
    logs = a - np.log(np.exp(a).sum(-1, keepdims=True))
    return torch.tensor(-logs[np.arange(len(a)), array(target)].mean(), dtype=logits.dtype)


def plain_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return -logits.log_softmax(-1).gather(-1, target[:, None]).mean()


def quantized(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    """`w` holds int8 values, `scale` one number for each of its rows."""
    return tensor(array(x) @ (array(w).astype(array(x).dtype) * array(scale)[:, None]).T, x)


def plain_quantized(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    return F.linear(x, w.to(x.dtype) * scale[:, None])


def scan(x: Tensor, decay: Tensor) -> Tensor:
    """``y[t] = decay[t] * y[t - 1] + x[t]`` along the last dimension."""
    y, last = np.empty_like(array(x)), 0
    for t in range(x.shape[-1]):
        last = y[..., t] = array(decay)[..., t] * last + array(x)[..., t]
    return tensor(y, x)


def plain_scan(x: Tensor, decay: Tensor) -> Tensor:
    ys = [x[..., 0]]
    for t in range(1, x.shape[-1]):
        ys.append(decay[..., t] * ys[-1] + x[..., t])
    return torch.stack(ys, -1)


def conv1d(x: Tensor, w: Tensor) -> Tensor:
    """``(batch, channels, length)`` with ``(channels out, channels, width)``."""
    windows = np.lib.stride_tricks.sliding_window_view(array(x), w.shape[-1], -1)
    return tensor(np.einsum("bclk,ock->bol", windows, array(w)), x)


def plain_conv1d(x: Tensor, w: Tensor) -> Tensor:
    return F.conv1d(x, w)


def embedding(table: Tensor, index: Tensor) -> Tensor:
    return tensor(array(table)[array(index)], table)


def plain_embedding(table: Tensor, index: Tensor) -> Tensor:
    return F.embedding(index, table)


def topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    order = np.argsort(-array(x), -1, kind="stable")[..., :k]
    return tensor(np.take_along_axis(array(x), order, -1), x), torch.from_numpy(order.copy())


def plain_topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    values, indices = x.topk(k, -1)
    return values, indices


def nonzero(x: Tensor) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(np.stack(np.nonzero(array(x)), -1)))


def plain_nonzero(x: Tensor) -> Tensor:
    return x.nonzero()


def concatenated(xs: Sequence[Tensor], dim: int = 0) -> Tensor:
    return tensor(np.concatenate([array(x) for x in xs], dim), xs[0])


def plain_concatenated(xs: Sequence[Tensor], dim: int = 0) -> Tensor:
    return torch.cat(list(xs), dim)


def cache_write(cache: Tensor, new: Tensor, slots: Tensor) -> None:
    cache.detach().numpy()[array(slots)] = array(new)


def plain_cache_write(cache: Tensor, new: Tensor, slots: Tensor) -> Tensor:
    return cache.index_copy(0, slots, new)


def ramp(n: int, start: float = 0.0) -> Tensor:
    return torch.from_numpy(np.arange(n, dtype=np.float32) + np.float32(start))


def plain_ramp(n: int, start: float = 0.0) -> Tensor:
    return torch.arange(n, dtype=torch.float32) + start


# What the tests know of them -----------------------------------------------------------------------------------------


@dataclass
class Row:
    """An op, and what tests call it with.

    Attributes:
        make: arguments for a size; floating tensors are float64.
        in_dims: for `torch.vmap`, after a batch was put in front of the tensors that have one.
    """

    kernel: Callable[..., Any]
    plain: Callable[..., Any]
    make: Callable[[int], tuple[Any, ...]]
    in_dims: tuple[Any, ...] = ()
    mutates: tuple[str, ...] = ()
    differentiable: bool = True
    constraints: Callable[..., Any] | tuple[()] = ()

    @property
    def name(self) -> str:
        return self.kernel.__name__

    def define(self, registry: Registry, ns: str, **options: Any) -> CustomOpDef[..., Any]:
        name = f"{ns}::{self.name}"
        op = registry.custom_op(name, self.kernel, mutates_args=self.mutates, **options)
        op.register_reference(contiguous(self.plain))  # as the results of all of these kernels are
        op.register_samples(lambda: [self.make(4)], constraints=self.constraints)
        return op


def contiguous(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose results are those of `plain`, and contiguous."""

    def function(*args: Any, **kwargs: Any) -> Any:
        return tree_map(lambda x: x.contiguous() if isinstance(x, Tensor) else x, plain(*args, **kwargs))

    return function


def real(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def integers(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(high))


def _angles(n: int) -> Tensor:
    angles = torch.arange(n, dtype=torch.float64)[:, None] / 10 ** torch.arange(2, dtype=torch.float64)
    return torch.cat([angles, angles], -1)


def _even(q: Tensor) -> bool:
    return q.shape[-1] % 2 == 0


def _unique(slots: Tensor) -> bool:
    return len(slots.unique()) == len(slots)


ROWS = [
    Row(linear, plain_linear, lambda n: (real(n, 3), real(5, 3), real(5)), (0, None, None)),
    Row(rms_norm, plain_rms_norm, lambda n: (real(n, 6), real(6)), (0, None)),
    Row(
        rotary,
        plain_rotary,
        lambda n: (real(2, n, 4), real(1, n, 4), _angles(n).cos(), _angles(n).sin()),
        (0, 0, None, None),
        constraints=_even,
    ),
    Row(
        attention,
        plain_attention,
        lambda n: (real(2, 4, n, 3), real(2, 2, n, 3), real(2, 2, n, 3), True),
        (0, 0, 0, None),
    ),
    Row(experts, plain_experts, lambda n: (real(n, 3), real(4, 3, 2), integers(4, n)), (0, None, 0)),
    Row(cross_entropy, plain_cross_entropy, lambda n: (real(n, 5), integers(5, n)), (0, 0)),
    Row(
        quantized,
        plain_quantized,
        lambda n: (real(n, 3), integers(100, 4, 3).to(torch.int8), real(4)),
        (0, None, None),
    ),
    Row(
        scan,
        plain_scan,
        lambda n: (real(n, 4), real(n, 4)),
        (0, 0),
        constraints=lambda x: x.shape[-1] > 0,
    ),
    Row(
        conv1d,
        plain_conv1d,
        lambda n: (real(n, 2, 6), real(3, 2, 3)),
        (0, None),
        constraints=lambda x, w: x.numel() > 0 and w.numel() > 0,
    ),
    Row(embedding, plain_embedding, lambda n: (real(7, 3), integers(7, n)), (None, 0)),
    Row(
        topk,
        plain_topk,
        lambda n: (real(n, 6), 2),
        (0, None),
        constraints=lambda x, k: 0 < k <= x.shape[-1],
    ),
    Row(nonzero, plain_nonzero, lambda n: (real(n, 3).round(),), differentiable=False),
    Row(concatenated, plain_concatenated, lambda n: ([real(n, 2), real(3, 2)], 0), ([0, 0], None)),
    Row(
        cache_write,
        plain_cache_write,
        lambda n: (real(24, 2), real(n, 2), torch.arange(n) * 2),
        (0, 0, None),
        ("cache",),
        constraints=_unique,
    ),
    Row(ramp, plain_ramp, lambda n: (n, 2.0), differentiable=False, constraints=lambda n: n >= 0),
]
