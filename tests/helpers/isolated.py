"""Tests whose body runs in a process of its own: a device is registered once per process, and stays."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from customops.testing import Isolated, run_each_isolated
from helpers import warm

Test = Callable[[], Any]


class isolated:
    """Decorator for the tests of one file: all of them run in forks of one fresh interpreter, after `setup`.

    Modules that several of the tests import, and that take seconds, can be imported once: `imports`.
    """

    def __init__(self, setup: Test | None = None, imports: Sequence[str] = ()) -> None:
        self.setup, self.imports = setup, imports
        self.tests: list[Test] = []
        self.outcomes: list[Isolated] = []

    def __call__(self, test: Test) -> Test:
        number = len(self.tests)
        self.tests.append(test)

        @functools.wraps(test)
        def run() -> None:
            if not self.outcomes:
                with warm.with_modules(*self.imports):
                    self.outcomes = run_each_isolated(self.tests, setup=self.setup)
            self.outcomes[number].get()

        return run
