"""What a check has to say: it passed, it failed, or it could not try anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from customops.errors import AliasError, CheckError, CustomOpsError, is_users

Status = Literal["passed", "failed", "not exercised"]


@dataclass(frozen=True)
class Outcome:
    """The result of one check on one set of inputs.

    Attributes:
        check: the name of the check, a key of `customops.checks.CHECKS`.
        status: "passed", "failed" or "not exercised".
        error: the exception, if the check failed.
        reason: why the check had nothing to test, if it was not exercised.
        seconds: the duration, in seconds.
    """

    check: str
    status: Status
    error: Exception | None = None
    reason: str | None = None
    seconds: float = 0.0


#: What torch says of operators that it does not functionalize, whatever they do.
_NOT_FUNCTIONALIZED = "Found a custom (non-ATen) operator whose output has alias annotations"
#: What torch says where the kernel of a `torch.library.custom_op` returns an input, or a tensor twice.
_ALIAS = "may not alias any inputs to this custom operator"


def torch_refuses(error: CheckError) -> bool:
    """Did a check fail since torch traces no operators of this kind?"""
    return _NOT_FUNCTIONALIZED in str(error)


def is_alias(error: BaseException) -> bool:
    """Does an exception say that the kernel returned memory of an input, or the same memory twice?

    Operators of customops and of `torch.library.custom_op` look at what their kernels return.
    """
    return isinstance(error, AliasError) or (isinstance(error, RuntimeError) and _ALIAS in str(error))


class NotExercised(RuntimeError):
    """Raised by a check that has nothing to test on the given inputs."""


class SchemaCheckError(CheckError, RuntimeError):
    """An operator mutates or aliases its arguments in a way that its schema does not declare."""


class UsageError(CustomOpsError, ValueError):
    """`opcheck` or `customops.check` was called with invalid arguments."""


def leave_frames_out(error: BaseException | None) -> None:
    """Take the frames of checks, and of torch, out of what a check found, and out of what led to it.

    They say nothing about the operator. Where its code raised something, the traceback starts there. An exception that
    is neither a finding nor from the operator's code keeps its traceback.
    """
    while isinstance(error, CheckError):
        error.__traceback__ = None
        error = error.__cause__
    if error is None:
        return
    frames = error.__traceback__
    while frames is not None and not is_users(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    if frames is not None or isinstance(error, CustomOpsError):
        error.__traceback__ = frames


def in_short(error: BaseException, limit: int = 1000) -> str:
    """The kind of an exception and the start of its message, on one line."""
    between = "; " if isinstance(error, CustomOpsError) else " "  # whose fields have a line each
    text = between.join(" ".join(line.split()) for line in str(error).splitlines() if line.strip())
    if len(text) > limit:
        text = text[:limit] + " ..."
    return f"{type(error).__name__}: {text}"
