"""Measurement of the kernels of an op on samples. In a process group, rank 0 measures for all ranks."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from customops import _torch
from customops._dispatch.preference import choose_from_now_on, here, prefer
from customops._dispatch.results import given
from customops._op.op import CustomOpDef
from customops._op.samples import samples_of
from customops._places import entry
from customops._rules.choice import REFERENCE, device_of
from customops._schema.defaults import completer
from customops.errors import CustomOpsError, RegistrationError, did_you_mean, first_line
from customops.tuning import _choices

__tracebackhide__ = True  # pytest leaves the frames out

log = logging.getLogger("customops")

#: Rounds in which each kernel has its turn, of which half count: a quarter at each end is left out.
_ROUNDS, _SECONDS = 12, 0.01
#: A kernel that is asked earlier stays unless another takes less than this part of its time: else noise would choose.
_BETTER = 0.97


@dataclass(frozen=True)
class Tuned:
    """What was chosen for a bucket of arguments, and of each kernel the seconds of a call on the last sample."""

    op: str
    hardware: str
    torch: str
    arguments: str
    kernel: str
    seconds: dict[str, float]
    left_out: dict[str, str]

    @property
    def key(self) -> _choices.Key:
        return self.op, self.hardware, self.torch, self.arguments


@entry
def autotune(
    op: CustomOpDef[Any, Any],
    samples: Iterable[Any] | None = None,
    kernels: str | Sequence[str] | None = None,
    *,
    file: str | os.PathLike[str] | None = None,
) -> list[Tuned]:
    """Measure the kernels of an op, and choose the fastest for such arguments from now on, in this process.

    A kernel whose results differ from those of the reference, or else of the first kernel, is left out, and logged. In
    a process group each rank must call it: rank 0 measures, and all ranks take its choices.

    Args:
        samples: arguments, as `register_samples` takes them. None: the op's samples.
        kernels: the names of the kernels to measure. None: all.
        file: the choices are put into this file, too; see `tuned`.

    Returns:
        a choice for each bucket of arguments that the samples are in; its `seconds` are those of a call.

    Raises:
        RegistrationError: there is nothing to choose, or the ranks have different files.

    Example:
        >>> autotune(double, [(torch.randn(64, n),) for n in (128, 4096)], file="tuned.toml")
    """
    known, kernels = op._rules.kernel.names(), [kernels] if isinstance(kernels, str) else kernels
    for name in ("",) if kernels == [] else kernels or ():
        if name not in known:
            expected, fix = f"some of {', '.join(known)}", did_you_mean(name, known)
            problem = f"the op has no kernel {name!r}" if name else "there is nothing to tune: kernels= is empty"
            raise RegistrationError(problem, op=op._qualname, expected=expected, fix=fix)
    given_samples = op.samples() if samples is None else samples_of(lambda: samples, op._qualname)

    def measure() -> list[Tuned]:
        if file is not None:  # else it would fail when all is measured
            _choices.check_place(file)
        found = _measured(op, list(given_samples), kernels)
        if file is not None:
            _choices.write(file, {each.key: each.kernel for each in found})
        return found

    found = from_first_rank(measure)
    _choices.add({each.key: each.kernel for each in found})
    return found


def from_first_rank(fn: Callable[[], list[Tuned]]) -> list[Tuned]:
    """What `fn` returns, called on rank 0 of the process group, if there is one; its error is one of all ranks."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
        return fn()
    check_tuned()
    outcome: list[Any] = [None]
    if distributed.get_rank() == 0:
        try:
            outcome = [fn()]
        except Exception as error:
            distributed.broadcast_object_list([str(error)], src=0)
            raise
    distributed.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[0], str):
        raise CustomOpsError("rank 0, which measures the kernels, raised an error", got=outcome[0])
    return outcome[0]  # type: ignore[no-any-return]


def check_tuned() -> None:
    """Raise if a rank of the process group has other tuned choices than rank 0; each rank is to call it.

    Raises:
        RegistrationError: on all ranks. It names the rank, its file, and the choice.

    Example:
        >>> torch.distributed.init_process_group()
        >>> customops.tuning.check_tuned()
    """
    mine = _choices.counting()
    everywhere: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everywhere, mine)
    for rank, theirs in enumerate(everywhere):
        for key in sorted({*theirs, *everywhere[0]}):
            (kernel, file), (first, first_file) = (
                each.get(key, ("no choice", "its files")) for each in (theirs, everywhere[0])
            )
            if kernel != first:
                raise RegistrationError(
                    f"rank {rank} has another tuned choice than rank 0",
                    op=key[0],
                    argument=" | ".join(key[1:]),
                    expected=f"{first}, as in {first_file} of rank 0",
                    got=f"{kernel}, in {file} of rank {rank}",
                    fix="give all ranks the same files (CUSTOMOPS_TUNED_FILE, customops.tuning.tuned)",
                )


def _measured(op: Any, samples: list[Any], kernels: Sequence[str] | None) -> list[Tuned]:
    """The choices for all buckets that the samples are in, by the mean over these of times relative to the fastest."""
    buckets: dict[_choices.Key, list[tuple[dict[str, float], dict[str, str]]]] = {}
    operator, rule = op._definition, op._rules.kernel
    complete = completer(operator.schema)
    choose_from_now_on([op._qualname])
    with torch.no_grad():
        for sample in samples:
            args, kwargs = op.lower(*sample.args, **sample.kwargs)
            call = _Call(operator, *complete(args, kwargs))
            chooser = rule.chooser_for(call.args, call.kwargs)
            if chooser is None:
                continue
            names = [each.name for each, _ in chooser.kernels if kernels is None or each.name in kernels]
            at = _choices.bucket(operator.schema, chooser.buckets, call.args, call.kwargs)
            key = op._qualname, _choices.hardware(call.device), _choices.VERSION, at
            buckets.setdefault(key, []).append(call.times(chooser, names))
    if not buckets:
        raise RegistrationError(
            "there is nothing to tune" if samples else "there are no samples to tune with",
            op=op._qualname,
            got="one kernel for the device of each sample" if samples else None,
            fix="op.register_kernel(device, fn, name=...)"
            if samples
            else "customops.tuning.autotune(op, samples), or op.register_samples",
        )
    return [found for key, measured in buckets.items() if (found := _chosen(key, measured)) is not None]


