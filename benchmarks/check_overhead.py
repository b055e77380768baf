"""What checking costs: `opcheck` against torch's on the same op and input, and `customops.check` by effort.

    python benchmarks/check_overhead.py
    python benchmarks/check_overhead.py --check     # only that everything passes

Each figure is the median of several runs after a first one, which loads what checks load late.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import customops
from customops import custom_op


@custom_op("check_overhead::sine", mutates_args=())
def sine(x: Tensor) -> Tensor:
    return x.sin()


@sine.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, dtype=x.dtype if x.is_floating_point() or x.is_complex() else torch.get_default_dtype())


def keep_input(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def sine_backward(ctx: Any, grad: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    return grad * x.cos().conj()


sine.register_autograd(sine_backward, setup_context=keep_input)


@custom_op("check_overhead::product", mutates_args=())
def product(x: Tensor, y: Tensor) -> Tensor:
    return x @ y


@product.register_fake
def _(x: Tensor, y: Tensor) -> Tensor:
    return torch.matmul(x, y)


@custom_op("check_overhead::add_", mutates_args={"x"})
def add_(x: Tensor, y: Tensor) -> None:
    x.add_(y)


OPS: list[tuple[Any, tuple[Any, ...]]] = [
    (sine, (torch.randn(3, 4, requires_grad=True),)),
    (product, (torch.randn(3, 4), torch.randn(4, 5))),
    (add_, (torch.randn(3, 4), torch.randn(3, 4))),
]


def seconds(run: Callable[[], Any], repeats: int) -> float:
    """The median time of a run, after one that is not counted."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()):
            run()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--check", action="store_true", help="measure nothing")
    options = parser.parse_args()
    if options.check:
        for op, args in OPS:
            customops.opcheck(op, args)
            customops.check(op, [args], effort="quick").raise_on_failure()
        print("the ops of benchmarks/check_overhead.py pass")
        return 0
    print("seconds            torch's opcheck   opcheck   ratio   check: quick   normal")
    for op, args in OPS:
        torchs = seconds(lambda op=op, args=args: torch.library.opcheck(op._opoverload, args), options.repeats)
        ours = seconds(lambda op=op, args=args: customops.opcheck(op, args), options.repeats)
        efforts = [
            seconds(lambda op=op, args=args, e=e: customops.check(op, [args], effort=e), options.repeats)
            for e in ("quick", "normal")
        ]
        name = op._qualname.partition("::")[2]
        print(
            f"{name:<18} {torchs:15.3f} {ours:9.3f} {ours / torchs:7.2f} {efforts[0]:14.2f} {efforts[1]:8.2f}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
