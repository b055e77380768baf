"""The versions of torch that customops is for, and what older versions of Python lack.

Nothing uses torch before this, which uses public names alone.
"""

from __future__ import annotations

import re
import sys
from contextlib import nullcontext
from functools import cached_property as cached_property
from typing import Any

import torch

#: The oldest torch. `pyproject.toml` says the same.
OLDEST = (2, 13)
#: The newest one that the tests were run on. A newer one works as far as `customops doctor` finds what it needs.
NEWEST = (2, 15)


if sys.version_info < (3, 12):

    class cached_property(cached_property):  # type: ignore[no-redef, type-arg]
        """One without a lock. Python's has a lock that all instances share: two threads can wait for each other."""

        def __init__(self, func: Any) -> None:
            super().__init__(func)
            self.lock = nullcontext()


def release(version: str) -> tuple[int, int] | None:
    """The first two numbers of a version; None for a build that has none.

    >>> release("2.13.0+cpu")
    (2, 13)
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else None


def spelled(numbers: tuple[int, int]) -> str:
    """Numbers as a version: ``2.13``."""
    return ".".join(map(str, numbers))


def refuse_older(version: str, file: str | None) -> None:
    """Raise ImportError for a torch that is older than `OLDEST`; `version` is what it says, `file` where it is."""
    found = release(version)
    if found is not None and found < OLDEST:
        raise ImportError(
            "customops: the installed torch is too old\n"
            f"  expected: torch {spelled(OLDEST)} or newer\n"
            f"  got:      torch {version} ({file})\n"
            f'  fix:      pip install --upgrade "torch>={spelled(OLDEST)}"'
        )


refuse_older(torch.__version__, torch.__file__)
