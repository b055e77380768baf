"""What `customops.check` says of ops that nobody here wrote: those of aten, and of three libraries.

Each op is checked in a process of its own, forked from one in which torch and the library are loaded. What is said of
an op that is right is a false alarm; `real_ops/explained.py` has the findings that are true, each with a program that
shows it.

    python benchmarks/real_ops.py                          # the table, and what is not explained
    python benchmarks/real_ops.py --library torchvision    # of one library
    python benchmarks/real_ops.py --ops softmax sort       # names of ops, or parts of them
    python benchmarks/real_ops.py --reproductions          # do the faults in explained.py still show?
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import importlib
import io
import json
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from real_ops import aten, explained_aten, explained_by_docs, explained_libraries, library, programs
from real_ops.explained import Explained
from real_ops.subject import Subject

import customops
from customops.testing.isolation import IsolationError, in_fork

LIBRARIES = ("aten", "torchvision", "bitsandbytes", "torchao")
UNMADE = "the check could not be made"


EXPLAINED = (*explained_aten.ATEN, *explained_by_docs.ALLOWED, *explained_libraries.LIBRARIES)


def explanation(op: str, check: str, problem: str) -> Explained | None:
    return next((row for row in EXPLAINED if row.matches(op, check, problem)), None)


@dataclass(frozen=True)
class Finding:
    """What one check says of an op."""

    check: str
    problem: str
    input: str
    text: str


@dataclass(frozen=True)
class Verdict:
    """How the check of an op went.

    Attributes:
        ended: "", or why there is no report: the process crashed or ran out of time, or there is no kernel.
        unmade: reasons of checks that failed themselves.
    """

    library: str
    op: str
    findings: list[Finding] = field(default_factory=list)
    ended: str = ""
    seconds: float = 0.0
    statuses: dict[str, dict[str, int]] = field(default_factory=dict)
    unmade: list[str] = field(default_factory=list)

    @property
    def unexplained(self) -> list[Finding]:
        return [f for f in self.findings if explanation(self.op, f.check, f.problem) is None]


def examine(subject: Subject, effort: Any) -> Verdict:
    """Have an op checked, in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    start = time.perf_counter()
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        report = customops.check(subject.op, subject.samples, effort=effort, progress=False, isolate=True)
    findings = [Finding(f.check, f.problem, f.input, str(f)) for f in report.failures]
    statuses = {
        name: dict(collections.Counter(result.status for result in results))
        for name, results in report.by_check().items()
    }
    unmade = sorted({f"{r.check}: {r.reason}" for r in report.results if (r.reason or "").startswith(UNMADE)})
    seconds = time.perf_counter() - start
    return Verdict(subject.library, subject.name, findings, "", seconds, statuses, unmade)


def verdict(subject: Subject, effort: str, timeout: float) -> Verdict:
    if not subject.samples:
        return Verdict(subject.library, subject.name, ended="no code for the CPU")
    done = in_fork(lambda: examine(subject, effort), timeout)
    if done.error is None:
        found: Verdict = done.value
        return found
    reason = " ".join(f"{type(done.error).__name__}: {done.error}".split())
    return Verdict(subject.library, subject.name, ended=reason[:300], seconds=timeout if "time" in reason else 0.0)


def subjects_of(name: str, samples: int, dtype: torch.dtype | None) -> list[Subject]:
    if name == "aten":
        return aten.subjects(samples, dtype)
    module = importlib.import_module(f"real_ops.{name}_ops")
    module.load()
    library.seeded()
    calls = module.samples()
    others = [op for op in library.ops_of(*module.NAMESPACES) if op not in calls]
    return [Subject(name, op, calls.get(op, [])) for op in [*calls, *others]]


def warm_up() -> None:
    """Load what checks load late, so that each fork has it."""

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    op = customops.custom_op("real_ops::warm_up", mutates_args=())(double)
    op.register_fake(torch.empty_like)
    customops.check(op, [(torch.ones(2),)], progress=False)


