"""``python -m customops doctor``: what of torch this package builds on, whether it is there, and what to do if not."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Iterable
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

import customops
from customops._compat.probes import PROBES, Probe, missing

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
    console = Console(highlight=False, markup=False, emoji=False)
    found = [(probe, missing(probe)) for probe in PROBES]
    versions = f"customops {customops.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    console.print(versions, soft_wrap=True)
    console.print(_table(found))
    lacking = [probe for probe, names in found if names]
    if not lacking:
        console.print(f"All of {sum(len(probe.names) for probe in PROBES)} names are there.")
        return ALL_THERE
    for probe in lacking:
        console.print(f"missing: {probe.without}", soft_wrap=True)
    console.print("Use a torch that customops is tested on (see its README), or report this output.", soft_wrap=True)
    return SOME_MISSING


def _table(found: Iterable[tuple[Probe, list[str]]]) -> Table:
    table = Table(box=box.SIMPLE)
    for title in ("part of torch", "needed, or else", "state"):
        table.add_column(title, overflow="fold")
    for probe, names in found:
        state = "missing: " + ", ".join(names) if names else f"{len(probe.names)} names, all there"
        table.add_row(probe.subsystem, probe.without, state)
    return table
