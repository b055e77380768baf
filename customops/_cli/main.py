"""The parser of the command line."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence

import torch

import customops
from customops._cli import backend_report, bench, check, show, stubs
from customops._cli.targets import TargetError

#: The exit status of a program that was ended by a closed pipe.
PIPE_CLOSED = 141

#: In the order of the help.
_COMMANDS = (
    check.add_parser,
    show.add_list_and_describe,
    bench.add_parser,
    stubs.add_parser,
    show.add_doctor,
    backend_report.add_parser,
    show.add_completion,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    parser = make_parser()
    options = parser.parse_args(argv)
    try:
        return options.run(options, parser)  # type: ignore[no-any-return]
    except TargetError as error:
        check.report_error(error)
        return check.NOTHING
    except BrokenPipeError:  # as with ``| head``: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is flushed at the end goes nowhere
        return PIPE_CLOSED


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="customops", description="Custom operators for PyTorch.")
    versions = f"customops {customops.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    parser.add_argument("--version", action="version", version=versions)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add_parser in _COMMANDS:
        add_parser(commands)
    return parser
