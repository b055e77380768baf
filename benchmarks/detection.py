"""How many broken ops of `tests/broken_ops` are found, and how many right ones are called broken.

Three checkers see the same ops and samples: `customops.check`, the default checks of `customops.opcheck`, and
`torch.library.opcheck`. Each op is checked in a process of its own, forked from one in which torch is loaded.

    python benchmarks/detection.py                    # the table
    python benchmarks/detection.py --only check       # one checker
    python benchmarks/detection.py --corpus "48 kinds"   # the ops of one author
    python benchmarks/detection.py --missed           # names what `check` misses, and what it says of right ops
    python benchmarks/detection.py softmax_rows --text
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib
import io
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import customops
from customops.testing.isolation import in_fork

TESTS = Path(__file__).resolve().parents[1] / "tests"
CHECKERS = ("check", "opcheck", "torch")
TITLES = {"check": "customops.check", "opcheck": "customops.opcheck", "torch": "torch.library.opcheck"}


@dataclass(frozen=True)
class Verdict:
    """What one checker said of one op."""

    name: str
    kind: str
    form: str  #: "broken", "right" (a twin) or "trap"
    checker: str
    found: bool
    seconds: float
    text: str = ""
    by: tuple[str, ...] = ()  #: the checks that found something


#: What a checker found, as text, and the checks by which.
Found = tuple[str, tuple[str, ...]]


def by_check(op: Any, sample: Any, effort: str) -> Found:
    report = customops.check(op, [sample], effort=effort)  # type: ignore[arg-type]
    return str(report) if report.failures else "", tuple(failure.check for failure in report.failures)


def by_opcheck(op: Any, sample: Any, _effort: str) -> Found:
    return _raised(customops.opcheck, op, sample), ()


def by_torch(op: Any, sample: Any, _effort: str) -> Found:
    return _raised(torch.library.opcheck, getattr(op, "_opoverload", op), sample), ()


RUN: dict[str, Callable[[Any, Any, str], Found]] = {"check": by_check, "opcheck": by_opcheck, "torch": by_torch}


def _raised(opcheck: Any, op: Any, sample: Any) -> str:
    args, kwargs = sample if len(sample) == 2 and isinstance(sample[1], dict) else (sample, {})
    if opcheck is torch.library.opcheck and isinstance(op, customops.CustomOpDef):
        args, kwargs = op.lower(*args, **kwargs)
    try:
        opcheck(op, args, kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def examine(entry: Any, form: str, checker: str, effort: str) -> tuple[Found, float]:
    """Define an op and have it checked: what was found, and the seconds that took."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    name = f"broken_ops_{checker}_{form}::{entry.name}"
    op = entry.build(name) if form == "trap" else entry.build(name, form == "broken")
    sample = corpus().sample_of(entry, op)
    start = time.perf_counter()
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        found = RUN[checker](op, sample, effort)
    return found, time.perf_counter() - start


def corpus() -> Any:
    return importlib.import_module("broken_ops.corpus")


def verdict(entry: Any, form: str, checker: str, effort: str) -> Verdict:
    done = in_fork(lambda: examine(entry, form, checker, effort), 120.0)
    if done.error is not None:
        done = replace(done, value=((f"{type(done.error).__name__}: {done.error}", ("process",)), 0.0))
    (text, by), seconds = done.value
    return Verdict(entry.name, getattr(entry, "kind", "trap"), form, checker, bool(text), seconds, text, by)


def warm_up() -> None:
    """Load what checks load late, so that each fork has it."""

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    op = customops.custom_op("broken_ops::warm_up", mutates_args=())(double)
    op.register_fake(torch.empty_like)
    customops.check(op, [(torch.ones(2),)])
    with contextlib.redirect_stdout(io.StringIO()):
        torch.library.opcheck(op._opoverload, (torch.ones(2),))


def verdicts(entries: list[tuple[Any, str]], checkers: list[str], effort: str, jobs: int) -> Iterator[Verdict]:
    with ThreadPoolExecutor(jobs) as pool:
        tasks = [(entry, form, checker) for entry, form in entries for checker in checkers]
        yield from pool.map(lambda task: verdict(*task, effort), tasks)


def table(found: list[Verdict], checkers: list[str]) -> str:
    """One line for each kind of fault; then the false alarms."""
    lines = ["| kind of fault | " + " | ".join(TITLES[c] for c in checkers) + " |", "|---|" + "---|" * len(checkers)]
    broken = [v for v in found if v.form == "broken"]
    for kind in dict.fromkeys(v.kind for v in broken):
        lines.append(_line(kind, [v for v in broken if v.kind == kind], checkers))
    lines.append(_line(f"**found, of {len({v.kind for v in broken})} kinds**", broken, checkers))
    for form, title in (("right", "false alarms on the corrected twins"), ("trap", "false alarms on other right ops")):
        lines.append(_line(title, [v for v in found if v.form == form], checkers))
    return "\n".join(lines)


def _line(title: str, rows: list[Verdict], checkers: list[str]) -> str:
    count = collections.Counter(v.checker for v in rows if v.found)
    total = collections.Counter(v.checker for v in rows)
    return f"| {title} | " + " | ".join(f"{count[c]} of {total[c]}" for c in checkers) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="names of ops, or parts of them; all by default")
    parser.add_argument("--only", choices=CHECKERS, action="append", help="a checker; all by default")
    parser.add_argument("--corpus", help="one corpus, as the modules name them: first, 48 kinds")
    parser.add_argument("--effort", default="normal")
    parser.add_argument("--missed", action="store_true", help="name what was missed, and false alarms with their text")
    parser.add_argument("--text", action="store_true", help="print all that was found")
    parser.add_argument("--tests", type=Path, default=TESTS, help="the folder with the package broken_ops")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write all that was said to this file")
    parser.add_argument("--write", action="store_true", help="write tests/broken_ops/found_by.json")
    options = parser.parse_args()
    sys.path.insert(0, str(options.tests))
    corpus().load()
    entries = [(e, form) for e in corpus().FAULTS.values() for form in ("broken", "right")]
    entries += [(e, "trap") for e in corpus().TRAPS.values()]
    entries = [(e, form) for e, form in entries if options.corpus in (None, e.corpus)]
    entries = [(e, form) for e, form in entries if not options.names or any(n in e.name for n in options.names)]
    checkers = options.only or list(CHECKERS)
    warm_up()
    found = []
    for v in verdicts(entries, checkers, options.effort, options.jobs):
        found.append(v)
        if options.text or (options.missed and v.checker == "check" and v.found != (v.form == "broken")):
            print(f"{v.checker} {v.form} {v.name} ({v.kind}), {v.seconds:.1f} s\n{v.text}\n", flush=True)
    print(table(found, checkers))
    times = sorted(v.seconds for v in found if v.checker == "check") or [0.0]
    print(f"\nseconds of customops.check: median {times[len(times) // 2]:.2f}, most {times[-1]:.2f}")
    if options.json:
        options.json.write_text(json.dumps([asdict(v) for v in found], indent=1))
    if options.write:
        found_by = {v.name: v.by[0] if v.by else None for v in found if v.checker == "check" and v.form == "broken"}
        path = options.tests / "broken_ops" / "found_by.json"
        found_by = json.loads(path.read_text()) | found_by
        found_by = {name: check for name, check in found_by.items() if name in corpus().FAULTS}
        path.write_text(json.dumps(dict(sorted(found_by.items())), indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
