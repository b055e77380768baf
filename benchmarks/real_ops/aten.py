"""Ops of aten, with the calls that torch's own test inputs (OpInfo) make of them."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from customops.checks._inputs import copy_tensors, tensors_in
from real_ops.subject import Sample, Subject

#: The helpers that nearly every function calls; they are subjects where an OpInfo is about them.
_HELPERS = {"empty", "empty_strided", "detach", "lift_fresh", "scalar_tensor", "clone", "_local_scalar_dense", "fill_"}
_TRIED = 8  #: samples of an OpInfo that are run
_ELEMENTS = 20_000  #: more than that in one call is left out
_DTYPES = (torch.float32, torch.int64, torch.bool, torch.complex64)


class _Recorder(TorchDispatchMode):
    """Keeps the calls of aten ops, with copies of their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Sample]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "aten":
            self.calls.append((func, copy_tensors((tuple(args), dict(kwargs)), leaves=True)))
        return func(*args, **kwargs)


def subjects(samples: int, dtype: torch.dtype | None = None) -> list[Subject]:
    """One subject for each overload that the functions of `op_db` come down to, with at most `samples` samples.

    Those that write in place come last.
    """
    from torch.testing._internal.common_methods_invocations import op_db  # noqa: PLC0415 (takes seconds)

    found: dict[str, Subject] = {}
    for info in op_db:
        dtypes = [d for d in (_DTYPES if dtype is None else (dtype,)) if d in info.supported_dtypes("cpu")]
        if not dtypes:
            continue
        for function in filter(None, (info.op, info.inplace_variant)):
            for func, sample in _calls(info, function, dtypes[0]):
                subject = found.setdefault(func.name(), Subject("aten", func.name()))
                if len(subject.samples) < samples:
                    subject.samples.append(sample)
    return sorted(found.values(), key=lambda subject: subject.is_in_place)


def _calls(info: Any, function: Callable[..., Any], dtype: torch.dtype) -> Iterator[tuple[Any, Sample]]:
    """The call that each of the first samples of an OpInfo comes down to."""
    in_place = function is not info.op
    torch.manual_seed(0)
    gradients = bool(info.supports_autograd) and not in_place and dtype.is_floating_point
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = info.sample_inputs("cpu", dtype, requires_grad=gradients)
        for sample in itertools.islice(_iterate(given), _TRIED):
            recorder = _Recorder()
            try:
                with recorder:
                    function(sample.input, *sample.args, **sample.kwargs)
            except Exception:  # the in-place variant cannot do all that the function can
                continue
            chosen = _chosen(info, recorder.calls)
            if chosen is not None and sum(t.numel() for t in tensors_in(chosen[1])) <= _ELEMENTS:
                yield chosen


def _iterate(samples: Any) -> Iterator[Any]:
    """The samples, until one cannot be made (for want of a library)."""
    try:
        yield from samples
    except Exception:
        return


def _chosen(info: Any, calls: list[tuple[Any, Sample]]) -> tuple[Any, Sample] | None:
    """The call of the op that the OpInfo is named after, or else the first that does something."""
    names = {name.rpartition(".")[2].strip("_") for name in (info.name, info.aten_name or "")}
    named = [call for call in calls if _plain_name(call[0]) in names]
    others = [call for call in calls if call[0].overloadpacket.__name__ not in _HELPERS]
    return next(iter([*named, *others]), None)


def _plain_name(func: Any) -> str:
    name: str = func.overloadpacket.__name__
    return name.strip("_").removeprefix("native_")
