"""FlashInfer's `register_custom_op` and `register_fake_op`: switched off upstream, because a call costs too much.

FlashInfer decorates every kernel, and its decorators return the function unchanged, so that nothing of it compiles. A
fork brings the ops back where an environment variable is set before the import. Here they are on, unless the variable
is 0, and ``eager=True`` keeps the cost of a plain call near that of the function.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from customops import adopt, custom_op, helper


def enabled() -> bool:
    """Return whether the decorators define ops; if not, they return the function unchanged."""
    return os.environ.get("FLASHINFER_USE_TORCH_CUSTOM_OPS", "1") != "0"


@helper
def register_custom_op(
    name: str,
    fn: Callable[..., Any] | None = None,
    /,
    *,
    mutates_args: str | Iterable[str],
    device_types: str | Sequence[str] | None = None,
    schema: str | None = None,
) -> Any:
    """Define an op and return its object; without `fn`, return a decorator."""
    if not enabled():
        return fn or (lambda function: function)
    return custom_op(name, fn, mutates_args=mutates_args, device_types=device_types, schema=schema, eager=True)


@helper
def register_fake_op(name: str, fn: Callable[..., Any] | None = None) -> Any:
    """Register the fake impl of an op that `register_custom_op` defined."""
    if fn is None:
        return functools.partial(register_fake_op, name)
    if enabled():
        adopt(name).register_fake(fn)
    return fn


# A module of the kind that FlashInfer has: made for a dtype on demand, once, with ops that carry its name -------------


@functools.cache
def sampling_module(uri: str) -> Any:
    @register_custom_op(f"examples_flashinfer::{uri}_softmax", mutates_args=("workspace",))
    def softmax(
        workspace: Tensor, logits: Tensor, temperature: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        workspace.zero_()
        if temperature is not None:
            torch._check(temperature.shape == (*logits.shape[:-1], 1), lambda: "a temperature for each row")
            logits = (logits / temperature).to(logits.dtype)
        return logits.softmax(-1)

    @register_fake_op(f"examples_flashinfer::{uri}_softmax")
    def _(
        workspace: Tensor, logits: Tensor, temperature: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        return torch.empty_like(logits, memory_format=torch.contiguous_format)

    return softmax


softmax = sampling_module("f32")


def samples() -> Iterator[tuple[Tensor, ...]]:
    yield torch.ones(4), torch.randn(2, 3)
    yield torch.ones(4), torch.randn(2, 3), torch.full((2, 1), 2.0)


if enabled():
    softmax.register_samples(samples)


def main() -> None:
    workspace = torch.ones(2)
    print(softmax, softmax(workspace, torch.zeros(1, 4)), workspace)


if __name__ == "__main__":
    main()
