"""The parser of the command line."""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from typing import NoReturn

import torch

import customops
from customops._cli.screen import FINE, NOTHING, report_error
from customops._cli.targets import TargetError
from customops.errors import did_you_mean

#: The exit status of a program that was ended by a closed pipe.
PIPE_CLOSED = 141

#: The commands, in the order of the help.
COMMANDS = ("check", "list", "describe", "bench", "tune", "new", "migrate", "stubs", "doctor", "backend-report")
#: The modules beside this one that are not called as their commands.
MODULES = {"list": "show", "describe": "show", "backend-report": "backend_report"}


class Parser(argparse.ArgumentParser):
    """A parser whose errors say what may have been meant."""

    def refuse(self, what: str, given: str, known: Sequence[str]) -> NoReturn:
        there_are = f"there are {', '.join(known)}"
        self.error(f"there is no {what} {given}; {did_you_mean(given, known) or there_are}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    if argv is None:
        gc.freeze()  # while more is loaded, the collector need not look at torch again and again
    given = list(sys.argv[1:] if argv is None else argv)
    command = given[0] if given else ""
    parser, commands = make_parser(command)
    if not given:
        parser.print_help()
        return FINE
    if command not in COMMANDS and not command.startswith("-"):
        parser.refuse("command", command, COMMANDS)
    options, unknown = parser.parse_known_args(given)
    own = commands.choices.get(command, parser)  # its usage is what helps
    if unknown and not unknown[0].startswith("-"):
        own.error(f"it takes no further argument: {shlex.join(unknown)}")
    if unknown:
        own.refuse("option", unknown[0], [*own._option_string_actions])
    try:
        return options.run(options, own)  # type: ignore[no-any-return]
    except TargetError as error:
        report_error(error)
        return NOTHING
    except BrokenPipeError:  # as with ``| head``: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is flushed at the end goes nowhere
        return PIPE_CLOSED


def make_parser(command: str = "") -> tuple[Parser, argparse._SubParsersAction[Parser]]:
    """The parser, and that of the commands; of all, or of one, so that nothing else is loaded."""
    parser = Parser(prog="customops", description="Custom operators for PyTorch.")
    versions = f"customops {customops.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    parser.add_argument("--version", action="version", version=versions)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    wanted = (command,) if command in COMMANDS else COMMANDS
    for module in dict.fromkeys(MODULES.get(each, each) for each in wanted):
        importlib.import_module(f"customops._cli.{module}").add_parser(commands)
    return parser, commands
