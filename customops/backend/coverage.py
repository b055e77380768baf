"""The coverage report of a device: the ops of a program, and where each of them ran."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import runpy
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from customops.backend import fallbacks
from customops.backend._backend import Backend
from customops.backend.errors import BackendError
from customops.backend.fallbacks import Spent
from customops.backend.op_tests import Score
from customops.backend.registration import get_backend


@dataclass(frozen=True)
class Row:
    """One op, and its time in kernels of the device and of the CPU."""

    op: str
    native: Spent
    fallback: Spent
    sites: list[tuple[str, Spent]]  #: ``file:line`` of the user, and what the CPU's kernels took for it there
    error: str | None  #: the last one it raised

    @property
    def status(self) -> str:
        if self.error is not None:
            return "FAILED"
        return "native" if not self.fallback.calls else "fallback" if not self.native.calls else "both"


def rows(record: fallbacks.Journal) -> list[Row]:
    """Return failures first, then the ops by the time in the CPU's kernels: the order to write kernels in."""
    found = []
    for op in {*record.failed, *(op for op, _ in (*record.native, *record.fallback))}:
        native = [spent for (name, _), spent in record.native.items() if name == op]
        sites = [(place, spent) for (name, place), spent in record.fallback.items() if name == op]
        sites.sort(key=lambda site: -site[1].seconds)
        fallback = [spent for _, spent in sites]
        found.append(Row(op, sum(native, Spent()), sum(fallback, Spent()), sites, record.failed.get(op)))
    return sorted(found, key=lambda r: (r.error is None, -r.fallback.seconds, -r.native.seconds, r.op))


@dataclass(frozen=True)
class Advice:
    """The kernels to write next, by the time that the ops of a program took."""

    seconds: float  #: of all ops that ran in kernels of the device or of the CPU
    now: float  #: the share of it in kernels of the device
    write: list[str]  #: the ops to write kernels for
    then: float  #: the share that these and the kernels of today make up

    #: The share that is aimed at, and how many kernels are named at most.
    GOAL, MOST = 0.9, 10


def advice(found: list[Row]) -> Advice:
    """Find the fewest kernels that reach the goal, if an op takes as long on the device as it takes now."""
    native = sum(row.native.seconds for row in found)
    total = native + sum(row.fallback.seconds for row in found)
    write, share = [], native / total if total else 1.0
    for row in sorted(found, key=lambda row: -row.fallback.seconds)[: Advice.MOST]:
        if share < Advice.GOAL:
            write.append(row.op)
            share += row.fallback.seconds / total
    return Advice(total, native / total if total else 1.0, write, share)


def run_script(target: str, arguments: Iterable[str] = ()) -> tuple[Backend, fallbacks.Journal, BaseException | None]:
    """Run a file or module as a program, which registers a device; what it raised is returned with the rest."""
    _check_exists(target)
    record = fallbacks.start()
    error: BaseException | None = None
    before, start = sys.argv, time.perf_counter()
    sys.argv = [target, *arguments]
    try:
        _execute(target, "__main__")
    except SystemExit as stop:
        error = stop if stop.code not in (None, 0) else None
    except Exception as raised:
        error = raised
    finally:
        sys.argv, record.seconds = before, time.perf_counter() - start
        fallbacks.open_journals.clear()
    return _require_backend(target, error), record, error


def load_device(target: str) -> Backend:
    """Import a file or module that registers a device: at its top, or in its function `make_device`."""
    _check_exists(target)
    is_file = Path(target).is_file()  # else it may be there already: `import torch` loads the devices of packages
    namespace = _execute(target, "__device__") if is_file else vars(importlib.import_module(target))
    if get_backend() is None and callable(namespace.get("make_device")):
        namespace["make_device"]()
    return _require_backend(target, None)


def _check_exists(target: str) -> None:
    if Path(target).is_file():
        return
    found = None
    if not target.endswith(".py") and all(part.isidentifier() for part in target.split(".")):
        try:
            found = importlib.util.find_spec(target)
        except ModuleNotFoundError as error:  # its package is missing, or misses something itself
            if not f"{target}.".startswith(f"{error.name}."):
                raise
    if found is None:
        raise BackendError("no such file or module", expected="a Python file, or the name of a module", got=target)


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
    fix = "call register_backend in it, at the top or in make_device()"
    raise BackendError(f"{target} registers no device", fix=fix)


def as_json(record: fallbacks.Journal, scores: Iterable[Score]) -> str:
    found = rows(record)
    ops = {
        row.op: {
            "native": asdict(row.native),
            "fallback": asdict(row.fallback),
            "sites": [{"where": place, **asdict(spent)} for place, spent in row.sites],
            "error": row.error,
        }
        for row in found
    }
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
    program = {"seconds": record.seconds, "advice": asdict(advice(found))}
    return json.dumps({"torch": torch.__version__, "program": program, "ops": ops, "scores": each}, indent=1) + "\n"
