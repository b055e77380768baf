"""Where the time of a call goes: what a bare op costs, and what each thing adds that customops does around a kernel.

Each step is an op that is defined with `torch.library.Library` and does what the step before it does, and one thing
more. The last one is customops itself. Two forms are taken apart: an op that writes an argument and returns nothing,
and one that returns a tensor.

    kernel      the Python function, called without an op
    op          a bare op: the dispatcher calls the function
    keys        the function is at the Autograd key and receives the dispatch key set, as a kernel there has to
    fast path   it looks up what is to be called for this key set
    gradient    it looks whether a gradient is needed
    versions    it counts a write to the argument
    state       it switches autocast and gradient mode off around the kernel, where they are on
    result      it checks what the kernel returned
    customops   customops.custom_op, which does all of this
    raw         the same with kernel_calls_torch=False, without the step "state"

A call with a gradient is taken apart, too: `x * y`, of which both are saved, forward alone and with its backward.

    Function    torch.autograd.Function.apply, without an op
    node        its C++ part alone: the Python method `apply` looks for transforms first
    op          a function at the Autograd key applies that node, whose forward calls the kernel
    state       its forward asks for autocast
    result      ... and checks what the kernel returned
    compared    ... and keeps shapes, dtypes and devices, and the backward compares gradients with them
    customops   customops.custom_op, which does all of this, and looks for tensors that are kept past save_for_backward
    never       the same with check="never"

``make bench`` compares the whole with other ways to define an op; see call_overhead.py.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import platform
from collections.abc import Callable
from typing import Any

import torch
from call_overhead import LIBRARIES, Times, take_turns, timeit
from torch import Tensor
from torch.library import Library

import customops

CONTEXTS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "gradient mode on": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}
NAMES = map("part_{}".format, itertools.count())
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
#: Step -> the lines that it adds; each function returns `result`.
STEPS = {
    "fast path": "    if paths.get(keyset.raw_repr()) is not None: return\n",
    "gradient": "    if is_grad_enabled() and (x.requires_grad or y.requires_grad): return\n",
    "versions": "    increment_version((x,))\n",
}
RESULTS = {
    "write": "    if result is not None: return\n",
    "functional": """\
    if not isinstance(result, Tensor): return
    s = result.untyped_storage()
    if not (s.resizable() and uses(s._cdata) == 2) or result is x or result is y: return
