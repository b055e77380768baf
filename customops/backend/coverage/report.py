"""The coverage report of a device: a script or torch's op tests are run, and what ran where is put into words."""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from customops.backend import journal
from customops.backend._backend import Backend
from customops.backend.coverage import opinfo
from customops.backend.errors import BackendError
from customops.backend.registration import get_backend


@dataclass(frozen=True)
class Row:
    """One op, and how often it ran in a kernel of the device and in one of the CPU."""

    op: str
    native: int
    fallback: int
    error: str | None  #: the last one it raised

    @property
    def status(self) -> str:
        if self.error is not None:
            return "FAILED"
        return "native" if not self.fallback else "fallback" if not self.native else "both"


def rows(record: journal.Journal) -> list[Row]:
    """Failures first, then what ran on the CPU, most frequent first: the order to write kernels in."""
    found = [Row(op, record.native[op], record.fallback[op], record.failed.get(op)) for op in record.ops]
    return sorted(found, key=lambda row: (row.error is None, -row.fallback, -row.native, row.op))


def run_script(target: str, arguments: Iterable[str] = ()) -> tuple[Backend, journal.Journal, BaseException | None]:
    """Run a file or module as a program, which registers a device; what it raised is returned with the rest.

    Raises:
        BackendError: there is no such program, or it registers none.
    """
    _check_exists(target)
    record = journal.start()
    error: BaseException | None = None
    before = sys.argv
    sys.argv = [target, *arguments]
    try:
        _execute(target, "__main__")
    except SystemExit as stop:
        error = stop if stop.code not in (None, 0) else None
    except Exception as raised:
        error = raised
    finally:
        sys.argv = before
    return _require_backend(target, error), record, error


def load_device(target: str) -> Backend:
    """Import a file or module that registers a device: at its top, or in its function `make_device`."""
    _check_exists(target)
    namespace = _execute(target, "__device__")
    if get_backend() is None and callable(namespace.get("make_device")):
        namespace["make_device"]()
    return _require_backend(target, None)


def _check_exists(target: str) -> None:
    if not Path(target).is_file() and not _is_module(target):
        raise BackendError("no such file or module", expected="a Python file, or the name of a module", got=target)


def _is_module(name: str) -> bool:
    if name.endswith(".py") or not all(part.isidentifier() for part in name.split(".")):
        return False
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:  # its package is missing, or misses something itself
        if f"{name}.".startswith(f"{error.name}."):
            return False
        raise


def _execute(target: str, name: str) -> dict[str, Any]:
    path = Path(target)
    if path.is_file():
        sys.path.insert(0, os.fspath(path.resolve().parent))  # as for `python FILE`
        return runpy.run_path(target, run_name=name)
    return runpy.run_module(target, run_name=name, alter_sys=True)


def _require_backend(target: str, error: BaseException | None) -> Backend:
    backend = get_backend()
    if backend is not None:
        return backend
    if error is not None:
        raise BackendError(f"{target} ended with {type(error).__name__} before it registered a device") from error
    raise BackendError(
        f"{target} registers no device", fix="call register_backend in it, at the top or in make_device()"
    )


def scores_as_text(scores: Iterable[opinfo.Score]) -> Iterator[str]:
    """A line for each score as it comes, and the ops that failed."""
    for score in scores:
        direction = "forward and backward" if score.backward else "forward"
        name = str(score.dtype).removeprefix("torch.")
        skipped = f", {len(score.skipped)} not for the CPU either" if score.skipped else ""
        yield f"{name:<10} {direction:<21} {len(score.passed):>4} of {score.total} ops pass{skipped}"
        yield from (f"    {op}: {error}" for op, error in sorted(score.failed.items()))


def as_json(record: journal.Journal, scores: Iterable[opinfo.Score]) -> str:
    """All of it, for other programs."""
    ops = {row.op: {"native": row.native, "fallback": row.fallback, "error": row.error} for row in rows(record)}
    each = [
        {
            "dtype": str(score.dtype).removeprefix("torch."),
            "backward": score.backward,
            "passed": sorted(score.passed),
            "skipped": sorted(score.skipped),
            "failed": score.failed,
        }
        for score in scores
    ]
    return json.dumps({"torch": torch.__version__, "ops": ops, "scores": each}, indent=1) + "\n"
