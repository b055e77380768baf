"""The command line: import the targets, check the ops they define over their sample inputs, print one table."""

from __future__ import annotations

import argparse
import collections
import fnmatch
import importlib
import importlib.util
import itertools
import sys
import textwrap
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from customops import CustomOpDef, CustomOpsError, Sample, default_registry
from customops._cli import backend_report, doctor
from customops.checks import CHECKS, DEFAULT_CHECKS, Outcome, run_check
from customops.errors import location_of

#: Exit statuses.
ALL_PASSED, SOME_FAILED, NOTHING_RUN = 0, 1, 2


class TargetError(CustomOpsError):
    """The command line names something that cannot be checked."""


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
    _print(run, Console(highlight=False, markup=False, emoji=False))
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
    return parser


# Targets --------------------------------------------------------------------------------------------------------

Op = CustomOpDef[Any, Any]


def _load_all(targets: list[str]) -> list[Op]:
    ops: dict[str, Op] = {}
    for target in targets:
        path = Path(target)
        is_file = path.is_file() or path.suffix == ".py"
        is_name = not is_file and all(part.isidentifier() for part in target.split("."))
        if path.is_dir() and not (is_name and (path / "__init__.py").exists()):
            raise TargetError(f"{target} is a directory", fix=f"name its files ({path / '*.py'}), or the package")
        before = set(default_registry)
        module = _import_module(target) if is_name else _import_file(path)
        found = [op for op in default_registry if _is_inside(module, op)]
        if not found:
            raise _no_ops(target, [op for op in default_registry if op not in before])
        for op in found:
            if ops.setdefault(op._qualname, op) is not op:
                older = ops[op._qualname].source
                raise TargetError(f"{target} replaces {op._qualname} ({older})", fix="check them in two runs")
    return list(ops.values())


def _import_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _import_failed(name, error) from error  # something that the module imports is missing
        is_file = Path(f"{name}.py").exists()
        raise TargetError(
            f"no module named {error.name!r}", fix=f"the file is {name}.py" if is_file else None
        ) from None
    except (Exception, SystemExit) as error:
        raise _import_failed(name, error) from error


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise TargetError(f"no such file: {path}")
    path = path.resolve()
    name = _module_name(path)
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TargetError(f"not a Python file: {path}")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # as for `python FILE`: it may import its neighbours
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _import_failed(str(path), error) from error
    return module


def _module_name(path: Path) -> str:
    """The stem of the file, so that pickle and torch.compile find its names; numbered if another module has it."""
    for name in (path.stem, *(f"{path.stem}_{i}" for i in range(2, 1000))):
        file = getattr(sys.modules.get(name), "__file__", None)
        if name not in sys.modules or (file is not None and Path(file).resolve() == path):
            return name
    raise TargetError(f"too many modules are called {path.stem}")


def _is_inside(module: ModuleType, op: Op) -> bool:
    """Was the op defined, or given its samples, in the module's file, or in a package's directory?"""
    # A helper may define the ops of a project: then the samples tell whose they are.
    places = [op.source, *(location_of(fn) for fn in [op._samples] if fn is not None)]
    sources = [Path(place.rpartition(":")[0]).resolve() for place in places]
    if hasattr(module, "__path__"):
        roots = [Path(directory).resolve() for directory in module.__path__]
        return any(source.is_relative_to(root) for source in sources for root in roots)
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).resolve() in sources


def _no_ops(target: str, elsewhere: list[Op]) -> TargetError:
    if not elsewhere:
        return TargetError(f"{target} defines no op")
    names = ", ".join(f"{op._qualname} ({op.source})" for op in elsewhere[:3]) + (", ..." if elsewhere[3:] else "")
    return TargetError(f"{target} defines no op itself; it imports some", got=names, fix="name the module they are in")


def _import_failed(target: str, error: BaseException) -> TargetError:
    """An error that shows the traceback from the user's code on."""
    is_relative = isinstance(error, ImportError) and "attempted relative import" in str(error)
    fix = "name the module instead of the file: package.module" if is_relative else None
    return TargetError(f"{target} cannot be imported\n\n{_trace(error)}", fix=fix)


