"""``customops check``: run the checker over the samples of ops."""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import pickle
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

import customops
from customops import checking
from customops._cli.screen import FAULTY, FINE, NOTHING, colored, refuse_unwritable, say, wrapped
from customops._cli.targets import TARGET_HELP, Op, error_text, ops_of
from customops._describe.render import plural, shorter_place, width_of_screen
from customops.checking import report
from customops.checking._check import can_fork
from customops.checking.report import Failure, Report
from customops.checks import CHECKS
from customops.checks._table import RETIRED
from customops.checks._trial import EFFORTS
from customops.errors import did_you_mean

#: The exit status of --strict, if something was left out.
INCOMPLETE = 3

#: "passed", "failed", "not exercised" (no check had something to try), "no samples", or "broken": there is no report.
Status = Literal["passed", "failed", "not exercised", "no samples", "broken"]


@dataclass(frozen=True)
class Checked:
    """What was found of one op. `problem` is why there is no report."""

    op: str
    name: str
    source: str
    report: Report | None = None
    problem: str = ""
    seconds: float = 0.0

    @property
    def status(self) -> Status:
        if self.report is None:
            return "broken" if self.problem else "no samples"
        return "failed" if self.report.failures else "passed" if self.report.passed else "not exercised"

    @property
    def is_fault(self) -> bool:
        return self.status in ("failed", "broken")

    @property
    def failures(self) -> Sequence[Failure]:
        return self.report.failures if self.report is not None else ()


def check_one(op: Op, choice: dict[str, Any]) -> Checked:
    """Check an op over its samples; `choice` are keyword arguments of `customops.check`."""
    place, start = (op._qualname, op.__name__, shorter_place(op.source)), time.perf_counter()
    if op._samples is None:
        return Checked(*place)
    isolate = can_fork() if choice["isolate"] is None else choice["isolate"]
    torch.manual_seed(0)  # the same inputs in every run
    problem = "the samples function raised"
    try:
        samples = op.samples()
        if not samples:
            return Checked(*place)
        problem = "it could not be checked"
        report = checking.check(op, samples, **{**choice, "isolate": isolate})
    except (Exception, SystemExit) as error:
        return Checked(*place, problem=f"{problem}\n{error_text(error)}", seconds=time.perf_counter() - start)
    return Checked(*place, report, seconds=time.perf_counter() - start)


def check_all(ops: Sequence[Op], targets: Sequence[str], choice: dict[str, Any], jobs: int) -> Iterator[Checked]:
    """Check ops, in their order; with several jobs, each process imports the targets for itself."""
    if jobs <= 1 or len(ops) == 1:
        yield from (check_one(op, choice) for op in ops)
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(min(jobs, len(ops)), context, _load, (tuple(targets),)) as pool:
        futures = [(op, pool.submit(_check_by_name, op._qualname, choice)) for op in ops]
        try:
            for op, future in futures:
                try:
                    yield pickle.loads(future.result())
                except BrokenProcessPool:
                    problem = "the process that checked it, or another op of this run, ended; run it with --jobs 1"
                    yield Checked(op._qualname, op.__name__, shorter_place(op.source), problem=problem)
        finally:
            pool.shutdown(cancel_futures=True)


#: The ops of the targets, in a process of a pool.
_loaded: dict[str, Op] = {}


def _load(targets: tuple[str, ...]) -> None:
    _loaded.update({op._qualname: op for op in ops_of(targets)})


def _check_by_name(qualname: str, choice: dict[str, Any]) -> bytes:
    return pickle.dumps(check_one(_loaded[qualname], choice))  # as bytes: torch would share the memory of tensors


# Lines for terminals.

_WORDS = {
    "passed": ("ok", "green"),
    "failed": ("FAILED", "red"),
    "broken": ("FAILED", "red"),
    "not exercised": ("nothing", "yellow"),
    "no samples": ("no samples", "yellow"),
}


