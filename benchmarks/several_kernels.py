"""What it costs to choose among several kernels for a device: microseconds of a processor for a call, in turns, the
best of many rounds.

    one        one kernel, without a predicate
    two        a second one before it, whose predicate says yes: the same kernel runs
    two keyed  the same, by a key of the author: ``lambda x: (x.dtype, x.shape[-1])``
    tuned      two, of which one was measured to be the faster for such arguments
    cycle      two, and the shapes change in each call: eight of them, in turn
    asked      two, and the predicate is asked in each call: ``key=None``

Each by a call of the object, of the object with ``bypass=True``, and of ``torch.ops``; and in a graph of inductor, ten
calls of each. `--check` only compares the results.
"""

from __future__ import annotations

import argparse
import time
import timeit
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import customops

Call = Callable[..., Any]


def kernel(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    return x.new_empty(x.shape)


def fits(x: Tensor, w: Tensor, eps: float) -> bool | str:
    return x.shape[-1] <= 4096 or "rows are too long"


KINDS: dict[str, dict[str, Any] | None] = {
    "one": None,
    "two": {},
    "two keyed": {"key": lambda x: (x.dtype, x.shape[-1])},
    "tuned": {},
    "cycle": {},
    "asked": {"key": None},
}


def define(kind: str, *, bypass: bool) -> customops.CustomOpDef[Any, Any]:
    name = f"bench_several::{kind.replace(' ', '_')}{'_bypass' * bypass}"
    tags = torch.Tag.nondeterministic_seeded if kind == "tuned" else ()  # memory as it is: results are not compared
    op = customops.custom_op(name, kernel, mutates_args=(), bypass=bypass, tags=tags)
    op.register_fake(lambda x, w, eps: torch.empty_like(x))
    options = KINDS[kind]
    if options is not None:
        op.register_kernel("cpu", kernel, name="v2", when=fits, priority=1, **options)
    if kind == "tuned":
        op.autotune(shapes(kind))
        assert ", tuned (" in op.explain(*shapes(kind)[0]).steps[-1].what
    return op


def shapes(kind: str) -> list[tuple[Tensor, Tensor]]:
    sizes = range(8, 72, 8) if kind == "cycle" else [64]
    return [(torch.ones(4, n), torch.ones(n)) for n in sizes]


def forms(kind: str) -> dict[str, Call]:
    """What is timed, of one kind; each takes the tensors."""
    op, bypassing = define(kind, bypass=False), define(kind, bypass=True)
    packet: Any = getattr(torch.ops.bench_several, kind.replace(" ", "_"))

    def chain(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(10):
            x = op(x, w)
        return x

    found: dict[str, Call] = {"object": op, "bypass": bypassing, "torch.ops": packet}
    if kind in ("one", "two"):
        found["graph, 10 calls"] = torch.compile(chain, fullgraph=True, dynamic=False)
    return found


def best(call: Call, inputs: list[tuple[Tensor, Tensor]], number: int) -> float:
    """Microseconds of a call."""

    def run() -> None:
        for x, w in inputs:
            call(x, w)

    return min(timeit.repeat(run, number=number, repeat=5, timer=time.process_time)) / number / len(inputs) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only verify the results; time nothing")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    contenders = {(kind, form): call for kind in KINDS for form, call in forms(kind).items()}
    for (kind, _), call in contenders.items():
        for x, w in shapes(kind):
            for _ in range(3):
                assert call(x, w).shape == x.shape
    if options.check:
        return
    times = dict.fromkeys(contenders, float("inf"))
    for _ in range(options.rounds):
        for (kind, form), call in contenders.items():
            times[kind, form] = min(times[kind, form], best(call, shapes(kind), 400 if kind == "cycle" else 3000))
    print(f"{'':<18}{''.join(f'{kind:>11}' for kind in KINDS)}{'two - one':>12}")
    for form in dict.fromkeys(form for _, form in contenders):
        cells = "".join(f"{times[k, form]:>11.2f}" if (k, form) in times else f"{'':>11}" for k in KINDS)
        print(f"{form:<18}{cells}{times['two', form] - times['one', form]:>12.2f}")


if __name__ == "__main__":
    main()
