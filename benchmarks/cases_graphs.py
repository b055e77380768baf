"""Calls in graphs of inductor.

graph direct        ten calls of an op in one graph
graph, out variant  the same, of an op with an out variant
chain               eight calls of `x * by + y`, each on the last result: `out` is an op with `register_out`, whose
                    results inductor allocates; `functional` is the same op without
chain, memory       the peak of resident memory that the chain adds to that of its process
"""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from cases import Case, Cold, Fn, Statement, each
from cases_calls import LIBRARIES, PLUS, defined, with_out_variant
from torch import Tensor

import customops


def compiled(program: FunctionType) -> Fn:
    """Compile a copy of a function that has its own code object.

    Dynamo keeps the graphs of one code object in one list, which it searches in each call.
    """
    copied = FunctionType(program.__code__.replace(), program.__globals__, closure=program.__closure__)
    return torch.compile(copied, fullgraph=True, dynamic=False)


# Ten calls ------------------------------------------------------------------------------------------------------


def ten_calls(op: Fn) -> Fn:
    """Return a graph with ten calls of an op. Inductor does not fuse them."""

    def ten(x: Tensor, y: Tensor) -> Tensor:
        for _ in range(10):
            x = op(x, y, 2.0)
        return x

    return compiled(ten)


def direct() -> dict[str, Fn]:
    ops = defined(PLUS, "plus_in_a_graph")
    for contender in ("customops", "custom_op"):
        ops[contender].register_fake(lambda x, y, by: torch.empty_like(x))
    LIBRARIES[-1]._register_fake("plus_in_a_graph", lambda x, y, by: torch.empty_like(x))
    return {contender: ten_calls(op) for contender, op in ops.items()}


def by_out_variant() -> dict[str, Fn]:
    """Return the graphs of customops and custom_op: inductor calls the out variant of a bare op wrongly."""
    return {contender: ten_calls(op) for contender, op in with_out_variant().items() if contender != "Library"}


# A chain --------------------------------------------------------------------------------------------------------

#: Elements of the tensors.
SIZES = (4, 1 << 16, 1 << 22, 1 << 24)


@cache
def chain_op(contender: str) -> Fn:
    """Return an op with an out variant, or without one."""

    def axpy(x: Tensor, by: float, y: Tensor) -> Tensor:
        return torch.add(y, x, alpha=by)

    op = customops.custom_op(f"bench_chain::axpy_{contender}", axpy, mutates_args=())
    op.register_fake(lambda x, by, y: torch.empty_like(x))
    if contender == "out":
        op.register_out(lambda x, by, y, *, out: torch.add(y, x, alpha=by, out=out))
    return op


@cache
def chain(contender: str, elements: int) -> Fn:
    """Return a graph with eight calls of an op, for tensors of one size."""
    op = chain_op(contender)

    def program(x: Tensor, y: Tensor) -> Tensor:
        for i in range(8):
            x = op(x, 0.5 + i / 16, y)
        return x

    return compiled(program)


#: Linux resets the peak of a process when "5" is written to this file.
RESET_PEAK = Path("/proc/self/clear_refs")


def resident(name: str) -> float:
    """Return the resident memory of this process in MiB: VmRSS is that of now, VmHWM is the peak."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def print_memory(contender: str, elements: int) -> None:
    """Print the MiB that a compiled chain needs at its peak, beyond its inputs."""
    torch.set_num_threads(1)
    program, given = chain(contender, elements), chain_inputs(elements)
    with torch.no_grad():
        program(**given)
        RESET_PEAK.write_text("5", encoding="ascii")
        before = resident("VmRSS")
        program(**given)
    print(resident("VmHWM") - before)


PRINT_MEMORY = "import sys, cases_graphs; cases_graphs.print_memory(sys.argv[1], int(sys.argv[2]))"


def chain_inputs(elements: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(elements, generator=generator) for name in "xy"}


def chain_case(elements: int) -> Case:
    return Case(
        f"chain, {elements} elements",
        "graphs",
        lambda: {contender: Statement("f(x, y)", chain(contender, elements)) for contender in ("out", "functional")},
        torch.no_grad,
        lambda: chain_inputs(elements),
        rounds=30,
        runs=1,
        unit="ms",
    )


def small_chain(contender: str) -> Tensor:
    with torch.no_grad():
        return chain(contender, 4)(**chain_inputs(4))


def memory_case(elements: int) -> Case:
    return Case(
        f"chain, {elements} elements, memory",
        "graphs",
        lambda: {
            contender: Cold(PRINT_MEMORY, (contender, str(elements)), work=partial(small_chain, contender))
            for contender in ("out", "functional")
        },
        rounds=1,
        unit="MiB",
    )


def cases() -> list[Case]:
    return [
        Case("graph direct", "graphs", each("f(x, y)", direct), torch.no_grad, runs=40),
        Case("graph, out variant", "graphs", each("f(x, y)", by_out_variant), torch.no_grad, runs=40),
        *map(chain_case, SIZES),
        # malloc keeps smaller tensors after their release, so that the resident memory does not show them.
        *(memory_case(elements) for elements in SIZES[-1:] if RESET_PEAK.exists()),
    ]