def verdicts(subjects: list[Subject], effort: str, timeout: float, jobs: int) -> Iterator[Verdict]:
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(lambda subject: verdict(subject, effort, timeout), subjects)


def table(found: list[Verdict]) -> str:
    """A line for each library."""
    columns = ("ops", "no finding", "findings, all explained", "findings not explained", "no report", "not for the CPU")
    lines = [f"| library | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    for name in dict.fromkeys(v.library for v in found):
        rows = [v for v in found if v.library == name]
        there = [v for v in rows if v.statuses or v.ended != "no code for the CPU"]
        counts = (
            len(there),
            sum(not v.findings and not v.ended for v in there),
            sum(bool(v.findings) and not v.unexplained for v in there),
            sum(bool(v.unexplained) for v in there),
            sum(bool(v.ended) for v in there),
            len(rows) - len(there),
        )
        lines.append(f"| {name} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines)


def told(v: Verdict, everything: bool) -> Iterator[str]:
    """What there is to say of one op."""
    if v.ended and v.ended != "no code for the CPU":
        yield f"## {v.op}: {v.ended}"
    for finding in v.findings if everything else v.unexplained:
        row = explanation(v.op, finding.check, finding.problem)
        yield f"## {v.op}: {finding.text}" + (f"\n  explained: {row.why}" if row else "")


def reproduced() -> Iterator[str]:
    """Run the programs of the explained findings, each in a process of its own, and say whether the fault shows."""
    for row in EXPLAINED:
        if row.shown_by:
            done = in_fork(functools.partial(run_program, row.shown_by), 60.0)
            crashed = isinstance(done.error, IsolationError)
            shows = crashed if row.crashes else done.error is None
            yield f"{'shows' if shows else 'DOES NOT SHOW'}: {' '.join(row.ops)}: {row.why}"
            if not shows:
                yield f"    {type(done.error).__name__}: {done.error}"


def run_program(code: str) -> None:
    exec(code, {**vars(programs), "aten": torch.ops.aten})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", choices=LIBRARIES, action="append", help="all by default")
    parser.add_argument("--ops", nargs="*", help="parts of names of ops")
    parser.add_argument("--effort", default="normal")
    parser.add_argument("--samples", type=int, default=2, help="of each aten op")
    parser.add_argument("--dtype", help="of the samples of aten ops: float64; by default float32 where it can be")
    parser.add_argument("--text", action="store_true", help="print the explained findings, too")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=120.0)
    parser.add_argument("--json", type=Path, help="a file to which a line is added for each op")
    parser.add_argument("--skip", type=Path, help="such a file: leave out the ops in it")
    parser.add_argument("--reproductions", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    libraries = options.library or list(LIBRARIES)
    dtype = getattr(torch, options.dtype) if options.dtype else None
    if options.reproductions:
        for name in LIBRARIES[1:]:
            subjects_of(name, 1, None)
        for line in reproduced():
            print(line, flush=True)
        return 0
    subjects = [s for name in libraries for s in subjects_of(name, options.samples, dtype)]
    if options.skip:
        done = {json.loads(line)["op"] for line in options.skip.read_text().splitlines()}
        subjects = [s for s in subjects if s.name not in done]
    if options.ops:
        subjects = [s for s in subjects if any(part in s.name for part in options.ops)]
    warm_up()
    found: list[Verdict] = []
    for v in verdicts(subjects, options.effort, options.timeout, options.jobs):
        found.append(v)
        if options.json:
            with options.json.open("a") as lines:
                lines.write(json.dumps(asdict(v)) + "\n")
        for text in told(v, options.text):
            print(text + "\n", flush=True)
    print(table(found))
    times = sorted(v.seconds for v in found if v.statuses) or [0.0]
    print(f"\nseconds of an op: median {times[len(times) // 2]:.2f}, most {times[-1]:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
