"""``customops check``: run the checker over the samples of ops."""

from __future__ import annotations

import argparse
import fnmatch
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from customops._cli import results, terminal
from customops._cli.checked import Checked, Options, check_all
from customops._describe.screen import plural, width_of_screen
from customops._targets import Op, TargetError, ops_of
from customops.checks import CHECKS
from customops.checks._check import EFFORTS

#: Exit statuses.
ALL_PASSED, SOME_FAILED, NOTHING_RUN = 0, 1, 2

TARGET_HELP = "a Python file, a folder, the name of a module or package, or ops: mylib::scale, 'mylib::*'"


def add_parser(commands: Any) -> None:
    """Add the command to those of the command line."""
    parser = commands.add_parser(
        "check",
        help="check ops over inputs derived from their samples",
        description="Import each TARGET and run customops.check on every op that it defines, over inputs that are "
        "derived from its samples (op.register_samples).",
        epilog="Exit status: 0 if nothing is wrong, 1 if there is a fault, 2 if nothing was checked.",
    )
    parser.add_argument("targets", nargs="+", metavar="TARGET", help=TARGET_HELP)
    parser.add_argument("--op", action="append", metavar="PATTERN", help='only ops of this name, e.g. "mylib::*"')
    parser.add_argument("--only", action="append", metavar="CHECK", help="only this check; may be repeated")
    parser.add_argument("--skip", action="append", metavar="CHECK", help="not this check; may be repeated")
    parser.add_argument("--effort", choices=EFFORTS, default="normal", help="how much is tried; default: normal")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="so many processes; 0 for one for each core")
    parser.add_argument("--fail-fast", action="store_true", help="stop at the first op with a fault")
    parser.add_argument("--no-isolate", action="store_true", help="run kernels in this process: a crash ends it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the reports as JSON; - for stdout")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="write them as JUnit XML, for CI systems")
    parser.add_argument("--repro", type=Path, metavar="DIR", help="write a program for each fault")
    parser.add_argument("-v", "--verbose", action="store_true", help="say what had nothing to try, and why")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    only, skip = (_checks(option, getattr(options, option), parser) for option in ("only", "skip"))
    _check_options(options, parser)
    try:
        ops = selected(ops_of(options.targets), options.op)
    except TargetError as error:
        terminal.error(error)
        return NOTHING_RUN
    chosen = Options(only or None, skip, options.effort, False if options.no_isolate else None)
    start = time.perf_counter()
    found, stopped = _run(ops, options, chosen)
    _write_files(found, options)
    if str(options.json) != "-":
        _print(found, options, stopped, time.perf_counter() - start)
    if any(checked.is_fault for checked in found):
        return SOME_FAILED
    return ALL_PASSED if any(checked.status == "passed" for checked in found) else NOTHING_RUN


def _check_options(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """All that can be wrong before something runs, which may take an hour."""
    if options.jobs < 0:
        parser.error(f"--jobs {options.jobs}: 0 or more")
    files = {"json": options.json if str(options.json) != "-" else None, "junit": options.junit}
    for name, path in files.items():
        problem = results.why_not_written(path) if path is not None else None
        if problem is not None:
            parser.error(f"--{name} {path}: {problem}")
    if options.repro is not None and options.repro.exists() and not options.repro.is_dir():
        parser.error(f"--repro {options.repro}: this is no directory")


def _checks(option: str, given: Sequence[str] | None, parser: argparse.ArgumentParser) -> tuple[str, ...]:
    """Names of checks; ``test_`` may be left out, and several be joined with commas."""
    names = [name for each in given or () for name in each.split(",") if name]
    full = [name if name in CHECKS else f"test_{name}" for name in names]
    for name, known in zip(names, full, strict=True):
        if known not in CHECKS:
            parser.error(f"--{option} {name}: no such check; there are {', '.join(CHECKS)}")
    return tuple(dict.fromkeys(full))


def selected(ops: list[Op], patterns: list[str] | None) -> list[Op]:
    """The ops of these names."""
    if patterns is None:
        return ops
    found = [op for op in ops if any(fnmatch.fnmatchcase(op._qualname, pattern) for pattern in patterns)]
    if not found:
        names = ", ".join(op._qualname for op in ops)
        raise TargetError(f"no op matches --op {' '.join(patterns)}", got=names, fix='e.g. --op "*::name"')
    return found


def _run(ops: list[Op], options: argparse.Namespace, chosen: Options) -> tuple[list[Checked], bool]:
    """What was found, and whether it was stopped early."""
    found: list[Checked] = []
    jobs = options.jobs or os.cpu_count() or 1
    for checked in check_all(ops, options.targets, chosen, jobs):
        found.append(checked)
        if str(options.json) != "-":
            terminal.say(results.line_of(checked, width_of_screen()))
        if options.fail_fast and checked.is_fault:
            return found, len(found) < len(ops)
    return found, False


def _write_files(found: list[Checked], options: argparse.Namespace) -> None:
    if options.json is not None:
        text = results.as_json(found)
        if str(options.json) == "-":
            terminal.say(text.rstrip())
        else:
            options.json.write_text(text, encoding="utf-8")
    if options.junit is not None:
        options.junit.write_text(results.as_junit(found), encoding="utf-8")


def _print(found: list[Checked], options: argparse.Namespace, stopped: bool, seconds: float) -> None:
    terminal.say()
    for part in results.details(found, width_of_screen()):
        terminal.say(part)
    if options.verbose:
        for reason, ops in results.not_exercised(found).items():
            text = f"not exercised: {reason} ({plural(len(ops), 'op')})"
            terminal.say(terminal.wrapped(text, width_of_screen()))
    if options.repro is not None:
        for path in results.write_programs(found, options.repro):
            terminal.say(f"wrote {path}")
    terminal.say(results.summary(found, stopped, seconds))
