"""Tests whose body runs in a process of its own, because a device that is registered stays until the process ends."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Sequence
from typing import Any

from customops.testing import Isolated, run_each_isolated
from helpers import warm

Test = Callable[[], Any]


class isolated:
    """Decorator for the tests of one file, which run in forks of one fresh interpreter, after `setup`.

    The first of these tests to run starts the forks of all that this session chose, and no others. `imports` names
    modules that several of the tests import and that take seconds to import.
    """

    #: The functions of the tests that this session runs, and the functions among their parameters.
    #: `tests/conftest.py` sets it after the selection.
    chosen: Container[object] = ()

    def __init__(self, setup: Test | None = None, imports: Sequence[str] = ()) -> None:
        self.setup, self.imports = setup, imports
        self.tests: dict[Test, Test] = {}
        self.outcomes: dict[Test, Isolated] = {}

    def __call__(self, test: Test) -> Test:
        @functools.wraps(test)
        def run() -> None:
            if not self.outcomes:
                tests = [body for collected, body in self.tests.items() if collected in self.chosen]
                with warm.with_modules(*self.imports):
                    self.outcomes = dict(zip(tests, run_each_isolated(tests, setup=self.setup), strict=True))
            self.outcomes[test].get()

        self.tests[run] = test
        return run