def _chosen(key: _choices.Key, measured: list[tuple[dict[str, float], dict[str, str]]]) -> Tuned | None:
    wrong = {name: why for _, left_out in measured for name, why in left_out.items()}
    logs: dict[str, list[float]] = {}
    for times, _ in measured:
        for name, seconds in times.items():
            if not wrong.get(name, "").startswith((_WRONG, _FAILS)):
                logs.setdefault(name, []).append(math.log(seconds / min(times.values())))
    for name, why in wrong.items():
        level = logging.WARNING if why.startswith((_WRONG, _FAILS)) else logging.INFO
        log.log(level, "%s: tuning leaves out the kernel %s for %s: %s", key[0], name, key[3], why)
    if not logs:
        return None
    # One that takes fewer samples of the bucket is not compared with those that take all.
    most = max(map(len, logs.values()))
    means = {name: sum(found) / most for name, found in logs.items() if len(found) == most}
    best = min(means.values())
    kernel = next(name for name, mean in means.items() if best >= mean + math.log(_BETTER))
    return Tuned(*key, kernel, measured[-1][0], wrong)


#: How the reasons begin of a kernel that is not to be chosen whatever its time.
_WRONG, _FAILS = "its results differ", "it raises"


class _Call:
    """A call of an op, with all arguments, which is made with one kernel or another."""

    def __init__(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.operator = operator
        detach = lambda x: x.detach() if isinstance(x, Tensor) else x  # noqa: E731
        self.args, self.kwargs = _torch.trees.tree_map(detach, (tuple(args), kwargs))
        self.device = device_of(operator.schema, self.args, self.kwargs)
        self.writes = bool(operator.schema.mutated)

    def fresh(self) -> Any:
        """The arguments; of an op that writes with copies of the tensors."""
        if not self.writes:
            return self.args, self.kwargs
        return _torch.trees.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, (self.args, self.kwargs))

    def results(self) -> list[Any]:
        args, kwargs = self.fresh()
        result = self.operator.overload(*args, **kwargs)
        written = [value for argument, value in given(self.operator.schema, args, kwargs) if argument.is_mutated]
        return [x for x in _torch.trees.tree_leaves((result, written)) if x is not None]

    def times(self, chooser: Any, names: list[str]) -> tuple[dict[str, float], dict[str, str]]:
        """The seconds of each kernel, and why others were left out: they do not take it, or their results differ."""
        left_out: dict[str, str] = {}
        passed: list[str] = []
        expected, failed = None, None
        of_reference = chooser.named(REFERENCE) is not None
        for name in [REFERENCE, *names] if of_reference else names:
            with prefer({self.operator.qualname: name}):
                chosen, refused = chooser.asked(here(), self.args, self.kwargs)
                if chosen is None or chosen.name != name:
                    left_out[name] = refused.get(name, "it is not chosen where it is preferred")
                    continue
                try:
                    results = self.results()
                except Exception as error:
                    failed = failed or error
                    left_out[name] = f"{_FAILS} {type(error).__name__}: {first_line(error)}"
                    continue
            expected = results if expected is None else expected
            why = self._difference(results, expected)
            if why:
                left_out[name] = f"{_WRONG} from those of {REFERENCE if of_reference else passed[0]}: {why}"
            else:
                passed.append(name)
        if failed is not None and not passed:
            raise failed
        rights = [name for name in names if name in passed]  # in the order in which they are asked
        rounds: dict[str, list[float]] = {name: [] for name in rights}
        counts = {name: max(1, min(10_000, int(_SECONDS / max(self._seconds(name, 1), 1e-9)))) for name in rights}
        for _ in range(_ROUNDS):
            for name in rights:
                rounds[name].append(self._seconds(name, counts[name]))
        quarter = _ROUNDS // 4
        inner = {name: sorted(found)[quarter:-quarter] for name, found in rounds.items()}
        return {name: max(sum(found) / len(found), 1e-12) for name, found in inner.items()}, left_out

    def _difference(self, results: list[Any], expected: list[Any]) -> str:
        if torch.Tag.nondeterministic_seeded in self.operator.tags:  # other numbers are right, too
            results, expected = ([x.new_zeros(x.shape) for x in each] for each in (results, expected))
        try:
            torch.testing.assert_close(results, expected, equal_nan=True)
        except AssertionError as error:
            return " ".join(str(error).split())[:200]
        return ""

    def _seconds(self, name: str, count: int) -> float:
        """The time of a call, as the mean of some: by events of the device where it has them, else by the clock."""
        run, (args, kwargs) = self.operator.overload, self.fresh()
        with prefer({self.operator.qualname: name}):
            run(*args, **kwargs)
            device = self.device
            if device is not None and device.type in ("cuda", "xpu"):
                start, end = (torch.Event(device, enable_timing=True) for _ in range(2))
                start.record()
                for _ in range(count):
                    run(*args, **kwargs)
                end.record()
                end.synchronize()
                return start.elapsed_time(end) / 1000 / count
            self._wait()
            begin = time.perf_counter()
            for _ in range(count):
                run(*args, **kwargs)
            self._wait()
            return (time.perf_counter() - begin) / count

    def _wait(self) -> None:
        if self.device is not None and self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
