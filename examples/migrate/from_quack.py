"""quack's `torch_library_op`: ops that write into tensors of the caller, with a way past the dispatcher.

quack wraps `torch.library.custom_op`, registers a fake that does nothing, and returns a function that runs the kernel
itself unless something compiles; modes, transforms, autocast and the profiler then see nothing of a call. Here the fake
is not needed, and ``eager=True`` goes past the dispatcher only where that has nothing to do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from customops import custom_op, helper


@helper
def torch_library_op(
    name: str,
    *,
    mutates_args: str | Iterable[str],
    schema: str | None = None,
    device_types: str | Iterable[str] | None = None,
) -> Callable[[Callable[..., Any]], Any]:
    """A decorator for an op that writes, of which it returns the object.

    What quack's wrapper has as ``_custom_op`` is that object, and as ``_init_fn`` its ``__wrapped__``.
    """
    devices = device_types if device_types is None or isinstance(device_types, str) else tuple(device_types)
    return custom_op(name, mutates_args=mutates_args, schema=schema, device_types=devices, eager=True)


# An op of the kind that quack has: a kernel that is compiled once for a dtype and a width -----------------------------


@functools.cache
def compiled_rmsnorm(dtype: torch.dtype, width: int, has_weight: bool) -> Callable[..., None]:
    def launch(x: Tensor, weight: Tensor | None, out: Tensor, rstd: Tensor | None, eps: float) -> None:
        inverse = (x.float().square().mean(-1, keepdim=True) + eps).rsqrt()
        out.copy_(x * inverse * (weight if has_weight else 1))
        if rstd is not None:
            rstd.copy_(inverse.squeeze(-1))

    return launch


@torch_library_op("examples_quack::rmsnorm_fwd", mutates_args=("out", "rstd"), device_types="cpu")
def rmsnorm_fwd(x: Tensor, weight: Tensor | None, out: Tensor, rstd: Tensor | None = None, eps: float = 1e-6) -> None:
    torch._check(x.dim() == 2, lambda: f"x must have two dimensions, not {x.dim()}")
    compiled_rmsnorm(x.dtype, x.shape[1], weight is not None)(x, weight, out, rstd, eps)


def rmsnorm(x: Tensor, weight: Tensor | None = None) -> Tensor:
    out = torch.empty_like(x)
    rmsnorm_fwd(x, weight, out)
    return out


@rmsnorm_fwd.register_samples
def _() -> Iterator[tuple[Any, ...]]:
    yield torch.randn(3, 4), torch.randn(4), torch.zeros(3, 4), torch.zeros(3)
    yield torch.randn(2, 8), None, torch.zeros(2, 8)


def main() -> None:
    x = torch.randn(2, 4)
    torch.testing.assert_close(rmsnorm(x), torch.nn.functional.rms_norm(x, (4,), eps=1e-6))
    print("rmsnorm:", rmsnorm(x))


if __name__ == "__main__":
    main()
