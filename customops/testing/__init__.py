"""Generated tests for operators: run the tests of a project, and check each operator call as `opcheck` does.

`generate_opcheck_tests` adds the tests to a test class. A `FailuresDict` lists those that are known to fail. The checks
can also be called one by one.
"""

from __future__ import annotations

import re
from types import TracebackType

from customops.checks import aot_autograd_check, autograd_registration_check, fake_check
from customops.errors import CheckError, OpCheckError
from customops.testing.environment import generate_repro
from customops.testing.failures import FailuresDict, FailuresDictError, validate_failures_dict_structure
from customops.testing.generate import (
    DEFAULT_TEST_UTILS,
    DEPRECATED_DEFAULT_TEST_UTILS,
    GenerationError,
    dontGenerateOpCheckTests,
    generate_opcheck_tests,
)
from customops.testing.isolation import Isolated, IsolationError, run_each_isolated, run_isolated
from customops.testing.tracing import make_fx_check
from customops.testing.watch import OpCheckMode, is_inside_opcheck_mode


class assert_raises_regex:
    """Context manager that asserts that the block raises `exception` with a message in which `regex` is found."""

    def __init__(self, exception: type[BaseException] | tuple[type[BaseException], ...], regex: str) -> None:
        self.exception = exception
        self.regex = regex

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if error is None:
            raise CheckError("Expected exception, but none was raised", expected=self._expected())
        if not isinstance(error, self.exception):
            if not isinstance(error, Exception):
                return False  # KeyboardInterrupt and the like are nobody's test result
            raise CheckError(
                f"Expected {self._expected()} to be raised, instead got {type(error).__name__}", got=str(error)
            ) from error
        if not re.search(self.regex, str(error)):
            raise CheckError("Expected exception to match regex", expected=self.regex, got=str(error)) from error
        return True

    def _expected(self) -> str:
        kinds = self.exception if isinstance(self.exception, tuple) else (self.exception,)
        return " or ".join(kind.__name__ for kind in kinds)


__all__ = [
    "DEFAULT_TEST_UTILS",
    "DEPRECATED_DEFAULT_TEST_UTILS",
    "FailuresDict",
    "FailuresDictError",
    "GenerationError",
    "Isolated",
    "IsolationError",
    "OpCheckError",
    "OpCheckMode",
    "aot_autograd_check",
    "assert_raises_regex",
    "autograd_registration_check",
    "dontGenerateOpCheckTests",
    "fake_check",
    "generate_opcheck_tests",
    "generate_repro",
    "is_inside_opcheck_mode",
    "make_fx_check",
    "run_each_isolated",
    "run_isolated",
    "validate_failures_dict_structure",
]
