"""Was an exception raised on purpose, to refuse an input, or did it come about?"""

from __future__ import annotations

import linecache
import traceback

from customops.errors import CustomOpsError, is_users

#: Raised by code that did not expect its input. Others may be how it says what it does not take.
_ACCIDENTS = (
    TypeError,
    IndexError,
    KeyError,
    AttributeError,
    NameError,
    ZeroDivisionError,
    UnboundLocalError,
    RuntimeError,
    ValueError,
    RecursionError,
)
_REFUSALS = ("raise ", "raise\n", "assert ", "torch._check", "_check")

_WRAPS_RESULTS = "wrap_outputs_maintaining_identity"  #: torch's function that takes what a vmap rule returned


def is_accident(error: BaseException) -> bool:
    """Did an exception come about in the user's code, by something that its author did not think of?

    No is the answer where the line of the user's code that raised it says so (``raise``, ``assert``, ``torch._check``),
    where no code of the user had a part in it, and for NotImplementedError.
    """
    if isinstance(error, (NotImplementedError, CustomOpsError)) or not isinstance(error, _ACCIDENTS):
        return False
    if error.__cause__ is not None and not is_accident(error.__cause__):
        return False
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
    if not frames or frames[-1].lineno is None:
        return False
    # A statement over several lines: `raise` is on its first.
    line = linecache.getline(frames[-1].filename, frames[-1].lineno).strip()
    return not any(line.startswith(word) or f" {word}" in f" {line}" for word in _REFUSALS)


def is_refusal(error: BaseException) -> bool:
    """Did a rule refuse its inputs on purpose?

    Not if it went on to call an operator, and that one refused what the rule passed to it.
    """
    if isinstance(error, (NotImplementedError, CustomOpsError)):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    if any(frame.name == _WRAPS_RESULTS for frame in frames):
        return False  # torch could not find the batch in what the rule returned
    users = [i for i, frame in enumerate(frames) if is_users(frame.filename)]
    if not users:
        return not isinstance(error, (IndexError, TypeError, AttributeError, KeyError, AssertionError))
    last = users[-1]
    start = last
    while start - 1 in users:
        start -= 1
    entry, first = frames[start], frames[users[0]]
    is_same = (entry.name, entry.filename) == (first.name, first.filename)
    return is_same and not is_accident(error)


def user_line(error: BaseException) -> str:
    """``file:line`` of the user's code that raised an exception; empty if none had a part in it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
