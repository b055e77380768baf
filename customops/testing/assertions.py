"""An assertion for tests that have no test case and no pytest at hand."""

from __future__ import annotations

import re
from types import TracebackType

from customops.errors import CheckError


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
