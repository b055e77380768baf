"""``customops tune``: measure the kernels of ops that have several, and write which are the fastest."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from customops._cli.screen import FAULTY, FINE, NOTHING, refuse_unwritable, report_error, say
from customops._cli.targets import TARGET_HELP, ops_of, trace
from customops._describe.render import in_words, plural
from customops.errors import CustomOpsError
from customops.tuning import autotune


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "tune",
        help="measure the kernels of ops that have several, and write a file of the fastest",
        description="Measure the kernels of each op that has several, on its samples, and put the fastest into a file, "
        "for customops.tuning.tuned(). Choices that are in the file for other arguments, hardware or versions stay.",
        epilog="Exit status: 0; 1 if an op could not be measured; 2 if there was none to measure.",
    )
    parser.add_argument("targets", nargs="+", metavar="TARGET", help=TARGET_HELP)
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="the file of choices, as tuned.toml")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    refuse_unwritable("out", options.out, parser)
    ops = [op for op in ops_of(options.targets) if len(op._rules.kernel.names()) > 1]
    progress, tuned, failed = _Progress(len(ops)), 0, 0
    for op in ops:
        progress.show(op._qualname)
        try:
            found = autotune(op, file=options.out, tell=progress.tell)
        except Exception as error:  # the other ops are tuned
            progress.clear()
            report_error(error if isinstance(error, CustomOpsError) else f"{op._qualname}\n{trace(error)}")
            failed += 1
            continue
        progress.clear()
        tuned += len(found)
        for each in found:
            times = ", ".join(f"{name} {in_words(seconds)}" for name, seconds in each.seconds.items())
            say(f"{each.op} {each.arguments}: {each.kernel} ({times})")
            for name, why in each.left_out.items():
                say(f"  without {name}: {why}")
    if tuned or not failed:
        nothing = "no kernel is left to choose" if ops else "no op has several kernels to measure"
        say(f"{plural(tuned, 'choice')} in {options.out}" if tuned else nothing)
    return FAULTY if failed else FINE if tuned else NOTHING


class _Progress:
    """A line on stderr: on terminals one that is overwritten, else one every few seconds."""

    def __init__(self, count: int) -> None:
        self.count, self.done, self.name, self.last = count, 0, "", time.monotonic()
        self.is_terminal = sys.stderr.isatty()

    def show(self, name: str) -> None:
        self.done += 1
        self.name = name
        self.tell("")

    def tell(self, text: str) -> None:
        line = f"tuning {self.done}/{self.count} {self.name} {text}".rstrip()
        if self.is_terminal:
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - self.last > 3:
            self.last = time.monotonic()
            say(line, sys.stderr)

    def clear(self) -> None:
        if self.is_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
