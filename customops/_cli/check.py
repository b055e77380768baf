"""The command line: check the ops that targets define over their sample inputs, print one table."""

from __future__ import annotations

import argparse
import fnmatch
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from customops._cli import backend_report, doctor, stubs
from customops._cli.outcomes import Run, print_outcomes
from customops._targets import Op, TargetError, load
from customops.checks import CHECKS, DEFAULT_CHECKS

#: Exit statuses.
ALL_PASSED, SOME_FAILED, NOTHING_RUN = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    return options.run(options, parser)  # type: ignore[no-any-return]


def _check(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if (options.atol is None) != (options.rtol is None):
        parser.error("--atol and --rtol go together: give both or neither")
    errors = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)
    try:
        ops = _selected(_load_all(options.targets), options.op)
    except TargetError as error:
        errors.print(Text("error: ", style="bold red") + Text(str(error)))
        return NOTHING_RUN
    run = Run(list(dict.fromkeys(options.check or DEFAULT_CHECKS)), options.atol, options.rtol, options.fail_fast)
    run.check(ops, errors)
    print_outcomes(run, Console(highlight=False, markup=False, emoji=False))
    if run.failed:
        return SOME_FAILED
    return ALL_PASSED if run.count("passed") else NOTHING_RUN


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m customops", description="Custom operators for PyTorch.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    check = commands.add_parser(
        "check",
        help="check the ops that files or modules define",
        description="Import each TARGET and run the checks of customops.opcheck over the sample inputs of every op it "
        "defines (op.register_samples).",
        epilog="Exit status: 0 if no check failed, 1 if one did, 2 if a TARGET cannot be imported or defines no op.",
    )
    check.add_argument("targets", nargs="+", metavar="TARGET", help="a Python file, or the name of a module or package")
    check.add_argument("--op", action="append", metavar="PATTERN", help='only ops of this name, e.g. "mylib::*"')
    names = ", ".join(CHECKS)
    check.add_argument(
        "--check", action="append", metavar="NAME", choices=CHECKS, help=f"only this check; may be repeated; {names}"
    )
    check.add_argument("--atol", type=float, help="how far apart two results may be, absolutely")
    check.add_argument("--rtol", type=float, help="how far apart two results may be, relatively")
    check.add_argument("--fail-fast", action="store_true", help="stop after the first failure")
    check.set_defaults(run=_check)
    backend_report.add_parser(commands)
    doctor.add_parser(commands)
    stubs.add_parser(commands)
    return parser


def _load_all(targets: list[str]) -> list[Op]:
    ops: dict[str, Op] = {}
    for target in targets:
        loaded = load(target)
        if not loaded.ops:
            raise _no_ops(target, loaded.imported)
        for op in loaded.ops:
            if ops.setdefault(op._qualname, op) is not op:
                older = ops[op._qualname].source
                raise TargetError(f"{target} replaces {op._qualname} ({older})", fix="check them in two runs")
    return list(ops.values())


def _no_ops(target: str, elsewhere: list[Op]) -> TargetError:
    if not elsewhere:
        return TargetError(f"{target} defines no op")
    names = ", ".join(f"{op._qualname} ({op.source})" for op in elsewhere[:3]) + (", ..." if elsewhere[3:] else "")
    return TargetError(f"{target} defines no op itself; it imports some", got=names, fix="name the module they are in")


def _selected(ops: list[Op], patterns: list[str] | None) -> list[Op]:
    if patterns is None:
        return ops
    found = [op for op in ops if any(fnmatch.fnmatchcase(op._qualname, pattern) for pattern in patterns)]
    if not found:
        names = ", ".join(op._qualname for op in ops)
        raise TargetError(f"no op matches --op {' '.join(patterns)}", got=names, fix='e.g. --op "*::name"')
    return found
