"""`record`: the calls inside a context, as a list."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, overload

from customops._describe import html
from customops._describe.screen import table, width_of_screen
from customops._dispatch.current_kernel import observe
from customops._timing import in_words
from customops.logging._calls import Call
from customops.logging._watch import Ops, Watcher


class Recording(Sequence[Call]):
    """The recorded calls, in the order in which they ended.

    Attributes:
        dropped: the number of calls that were not kept because of the limit.
    """

    def __init__(self, limit: int) -> None:
        self._calls: list[Call] = []
        self._limit = limit
        self.dropped = 0

    def _add(self, call: Call, given: Any) -> None:
        if len(self._calls) < self._limit:
            self._calls.append(call)
        else:
            self.dropped += 1

    def __len__(self) -> int:
        return len(self._calls)

    @overload
    def __getitem__(self, index: int) -> Call: ...
    @overload
    def __getitem__(self, index: slice) -> list[Call]: ...
    def __getitem__(self, index: int | slice) -> Call | list[Call]:
        return self._calls[index]

    def of(self, op: Any) -> list[Call]:
        """The calls of one op, given by its name or object."""
        name = getattr(op, "_qualname", op)
        return [call for call in self._calls if call.op == name]

    def _rows(self) -> list[tuple[str, ...]]:
        """For each op and kernel: the number of calls, and their times."""
        groups: dict[tuple[str, str], list[Call]] = {}
        for call in self._calls:
            groups.setdefault((call.op, call.kernel or "none"), []).append(call)
        return [
            (
                op,
                kernel,
                str(len(calls)),
                in_words(sum(call.seconds for call in calls)),
                in_words(sum(call.kernel_seconds for call in calls)),
                str(sum(bool(call.error) for call in calls) or ""),
            )
            for (op, kernel), calls in groups.items()
        ]

    def summary(self, width: int | None = None) -> str:
        """A table with one row for each op and kernel: calls, time, time in the kernel, calls that raised."""
        dropped = f"\n{self.dropped} more calls were not kept" if self.dropped else ""
        return table(self._rows(), _HEAD, width or width_of_screen(), right=(2, 3, 4, 5)) + dropped

    def to_json(self, indent: int | None = 2) -> str:
        """All calls as JSON."""
        return json.dumps([call.to_dict() for call in self._calls], indent=indent)

    def __str__(self) -> str:
        return "\n".join([*(call.line() for call in self._calls[:20]), *["..."] * (len(self) > 20)]) or "no calls"

    def __repr__(self) -> str:
        return f"<Recording of {len(self)} calls>"

    def _repr_html_(self) -> str:
        return html.page(repr(self).strip("<>"), html.table(_HEAD, self._rows()))


_HEAD = ("op", "kernel", "calls", "time", "in kernels", "raised")


@contextmanager
def record(ops: Ops = None, *, limit: int = 100_000, synchronize: bool = False) -> Iterator[Recording]:
    """Record the calls of ops inside the context, in all threads.

    A call through the op's object is recorded as a whole, including what it raises, even if no kernel runs, as for fake
    tensors. A call through ``torch.ops``, in a compiled graph or inside a transform is recorded when its kernel runs.
    Kernels that were registered outside customops, or with `impl`, are recorded only in calls through the object.

    Args:
        ops: the ops to record: a name or pattern (``"mylib::*"``), an op, or several of these. None for all.
        limit: the maximum number of calls that are kept.
        synchronize: if True, wait for the accelerator before and after each call, so that the times include the
            computation and not only the launch.

    Yields:
        A `Recording`, to which the calls are appended.

    Example:
        >>> with customops.logging.record() as calls:
        ...     model(x)
        >>> print(calls.summary())
        >>> calls[0].kernel, calls[0].arguments["x"].shape, calls[0].caller
    """
    recording = Recording(limit)
    with observe(Watcher(recording._add, ops, synchronize=synchronize)):
        yield recording
