"""What a check has to say: it passed, it failed, or it could not try anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from customops.errors import CheckError, CustomOpsError

Status = Literal["passed", "failed", "not exercised"]


@dataclass(frozen=True)
class Outcome:
    """The result of one check on one set of inputs.

    Attributes:
        check: the name of the check, a key of `customops.checks.CHECKS`.
        status: "passed", "failed" or "not exercised".
        error: what went wrong, where the check failed.
        reason: why nothing was tried, where the check was not exercised.
        seconds: how long it took.
    """

    check: str
    status: Status
    error: Exception | None = None
    reason: str | None = None
    seconds: float = 0.0


class NotExercised(RuntimeError):
    """Raised by a check that has nothing to try on the inputs it was given."""


class SchemaCheckError(CheckError, RuntimeError):
    """An operator does to its arguments what its schema does not say."""


class UsageError(CustomOpsError, ValueError):
    """`opcheck` was called in a way that makes no sense."""


def in_short(error: BaseException, limit: int = 1000) -> str:
    """The kind of an exception and the start of its message, on one line."""
    text = " ".join(str(error).split())
    if len(text) > limit:
        text = text[:limit] + " ..."
    return f"{type(error).__name__}: {text}"
