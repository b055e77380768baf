"""The parts of a call with a gradient: `x * y`, which saves both, forward and with its backward.

Function    torch.autograd.Function.apply, without an op
node        the C++ part of `apply`, without its Python part, which looks for transforms
op          the function of an op at the Autograd key applies that node
state       the forward of the node looks whether autocast is on
result      ... and checks the result of the kernel
compared    ... and keeps shapes, dtypes and devices, with which the backward compares the gradients
customops   customops.custom_op, which does all of this and looks for tensors kept past save_for_backward
never       the same with check="never"
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from cases import Case, Fn, each
from cases_calls import LIBRARIES, NAMES
from torch import Tensor
from torch.library import Library

import customops

NODE = """\
class Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        {state}result = kernel(x, y)
        {result}ctx.save_for_backward(x, y)
        {keep}return result

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        of_x, of_y = grad * y, grad * x
        {compare}return of_x, of_y

apply = super(torch.autograd.Function, Node).apply

def f(keyset, x, y):
    if is_grad_enabled() and (x.requires_grad or y.requires_grad):
        return apply(x, y)
    raise NotImplementedError
"""
#: Step -> the parts that it adds to the node of the step before.
STEPS: dict[str, dict[str, str]] = {
    "op": {},
    "state": {"state": "if is_autocast_on(): return\n        "},
    "result": {
        "result": "s = result.untyped_storage()\n        if not isinstance(result, Tensor) or not (s.resizable() and "
        "uses(s._cdata) == 2) or result is x or result is y: return\n        "
    },
    "compared": {
        "keep": "ctx.likes = (x.shape, x.dtype, x.device), (y.shape, y.dtype, y.device)\n        ",
        "compare": "if not isinstance(of_x, Tensor) or not isinstance(of_y, Tensor) or ctx.likes != ("
        "(of_x.shape, of_x.dtype, of_x.device), (of_y.shape, of_y.dtype, of_y.device)): return\n        ",
    },
}


def multiply(x: Tensor, y: Tensor) -> Tensor:
    return x * y


def multiply_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, y = ctx.saved_tensors
    return grad * y, grad * x


def save_both(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def define_ours(check: str) -> Fn:
    op = customops.custom_op(f"bench_node::multiply_{check}", multiply, mutates_args=(), check=check)
    op.register_autograd(multiply_backward, setup_context=save_both)
    return op


@cache
def steps() -> dict[str, Fn]:
    """Return a function of two tensors for each step."""
    found = {"customops": define_ours("always"), "never": define_ours("never")}
    parts = dict.fromkeys(("state", "result", "keep", "compare"), "")
    for name, added in STEPS.items():
        parts |= added
        made: dict[str, Any] = {
            "torch": torch,
            "kernel": multiply,
            "Tensor": Tensor,
            "is_grad_enabled": torch.is_grad_enabled,
            "is_autocast_on": torch._C._is_any_autocast_enabled,
            "uses": torch._C._storage_Use_Count,
        }
        exec(NODE.format_map(parts), made)
        if name == "op":
            found |= {"Function": made["Node"].apply, "node": made["apply"]}
        op, library = next(NAMES), Library("bench_parts", "FRAGMENT")
        library.define(f"{op}(Tensor x, Tensor y) -> Tensor")
        library.impl(op, made["f"], "Autograd", with_keyset=True)
        LIBRARIES.append(library)
        found[name] = getattr(torch.ops.bench_parts, op).default
    return found


def inputs() -> dict[str, Any]:
    x, y = torch.arange(1.0, 5.0, requires_grad=True), torch.full((4,), 0.5, requires_grad=True)
    return {"x": x, "y": y, "grad_out": torch.ones(4), "grad": torch.autograd.grad}


def cases() -> list[Case]:
    statements = {"x * y, forward": "f(x, y)", "x * y, forward and backward": "grad(f(x, y), (x, y), grad_out)"}
    return [Case(name, "node", each(code, steps), inputs=inputs, runs=100) for name, code in statements.items()]
