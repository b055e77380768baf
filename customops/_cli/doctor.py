"""``customops doctor``: what of torch this package builds on, whether it is there, and what to do if not."""

from __future__ import annotations

import argparse
import platform
from typing import Any

import torch

import customops
from customops._cli import terminal
from customops._compat.probes import PROBES, missing
from customops._describe.screen import table, width_of_screen

#: Exit statuses.
ALL_THERE, SOME_MISSING = 0, 1


def add_parser(commands: Any) -> None:
    """Add the command to those of the command line."""
    parser = commands.add_parser(
        "doctor",
        help="say which private parts of torch are used, and whether this torch has them",
        description="Try each private name of torch that customops uses. For what is missing, say what does not work.",
        epilog="Exit status: 0 if all are there, 1 if one is missing.",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    found = [(probe, missing(probe)) for probe in PROBES]
    width = width_of_screen()
    terminal.say(f"customops {customops.__version__}, torch {torch.__version__}, Python {platform.python_version()}")
    rows = [
        (probe.subsystem, "missing: " + ", ".join(names) if names else f"all {len(probe.names)} there", probe.without)
        for probe, names in found
    ]
    terminal.say(table(rows, ("part of torch", "state", "needed, or else"), width))
    lacking = [probe for probe, names in found if names]
    if not lacking:
        terminal.say(f"All of {sum(len(probe.names) for probe in PROBES)} names are there.")
        return ALL_THERE
    for probe in lacking:
        terminal.say(terminal.wrapped(f"missing: {probe.without}", width))
    advice = "Use a torch that customops is tested on (see its README), or report this output."
    terminal.say(terminal.wrapped(advice, width))
    return SOME_MISSING
