"""``customops doctor``: what of torch this package builds on, whether it is there, and what to do if not."""

from __future__ import annotations

import argparse
import platform
from typing import Any

import torch

import customops
from customops._cli import check
from customops._describe.render import table, width_of_screen
from customops._torch.probes import Probe, is_too_new_for, missing, probes
from customops._versions import NEWEST, OLDEST, spelled
from customops._versions import release as release_of

#: Exit statuses. What only a newer torch has counts as there.
ALL_THERE, SOME_MISSING = 0, 1


def add_parser(commands: Any) -> None:
    """Add the command to those of the command line."""
    parser = commands.add_parser(
        "doctor",
        help="say which private parts of torch are used, and whether this torch has them",
        description="Try each private name of torch that customops uses. For what is missing, say what does not work.",
        epilog="Exit status: 0 if all are there that this torch should have, 1 if one is missing.",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    found = [(probe, missing(probe)) for probe in probes()]
    width = width_of_screen()
    release = release_of(torch.__version__)
    check.say(f"customops {customops.__version__}, torch {torch.__version__}, Python {platform.python_version()}")
    tested = f"torch {spelled(OLDEST)} to {spelled(NEWEST)}"
    if release is None or release > NEWEST:
        check.say(check.wrapped(f"This torch is newer than those that customops was tested on, {tested}.", width))
    rows = [(probe.subsystem, _state(probe, names, release), probe.without) for probe, names in found]
    check.say(table(rows, ("part of torch", "state", "needed, or else"), width))
    later = [probe for probe, names in found if names and is_too_new_for(probe, release)]
    gone = [probe for probe, names in found if names and probe not in later]
    for probe in later:
        since = spelled(probe.since)  # type: ignore[arg-type]
        check.say(check.wrapped(f"from torch {since} on; until then: {probe.without}", width))
    if not gone:
        count = sum(len(probe.names) for probe in probes() if probe not in later)
        check.say(f"All of {count} names are there.")
        return ALL_THERE
    for probe in gone:
        check.say(check.wrapped(f"missing: {probe.without}", width))
    advice = f"Use a torch that customops is tested on, {tested}, or report this output."
    check.say(check.wrapped(advice, width))
    return SOME_MISSING


def _state(probe: Probe, names: list[str], release: tuple[int, int] | None) -> str:
    if not names:
        return f"all {len(probe.names)} there"
    word = "not yet there" if is_too_new_for(probe, release) else "missing"
    return f"{word}: {', '.join(names)}"
