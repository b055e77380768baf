"""The parts of a call without a gradient: what each step of `customops` adds to a bare op.

Each step is a bare op whose function does the work of the step before it, and one thing more. One kernel writes an
argument and returns nothing, the other returns a tensor.

    kernel      the Python function, called without an op
    op          a bare op: the dispatcher calls the function
    keys        the function is at the Autograd key and receives the dispatch key set
    fast path   looks up the kernel for this key set
    gradient    looks whether a gradient is needed
    versions    increases the version counter of the written argument
    state       looks whether autocast is on, and disables gradient mode for the kernel
    result      checks the result of the kernel
    customops   customops.custom_op, which does all of this
    raw         the same with kernel_calls_torch=False, without the step `state`
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from cases import Case, Fn, alike, each
from cases_calls import LIBRARIES, NAMES
from torch import Tensor
from torch.library import Library

import customops

MODES = {"gradient mode on": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


def write(x: Tensor, y: Tensor) -> None: ...


def functional(x: Tensor, y: Tensor) -> Tensor:
    return torch.empty_like(x)


KERNELS: dict[str, tuple[Fn, str]] = {
    "write": (write, "(Tensor(a!) x, Tensor y) -> ()"),
    "functional": (functional, "(Tensor x, Tensor y) -> Tensor"),
}

CALL = "    result = kernel(x, y)\n"
#: Step before the call of the kernel -> the lines that it adds.
BEFORE = {
    "keys": "",
    "fast path": "    if paths.get(keyset.raw_repr()) is not None: return\n",
    "gradient": "    if is_grad_enabled() and (x.requires_grad or y.requires_grad): return\n",
    "versions": "    increment_version((x,))\n",
}
STATE = """\
    if is_autocast_on():
        raise NotImplementedError
    if is_grad_enabled():
        set_grad_enabled(False)
        try:
            result = kernel(x, y)
        finally:
            set_grad_enabled(True)
    else:
        result = kernel(x, y)
"""
RESULTS = {
    "write": "    if result is not None: return\n",
    "functional": """\
    if not isinstance(result, Tensor): return
    s = result.untyped_storage()
    if not (s.resizable() and uses(s._cdata) == 2) or result is x or result is y: return
""",
}


def step(lines: str, kernel: Fn) -> Fn:
    """Return the function of a step, which consists of these lines."""
    variables: dict[str, Any] = {
        "kernel": kernel,
        "paths": {},
        "Tensor": Tensor,
        "is_grad_enabled": torch.is_grad_enabled,
        "set_grad_enabled": torch._C._set_grad_enabled,
        "is_autocast_on": torch._C._is_any_autocast_enabled,
        "increment_version": torch.autograd.graph.increment_version,
        "uses": torch._C._storage_Use_Count,
    }
    exec(f"def f(keyset, x, y):\n{lines}    return result\n", variables)
    return variables["f"]


def bare_op(schema: str, fn: Fn, key: str) -> Fn:
    name, library = next(NAMES), Library("bench_parts", "FRAGMENT")
    library.define(name + schema)
    library.impl(name, fn, key, with_keyset=key == "Autograd")
    if key == "Autograd":  # inference mode excludes this key
        library.impl(name, fn, "ADInplaceOrView", with_keyset=True)
        library.impl(name, lambda x, y: fn(torch._C._dispatch_keys(x), x, y), "CompositeExplicitAutograd")
    LIBRARIES.append(library)
    return getattr(torch.ops.bench_parts, name).default


@cache
def steps(form: str) -> dict[str, Fn]:
    """Return the function of each step for one of the kernels."""
    kernel, schema = KERNELS[form]
    bodies, before = {}, ""
    for name, lines in BEFORE.items():
        if name != "versions" or form == "write":
            before += lines
            bodies[name] = before + CALL
    bodies["state"] = before + STATE
    bodies["result"] = before + STATE + RESULTS[form]
    name, mutated = f"bench_parts_ours::{form}", ("x",) if form == "write" else ()
    return {
        "customops": customops.custom_op(name, kernel, mutates_args=mutated),
        "raw": customops.custom_op(f"{name}_raw", kernel, mutates_args=mutated, kernel_calls_torch=False),
        "kernel": kernel,
        "op": bare_op(schema, kernel, "CompositeExplicitAutograd"),
        **{name: bare_op(schema, step(body, kernel), "Autograd") for name, body in bodies.items()},
    }


def cases() -> list[Case]:
    return [
        Case(
            f"{form}, {mode}",
            "parts",
            each("f(x, y)", lambda form=form: steps(form)),
            context,
            agree=alike,
        )
        for form in KERNELS
        for mode, context in MODES.items()
    ]
