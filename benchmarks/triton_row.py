"""An op of a Triton kernel for `call_overhead`, by each contender. On CPU tensors, under Triton's interpreter."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import Library

import customops

LIBRARY = Library("bench_triton_library", "FRAGMENT")


@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n) + tl.load(y + i, mask=i < n), mask=i < n)


def adding(wrap: Callable[[Any], Any], programs: int) -> Callable[[Tensor, Tensor], Tensor]:
    """The function of the op. Without a program, nothing but the way to the kernel is left."""

    def add(x: Tensor, y: Tensor) -> Tensor:
        out = torch.empty_like(x)
        if programs:
            wrap(add_kernel)[(programs,)](x, y, out, 4, BLOCK=4)
        else:
            wrap(add_kernel)
            out.fill_(0)
        return out

    return add


def contenders(programs: int) -> dict[str, Callable[..., Any]]:
    name = f"add_{programs}"
    ours = customops.triton_op(f"bench_triton::{name}", adding(customops.wrap_triton, programs), mutates_args=())
    theirs = torch.library.triton_op(
        f"bench_triton_torch::{name}", adding(torch.library.wrap_triton, programs), mutates_args=()
    )
    LIBRARY.define(f"{name}(Tensor x, Tensor y) -> Tensor")
    LIBRARY.impl(name, adding(lambda kernel: kernel, programs), "CompositeExplicitAutograd")
    bare = getattr(torch.ops.bench_triton_library, name).default
    return {"customops": ours, "custom_op": theirs, "Library": bare}
