"""A line on the terminal that says what is being checked, where that takes long."""

from __future__ import annotations

import sys
import time

_PATIENCE = 2.0  #: seconds before the line is shown
_PAUSE = 0.1  #: seconds between two lines about the same check


class Progress:
    """Shows ``mylib::op [#####-----] 12/30 test_vmap`` on stderr while it is entered.

    Args:
        name: of the operator.
        shown: None shows it on terminals only, after two seconds.
    """

    def __init__(self, name: str, shown: bool | None) -> None:
        self._name = name
        self._patience = 0.0 if shown else _PATIENCE
        self._enabled = sys.stderr.isatty() if shown is None else shown
        self._start = time.monotonic()
        self._last, self._what = 0.0, ""
        self._width = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._write("")

    def step(self, done: int, total: int, what: str) -> None:
        """Show how far it is, and what comes next."""
        now = time.monotonic()
        is_due = now - self._last >= _PAUSE or what != self._what
        if self._enabled and is_due and now - self._start >= self._patience:
            self._last, self._what = now, what
            filled = 20 * done // max(total, 1)
            self._write(f"{self._name} [{'#' * filled}{'-' * (20 - filled)}] {done}/{total} {what}")

    def _write(self, line: str) -> None:
        if self._width or line:
            sys.stderr.write("\r" + line.ljust(self._width) + ("" if line else "\r"))
            sys.stderr.flush()
            self._width = len(line)
