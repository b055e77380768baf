"""What torch's own tests of ops say of a device: which ops run in a kernel of it, by fallback, or not."""

from __future__ import annotations

import copy
import fnmatch
import functools
import importlib
import importlib.util
import itertools
import json
import os
import random
import runpy
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from customops import _torch
from customops.backend import _compat, fallbacks
from customops.backend._backend import Backend
from customops.backend.errors import BackendError
from customops.backend.fallbacks import Spent
from customops.backend.registration import get_backend
from customops.testing.isolation import in_fork

# How much of torch's own op tests (OpInfo) a device passes: each op in a fork, compared with the CPU ------------------

#: Ops whose results are whatever the memory held.
UNINITIALISED = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}


@dataclass
class Score:
    """The ops that passed and failed for one dtype, in one direction."""

    dtype: torch.dtype
    backward: bool
    passed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)  #: not for the CPU either
    failed: dict[str, str] = field(default_factory=dict)  #: name -> the error, in a line
    #: what ran where in all of them, but for those that crashed or ran out of time
    journal: fallbacks.Journal = field(default_factory=fallbacks.Journal)

    @property
    def total(self) -> int:
        return len(self.passed) + len(self.failed) + len(self.skipped)


def run(
    backend: Backend,
    dtypes: Iterable[torch.dtype],
    *,
    backward: bool = True,
    patterns: Iterable[str] | None = None,
    samples: int | None = None,
    timeout: float = 60.0,
) -> Iterator[Score]:
    """Score each dtype, forward and, if it has gradients, both; of ops of these names, with at most so many samples."""
    ops = _compat.op_infos()
    if patterns is not None:
        chosen = list(patterns)
        ops = [op for op in ops if any(fnmatch.fnmatchcase(_name(op), pattern) for pattern in chosen)]
    for dtype, both in itertools.product(dtypes, (False, True) if backward else (False,)):
        if both and not (dtype.is_floating_point or dtype.is_complex):
            continue
        score = Score(dtype, both)
        for op in ops:
            if dtype not in (op.supported_backward_dtypes("cpu") if both else op.supported_dtypes("cpu")):
                continue
            # A fork each: one that crashes, or leaves autograd's threads behind, is no matter to the next.
            outcome = in_fork(functools.partial(_check, backend, op, dtype, both, samples), timeout)
            failure = (fallbacks.Journal(), False, _line(outcome.error)) if outcome.error is not None else None
            journal, compared, error = failure or outcome.value
            score.journal.add(journal)
            if error is not None:
                score.failed[_name(op)] = error
            else:
                (score.passed if compared else score.skipped).append(_name(op))
        yield score


def _name(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _check(
    backend: Backend, op: Any, dtype: torch.dtype, backward: bool, limit: int | None
) -> tuple[fallbacks.Journal, bool, str | None]:
    """What ran in the test of an op, whether the CPU can run any of the inputs, and the error that ended it."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    record = fallbacks.start()
    try:
        return record, _compare_all(backend, op, dtype, backward, limit), None
    except Exception as error:
        return record, False, _line(error)


def _compare_all(backend: Backend, op: Any, dtype: torch.dtype, backward: bool, limit: int | None) -> bool:
    """Compare the results for all inputs with the CPU's; is there one that the CPU can run?"""
    compared = False
    for there, here in itertools.islice(_samples(backend, op, dtype, backward), limit):
        try:
            expected = _outcome(op, here, backward)
        except Exception:
            continue  # not an input for the CPU either
        compared = True
        got = _outcome(op, there, backward)
        device = backend.name if _asks_for(there, backend.name) else None
        _compare(got, expected, device, values=_name(op) not in UNINITIALISED)
    return compared


def _asks_for(sample: Any, name: str) -> bool:
    """Do the results belong on the device? Not where the CPU is named, or nothing is: `arange(2)`."""
    leaves = _leaves(sample)
    named = {str(leaf).partition(":")[0] for leaf in leaves if isinstance(leaf, (str, torch.device))}
    used = {leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)}
    return "cpu" not in named and name in named | used


