"""Tests whose body runs in a process of its own: a device is registered once per process, and stays."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

from customops.testing import Isolated, run_each_isolated

Test = Callable[[], Any]


def prepare(setup: Test | None, imports: Sequence[str]) -> None:
    if setup is not None:
        setup()
    for name in imports:
        importlib.import_module(name)


class isolated:
    """Decorator for the tests of one file: all of them run in forks of one fresh interpreter, after `setup`.

    Modules that several of the tests import, and that take seconds, can be imported once, after `setup`: `imports`.
    """

    def __init__(self, setup: Test | None = None, imports: Sequence[str] = ()) -> None:
        self.setup = setup if not imports else functools.partial(prepare, setup, imports)
        self.tests: list[Test] = []
        self.outcomes: list[Isolated] = []

    def __call__(self, test: Test) -> Test:
        number = len(self.tests)
        self.tests.append(test)

        @functools.wraps(test)
        def run() -> None:
            if not self.outcomes:
                self.outcomes = run_each_isolated(self.tests, setup=self.setup)
            self.outcomes[number].get()

        return run
