"""What a call costs on the device, next to the CPU: `python overhead.py` prints it, `measure()` returns it."""

from __future__ import annotations

import sys
import timeit
from typing import NamedTuple

import torch
import toy


class Cost(NamedTuple):
    """Microseconds of a call."""

    cpu: float
    toy: float


#: Statements, and what runs on the device. Tensors have four elements: what is measured is the way to the kernel.
STATEMENTS = {
    "empty": ("torch.empty(4, device=device)", "an allocation"),
    "view": ("x.view(2, 2)", "the kernel that the CPU has"),
    "add": ("x + y", "a kernel of the device"),
    "copy": ("x.copy_(y)", "a kernel of the device"),
    "sub": ("x - y", "the fallback: two copies to the CPU, one back"),
    "mul": ("x * y", "the fallback, in the form with out="),
}


def measure(statement: str, *, number: int = 500, repeat: int = 41) -> Cost:
    """The best of several runs, because what disturbs only adds. The devices take turns, to be disturbed alike."""
    timers = []
    for device in ("cpu", "toy"):
        x, y = torch.ones(2, 4, device=device)
        timers.append(timeit.Timer(statement, globals={"torch": torch, "device": device, "x": x, "y": y}))
    runs = [[timer.timeit(number) for timer in timers] for _ in range(repeat)]
    return Cost(*(min(times) / number * 1e6 for times in zip(*runs, strict=True)))


def main() -> None:
    torch.set_num_threads(1)
    toy.register(*sys.argv[1:])
    print(f"{'us':6} {'cpu':>6} {'toy':>6} {'ratio':>6}")
    for name, (statement, how) in STATEMENTS.items():
        cost = measure(statement)
        print(f"{name:6} {cost.cpu:6.2f} {cost.toy:6.2f} {cost.toy / cost.cpu:6.1f}  {how}")


if __name__ == "__main__":
    main()
