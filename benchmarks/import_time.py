"""Print what `import torch` costs and what `import customops` adds, in fresh interpreters."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys

MEASURE = """
import json, time
start = time.perf_counter()
import torch
middle = time.perf_counter()
import customops
end = time.perf_counter()
print(json.dumps([1e3 * (middle - start), 1e3 * (end - middle)]))
"""


def measure_once() -> tuple[float, float]:
    """Return the milliseconds of `import torch` and of `import customops` after it."""
    run = subprocess.run([sys.executable, "-c", MEASURE], check=True, capture_output=True, text=True)
    of_torch, of_customops = json.loads(run.stdout)
    return of_torch, of_customops


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", "--repeats", type=int, default=9, help="how many interpreters")
    repeats = parser.parse_args().repeats

    measure_once()  # writes the .pyc files and warms the disk cache
    runs = [measure_once() for _ in range(repeats)]
    of_torch, of_customops = (statistics.median(column) for column in zip(*runs, strict=True))
    print(f"import torch      {of_torch:8.1f} ms")
    print(f"import customops +{of_customops:8.1f} ms   (medians of {repeats})")


if __name__ == "__main__":
    main()
