"""What is found of ops by authors who did not know the checker, each measured once when it was new.

The folders of `benchmarks/blind` are kept as they were written, until `tests/broken_ops` has their ops. `verify.py` in
each proves by itself that the broken ops are wrong and their twins right; ``PYTHONPATH=benchmarks/blind`` gives it the
registry that all share. Each op is checked in a process of its own.

    python benchmarks/blind.py kinds_45              # customops.check; --effort quick, opcheck, torch
    python benchmarks/blind.py kinds_45 --text rope  # what is said of some ops
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import timeit
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")

import detection  # beside this file
import torch

import customops
from customops.checks._outcome import processor_time
from customops.testing.isolation import in_fork

FOLDER = Path(__file__).parent / "blind"
EFFORTS = ("quick", "normal", "thorough")


def examine(case: Any, effort: str) -> tuple[str, float]:
    """What is said of an op, and the seconds of processor time that it took, with those of child processes."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    op, start = case.make(), processor_time()
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        if effort in EFFORTS:
            report = customops.check(op, effort=effort)  # type: ignore[arg-type]
            text = str(report) if report.failures else ""
        else:
            text = "".join(detection.RUN[effort](op, sample, "")[0] for sample in op.samples())
    return text, processor_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", choices=sorted(path.parent.name for path in FOLDER.glob("*/cases.py")))
    parser.add_argument("names", nargs="*", help="parts of names of ops; all by default")
    parser.add_argument("--effort", default="normal", choices=(*EFFORTS, "opcheck", "torch"))
    parser.add_argument("--text", action="store_true", help="print what is said")
    options = parser.parse_args()
    sys.path[:0] = [str(FOLDER / options.corpus), str(FOLDER)]  # the latter has the registry of all
    __import__("cases")
    registry: Any = __import__("registry")
    detection.warm_up()
    times = []
    for title, cases in (("found", registry.BROKEN), ("alarms, twins", registry.TWINS), ("alarms", registry.RIGHT)):
        chosen = [case for case in cases if not options.names or any(name in case.name for name in options.names)]
        said = 0
        for case in chosen:
            done = in_fork(lambda case=case: examine(case, options.effort), 900.0)
            text, seconds = done.value if done.error is None else (str(done.error), 0.0)
            said += bool(text)
            times.append(seconds)
            if options.text and text:
                print(f"{case.name}: {case.about}\n{text}\n", flush=True)
        print(f"{title}: {said} of {len(chosen)}", flush=True)
    if not times:
        raise SystemExit("no such op")
    median, loop = sorted(times)[len(times) // 2], min(timeit.repeat("sum(range(10**6))", number=1, repeat=9))
    print(f"processor time: median {median:.2f} s, where sum(range(10**6)) takes {1000 * loop:.0f} ms")


if __name__ == "__main__":
    main()
