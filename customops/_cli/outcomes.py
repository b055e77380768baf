"""What the checks found, as one table and its notes."""

from __future__ import annotations

import collections
import itertools
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from customops import CustomOpsError, Sample
from customops._targets import Op, trace
from customops.checks import Outcome, run_check
from customops.checks._describe import outlined


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
        f"{name}: {outlined(value)}" for name, value in (*zip(names, sample.args, strict=False), *sample.kwargs.items())
    ]


_CELLS = {"passed": ("passed", "green"), "failed": ("FAILED", "bold red"), "not exercised": ("-", "yellow")}


def print_outcomes(run: Run, console: Console) -> None:
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
    message = str(error) if isinstance(error, CustomOpsError) else trace(error)
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