def line_of(checked: Checked, width: int) -> str:
    """``ok          mylib::scale  19 inputs, 2.1 s``; on two lines if it is too long for the screen."""
    word, color = _WORDS[checked.status]
    found, detail = checked.report, ""
    if found is not None:
        faults = f"{plural(len(found.failures), 'fault')}, " if found.failures else ""
        refused = f" ({found._rejected} more refused)" if found._rejected > found._inputs else ""  # little was tried
        detail = f"{faults}{plural(found._inputs, 'input')}{refused}, {checked.seconds:.1f} s"
        detail = "; ".join(filter(None, (found._shortfall(), detail)))
    elif checked.status == "no samples":
        detail = f"attach some with @{checked.name}.register_samples"
    first = f"{word:<12}{checked.op}"
    gap = "  " if len(first) + 2 + len(detail) <= width else "\n" + " " * 12
    text = f"{first}{gap}{detail}" if detail else first
    return colored(word, color) + text[len(word) :]


#: A place in a fault: absolute, with a line. Those below the current directory are shown without it.
_PLACE = re.compile(r"(?<![\w/.])(/[^\s:()]+\.py:\d+)")


def say_details(results: Sequence[Checked], verbose: bool, width: int) -> None:
    """A paragraph for each fault; if asked for, why checks had nothing to try, and in how many ops."""
    reasons: dict[str, int] = {}
    for checked in results:
        head = f"{colored('FAILED', 'red')} {checked.op}  ({shorter_place(checked.source)})"
        if checked.problem:
            say(f"{head}\n{wrapped(checked.problem, width)}\n")
        for failure in checked.failures:
            text = _PLACE.sub(lambda place: shorter_place(place[1], len(place[1])), str(failure))
            say(f"{head}\n{wrapped(text, width)}\n")
        for name, found in checked.report.by_check().items() if checked.report is not None and verbose else ():
            if {result.status for result in found} == {"not exercised"}:
                for each in found if name == report.KERNELS else found[:1]:
                    reason = f"{name}: {each.reason}"
                    reasons[reason] = reasons.get(reason, 0) + 1
    for reason, count in reasons.items():
        say(wrapped(f"not exercised: {reason} ({plural(count, 'op')})", width))


def summary(results: Sequence[Checked], stopped: bool, seconds: float) -> str:
    """``3 ops: 1 ok, 1 with faults, 1 without samples, in 3.2 s``."""
    statuses = [checked.status for checked in results]
    faults = sum(checked.is_fault for checked in results)
    text = f"{plural(len(results), 'op')}: {statuses.count('passed')} ok, {faults} with faults"
    short = sum(checked.report is not None and not checked.report.complete for checked in results)
    text += f", {short} incomplete" if short else ""
    for status, words in (("not exercised", "not exercised"), ("no samples", "without samples")):
        text += f", {statuses.count(status)} {words}" if status in statuses else ""
    text += f", in {seconds:.1f} s" + ("; stopped at the first fault" if stopped else "")
    return colored(text, "red" if faults else "green" if "passed" in statuses else "yellow")


# Files.


def as_json(results: Sequence[Checked]) -> str:
    ops = [
        {"op": checked.op, "source": checked.source, "status": checked.status}
        | ({"problem": checked.problem} if checked.problem else {})
        | ({"report": checked.report.to_dict()} if checked.report is not None else {})
        for checked in results
    ]
    return json.dumps({"customops": customops.__version__, "ops": ops}, indent=2) + "\n"


def as_junit(results: Sequence[Checked]) -> str:
    """One test suite for each op."""
    suites = []
    for checked in results:
        if checked.report is not None:
            suites.append(checked.report._junit_suite())
        else:
            text, tag = checked.problem or "no samples", "error" if checked.problem else "skipped"
            cases: report.JunitCases = {"samples": (0.0, [(tag, text.partition("\n")[0], text)])}
            suites.append(report.junit_suite(checked.op, checked.seconds, cases))
    return report.junit_xml(suites)


