"""``customops describe``: what an op is, has and lacks."""

from __future__ import annotations

import argparse
import json
from typing import Any

from customops._cli import check
from customops._cli.check import TARGET_HELP
from customops._cli.targets import TargetError, ops_of

#: Exit statuses.
FOUND, NOT_FOUND = 0, 2


def add_parser(commands: Any) -> None:
    """Add the command to those of the command line."""
    parser = commands.add_parser(
        "describe",
        help="say what ops are, have and lack",
        description="Describe ops: describe mylib::scale ops.py. Without a file or module, the module that is called "
        "as the namespace is imported; torch's own ops are there anyway.",
        epilog="Exit status: 0, or 2 if there is no such op.",
    )
    parser.add_argument("targets", nargs="+", metavar="OP|TARGET", help=TARGET_HELP)
    parser.add_argument("--json", action="store_true", help="print a list of objects")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    try:
        found = [op.describe() for op in ops_of(options.targets)]
    except TargetError as error:
        check.report_error(error)
        return NOT_FOUND
    if options.json:
        check.say(json.dumps([each.to_dict() for each in found], indent=2))
    else:
        check.say("\n\n".join(each.text() for each in found))
    return FOUND
