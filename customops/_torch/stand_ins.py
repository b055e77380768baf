"""Stand-ins for private names that a torch newer than those tested has lost.

The modules here bind private names when they are imported. A missing name becomes a class that cannot be called: the
package loads, and what needs the name raises. The comment ``#: Without: ...`` above the line says what does not work
without the name. ``customops doctor`` tries all names.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from customops import _versions
from customops.errors import UnsupportedError

__tracebackhide__ = True  # pytest leaves the frames out

#: The first torch that has the names, if it is not the oldest supported one; and what does not work without them.
WITHOUT = re.compile(r"^#: Without(?: \(since (\d+)\.(\d+)\))?: (.*)$", re.MULTILINE)
_FOLDER = Path(__file__).parent
#: The names that this torch has lost: their places, and the stand-ins.
_lost: dict[tuple[Any, str], Any] = {}


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


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """Put stand-ins in the places of lost names, if torch is newer than those tested. Remove them afterwards."""
    release = _versions.release(torch.__version__)
    put_in = []
    try:
        if release is None or release > _versions.NEWEST:
            for place, value in _lost.items():
                setattr(*place, value)
                put_in.append(place)
            for path in sorted(_FOLDER.glob("[!_]*.py")):
                while (error := _error_of_import(path.stem)) is not None:
                    place, value = _lost_name(error)
                    setattr(*place, value)
                    _lost[place] = value
                    put_in.append(place)
        yield
    finally:
        for place in put_in:
            delattr(*place)


def _error_of_import(module: str) -> AttributeError | ImportError | None:
    try:
        importlib.import_module(f"{__package__}.{module}")
    except (AttributeError, ImportError) as error:
        return error
    return None


def _lost_name(error: AttributeError | ImportError) -> tuple[tuple[Any, str], Any]:
    """Return the place of the name that an import did not find, and a stand-in. Raise the error if it is another."""
    parent: Any
    if isinstance(error, AttributeError):
        parent, name = error.obj, error.name
    else:
        found = re.match(r"cannot import name '(\w+)'", str(error))  # Python 3.12 has it as `name_from`
        parent, name = sys.modules.get(error.name or ""), found[1] if found else ""
    owner = getattr(parent, "__name__", "")
    if isinstance(parent, type):
        owner = f"{parent.__module__}.{owner}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).parent == _FOLDER]
    if not name or owner.partition(".")[0] != "torch" or (parent, name) in _lost:
        raise error
    return (parent, name), _stand_in(f"{owner}.{name}", _without(name, frames[-1].filename, frames[-1].lineno or 0))


def _without(name: str, file: str, line: int) -> str:
    """Return the comment above a line, or, for an import above all comments, above the first use of the name."""
    text = Path(file).read_text(encoding="utf-8")
    comments = list(WITHOUT.finditer(text))
    place = sum(map(len, text.splitlines(keepends=True)[:line]))
    place = max(place, text.find(name, comments[0].end()))
    return next((comment[3] for comment in reversed(comments) if comment.end() <= place), comments[0][3])
