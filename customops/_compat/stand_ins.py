"""Names that a torch newer than those tested may have lost: the package loads without them, and what uses one raises.

While the other modules here load, each missing name of `probes` is a class that cannot be called. Then torch is as it
was; the modules keep what they took.
"""

from __future__ import annotations

import importlib.util
import types
from typing import Any

import torch

from customops import _versions
from customops._compat.probes import PROBES
from customops.errors import UnsupportedError

__tracebackhide__ = True  # pytest leaves the frames out

_put_in: list[tuple[Any, str]] = []


class _Missing(type):
    """The class of a stand-in: its attributes are stand-ins, too, and a call raises."""

    _name: str
    _without: str

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stand_in(f"{cls._name}.{name}", cls._without)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(
            f"torch {torch.__version__} has no {cls._name}, so {cls._without}",
            expected=f"torch {_versions.spelled(_versions.OLDEST)} to {_versions.spelled(_versions.NEWEST)}",
            fix="customops doctor lists what is missing; a newer customops may know this torch",
        )


def _stand_in(name: str, without: str) -> Any:
    return _Missing(name.rpartition(".")[2], (), {"_name": name, "_without": without})


def put_in() -> None:
    """Let names be there that this torch does not have, if it is newer than those tested."""
    release = _versions.release(torch.__version__)
    if release is not None and release <= _versions.NEWEST:
        return
    for probe in PROBES:
        for name in probe.names:
            parent, missing = _first_missing(name)
            if missing:
                setattr(parent, missing, _stand_in(name, probe.without))
                _put_in.append((parent, missing))


def take_out() -> None:
    """Leave torch as it was."""
    while _put_in:
        delattr(*_put_in.pop())


def _first_missing(name: str) -> tuple[Any, str]:
    """What lacks the first part of a dotted name that is not there, and that part. A module to be loaded is there."""
    found: Any = torch
    for part in name.split(".")[1:]:
        if not hasattr(found, part):
            is_package = isinstance(found, types.ModuleType) and hasattr(found, "__path__")
            if is_package and importlib.util.find_spec(f"{found.__name__}.{part}") is not None:
                break
            return found, part
        found = getattr(found, part)
    return found, ""
