"""``customops list``, ``describe`` and ``doctor``."""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import sys
from typing import Any

import torch

import customops
from customops._cli.screen import FAULTY, FINE, say, wrapped
from customops._cli.targets import TARGET_HELP, ops_of, what_runs
from customops._describe.description import OUTLINE, outline
from customops._describe.render import table, width_of_screen
from customops._torch.probes import is_too_new_for, missing, probes
from customops._versions import NEWEST, OLDEST, spelled
from customops._versions import release as release_of


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
    parser = commands.add_parser(
        "doctor",
        help="say which private parts of torch are used, and whether this torch has them",
        description="Try each private name of torch that customops uses. For what is missing, say what does not work.",
        epilog="Exit status: 0 if all are there that this torch should have, 1 if one is missing.",
    )
    parser.set_defaults(run=_doctor)


def _list(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    for line in (line for target in options.targets for line in what_runs(target)):
        say(f"warning: {line}", sys.stderr)
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


def _doctor(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    release, tested = release_of(torch.__version__), f"torch {spelled(OLDEST)} to {spelled(NEWEST)}"
    width = width_of_screen()
    say(f"customops {customops.__version__}, torch {torch.__version__}, Python {platform.python_version()}")
    if release is None or release > NEWEST:
        say(wrapped(f"This torch is newer than those that customops was tested on, {tested}.", width))
    rows, later, gone, total = [], [], [], 0
    for subsystem, group in itertools.groupby(probes(), lambda probe: probe.subsystem):
        there, states, needs = 0, [], []
        for probe in group:
            needs.append(probe.without)
            names = missing(probe)
            there += len(probe.names) - len(names)
            if names and probe.since is not None and is_too_new_for(probe, release):
                states.append(f"not yet there: {', '.join(names)}")
                later.append(f"from torch {spelled(probe.since)} on; until then: {probe.without}")
            elif names:
                states.append(f"missing: {', '.join(names)}")
                gone.append(f"missing: {probe.without}")
        rows.append((subsystem, "; ".join(states) or f"all {there} there", "; ".join(needs)))
        total += there
    say(table(rows, ("part of torch", "state", "needed, or else"), width))
    advice = f"Use a torch that customops is tested on, {tested}, or report this output."
    for line in (*later, *gone, advice if gone else f"All of {total} names are there."):
        say(wrapped(line, width))
    return FAULTY if gone else FINE