# The options.


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "check",
        help="check ops over inputs derived from their samples",
        description="Import each TARGET and run customops.check on every op that it defines, over inputs that are "
        "derived from its samples (op.register_samples).",
        epilog="Exit status: 0 if nothing is wrong, 1 if there is a fault, 2 if nothing was checked, with --strict 3 "
        "if an op was too slow for all that the effort tries.",
    )
    parser.add_argument("targets", nargs="+", metavar="TARGET", help=TARGET_HELP)
    parser.add_argument("--only", action="append", metavar="CHECK", help="only this check; may be repeated")
    parser.add_argument("--skip", action="append", metavar="CHECK", help="not this check; may be repeated")
    parser.add_argument("--effort", choices=EFFORTS, default="normal", help="how much is tried; default: normal")
    parser.add_argument("--strict", action="store_true", help="exit status 3 if something was left out of a slow op")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="so many processes; 0 for one for each core")
    parser.add_argument("--fail-fast", action="store_true", help="stop at the first op with a fault")
    parser.add_argument("--no-isolate", action="store_true", help="run kernels in this process: a crash ends it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the reports as JSON; - for stdout")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="write them as JUnit XML, for CI systems")
    parser.add_argument("--repro", type=Path, metavar="DIR", help="write a program for each fault")
    parser.add_argument("-v", "--verbose", action="store_true", help="say what had nothing to try, and why")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    # All that can be wrong before something runs, which may take an hour.
    only, skip = (_checks(option, getattr(options, option), parser) for option in ("only", "skip"))
    if options.jobs < 0:
        parser.error(f"--jobs {options.jobs}: must be 0 or more")
    is_quiet = str(options.json) == "-"
    refuse_unwritable("json", None if is_quiet else options.json, parser)
    refuse_unwritable("junit", options.junit, parser)
    if options.repro is not None and options.repro.exists() and not options.repro.is_dir():
        parser.error(f"--repro {options.repro}: this is not a directory")
    ops = ops_of(options.targets)
    isolate = False if options.no_isolate else None
    choice = {"only": only or None, "skip": skip, "effort": options.effort, "isolate": isolate}
    width, start = width_of_screen(), time.perf_counter()
    found: list[Checked] = []
    for checked in check_all(ops, options.targets, choice, options.jobs or os.cpu_count() or 1):
        found.append(checked)
        if not is_quiet:
            say(line_of(checked, width))
        if options.fail_fast and checked.is_fault:
            break
    if is_quiet:
        say(as_json(found).rstrip())
    elif options.json is not None:
        options.json.write_text(as_json(found), encoding="utf-8")
    if options.junit is not None:
        options.junit.write_text(as_junit(found), encoding="utf-8")
    programs = []
    if options.repro is not None:
        options.repro.mkdir(parents=True, exist_ok=True)
        for checked in found:
            for number, failure in enumerate(checked.failures, 1):
                name = re.sub(r"\W+", "_", f"{checked.op}_{number}_{failure.check.removeprefix('test_')}")
                programs.append(failure.save_script(options.repro / f"{name}.py"))
    if not is_quiet:
        say()
        say_details(found, options.verbose, width)
        for path in programs:
            say(f"wrote {path}")
        say(summary(found, len(found) < len(ops), time.perf_counter() - start))
    if any(checked.is_fault for checked in found):
        return FAULTY
    if options.strict and any(checked.report is not None and not checked.report.complete for checked in found):
        return INCOMPLETE
    return FINE if any(checked.status == "passed" for checked in found) else NOTHING


def _checks(option: str, given: Sequence[str] | None, parser: argparse.ArgumentParser) -> tuple[str, ...]:
    """Names of checks; ``test_`` may be left out, and several be joined with commas."""
    names = [name for name in ",".join(given or ()).split(",") if name]
    known = {*CHECKS, *(RETIRED if option == "skip" else ())}
    for name in names:
        if name not in known and f"test_{name}" not in known:
            near = did_you_mean(name, CHECKS)
            parser.error(f"--{option} {name}: no such check; {near or 'there are ' + ', '.join(CHECKS)}")
    return tuple(dict.fromkeys(name if name in known else f"test_{name}" for name in names))
