"""Lines for a terminal, a pipe or a log: colours only where somebody sees them."""

from __future__ import annotations

import os
import re
import sys
from typing import Any, TextIO

from customops._describe.screen import filled

_CODES = {"red": "1;31", "green": "32", "yellow": "33", "bold": "1"}

#: The start of a line after which its further lines are indented: blanks, and a field with its name.
_START = re.compile(r"^ *(\w+: +)?")


def has_colors(stream: TextIO) -> bool:
    """Does a stream show colours? ``NO_COLOR`` and ``FORCE_COLOR`` have a say."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def colored(text: str, color: str, stream: TextIO | None = None) -> str:
    """The text in "red", "green", "yellow" or "bold"."""
    return f"\x1b[{_CODES[color]}m{text}\x1b[0m" if has_colors(stream or sys.stdout) else text


def say(text: str = "", stream: TextIO | None = None) -> None:
    """Print a text now. What the encoding of the stream does not have becomes a question mark."""
    out: Any = stream or sys.stdout
    encoding = getattr(out, "encoding", None) or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding), file=out, flush=True)


def error(problem: object) -> None:
    say(f"{colored('error:', 'red', sys.stderr)} {problem}", sys.stderr)


def wrapped(text: str, width: int) -> str:
    """A text whose lines are no longer than `width`, but for long words and tracebacks; indentation is kept."""
    return "\n".join(_wrapped(line, width) for line in text.splitlines())


def _wrapped(line: str, width: int) -> str:
    if len(line) <= width or line.lstrip().startswith('File "'):  # editors find places by whole lines
        return line
    start = _START.match(line)
    indent = " " * len(start[0] if start is not None else "")
    margin = len(line) - len(line.lstrip())
    return filled(line[margin:], width, first=line[:margin], rest=indent)
