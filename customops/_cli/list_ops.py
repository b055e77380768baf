"""``customops list``: the ops of targets, and what they have."""

from __future__ import annotations

import argparse
import json
from typing import Any

from customops._cli import check
from customops._cli.check import TARGET_HELP
from customops._cli.targets import TargetError, ops_of
from customops._describe.description import OUTLINE, outline
from customops._describe.render import table, width_of_screen

#: Exit statuses.
FOUND, NOT_FOUND = 0, 2


def add_parser(commands: Any) -> None:
    """Add the command to those of the command line."""
    parser = commands.add_parser(
        "list",
        help="list the ops of targets: schema, kernels, rules, samples",
        description="Import each TARGET and list the ops that it defines.",
        epilog="Exit status: 0, or 2 if a TARGET cannot be imported or defines no op.",
    )
    parser.add_argument("targets", nargs="+", metavar="TARGET", help=TARGET_HELP)
    parser.add_argument("--json", action="store_true", help="print a list of objects")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    try:
        rows = [outline(op) for op in ops_of(options.targets)]
    except TargetError as error:
        check.report_error(error)
        return NOT_FOUND
    if options.json:
        check.say(json.dumps([dict(zip(OUTLINE, row, strict=True)) for row in rows], indent=2))
    else:
        check.say(table(rows, OUTLINE, width_of_screen()))
    return FOUND