""",
}


def write(x: Tensor, y: Tensor) -> None: ...


def functional(x: Tensor, y: Tensor) -> Tensor:
    return torch.empty_like(x)


KERNELS = {
    "write": (write, "(Tensor(a!) x, Tensor y) -> ()"),
    "functional": (functional, "(Tensor x, Tensor y) -> Tensor"),
}


def step(lines: str, kernel: Any) -> Any:
    variables = {
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


def defined(schema: str, fn: Any, key: str) -> Any:
    name, library = next(NAMES), Library("bench_parts", "FRAGMENT")
    library.define(name + schema)
    library.impl(name, fn, key, with_keyset=key == "Autograd")
    if key == "Autograd":  # inference mode leaves it out
        library.impl(name, fn, "ADInplaceOrView", with_keyset=True)
        library.impl(name, lambda x, y: fn(torch._C._dispatch_keys(x), x, y), "CompositeExplicitAutograd")
    LIBRARIES.append(library)
    return getattr(torch.ops.bench_parts, name).default


def contenders(form: str) -> dict[str, Any]:
    """Step -> op; each does what the one before it does, and more."""
    kernel, schema = KERNELS[form]
    ops = {"kernel": kernel, "op": defined(schema, kernel, "CompositeExplicitAutograd")}
    call, before = "    result = kernel(x, y)\n", ""
    ops["keys"] = defined(schema, step(call, kernel), "Autograd")
    for name, lines in STEPS.items():
        if name != "versions" or form == "write":
            before += lines
            ops[name] = defined(schema, step(before + call, kernel), "Autograd")
    ops["state"] = defined(schema, step(before + STATE, kernel), "Autograd")
    ops["result"] = defined(schema, step(before + STATE + RESULTS[form], kernel), "Autograd")
    name, mutated = f"bench_parts_ours::{form}", ("x",) if form == "write" else ()
    ops["customops"] = customops.custom_op(name, kernel, mutates_args=mutated)
    ops["raw"] = customops.custom_op(name + "_raw", kernel, mutates_args=mutated, kernel_calls_torch=False)
    return ops


# With a gradient ------------------------------------------------------------------------------------------------------

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
#: Step -> what it adds to the node; each step has what those before it have.
NODE_STEPS = {
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


def multiply_save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def with_gradient() -> dict[str, Any]:
    """Step -> function of two tensors that require grad."""
    variables = {
        "torch": torch,
        "kernel": multiply,
        "Tensor": Tensor,
        "is_grad_enabled": torch.is_grad_enabled,
        "is_autocast_on": torch._C._is_any_autocast_enabled,
        "uses": torch._C._storage_Use_Count,
    }
    parts, found = dict.fromkeys(("state", "result", "keep", "compare"), ""), {}
    for name, lines in NODE_STEPS.items():
        parts |= lines
        made = dict(variables)
        exec(NODE.format_map(parts), made)
        if name == "op":
            found |= {"Function": made["Node"].apply, "node": made["apply"]}
        op, library = next(NAMES), Library("bench_parts", "FRAGMENT")
        library.define(op + "(Tensor x, Tensor y) -> Tensor")
        library.impl(op, made["f"], "Autograd", with_keyset=True)
        LIBRARIES.append(library)
        found[name] = getattr(torch.ops.bench_parts, op).default
    for name, check in (("customops", "always"), ("never", "never")):
        op = customops.custom_op(f"bench_parts_ours::multiply_{check}", multiply, mutates_args=(), check=check)
        op.register_autograd(multiply_backward, setup_context=multiply_save)
        found[name] = op
    return found


def times_with_gradient(rounds: int) -> list[Times]:
    x, y = torch.rand(4, requires_grad=True), torch.rand(4, requires_grad=True)
    variables, ops, columns = {"x": x, "y": y, "g": torch.ones(4), "grad": torch.autograd.grad}, with_gradient(), []
    for op in ops.values():
        torch.testing.assert_close(torch.autograd.grad(op(x, y).sum(), (x, y)), (y, x))
    for title, statement in (("forward", "f(x, y)"), ("forward and backward", "grad(f(x, y), (x, y), g)")):
        timers = {name: timeit.Timer(statement, globals={"f": op, **variables}) for name, op in ops.items()}
        found = take_turns(list(ops), rounds, lambda name, t=timers: t[name].timeit(100) / 100) if rounds else {}
        columns.append(Times(title, found))
    return columns


def table(title: str, columns: list[Times], base: str) -> None:
    head = "".join(f"{each.case:>24}" for each in columns)
    print(f"\n{title}: us, and what it is of `{base}`\n\n{'':16}{head}")
    for name in columns[0].rounds:
        cells = (
            f"{t.median(name):10.2f} ±{t.spread(name):3.0f}%{t.median(name) / t.median(base):8.2f}" for t in columns
        )
        print(f"{name:16}" + "".join(cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only call every step; time nothing")
    parser.add_argument("--rounds", type=int, default=300)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, Python {platform.python_version()}, one thread")
    for form in KERNELS:
        ops, columns = contenders(form), {}
        for place, context in CONTEXTS.items():
            x, y = torch.ones(4), torch.ones(4)
            with context():
                for op in ops.values():
                    assert (op(x, y) is None) == (form == "write")
                if not options.check:
                    timers = {
                        name: timeit.Timer("f(x, y)", globals={"f": op, "x": x, "y": y}) for name, op in ops.items()
                    }
                    columns[place] = Times(
                        place, take_turns(list(ops), options.rounds, lambda name, t=timers: t[name].timeit(200) / 200)
                    )
        if not options.check:
            table(form, list(columns.values()), "op")
    times = times_with_gradient(0 if options.check else options.rounds)
    if not options.check:
        table("with a gradient", times, "op")


if __name__ == "__main__":
    main()
