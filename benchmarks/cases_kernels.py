"""The choice among several kernels for a device.

    one        one kernel, without a predicate
    two        a second kernel of higher priority, whose predicate accepts the arguments
    two keyed  the same, with a key of the author: `lambda x: (x.dtype, x.shape[-1])`
    tuned      two kernels, one of which was measured to be faster for these arguments
    cycle      two kernels and eight shapes in turn
    asked      two kernels, and the predicate runs in each call: `key=None`

Each is called through the object, the object of an op with bypass=True, and `torch.ops`; `one` and `two` also in a
graph of inductor that has ten calls.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from cases import Case, Contenders, Fn, Statement
from cases_graphs import compiled
from torch import Tensor

import customops

#: Contender -> options of its second kernel.
KINDS: dict[str, dict[str, Any] | None] = {
    "one": None,
    "two": {},
    "two keyed": {"key": lambda x: (x.dtype, x.shape[-1])},
    "tuned": {},
    "cycle": {},
    "asked": {"key": None},
}


def kernel(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    return x.new_empty(x.shape)


def fits(x: Tensor, w: Tensor, eps: float) -> bool | str:
    return x.shape[-1] <= 4096 or "rows are too long"


def name_of(kind: str, bypass: bool) -> str:
    return f"{kind.replace(' ', '_')}{'_bypass' * bypass}"


def arguments(kind: str) -> list[tuple[Tensor, Tensor]]:
    """Return the arguments of eight calls."""
    sizes = range(8, 72, 8) if kind == "cycle" else [64] * 8
    return [(torch.ones(4, n), torch.ones(n)) for n in sizes]


@cache
def define(kind: str, bypass: bool) -> Any:
    # The results are uninitialized memory, which tuning would otherwise compare.
    tags = torch.Tag.nondeterministic_seeded if kind == "tuned" else ()
    name = f"bench_kernels::{name_of(kind, bypass)}"
    op = customops.custom_op(name, kernel, mutates_args=(), bypass=bypass, tags=tags)
    op.register_fake(lambda x, w, eps: torch.empty_like(x))
    options = KINDS[kind]
    if options is not None:
        op.register_kernel("cpu", kernel, name="v2", when=fits, priority=1, **options)
    if kind == "tuned":
        customops.tuning.autotune(op, arguments(kind)[:1])
        assert ", tuned (" in op.explain(*arguments(kind)[0]).steps[-1].what
    return op


def by_object(kind: str) -> Fn:
    return define(kind, False)


def by_bypass(kind: str) -> Fn:
    return define(kind, True)


def by_torch_ops(kind: str) -> Fn:
    define(kind, False)
    return getattr(torch.ops.bench_kernels, name_of(kind, False))


def in_graph(kind: str) -> Fn:
    op = define(kind, False)

    def chain(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(10):
            x = op(x, w)
        return x

    return compiled(chain)


def contenders(form: Fn, kinds: list[str]) -> Contenders:
    """Return a loop over the same shapes for each kind, and over varying shapes for `cycle`."""

    def code(kind: str) -> str:
        return f"[f(x, w) for x, w in {'varying' if kind == 'cycle' else 'same'}]"

    return {kind: Statement(code(kind), form(kind)) for kind in kinds}


def inputs() -> dict[str, Any]:
    return {"same": arguments("one"), "varying": arguments("cycle")}


def eight_tensors(found: Any, expected: Any) -> None:
    """Raise AssertionError unless two outcomes are those of eight calls. The shapes depend on the contender."""
    for results, _ in (found, expected):
        assert [type(result) for result in results] == [Tensor] * 8


def cases() -> list[Case]:
    forms: dict[str, tuple[Fn, list[str]]] = {
        "object": (by_object, [*KINDS]),
        "bypass": (by_bypass, [*KINDS]),
        "torch.ops": (by_torch_ops, [*KINDS]),
        "graph, 10 calls": (in_graph, ["one", "two"]),
    }
    return [
        Case(
            name,
            "kernels",
            lambda form=form, kinds=kinds: contenders(form, kinds),
            inputs=inputs,
            agree=eight_tensors,
            rounds=100,
            runs=50,
            calls=8,
        )
        for name, (form, kinds) in forms.items()
    ]
