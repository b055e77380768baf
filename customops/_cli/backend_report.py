"""``customops backend-report``: which ops a device runs itself, leaves to the CPU, or fails at."""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from customops._cli.screen import FAULTY, FINE, NOTHING, refuse_unwritable, report_error, say, wrapped
from customops._describe.render import in_words, shorter_place, table, width_of_screen
from customops.backend import coverage, fallbacks, op_tests
from customops.backend.errors import BackendError
from customops.backend.fallbacks import Spent

#: How many lines of the program are listed.
SITES = 10


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "backend-report",
        help="list which ops a device runs itself, leaves to the CPU, or fails at",
        description="Run MODULE, which registers a device (customops.backend), as a program, and list the ops it used, "
        "what they took and for which lines, and the kernels to write next. "
        "With --opinfo, import it instead and run torch's own op tests on the device, against the CPU.",
        epilog="Options of the program come last, after --: MODULE -- --epochs 3. "
        "Exit status: 0 if nothing failed, 1 if something did, 2 if there is no MODULE, or no device in it.",
    )
    parser.add_argument("module", metavar="MODULE", help="a Python file, or the name of a module")
    parser.add_argument("arguments", nargs="*", metavar="ARG", help="arguments of the program; its options after --")
    parser.add_argument("--opinfo", action="store_true", help="run torch's op tests; each op in a process of its own")
    of_dtype = "with --opinfo: e.g. float32; may be repeated"
    parser.add_argument("--dtype", action="append", metavar="DTYPE", help=of_dtype)
    of_op = 'with --opinfo: only ops of this name, e.g. "nn.*"'
    parser.add_argument("--op", action="append", metavar="PATTERN", help=of_op)
    parser.add_argument("--samples", type=int, metavar="N", help="with --opinfo: at most N inputs an op, 1 or more")
    parser.add_argument("--forward-only", action="store_true", help="with --opinfo: no gradients")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all of it to a file, too")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    # All that can be wrong before something runs, which may take an hour.
    if not options.opinfo and (options.dtype or options.op or options.samples is not None or options.forward_only):
        parser.error("--dtype, --op, --samples and --forward-only go with --opinfo")
    if options.opinfo and options.arguments:
        parser.error(f"{options.arguments[0]}: with --opinfo no program is run that could have arguments")
    if options.samples is not None and options.samples < 1:
        parser.error(f"--samples {options.samples}: at least 1")
    file = options.json.absolute() if options.json is not None else None  # the program may go elsewhere
    refuse_unwritable("json", file, parser)
    dtypes = []
    for name in options.dtype or ["float32"]:
        if not isinstance(getattr(torch, name, None), torch.dtype):
            parser.error(f"--dtype {name}: torch has no such dtype")
        dtypes.append(getattr(torch, name))
    try:
        if options.opinfo:
            return _run_op_tests(options, dtypes, file)
        backend, record, error = coverage.run_script(options.module, options.arguments)
    except BackendError as refused:
        report_error(refused)
        if refused.__cause__ is not None:
            traceback.print_exception(refused.__cause__)
        return NOTHING
    _say_ops(record)
    if error is not None:
        traceback.print_exception(error)
        say(f"{options.module} ended with {type(error).__name__}; what it ran until then is above")
    for line in (_summary(backend.name, record), *_advice(backend.name, record)):
        say(wrapped(line, width_of_screen()))
    if file is not None:
        file.write_text(coverage.as_json(record, []), encoding="utf-8")
    return FAULTY if error is not None or record.failed else FINE


def _run_op_tests(options: argparse.Namespace, dtypes: list[torch.dtype], file: Path | None) -> int:
    backend, record = coverage.load_device(options.module), fallbacks.Journal()
    scores = []
    for score in op_tests.run(
        backend, dtypes, backward=not options.forward_only, patterns=options.op, samples=options.samples
    ):
        for line in op_tests.scores_as_text([score]):
            say(line)
        scores.append(score)
        record.add(score.journal)
    say()
    if record.native or record.failed:  # all else is the CPU's
        _say_ops(record, with_times=False)
    failed = sum(len(score.failed) for score in scores)
    say(f"{_summary(backend.name, record)}; {failed} of the op tests failed")
    if file is not None:
        file.write_text(coverage.as_json(record, scores), encoding="utf-8")
    if not any(score.total for score in scores):
        return NOTHING
    return FAULTY if failed else FINE


def _say_ops(record: fallbacks.Journal, *, with_times: bool = True) -> None:
    """Print what ran where, and the lines of the program that the CPU's kernels took longest for."""
    found, width = coverage.rows(record), width_of_screen()
    head: tuple[str, ...] = ("op", "state", "native", "fallback", "time", "bytes")
    ops: list[tuple[str, ...]] = []
    for row in found:
        calls = [str(each.calls or "-") for each in (row.native, row.fallback)]
        ops.append((row.op, row.status, *calls, *_spent(row.native + row.fallback)))
    if not with_times:  # torch's own tests of ops are not a program whose time counts
        head, ops = head[:4], [cells[:4] for cells in ops]
    sites = [(place, row.op, spent) for row in found for place, spent in row.sites]
    sites = sorted(sites, key=lambda site: -site[2].seconds)[:SITES]
    lines = [(shorter_place(place), op, str(spent.calls), *_spent(spent)) for place, op, spent in sites]
    of_sites = ("on the CPU for", "op", "calls", "time", "bytes")
    for titles, cells in ((head, ops), (of_sites, lines if with_times else [])):
        if cells:
            say(table(cells, titles, width, right=range(2, len(titles))))
            say()
    for row in found:
        if row.error:
            say(wrapped(f"{row.op}: {row.error}", width))


def _spent(spent: Spent) -> tuple[str, str]:
    units = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))
    size = next((f"{spent.nbytes / one:.3g} {unit}" for unit, one in units if spent.nbytes >= one), "-")
    return in_words(spent.seconds) if spent.calls else "-", size


def _advice(name: str, record: fallbacks.Journal) -> Iterator[str]:
    found = coverage.advice(coverage.rows(record))
    if not found.seconds:
        return
    times = f"{in_words(record.seconds)}, of which {in_words(found.seconds)} in ops"
    yield f"The program took {times}, {found.now:.0%} of that in kernels of {name}."
    if found.write:
        kernels = "this kernel" if len(found.write) == 1 else f"these {len(found.write)} kernels"
        yield (
            f"Write {kernels}, and {found.then:.0%} of the time in ops stays on {name} (while an op takes what it "
            f"takes on the CPU): {', '.join(found.write)}"
        )


def _summary(name: str, record: fallbacks.Journal) -> str:
    statuses = [row.status for row in coverage.rows(record)]
    native, both, fallback, failed = map(statuses.count, ("native", "both", "fallback", "FAILED"))
    text = f"{native} native, {both} both native and on the CPU, {fallback} on the CPU only, {failed} failed"
    return f"{len(statuses)} ops on {name}: {text}"