def _samples(backend: Backend, op: Any, dtype: torch.dtype, backward: bool) -> Iterator[tuple[Any, Any]]:
    """The same inputs on the device and on the CPU."""

    def made_on(device: str) -> Iterator[Any]:
        torch.manual_seed(0)
        random.seed(0)
        return iter(op.sample_inputs(device, dtype, requires_grad=backward))

    # Each is made where it is used, because some inputs are on the CPU by right, and some are views of more.
    # Where the two differ, for being drawn from two generators in turns, or by design, copies have to do.
    for there, here in itertools.zip_longest(made_on(backend.name), list(made_on("cpu"))):
        if there is not None:
            yield there, here if here is not None and _equal(there, here) else _moved(there, backend.name)


def _equal(there: Any, here: Any) -> bool:
    def equal(ours: Any, theirs: Any) -> bool:
        if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
            return ours.shape == theirs.shape and torch.equal(ours.detach().cpu(), theirs.detach())
        return not isinstance(ours, (int, float, complex)) or bool(ours == theirs)

    ours, theirs = _leaves(there), _leaves(here)
    return len(ours) == len(theirs) and all(map(equal, ours, theirs))


def _moved(sample: Any, name: str) -> Any:
    def on_cpu(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().cpu().requires_grad_(value.requires_grad)
        is_device = isinstance(value, (str, torch.device)) and str(value).partition(":")[0] == name
        return torch.device("cpu") if is_device else value

    leaves, spec = _torch.trees.tree_flatten((sample.input, sample.args, sample.kwargs))
    moved = copy.copy(sample)
    moved.input, moved.args, moved.kwargs = _torch.trees.tree_unflatten(list(map(on_cpu, leaves)), spec)
    return moved


def _leaves(sample: Any) -> list[Any]:
    return _torch.trees.tree_leaves((sample.input, sample.args, sample.kwargs))


def _outcome(op: Any, sample: Any, backward: bool) -> tuple[Any, list[Tensor | None]]:
    """What an op returns, and the gradients of its inputs."""
    torch.manual_seed(1)
    result = op(sample.input, *sample.args, **sample.kwargs)
    if not backward:
        return result, []
    if sample.output_process_fn_grad is not None:
        result = sample.output_process_fn_grad(result)
    outputs, wanted = (
        [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        for leaves in (_torch.trees.tree_leaves(result), _leaves(sample))
    )
    if not outputs or not wanted:
        return result, []
    torch.manual_seed(2)
    weights = [torch.randn(y.shape, dtype=y.dtype).to(y.device) for y in outputs]
    return result, list(torch.autograd.grad(outputs, wanted, weights, allow_unused=True))


def _compare(got: Any, expected: Any, device: str | None, *, values: bool) -> None:
    ours, theirs = _torch.trees.tree_leaves(got), _torch.trees.tree_leaves(expected)
    if len(ours) != len(theirs):
        raise AssertionError(f"{len(ours)} results instead of {len(theirs)}")
    for a, b in zip(ours, theirs, strict=True):
        if isinstance(b, Tensor):
            if device is not None and a.device.type != device and b.numel():
                raise AssertionError(f"a result is on {a.device}")
            if values:
                torch.testing.assert_close(a.cpu(), b, equal_nan=True)
            elif (a.shape, a.dtype) != (b.shape, b.dtype):
                raise AssertionError(f"{a.dtype}{list(a.shape)} instead of {b.dtype}{list(b.shape)}")
        elif isinstance(b, (int, float, complex)):
            torch.testing.assert_close(a, b, equal_nan=True)
        elif a != b:
            raise AssertionError(f"{a!r} instead of {b!r}")


# The coverage report of a device: a script or torch's op tests are run, and what ran where is put into words ----------


@dataclass(frozen=True)
class Row:
    """One op, and what it took in kernels of the device and in those of the CPU."""

    op: str
    native: Spent
    fallback: Spent
    sites: list[tuple[str, Spent]]  #: ``file:line`` of the user, and what the CPU's kernels took for it there
    error: str | None  #: the last one it raised

    @property
    def both(self) -> Spent:
        both = Spent()
        both.add(self.native)
        both.add(self.fallback)
        return both

    @property
    def status(self) -> str:
        if self.error is not None:
            return "FAILED"
        return "native" if not self.fallback.calls else "fallback" if not self.native.calls else "both"


def rows(record: fallbacks.Journal) -> list[Row]:
    """Failures first, then what the CPU's kernels took longest for: the order to write kernels in."""
    found = {op: Row(op, Spent(), Spent(), [], error) for op, error in record.failed.items()}
    for op, _ in (*record.native, *record.fallback):
        found.setdefault(op, Row(op, Spent(), Spent(), [], None))
    for (op, _), spent in record.native.items():
        found[op].native.add(spent)
    for (op, place), spent in record.fallback.items():
        found[op].fallback.add(spent)
        found[op].sites.append((place, spent))
    for row in found.values():
        row.sites.sort(key=lambda site: -site[1].seconds)
    return sorted(found.values(), key=lambda r: (r.error is None, -r.fallback.seconds, -r.native.seconds, r.op))


@dataclass(frozen=True)
class Advice:
    """Which kernels to write next, from what the ops of a program took."""

    seconds: float  #: of all ops that ran in kernels of the device or of the CPU
    now: float  #: the share of it in kernels of the device
    write: list[str]  #: the ops to write kernels for
    then: float  #: the share that these and the kernels of today make up

    #: The share that is aimed at, and how many kernels are named at most.
    GOAL, MOST = 0.9, 10


def advice(found: list[Row]) -> Advice:
    """The fewest kernels with which the goal is reached, as long as an op takes on the device what it takes now."""
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


def scores_as_text(scores: Iterable[Score]) -> Iterator[str]:
    """A line for each score as it comes, and the ops that failed."""
    for score in scores:
        direction = "forward and backward" if score.backward else "forward"
        name = str(score.dtype).removeprefix("torch.")
        skipped = f", {len(score.skipped)} not for the CPU either" if score.skipped else ""
        yield f"{name:<10} {direction:<21} {len(score.passed):>4} of {score.total} ops pass{skipped}"
        yield from (f"    {op}: {error}" for op, error in sorted(score.failed.items()))


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


#: A page by itself, light or dark as the reader has it.
_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --native: light-dark(#2e7d32, #66bb6a); --cpu: light-dark(#c62828, #ef5350) }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }}
table {{ border-collapse: collapse; width: 100% }}
th, td {{ text-align: left; padding: .2rem 1rem .2rem 0; white-space: nowrap }}
td:last-child {{ width: 100% }}
.bar {{ display: flex; height: 1em }}
.native {{ background: var(--native) }}
.cpu {{ background: var(--cpu) }}
</style>
<h1>{title}</h1>
{advice}
<p><span class="native">&emsp;</span> in kernels of the device &emsp; <span class="cpu">&emsp;</span> on the CPU</p>
{tables}
</html>
"""


def as_html(title: str, lines: Iterable[str], tables: Iterable[Table]) -> str:
    """A page of these lines and tables, with a bar for each row."""
    text = "".join(f"<p>{escape(line)}</p>\n" for line in lines)
    return _PAGE.format(title=escape(title), advice=text, tables="\n".join(map(_with_bars, tables)))


@dataclass(frozen=True)
class Table:
    """Rows of texts, and for each row the seconds in kernels of the device, and on the CPU."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    bars: Sequence[tuple[float, float]]


def _with_bars(table: Table) -> str:
    longest = max(map(sum, table.bars), default=0.0) or 1.0
    html = "".join(f"<th>{escape(title)}" for title in table.head)
    for cells, bar in zip(table.rows, table.bars, strict=True):
        parts = zip(("native", "cpu"), bar, strict=True)
        bars = "".join(f'<div class={name} style="width:{100 * each / longest:.1f}%"></div>' for name, each in parts)
        html += f"\n<tr>{''.join(f'<td>{escape(cell)}' for cell in cells)}<td><div class=bar>{bars}</div>"
    return f"<table>\n<tr>{html}\n</table>"