def _trace(error: BaseException) -> str:
    """The traceback without the frames of this package and of the import system."""
    trace = traceback.TracebackException.from_exception(error)
    ours = (str(Path(__file__).parent), importlib.__file__, "<frozen importlib")
    trace.stack = traceback.StackSummary.from_list([f for f in trace.stack if not f.filename.startswith(ours)])
    return "".join(trace.format()).rstrip()


def _selected(ops: list[Op], patterns: list[str] | None) -> list[Op]:
    if patterns is None:
        return ops
    found = [op for op in ops if any(fnmatch.fnmatchcase(op._qualname, pattern) for pattern in patterns)]
    if not found:
        names = ", ".join(op._qualname for op in ops)
        raise TargetError(f"no op matches --op {' '.join(patterns)}", got=names, fix='e.g. --op "*::name"')
    return found


# Running --------------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """One sample of an op, and what the checks said of it."""

    op: Op
    number: int
    arguments: list[str] | None = None  #: None for an op without samples, and where the samples function raised
    problem: BaseException | None = None  #: what it raised
    outcomes: list[Outcome] = field(default_factory=list)


@dataclass
class Run:
    """The checks to run, and the rows of the table so far."""

    checks: list[str]
    atol: float | None
    rtol: float | None
    fail_fast: bool
    rows: list[Row] = field(default_factory=list)

    def check(self, ops: list[Op], console: Console) -> None:
        """Check every op; the progress bar goes to `console`, and only if that is a terminal."""
        columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        # What ops print is theirs, so neither stream is redirected.
        with Progress(
            *columns,
            console=console,
            transient=True,
            disable=not console.is_terminal,
            redirect_stdout=False,
            redirect_stderr=False,
        ) as progress:
            task = progress.add_task("", total=len(ops))
            for op in ops:
                for step in self.steps(op):
                    if self.fail_fast and self.failed:
                        return
                    progress.update(task, description=step)
                progress.advance(task)

    def steps(self, op: Op) -> Iterator[str]:
        """Check one op; yields what comes next, before doing it."""
        yield op._qualname
        for row, sample in _rows(op):
            self.rows.append(row)
            if sample is None:
                return
            for check in self.checks:
                yield f"{op._qualname} {row.number} {check}"
                row.outcomes.append(run_check(check, op, sample.args, sample.kwargs, self.atol, self.rtol))

    @property
    def without_samples(self) -> list[Row]:
        return [row for row in self.rows if row.arguments is None and row.problem is None]

    @property
    def failed(self) -> int:
        """How many checks failed; a samples function that raises counts as one."""
        return self.count("failed") + sum(row.problem is not None for row in self.rows)

    def count(self, status: str) -> int:
        return sum(outcome.status == status for row in self.rows for outcome in row.outcomes)


def _rows(op: Op) -> Iterator[tuple[Row, Sample | None]]:
    """A row for each sample of an op, and at least one. Rows describe samples and do not keep them: they may be big."""
    torch.manual_seed(0)  # the same inputs in every run
    samples = op.samples()
    for number in itertools.count(1):
        try:
            sample = next(samples, None)
        except (Exception, SystemExit) as error:
            yield Row(op, number, problem=error), None
            return
        if sample is None:
            break
        yield Row(op, number, _described(op, sample)), sample
    if number == 1:
        yield Row(op, 0), None


def _described(op: Op, sample: Sample) -> list[str]:
    names = [argument.name for argument in op.schema.positional]
    names += [f"argument {i}" for i in range(len(names), len(sample.args))]
    return [
        f"{name}: {_brief(value)}" for name, value in (*zip(names, sample.args, strict=False), *sample.kwargs.items())
    ]


def _brief(value: Any) -> str:
    """``float32[3, 4] requires_grad`` for a tensor, the start of the repr for anything else."""
    if isinstance(value, (list, tuple)):
        items = [_brief(item) for item in value[:4]] + (["..."] if len(value) > 4 else [])
        return f"[{', '.join(items)}]"
    if not isinstance(value, torch.Tensor):
        text = " ".join(repr(value).split())
        return text if len(text) <= 80 else f"{text[:77]}..."
    text = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if value.layout is not torch.strided:
        text += f" {value.layout}"
    elif not value.is_contiguous():
        text += f" strides={list(value.stride())}"
    if value.device.type != "cpu":
        text += f" on {value.device}"
    return f"{text} requires_grad" if value.requires_grad else text


