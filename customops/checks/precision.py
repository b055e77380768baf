"""test_precision: a result is near that of the same call in a wider dtype.

A result of integers that has room for more than the inputs has to be that for int64, or int32. One of floating point
has to be near that for float64, or, of 16 bits where float64 is not accepted, near that for float32. How near is
learnt: the wider call on inputs that are changed by what the narrower dtype resolves shows how steep the operator is
there. Sums of many elements in a dtype of 16 bits must not stand still. Elements that are not finite in the narrower
dtype are left out, and results of integers, which may be steps.

The other way round, a result in float64 has to depend on more of its inputs than float32 resolves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from customops.checks._outcome import NotExercised
from customops.checks._runs import (
    Nudge,
    Results,
    attempt,
    difference,
    first_difference,
    is_tie_of_indices,
    nudges,
    steady_results,
    tolerance_of,
)
from customops.checks._trial import Trial
from customops.checks.inputs.values import name_of

_NARROW = (torch.float16, torch.bfloat16, torch.float32)
_NARROW_INTS = (torch.uint8, torch.int8, torch.int16, torch.int32)
#: How many times what a change of the inputs by rounding does the error of a result may be.
_STEPS = {torch.float16: 8.0, torch.bfloat16: 8.0, torch.float32: 64.0}
_MOST_RESULTS = 1_000_000
_LARGE = 2048  #: elements; sums of as many in a dtype of 16 bits show how they are made


def check(trial: Trial) -> None:
    trial = trial.detached()
    expected = steady_results(trial)
    tried = [_check_integers(trial, expected), _check_wider(trial, expected)]
    if not any(tried):
        raise NotExercised("the operator takes no wider dtype than that of these inputs, or has no results in it")


def check_resolution(trial: Trial) -> None:
    """Does a result in float64 see no more of its inputs than float32 resolves?"""
    trial = trial.detached()
    steady_results(trial)
    if not any(tensor.dtype in (torch.float32, torch.float64) for tensor in trial.tensors):
        raise NotExercised("no input is of float32 or float64")
    wide = trial.map_tensors(_as_float64)
    if not any(tensor.dtype is torch.float64 for tensor in wide.tensors):
        return
    truth, tiny, small = (attempt(wide.map_tensors(Nudge(size, None))) for size in (0.0, 1e-10, 1e-5))
    if truth is None or tiny is None or small is None:
        return
    for name, value in truth.items():
        if not isinstance(value, torch.Tensor) or value.dtype is not torch.float64 or value.numel() == 0:
            continue
        if value.layout is not torch.strided or not (tiny[name].shape == small[name].shape == value.shape):
            continue
        seen = (small[name] != value) & value.isfinite()
        # Steps have few elements that change a little; what goes through float32 has nothing but those.
        if float(seen.double().mean()) < 0.9 or (tiny[name] != value).any():
            continue
        if difference(value.float().double(), value) is None and torch.equal(value.float().double(), value):
            raise trial.fault(
                "a result for float64 is computed in float32",
                f"{name} is the same, and each element of it is a number of float32",
                "convert only dtypes narrower than float32 to float32: look for .float(), torch.float32",
                expected="a result that changes where a float64 input changes by one part in 10,000,000,000",
            )


def _as_float64(_name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() * (1 + 1e-8 / 3) if tensor.is_floating_point() else tensor


def _check_integers(trial: Trial, expected: Results) -> bool:
    """A result that has room for more than the inputs is that of wider inputs."""
    narrow = {tensor.dtype for tensor in trial.tensors if tensor.dtype in _NARROW_INTS}
    if len(narrow) != 1:
        return False
    (dtype,) = narrow
    wider = [each for each in (torch.int64, torch.int32) if each.itemsize > dtype.itemsize]
    accepted = list(_accepted(trial, wider, lambda tensor: tensor.dtype is dtype))
    if not accepted or first_difference(accepted[0][2], accepted[-1][2], rtol=trial.rtol):
        return False  # int64 and int32 differ as well: the result depends on the width of the dtype
    wide_dtype, _, wide = accepted[0]
    tried = False
    for name, value in wide.items():
        actual = expected[name]
        if not isinstance(value, torch.Tensor) or not isinstance(actual, torch.Tensor) or value.dtype != actual.dtype:
            continue
        if actual.shape != value.shape or actual.dtype is torch.bool:
            continue
        tried = True
        found = difference(actual, value, rtol=trial.rtol)
        # Some ops divide by the largest number of the dtype, as conversions of images do.
        whole = actual * float(torch.iinfo(dtype).max), value * float(torch.iinfo(wide_dtype).max)
        if found and not is_tie_of_indices(trial, value, actual) and difference(*whole, rtol=1e-3):
            raise trial.fault(
                f"a result for narrow integers differs from that for the same numbers in {name_of(wide_dtype)}",
                expected=f"the result for {name_of(wide_dtype)}, as it is returned in {value.dtype} for both",
                got=f"{name}, for {dtype}: {found}",
                fix="the numbers overflow, or are read as another type, on the way: convert to the dtype of the "
                "result first",
            )
    return tried


def _accepted(
    trial: Trial, dtypes: Sequence[torch.dtype], is_converted: Callable[[torch.Tensor], bool]
) -> Iterator[tuple[torch.dtype, Trial, Results]]:
    """Those of some dtypes that the operator takes in the place of its own, the calls with them, and the results."""
    for dtype in dtypes:
        changed = trial.map_tensors(lambda _name, x, to=dtype: x.to(to) if is_converted(x) else x)  # type: ignore[misc]
        results = attempt(changed)
        if results is not None:
            yield dtype, changed, results


def _check_wider(trial: Trial, expected: Results) -> bool:
    """A result in a narrow dtype is near that of a wider one."""
    dtypes = {tensor.dtype for tensor in trial.tensors if tensor.is_floating_point() or tensor.is_complex()}
    if len(dtypes) != 1 or not dtypes <= set(_NARROW):
        return False
    if any(tensor.layout is not torch.strided or tensor.is_quantized for tensor in trial.tensors):
        return False
    (dtype,) = dtypes
    tried = _compare_with_wider(trial, dtype, expected)
    if dtype is not torch.float32 and tried:
        for large in _enlarged(trial):
            results = attempt(large)
            if results is not None and sum(map(_size, results.values())) <= _MOST_RESULTS:
                _compare_with_wider(large, dtype, results)
    return tried


def _enlarged(trial: Trial) -> Iterator[Trial]:
    """The call with one size made large, by repetition, and without signs, so that sums grow."""
    for old in sorted({size for tensor in trial.tensors for size in tensor.shape if 1 < size < _LARGE}):

        def larger(_name: str, tensor: torch.Tensor, old: int = old) -> torch.Tensor:
            for dim, size in enumerate(tensor.shape):
                if size == old:
                    tensor = tensor.index_select(dim, (torch.arange(_LARGE) % size).to(tensor.device))
            return tensor.abs() if tensor.is_floating_point() else tensor

        sizes = [tensor.numel() // old ** list(tensor.shape).count(old) for tensor in trial.tensors]
        counts = [list(tensor.shape).count(old) for tensor in trial.tensors]
        if max(size * _LARGE**count for size, count in zip(sizes, counts, strict=True)) <= 300_000:
            yield trial.map_tensors(larger)


def _compare_with_wider(trial: Trial, dtype: torch.dtype, expected: Results) -> bool:
    wider = (torch.float64, torch.float32) if dtype.itemsize < torch.float32.itemsize else (torch.float64,)
    found_wide = next(_accepted(trial, wider, torch.Tensor.is_floating_point), None)
    if found_wide is None:
        return False
    wide_dtype, wide, truth = found_wide
    names = [name for name, value in truth.items() if _is_floating(value) and _is_floating(expected[name])]
    if not names:
        return False
    nudged = [attempt(wide.map_tensors(nudge)) for nudge in nudges(torch.finfo(dtype).eps)]
    for name in names:
        near = [results[name] for results in nudged if results is not None]
        found = _beyond(expected[name], truth[name], near, dtype)
        if found:
            raise trial.fault(
                f"a result for {dtype} is far from that for the same numbers in {name_of(wide_dtype)}",
                expected=f"what {name_of(wide_dtype)} gives, but for rounding",
                got=f"{name}: {found}",
                fix="accumulate in a wider dtype; or the kernel takes memory of one dtype for another, or has a branch "
                "for a dtype that does something else",
            )
    return True


def _size(value: Any) -> int:
    return value.numel() if isinstance(value, torch.Tensor) else 1


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.layout is torch.strided


def steepness_of(truth: torch.Tensor, near: list[torch.Tensor]) -> torch.Tensor:
    """How much each element changes between results of inputs that are near each other."""
    steepness = torch.zeros_like(truth)
    for other in near:
        change = (other.double() - truth).abs()
        steepness = torch.maximum(steepness, change.nan_to_num(float("inf"), posinf=float("inf")))
    # Elements without steepness of their own still take part in what the others are computed from.
    return torch.maximum(steepness, steepness[steepness.isfinite()].mean().nan_to_num(0.0))


def _beyond(actual: torch.Tensor, truth: torch.Tensor, near: list[torch.Tensor], dtype: torch.dtype) -> str | None:
    """Where a result is farther from the truth than the dtype and the steepness of the operator explain."""
    if actual.shape != truth.shape:
        return None  # of sizes that depend on data
    actual, truth = actual.double(), truth.double()
    comparable = actual.isfinite() & truth.isfinite()
    if any(other.shape != truth.shape for other in near) or not comparable.any():
        return None
    scale = truth[comparable].abs().max()
    steepness = steepness_of(truth, near)
    allowed = 4 * tolerance_of(dtype) * scale + _STEPS[dtype] * steepness
    wrong = comparable & ((actual - truth).abs() > allowed)
    # Of thousands of elements, a few may lie where the function jumps, which quantization does.
    if int(wrong.sum()) <= wrong.numel() // 1000:
        return None
    at = tuple(wrong.nonzero()[0].tolist())
    count = f"{int(wrong.sum())} of {wrong.numel()} elements, the first at {at}: "
    return f"{count if at else ''}{actual[at].item():.6g} and not {truth[at].item():.6g}"
