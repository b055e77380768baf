"""What all commands share: exit statuses, lines for terminals, files that they write."""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path
from typing import Any, TextIO

from customops._describe.render import filled

#: The exit statuses: nothing is wrong, something is, the target is of no use.
FINE, FAULTY, NOTHING = 0, 1, 2

_CODES = {"red": "1;31", "green": "32", "yellow": "33", "bold": "1"}


def colored(text: str, color: str, stream: TextIO | None = None) -> str:
    """The text in this colour, if the stream shows colours. ``NO_COLOR`` and ``FORCE_COLOR`` have a say."""
    stream, environment = stream or sys.stdout, os.environ
    is_capable = stream.isatty() and environment.get("TERM") != "dumb"
    if environment.get("NO_COLOR") or not (environment.get("FORCE_COLOR") or is_capable):
        return text
    return f"\x1b[{_CODES[color]}m{text}\x1b[0m"


def say(text: str = "", stream: TextIO | None = None) -> None:
    """Print a text now. What the encoding of the stream does not have becomes a question mark."""
    out: Any = stream or sys.stdout
    encoding = getattr(out, "encoding", None) or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding), file=out, flush=True)


def report_error(problem: object) -> None:
    say(f"{colored('error:', 'red', sys.stderr)} {problem}", sys.stderr)


def wrapped(text: str, width: int) -> str:
    """A text in lines of `width`, but for long words and tracebacks. What is before a line or field is its margin."""
    lines = text.splitlines()
    for i, line in enumerate(lines):
        if len(line) > width and not line.lstrip().startswith('File "'):  # editors find places by whole lines
            blank, field = re.findall(r"^( *)(\w+: +)?", line)[0]
            lines[i] = filled(line[len(blank) :], width, first=blank, rest=" " * len(blank + field))
    return "\n".join(lines)


def refuse_unwritable(option: str, path: Path | None, parser: argparse.ArgumentParser) -> None:
    """End the program if the file that an option names could not be written."""
    if path is None:
        return
    if path.is_dir():
        parser.error(f"--{option} {path}: this is a directory")
    if not path.parent.is_dir():
        parser.error(f"--{option} {path}: there is no directory {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        parser.error(f"--{option} {path}: you have no permission to write it")
