"""``customops tune``: measure the kernels of ops that have several, and write which are the fastest."""

from __future__ import annotations

import argparse
import sys
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
    tuned = failed = 0
    for number, op in enumerate(ops, 1):
        say(f"tuning {number}/{len(ops)} {op._qualname}", sys.stderr)  # it may take minutes
        try:
            found = autotune(op, file=options.out)
        except Exception as error:  # the other ops are tuned
            report_error(error if isinstance(error, CustomOpsError) else f"{op._qualname}\n{trace(error)}")
            failed += 1
            continue
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
