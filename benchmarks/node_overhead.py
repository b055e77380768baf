"""What the layout of an op's arguments costs where it is differentiated, next to an op with positional tensors.

Each layout adds two tensors of four elements, as the op `(Tensor x, Tensor y) -> Tensor` does; the one with a list of
results returns two tensors, as its rival does. A ratio is that of two medians: layout to positional.

    list           (Tensor[] xs) -> Tensor
    list and x     (Tensor[] xs, Tensor y) -> Tensor
    optional list  (Tensor x, Tensor[]? ys) -> Tensor
    keyword-only   (Tensor x, *, Tensor y) -> Tensor
    returns list   (Tensor[] xs) -> Tensor[]      next to  (Tensor x, Tensor y) -> (Tensor, Tensor)
    in-place       (Tensor(a!) x, Tensor y) -> Tensor(a!), x being a new tensor in each call (for both)
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
import timeit
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import customops
from customops import Tag

Fn = Callable[..., Any]

#: Ratios that the layouts must not exceed; others are only shown.
LIMITS = {"list": 1.5, "list and x": 1.5, "optional list": 1.5, "keyword-only": 1.5, "returns list": 1.5}


# Ops ------------------------------------------------------------------------------------------------------------


def positional(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def of_list(xs: list[Tensor]) -> Tensor:
    return xs[0] + xs[1]


def of_list_and_tensor(xs: list[Tensor], y: Tensor) -> Tensor:
    return xs[0] + y


def of_optional_list(x: Tensor, ys: list[Tensor] | None) -> Tensor:
    return x if ys is None else x + ys[0]


def of_keyword(x: Tensor, *, y: Tensor) -> Tensor:
    return x + y


def two(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x + y, x - y


def list_of_two(xs: list[Tensor]) -> list[Tensor]:
    return [xs[0] + xs[1], xs[0] - xs[1]]


def add_(x: Tensor, y: Tensor) -> Tensor:
    return x.add_(y)


def define(kernel: Fn, backward: Fn, **options: Any) -> Fn:
    op = customops.custom_op(f"bench_node::{kernel.__name__}", kernel, **{"mutates_args": (), **options})
    op.register_autograd(backward)
    return op


class Case(NamedTuple):
    """A layout's statement, and that of its rival."""

    layout: str
    statement: str
    rival: str


CASES = [
    Case("list", "of_list([x, y])", "positional(x, y)"),
    Case("list and x", "of_list_and_tensor([x], y)", "positional(x, y)"),
    Case("optional list", "of_optional_list(x, [y])", "positional(x, y)"),
    Case("keyword-only", "of_keyword(x, y=y)", "positional(x, y)"),
    Case("returns list", "list_of_two([x, y])[0]", "two(x, y)[0]"),
    Case("in-place", "add_(x.detach().clone(), y)", "positional(x.detach().clone(), y)"),
]


def names() -> dict[str, Any]:
    """What the statements refer to."""
    return {
        "positional": define(positional, lambda ctx, grad: (grad, grad)),
        "of_list": define(of_list, lambda ctx, grad: ([grad, grad],)),
        "of_list_and_tensor": define(of_list_and_tensor, lambda ctx, grad: ([grad], grad)),
        "of_optional_list": define(of_optional_list, lambda ctx, grad: (grad, [grad])),
        "of_keyword": define(of_keyword, lambda ctx, grad: (grad, grad)),
        "two": define(two, lambda ctx, a, b: (a, b)),
        "list_of_two": define(list_of_two, lambda ctx, grads: (grads,)),
        "add_": define(add_, lambda ctx, grad: (grad, grad), mutates_args=("x",), tags=Tag.inplace),
        "x": torch.ones(4, requires_grad=True),
        "y": torch.arange(4.0, requires_grad=True),
        "grad": torch.ones(4),
        "backward": torch.autograd.grad,
    }


def statements(case: Case, *, with_backward: bool) -> list[str]:
    plain = [case.statement, case.rival]
    return [f"backward({statement}, y, grad)" for statement in plain] if with_backward else plain


# Timing ---------------------------------------------------------------------------------------------------------


def medians(statements: list[str], variables: dict[str, Any], rounds: int) -> list[float]:
    """Microseconds of each statement. They take turns."""
    # Processor time: waiting for a core that is lent to somebody else does not count.
    timers = [timeit.Timer(statement, "", time.process_time, variables) for statement in statements]
    microseconds: list[list[float]] = [[] for _ in timers]
    order = range(len(timers))
    for i in range(-3, rounds):  # the first ones warm up
        for k in order if i % 2 else reversed(order):
            measured = 1e6 * timers[k].timeit(100) / 100
            if i >= 0:
                microseconds[k].append(measured)
    return [statistics.median(each) for each in microseconds]


def ratio(case: Case, variables: dict[str, Any], rounds: int, *, with_backward: bool) -> tuple[float, float, float]:
    """Microseconds of the layout, of its rival, and their ratio."""
    ours, rival = medians(statements(case, with_backward=with_backward), variables, rounds)
    return ours, rival, ours / rival


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only verify the results of the layouts; time nothing")
    parser.add_argument("--limits", action="store_true", help="fail where a ratio is over its limit")
    parser.add_argument("--rounds", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(1)

    variables = names()
    for case in CASES:
        for with_backward in (False, True):
            ours, rival = (eval(each, variables) for each in statements(case, with_backward=with_backward))
            torch.testing.assert_close(ours, rival, rtol=0, atol=0)
    if options.check:
        print(f"{len(CASES)} layouts: the results agree")
        return

    print(f"torch {torch.__version__}, Python {platform.python_version()}, one thread, {options.rounds} rounds")
    print(f"{'us: layout, positional, ratio':30}{'forward':>24}{'forward and backward':>26}")
    too_slow = []
    for case in CASES:
        both = [ratio(case, variables, options.rounds, with_backward=each) for each in (False, True)]
        print(f"{case.layout:30}" + "".join(f"{'':4}{ours:7.2f}{rival:7.2f}{r:6.2f}" for ours, rival, r in both))
        too_slow += [case.layout for *_, r in both if r > LIMITS.get(case.layout, float("inf"))]
    if options.limits and too_slow:
        raise SystemExit(f"over the limit: {', '.join(dict.fromkeys(too_slow))}")


if __name__ == "__main__":
    main()
