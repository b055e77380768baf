"""``customops list`` and ``describe``."""

from __future__ import annotations

import argparse
import json
from typing import Any

from customops._cli.screen import FINE, say
from customops._cli.targets import TARGET_HELP, ops_of
from customops._describe.description import OUTLINE, outline
from customops._describe.render import table, width_of_screen


def add_parser(commands: Any) -> None:
    listing = commands.add_parser(
        "list",
        help="list the ops of targets: schema, kernels, rules, samples",
        description="Import each TARGET and list the ops that it defines.",
        epilog="Exit status: 0, or 2 if a TARGET cannot be imported or defines no op.",
    )
    describing = commands.add_parser(
        "describe",
        help="say what ops are, have and lack",
        description="Describe ops: describe mylib::scale ops.py. Without a file or module, the module that is called "
        "as the namespace is imported; torch's own ops are there anyway.",
        epilog="Exit status: 0, or 2 if there is no such op.",
    )
    for parser, targets, run in ((listing, "TARGET", _list), (describing, "OP|TARGET", _describe)):
        parser.add_argument("targets", nargs="+", metavar=targets, help=TARGET_HELP)
        parser.add_argument("--json", action="store_true", help="print a list of objects")
        parser.set_defaults(run=run)


def _list(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    rows = [outline(op) for op in ops_of(options.targets)]
    objects = [dict(zip(OUTLINE, row, strict=True)) for row in rows]
    say(json.dumps(objects, indent=2) if options.json else table(rows, OUTLINE, width_of_screen()))
    return FINE


def _describe(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    found = [op.describe() for op in ops_of(options.targets)]
    if options.json:
        say(json.dumps([each.to_dict() for each in found], indent=2))
    else:
        say("\n\n".join(each.text() for each in found))
    return FINE
