"""Ops with kernels in Triton and TVM-FFI. The cases of a language need its package.

For Triton, `customops` and `custom_op` stand for the `triton_op` of each. Tensors are on the CPU, so the kernel runs in
Triton's interpreter; without a launch, the time is that of the way to the kernel. For TVM-FFI, `customops` calls the
wrapped function and `Function` the function itself: each alone, and as the kernel of an op with bypass=True.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from cases import Case, Fn, each
from cases_calls import LIBRARIES, NAMES, Kernel, define_ours
from torch import Tensor
from torch.library import Library

import customops

os.environ.setdefault("TRITON_INTERPRET", "1")  # before another case imports triton


def adding(wrap: Callable[[Any], Any], programs: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function of an op that launches so many programs of the kernel."""
    from triton_kernels import add_kernel as kernel  # noqa: PLC0415 (Triton may be absent)

    def add(x: Tensor, y: Tensor) -> Tensor:
        out = torch.empty_like(x)
        if programs:
            wrap(kernel)[(programs,)](x, y, out, 4, BLOCK=4)
        else:
            wrap(kernel)
            out.fill_(0)
        return out

    return add


def triton_ops(programs: int) -> dict[str, Fn]:
    name = f"add_{programs}"
    ours = adding(customops.wrap_triton, programs)
    theirs = adding(torch.library.wrap_triton, programs)
    library = Library("bench_triton_library", "FRAGMENT")
    LIBRARIES.append(library)
    library.define(f"{name}(Tensor x, Tensor y) -> Tensor")
    library.impl(name, adding(lambda kernel: kernel, programs), "CompositeExplicitAutograd")
    return {
        "customops": customops.triton_op(f"bench_triton::{name}", ours, mutates_args=()),
        "custom_op": torch.library.triton_op(f"bench_triton_torch::{name}", theirs, mutates_args=()),
        "Library": getattr(torch.ops.bench_triton_library, name).default,
    }


@cache
def tvm_functions() -> dict[str, Fn]:
    import tvm_ffi  # noqa: PLC0415 (it may be absent)

    function = tvm_ffi.get_global_func("testing.nop")
    return {"customops": customops.languages.from_tvm_ffi(function), "Function": function}


def calling(fn: Fn) -> Kernel:
    def called(x: Tensor, y: Tensor, out: Tensor) -> None:
        fn(x, y, out)

    return Kernel(called, "(Tensor x, Tensor y, Tensor(a!) out) -> ()", ("out",))


def tvm_ops() -> dict[str, Fn]:
    return {name: define_ours(next(NAMES), calling(fn), bypass=True) for name, fn in tvm_functions().items()}


def case(name: str, code: str, functions: Callable[[], dict[str, Fn]], runs: int = 200) -> Case:
    return Case(name, "languages", each(code, functions), torch.no_grad, runs=runs)


def cases() -> list[Case]:
    found = []
    if importlib.util.find_spec("triton") is not None:
        found += [
            case("Triton, interpreted", "f(x, y)", lambda: triton_ops(1), runs=2),
            case("Triton, no launch", "f(x, y)", lambda: triton_ops(0)),
        ]
    if importlib.util.find_spec("tvm_ffi") is not None:
        found += [
            case("from_tvm_ffi", "f(x, y, out)", tvm_functions),
            case("from_tvm_ffi, in an op", "f(x, y, out)", tvm_ops),
        ]
    return found
