"""What a check has to say: it passed, it failed, or it could not try anything."""

from __future__ import annotations

import os
import time
import traceback
from dataclasses import dataclass
from typing import Literal

from customops._places import is_deliberate, is_users, users_frames
from customops.errors import AliasError, CheckError, CustomOpsError, KernelError

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
    """Does an exception say that the kernel returned memory of an input, or the same memory twice?"""
    return isinstance(error, AliasError) or (isinstance(error, RuntimeError) and _ALIAS in str(error))


class NotExercised(RuntimeError):
    """Raised by a check that has nothing to test on the given inputs."""


def require(condition: object, reason: str) -> None:
    """Raise NotExercised for this reason unless the condition is true."""
    if not condition:
        raise NotExercised(reason)


class SchemaCheckError(CheckError, RuntimeError):
    """An operator mutates or aliases its arguments in a way that its schema does not declare."""


class UsageError(CustomOpsError, ValueError):
    """`opcheck` or `customops.check` was called with invalid arguments."""


def leave_frames_out(error: BaseException | None) -> None:
    """Take the frames of checks, and of torch, out of what a check found, and out of what led to it.

    Where the operator's code raised something, the traceback starts there; where it did not, a finding has none.
    """
    while isinstance(error, CheckError):
        error.__traceback__ = None
        error = error.__cause__
    frames = users_frames(error) if error is not None else []
    if error is not None and (frames or isinstance(error, CustomOpsError)):
        error.__traceback__ = frames[0] if frames else None


def processor_time() -> float:
    """Seconds of processor time of this process, and of its children that have ended.

    Limits count these: what is tried then does not depend on what else the machine does.
    """
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


def in_short(error: BaseException, limit: int = 1000) -> str:
    """The kind of an exception and the start of its message, on one line."""
    between = "; " if isinstance(error, CustomOpsError) else " "  # whose fields have a line each
    text = between.join(" ".join(line.split()) for line in str(error).splitlines() if line.strip())
    text = text.partition(" For more information, run with TORCH_LOGS")[0]
    if len(text) > limit:
        text = text[:limit] + " ..."
    return f"{type(error).__name__}: {text}"


#: Raised by code that did not expect its input. Others may be how it says what it does not take.
_ACCIDENTS = (TypeError, LookupError, AttributeError, NameError, ZeroDivisionError, RuntimeError, ValueError)

_WRAPS_RESULTS = "wrap_outputs_maintaining_identity"  #: torch's function that takes what a vmap rule returned


def is_accident(error: BaseException) -> bool:
    """Did the user's code raise an exception that its author did not think of, by another line than ``raise`` or so?"""
    if isinstance(error, (NotImplementedError, CustomOpsError)) or not isinstance(error, _ACCIDENTS):
        return False
    if is_singular(error):
        return False
    if error.__cause__ is not None and not is_accident(error.__cause__):
        return False
    return bool(users_frames(error)) and not is_deliberate(error)


def is_singular(error: BaseException) -> bool:
    """Does torch, or NumPy, say that a matrix has no inverse or the like? It depends on values alone."""
    return any(each.__name__.removeprefix("_") == "LinAlgError" for each in type(error).__mro__)


def is_mistake(error: BaseException) -> bool:
    """Does an exception of the user's code say that the code is wrong, whatever the input: a name that is not there?

    None has no names: arguments that are None are judged by themselves.
    """
    is_name = isinstance(error, NameError) or (isinstance(error, AttributeError) and error.obj is not None)
    return is_name and is_accident(error)


def is_refusal(error: BaseException) -> bool:
    """Did a rule refuse its inputs on purpose, rather than an operator that it called what the rule passed on?"""
    if isinstance(error, (NotImplementedError, CustomOpsError)):
        return not isinstance(error, KernelError)  # of what the rule returned
    frames = traceback.extract_tb(error.__traceback__)
    if any(frame.name == _WRAPS_RESULTS for frame in frames):
        return False  # torch could not find the batch in what the rule returned
    users = [i for i, frame in enumerate(frames) if is_users(frame.filename)]
    if not users:
        return not isinstance(error, (IndexError, TypeError, AttributeError, KeyError, AssertionError))
    start = users[-1]  # and back, to where the user's code was last entered
    while start - 1 in users:
        start -= 1
    entry, first = frames[start], frames[users[0]]
    return (entry.name, entry.filename) == (first.name, first.filename) and not is_accident(error)


def raised_at(error: BaseException) -> str | None:
    """``name (file:line)`` of the innermost line of the user's code that was left by an error."""
    for frame in users_frames(error)[-1:]:
        code = frame.tb_frame.f_code
        return f"{code.co_name} ({code.co_filename}:{frame.tb_lineno})"
    return None