# Reporting ------------------------------------------------------------------------------------------------------

_CELLS = {"passed": ("passed", "green"), "failed": ("FAILED", "bold red"), "not exercised": ("-", "yellow")}


def _print(run: Run, console: Console) -> None:
    table = _table(run)
    if not console.is_terminal:
        # Nobody can widen a pipe: a wide line is better there than a truncated one.
        unbounded = console.options.update(max_width=10_000)
        console.width = max(console.width, console.measure(table, options=unbounded).maximum)
    console.print(table)
    console.print()
    for part in (_not_exercised(run), *_failures(run), _summary(run)):
        if part:
            console.print(part, soft_wrap=True)


def _table(run: Run) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("op", overflow="fold", vertical="bottom")
    table.add_column("sample", justify="right", vertical="bottom")
    for check in run.checks:
        # One word a line: the columns stay narrow, and leave the rest to the names of the ops.
        header = check.removeprefix("test_").replace("_", "\n")
        table.add_column(header, justify="center", vertical="bottom", no_wrap=True)
    table.add_column("time", justify="right", vertical="bottom")
    for row, previous in zip(run.rows, [None, *run.rows], strict=False):
        is_first = previous is None or previous.op is not row.op
        table.add_row(row.op._qualname if is_first else "", *_cells(row, len(run.checks)))
    return table


def _cells(row: Row, width: int) -> Iterator[Text]:
    if row.arguments is None:
        yield Text("none", "yellow") if row.problem is None else Text("FAILED", "bold red")
        yield from [Text("-", "yellow")] * width
        return
    yield Text(str(row.number))
    yield from (Text(*_CELLS[outcome.status]) for outcome in row.outcomes)
    yield from [Text()] * (width - len(row.outcomes))  # stopped before these
    yield Text(f"{sum(outcome.seconds for outcome in row.outcomes):.2f}s")


def _not_exercised(run: Run) -> Text:
    """What the dashes in the table stand for."""
    reasons = collections.Counter(
        f"{outcome.check}: {outcome.reason}"
        for row in run.rows
        for outcome in row.outcomes
        if outcome.status == "not exercised"
    )
    lines = [f"  {reason} ({_plural(count, 'sample')})\n" for reason, count in reasons.items()]
    lines += [
        f"  {row.op._qualname}: no samples; attach some with @{row.op.__name__}.register_samples ({row.op.source})\n"
        for row in run.without_samples
    ]
    return Text.assemble(("not exercised (-):\n", "yellow"), *lines) if lines else Text()


def _failures(run: Run) -> Iterator[Text]:
    for row in run.rows:
        if row.problem is not None:
            yield _failure(row, "the samples function raised", row.problem)
        for outcome in row.outcomes:
            if outcome.error is not None:
                yield _failure(row, outcome.check, outcome.error)


def _failure(row: Row, what: str, error: BaseException) -> Text:
    title = f"{row.op._qualname}, sample {row.number}, {what}  ({row.op.source})\n"
    message = str(error) if isinstance(error, CustomOpsError) else _trace(error)
    lines = "\n".join([*(row.arguments or []), "", message])
    return Text.assemble(("FAILED ", "bold red"), (title, "bold"), textwrap.indent(lines, "  "), "\n")


def _summary(run: Run) -> Text:
    ops = len({id(row.op) for row in run.rows})
    samples = sum(row.arguments is not None for row in run.rows)
    passed = run.count("passed")
    text = f"{_plural(ops, 'op')}, {_plural(samples, 'sample')}: "
    text += f"{passed} passed, {run.failed} failed, {run.count('not exercised')} not exercised"
    if run.without_samples:
        text += f"; {_plural(len(run.without_samples), 'op')} without samples, not exercised at all"
    if run.fail_fast and run.failed:
        text += "; stopped at the first failure"
    return Text(text, "bold red" if run.failed else "bold green" if passed else "bold yellow")


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
