"""Text for screens of 60 to 120 columns."""

from __future__ import annotations

import os
import shutil
import statistics
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from customops.errors import brief

NARROWEST, WIDEST = 60, 120


class Shown:
    """A dataclass that is shown as text, from the lines of `_lines`."""

    def to_dict(self) -> dict[str, Any]:
        """The same as lists, dicts, strings and numbers."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]

    def text(self, width: int | None = None) -> str:
        """The same as text of `width` columns; by default the width of the terminal, from 60 to 120."""
        return "\n".join(self._lines(width or width_of_screen()))

    def _lines(self, width: int) -> Iterator[str]:
        raise NotImplementedError

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__


def width_of_screen() -> int:
    """The columns of the terminal, or those that ``COLUMNS`` says, but at least 60 and at most 120."""
    return max(NARROWEST, min(WIDEST, shutil.get_terminal_size((100, 24)).columns))


def shorter_place(place: str, room: int = 48) -> str:
    """``file:line`` below the current directory, or else its end, in `room` columns where that can be done."""
    file, _, line = place.rpartition(":")
    if not file or not os.path.isabs(file):
        return place
    try:
        relative = os.path.relpath(file)
    except ValueError:  # another drive
        relative = file
    if not relative.startswith(os.pardir + os.sep):
        return f"{relative}:{line}"
    parts = file.split(os.sep)
    while len(parts) > 2 and sum(map(len, parts)) + len(parts) + len(line) > room:
        parts = parts[1:]
    shown = os.sep.join(parts)
    return f"{shown if len(shown) == len(file) else os.path.join('...', shown)}:{line}"


def entry(label: str, text: str, width: int, *, column: int = 21, indent: str = "  ") -> str:
    """``  label     text``, with further lines of the text below its first one."""
    start, blank = f"{indent}{label:<{column}}", " " * (len(indent) + column)
    if len(start) > len(blank):
        start += " "
    text = text or "-"
    if len(start) + len(text.split(maxsplit=1)[0]) > width and len(start) > len(blank):
        return f"{indent}{label}\n{filled(text, width, first=blank, rest=blank)}"
    return filled(text, width, first=start, rest=blank)


def plural(number: int, noun: str) -> str:
    """``1 call``, ``2 calls``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def filled(text: str, width: int, *, first: str = "", rest: str = "") -> str:
    """A text in lines of `width` that begin so; long words stay whole."""
    return textwrap.fill(
        text, width, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


def table(rows: Sequence[Sequence[str]], head: Sequence[str], width: int, *, right: Sequence[int] = ()) -> str:
    """Columns, two spaces apart. Where they are too many for the width, each row is a block of its own.

    `right` are the columns that are flush right. In blocks, the first column is a line, and the others follow.
    """
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    if sum(widths) + 2 * (len(widths) - 1) > width:
        column = max(map(len, head[1:]), default=0) + 2
        blocks = []
        for first, *cells in rows:
            pairs = [(title, cell) for title, cell in zip(head[1:], cells, strict=True) if cell]
            blocks += [first, *(entry(title, cell, width, column=column) for title, cell in pairs)]
        return "\n".join(blocks)
    lines.insert(1, ["-" * each for each in widths])
    for line in lines:
        for i, size in enumerate(widths):
            line[i] = line[i].rjust(size) if i in right and line[i].strip("-") else line[i].ljust(size)
    return "\n".join("  ".join(line).rstrip() for line in lines)


def described(value: Any, *, with_values: bool = True) -> str:
    """``float32[2, 3] strides=[1, 2]`` for a tensor, with its values if they are few; the start of the repr else."""
    if isinstance(value, (list, tuple)):
        items = [described(item, with_values=with_values) for item in value[:4]]
        return f"[{', '.join([*items, *['...'] * (len(value) > 4)])}]"
    if not isinstance(value, torch.Tensor):
        return brief(value)
    text = str(value.dtype).removeprefix("torch.")
    if value.is_nested and value.layout is torch.strided:  # it has no sizes
        return f"{text} nested" + " requires_grad" * value.requires_grad
    text += str(list(value.shape))
    if value.layout is not torch.strided:
        text += f" {value.layout}"
    else:
        text += "" if value.is_contiguous() else f" strides={list(value.stride())}"
        text += f" offset={value.storage_offset()}" if value.storage_offset() else ""
        text += " conj" if value.is_conj() else ""
        text += " neg" if value.is_neg() else ""
    text += f" on {value.device}" if value.device.type != "cpu" else ""
    text += " requires_grad" if value.requires_grad else ""
    return text + _values(value) if with_values else text


def outlined(value: Any) -> str:
    """The same without the values."""
    return described(value, with_values=False)


def _values(tensor: torch.Tensor) -> str:
    if not 0 < tensor.numel() <= 8 or tensor.layout is not torch.strided or tensor.is_quantized:
        return ""
    try:
        with torch.no_grad():
            wide = tensor.detach().to("cpu", torch.float64) if tensor.is_floating_point() else tensor.detach().cpu()
            values = wide.resolve_conj().resolve_neg().tolist()
    except (RuntimeError, NotImplementedError):  # a tensor without data, or of a dtype that nothing can read
        return ""

    def rounded(value: Any) -> Any:
        if isinstance(value, list):
            return [rounded(item) for item in value]
        return float(f"{value:.5g}") if isinstance(value, float) else value

    return f" = {brief(rounded(values))}"


def synchronize() -> None:
    """Wait for the accelerator, if there is one: what was launched there may still run."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def seconds_per_call(fn: Callable[[], Any], seconds: float = 0.1) -> float:
    """The time of a call of `fn`, as the median of rounds that take `seconds` together. It is called at least once."""

    def time_of(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            fn()
        synchronize()
        return time.perf_counter() - start

    rounds = 9  # of which the median counts: what disturbs the machine disturbs few of them
    time_of(1)  # what is made on the first call is there
    count, taken = 1, time_of(1)
    while taken < seconds / rounds and count < 1_000_000:
        count = max(count + 1, min(count * 10, int(count * seconds / rounds / max(taken, 1e-9))))
        taken = time_of(count)
    if taken > seconds:
        return taken / count
    return statistics.median([taken, *(time_of(count) for _ in range(rounds - 1))]) / count


def in_words(seconds: float) -> str:
    """``12.3 us``."""
    for limit, factor, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms")):
        if seconds < limit:
            return f"{seconds * factor:.3g} {unit}" if seconds * factor < 1000 else f"{seconds * factor:.0f} {unit}"
    return f"{seconds:.3g} s"
