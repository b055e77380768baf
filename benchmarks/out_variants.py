"""What an out variant is worth in a graph of inductor: time and memory of a chain of calls, with one and without.

The op is ``x * by + y`` in one pass over memory. A chain calls it eight times, each on the last result. Each contender
runs in a process of its own, whose peak of resident memory is read; that of the process before the calls is taken off.

    functional   an op without an out variant: it allocates its result in each call
    out          the same op with `register_out`: inductor allocates
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time

import torch
from torch import Tensor

import customops

CALLS = 8


def define(*, with_out: bool) -> customops.CustomOpDef:
    @customops.custom_op("bench_out::axpy", mutates_args=())
    def axpy(x: Tensor, by: float, y: Tensor) -> Tensor:
        return torch.add(y, x, alpha=by)

    axpy.register_fake(lambda x, by, y: torch.empty_like(x))
    if with_out:
        axpy.register_out(lambda x, by, y, *, out: torch.add(y, x, alpha=by, out=out))
    return axpy


def chain(op: customops.CustomOpDef) -> object:
    def program(x: Tensor, y: Tensor) -> Tensor:
        for i in range(CALLS):
            x = op(x, 0.5 + i / 16, y)
        return x

    return torch.compile(program, fullgraph=True, dynamic=False)


def peak() -> float:
    """MiB that the process had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(*, with_out: bool, elements: int, rounds: int) -> None:
    """Print the median of milliseconds of a chain, the MiB it needs, and the sum of its result."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    op = define(with_out=with_out)
    program = chain(op)
    program(torch.ones(4), torch.ones(4))
    x, y = torch.randn(elements), torch.randn(elements)
    program = chain(op)
    before, times = peak(), []
    with torch.no_grad():
        for i in range(-2, rounds):
            start = time.process_time()
            result = program(x, y)
            if i >= 0:
                times.append(1e3 * (time.process_time() - start))
    print(json.dumps([statistics.median(times), peak() - before, result.double().sum().item()]))


def run(contender: str, elements: int, rounds: int) -> list[float]:
    command = [sys.executable, __file__, "--contender", contender, "-n", str(elements), "--rounds", str(rounds)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", "--elements", type=int, nargs="*", default=[4, 1 << 16, 1 << 22, 1 << 24])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--contender", choices=["functional", "out"], help=argparse.SUPPRESS)
    parser.add_argument("--check", action="store_true", help="only verify that both compute the same; time nothing")
    options = parser.parse_args()
    if options.contender:
        measure(with_out=options.contender == "out", elements=options.elements[0], rounds=options.rounds)
        return
    sizes, rounds = ([4], 1) if options.check else (options.elements, options.rounds)
    print(f"torch {torch.__version__}, Python {platform.python_version()}, one thread, {CALLS} calls, {rounds} rounds")
    print(f"{'elements':>12}{'functional':>22}{'out':>22}{'ratio of times':>18}")
    for elements in sizes:
        functional, out = (run(contender, elements, rounds) for contender in ("functional", "out"))
        assert functional[2] == out[2]
        if options.check:
            print("the results agree")
            return
        cells = "".join(f"{ms:9.3f} ms {mib:6.0f} MiB" for ms, mib, _ in (functional, out))
        print(f"{elements:>12}{cells}{out[0] / functional[0]:18.2f}")


if __name__ == "__main__":
    main()
