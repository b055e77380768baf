"""``customops stubs``: what `torch.ops` has of a module's ops, as a file for type checkers and editors."""

from __future__ import annotations

import argparse
import difflib
import sys
from pathlib import Path
from typing import Any

from customops._cli.stub_file import StubFile
from customops._targets import TargetError, load

#: Exit statuses.
UP_TO_DATE, STALE, NOTHING_WRITTEN = 0, 1, 2
#: How many lines of a difference are printed.
_LINES = 12


def add_parser(commands: Any) -> None:
    """Add the command to those of the command line."""
    parser = commands.add_parser(
        "stubs",
        help="write a .pyi file for the ops of a module in torch.ops",
        description="Import MODULE and write a stub: torch.ops with the ops that MODULE defines (or, if it defines "
        "none, those that importing it defined), as type checkers and editors read it.",
        epilog="Exit status: 0 if the file was written or is up to date, 1 if --check finds it stale, 2 if MODULE "
        "cannot be imported or brings no op.",
    )
    parser.add_argument("module", metavar="MODULE", help="the name of a module or package, or a Python file")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="e.g. mylib/torch_ops.pyi; default: stdout")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if FILE is not what would be written")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    output: Path | None = options.output
    if options.check and output is None:
        parser.error("--check needs the file to compare: -o FILE")
    if output is not None and output.suffix != ".pyi":
        parser.error(f"a stub ends in .pyi: -o {output.with_suffix('.pyi')}")
    try:
        text = _stub(options.module)
    except TargetError as error:
        print(f"error: {error}", file=sys.stderr)
        return NOTHING_WRITTEN
    if output is None:
        sys.stdout.write(text)
        return UP_TO_DATE
    return _compare(output, text, options.module) if options.check else _write(output, text)


def _stub(target: str) -> str:
    loaded = load(target)
    ops = loaded.ops or loaded.imported
    if not ops:
        raise TargetError(f"{target} defines no op")
    return StubFile(f"The ops of {loaded.module.__name__}, as torch.ops has them.").text(ops)


def _write(output: Path, text: str) -> int:
    try:
        output.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        print(f"error: {output} cannot be written: {error.strerror}", file=sys.stderr)
        return NOTHING_WRITTEN
    if not output.with_suffix(".py").exists():
        module = output.with_suffix(".py")
        print(f"note: Python itself imports {module}; write there: from torch import ops as ops", file=sys.stderr)
    return UP_TO_DATE


def _compare(output: Path, text: str, module: str) -> int:
    again = f"python -m customops stubs {module} -o {output}"
    if not output.is_file():
        print(f"{output} is not there; write it: {again}")
        return STALE
    old = output.read_text(encoding="utf-8")
    if old == text:
        return UP_TO_DATE
    print(f"{output} is stale; write it anew: {again}")
    lines = list(difflib.unified_diff(old.splitlines(), text.splitlines(), "there", "now", n=1, lineterm=""))
    print("\n".join(lines[:_LINES]))
    if lines[_LINES:]:
        print(f"... and {len(lines) - _LINES} lines more")
    return STALE
