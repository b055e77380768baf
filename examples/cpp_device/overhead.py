"""What a call costs on the device, next to the CPU: `python overhead.py` prints it, `measure()` returns it."""

from __future__ import annotations

import statistics
import sys
import timeit
from collections.abc import Callable

import torch
import toy

#: Of four elements, so that what is measured is the way to the kernel.
STATEMENTS: dict[str, str] = {
    "empty": "torch.empty(4, device=device)",
    "add": "x + y",
    "sub": "x - y",
    "view": "x.view(2, 2)",
    "copy": "x.copy_(y)",
}
NOTES = {
    "empty": "an allocation",
    "add": "a kernel of our own",
    "sub": "by the fallback: two copies to the CPU, one back",
    "view": "the CPU's kernel on our tensor",
    "copy": "all copies end in one kernel",
}


def measure(device: str, statement: str, *, number: int = 2000, repeat: int = 15) -> float:
    """Microseconds of one call, the median of several runs."""
    names = {"torch": torch, "device": device, "x": torch.ones(4, device=device), "y": torch.ones(4, device=device)}
    timer = timeit.Timer(statement, globals=names)
    timer.timeit(number)
    return statistics.median(timer.repeat(repeat, number)) / number * 1e6


def table(measure: Callable[[str, str], float] = measure) -> dict[str, tuple[float, float]]:
    """Name to microseconds on the CPU and on the device, which has to be registered."""
    return {name: (measure("cpu", text), measure("toy", text)) for name, text in STATEMENTS.items()}


def main() -> None:
    torch.set_num_threads(1)
    toy.register(*sys.argv[1:])
    print(f"{'us':6} {'cpu':>6} {'toy':>6} {'ratio':>6}")
    for name, (cpu, ours) in table().items():
        print(f"{name:6} {cpu:6.2f} {ours:6.2f} {ours / cpu:6.1f}  {NOTES[name]}")


if __name__ == "__main__":
    main()
