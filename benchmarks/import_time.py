"""Print what `import torch` costs, what `import customops` adds, and what a module with many ops costs on top.

Each in fresh interpreters. An op of the module has two tensors, a number with a default, and a fake impl; the same ones
are defined with `torch.library.custom_op`, and by hand in a `Library` of each op. Lazy ones are defined when they
are used; the functions alone are no ops. What an op holds is the memory of its Python objects, by `tracemalloc`; the
dispatcher's own comes on top, and is the same for all.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys

#: Torch leaves so many objects that the next large import, whatever it is, sets off a collection of all of them.
MEASURE = """
import gc, json, time
start = time.perf_counter()
import torch
of_torch = time.perf_counter() - start
gc.collect()
start = time.perf_counter()
import customops
print(json.dumps([1e3 * of_torch, 1e3 * (time.perf_counter() - start)]))
"""


#: How a module defines an op, by the way that it goes.
WAYS = {
    "customops": """
@customops.custom_op("bench_import::op{i}", mutates_args=())
def op{i}(x: Tensor, y: Tensor, by: float = 2.0) -> Tensor:
    return x + y
op{i}.register_fake(lambda x, y, by: torch.empty_like(x))
""",
    "lazy": """
@customops.custom_op("bench_import::op{i}", mutates_args=(), lazy=True)
def op{i}(x: Tensor, y: Tensor, by: float = 2.0) -> Tensor:
    return x + y
op{i}.register_fake(lambda x, y, by: torch.empty_like(x))
""",
    "functions": """
def op{i}(x: Tensor, y: Tensor, by: float = 2.0) -> Tensor:
    return x + y
fake{i} = lambda x, y, by: torch.empty_like(x)
""",
    "custom_op": """
@torch.library.custom_op("bench_import::op{i}", mutates_args=())
def op{i}(x: Tensor, y: Tensor, by: float = 2.0) -> Tensor:
    return x + y
op{i}.register_fake(lambda x, y, by: torch.empty_like(x))
""",
    "Library": """
def op{i}(x, y, by=2.0):
    return x + y
libraries.append(torch.library.Library("bench_import", "FRAGMENT"))
libraries[-1].define("op{i}(Tensor x, Tensor y, float by=2.0) -> Tensor")
libraries[-1].impl("op{i}", op{i}, "CompositeExplicitAutograd")
torch.library.register_fake("bench_import::op{i}", lambda x, y, by: torch.empty_like(x), lib=libraries[-1])
""",
}

MEASURE_OPS = """
import gc, sys, time, tracemalloc
import torch, customops
from torch import Tensor
libraries = []
code = compile(sys.stdin.read(), "ops", "exec")
if sys.argv[1] == "time":
    start = time.process_time()
    exec(code)
    print(1e3 * (time.process_time() - start))
else:
    tracemalloc.start()
    exec(code)
    gc.collect()
    print(tracemalloc.get_traced_memory()[0])
"""


def measure_ops(way: str, count: int, what: str = "time") -> float:
    """Milliseconds for a module with so many ops, compiled before; or the bytes that they hold."""
    source = "".join(WAYS[way].format(i=i) for i in range(count))
    command = [sys.executable, "-c", MEASURE_OPS, what]
    return float(subprocess.run(command, check=True, capture_output=True, text=True, input=source).stdout)


def measure_once() -> tuple[float, float]:
    """Return the milliseconds of `import torch` and of `import customops` after it."""
    run = subprocess.run([sys.executable, "-c", MEASURE], check=True, capture_output=True, text=True)
    of_torch, of_customops = json.loads(run.stdout)
    return of_torch, of_customops


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", "--repeats", type=int, default=9, help="how many interpreters")
    parser.add_argument("--ops", type=int, default=500, help="how many ops the module has; 0 leaves it out")
    options = parser.parse_args()
    repeats = options.repeats

    measure_once()  # writes the .pyc files and warms the disk cache
    runs = [measure_once() for _ in range(repeats)]
    of_torch, of_customops = (statistics.median(column) for column in zip(*runs, strict=True))
    print(f"import torch      {of_torch:8.1f} ms")
    print(f"import customops +{of_customops:8.1f} ms   (medians of {repeats})")
    for way in WAYS if options.ops else ():
        milliseconds = statistics.median(measure_ops(way, options.ops) for _ in range(repeats))
        held = measure_ops(way, options.ops, "memory") / options.ops / 1024
        print(f"{options.ops} ops, {way:10}{milliseconds:8.1f} ms{held:8.1f} KiB an op")


if __name__ == "__main__":
    main()
