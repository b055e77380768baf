"""test_precision, test_resolution, test_stability: a result is near that of the same call in a wider dtype.

A result of integers that has room for more than the inputs has to be that for int64, or int32. One of floating point
has to be near that for float64, or, of 16 bits where float64 is not accepted, near that for float32. How near is
learnt: the wider call on inputs that are changed by what the narrower dtype resolves shows how steep the operator is
there. Sums of many elements in a dtype of 16 bits must not stand still. Elements that are not finite in the narrower
dtype are left out, and results of integers, which may be steps.

The other way round, a result in float64 has to depend on more of its inputs than float32 resolves. And float32 has to
give an answer wherever the problem has one: some formulas are right on paper and overflow on the way, such as the
logarithm of a sum of exponentials for values in the hundreds. Results beyond the range in which float32 is at ease are
left out. Digits that are lost in a difference, as by exp(x) - 1 near zero, are no finding: many right operators do so.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from customops.checks._inputs import tensors_in
from customops.checks._memory import is_dense
from customops.checks._outcome import NotExercised, require
from customops.checks._runs import (
    Results,
    attempt,
    difference,
    first_difference,
    is_tie_of_indices,
    nudge,
    results_near,
    steady_results,
    told_apart,
    tolerance_of,
)
from customops.checks._trial import Trial
from customops.checks._variants import repeated, with_large_integers
from customops.checks.inputs.parts import is_integer
from customops.checks.inputs.values import name_of
from customops.checks.repeat import kept_settings

_NARROW_INTS = (torch.uint8, torch.int8, torch.int16, torch.int32)
#: Of narrow dtypes, how many times what a change of the inputs by rounding does the error of a result may be.
_STEPS = {torch.float16: 8.0, torch.bfloat16: 8.0, torch.float32: 64.0}
_MOST_RESULTS = 1_000_000
_LARGE = (2048, 1024, 512)  #: elements; sums of as many in a dtype of 16 bits show how they are made
_MOST_PAIRS = 2**26  #: elements times such a size, where a kernel may pair what has it, as attention does
_SLOW = 0.05  #: seconds of this thread; smaller sizes are tried where a call takes longer
#: Dtypes, the largest values to try in them, the results that they should be able to hold, and what may be wrong.
_RANGES = (
    (  # The exponential overflows in float32, and not in float64.
        torch.float32,
        300.0,
        1e6,
        "something overflows on the way, such as exp(x) for x > 88: subtract the largest value first, or use "
        "logsumexp, log_softmax, softplus, logaddexp",
    ),
    (  # bfloat16 has the range of float32.
        torch.bfloat16,
        1e5,
        1e30,
        "something overflows on the way, as in float16, which ends at 65504: convert bfloat16 to float32",
    ),
)


def check(trial: Trial) -> None:
    trial = trial.detached()
    expected = steady_results(trial)
    tried = [_check_integers(trial, expected), _check_masks(trial, expected), _check_wider(trial, expected)]
    require(any(tried), "the operator takes no wider dtype than that of these inputs, or has no results in it")


def check_resolution(trial: Trial) -> None:
    """Raise CheckError for a result in float64 that sees no more of its inputs than float32 resolves."""
    trial = trial.detached()
    steady_results(trial)
    if not any(tensor.dtype in (torch.float32, torch.float64) for tensor in trial.tensors):
        raise NotExercised("no input is of float32 or float64")
    wide = trial.map_floats(lambda x: x.double() * (1 + 1e-8 / 3))
    truth, tiny, small = (attempt(wide.map_tensors(nudge(size))) for size in (0.0, 1e-10, 1e-5))
    if truth is None or tiny is None or small is None:
        raise NotExercised("the operator does not take float64")
    _compare_default_dtypes(trial, wide, truth)
    for name, changed, value in _floats(tiny, truth):
        if value.dtype is not torch.float64 or value.numel() == 0 or small[name].shape != value.shape:
            continue
        seen = (small[name] != value) & value.isfinite()
        # Steps have few elements that change a little; what goes through float32 has nothing but those.
        if float(seen.double().mean()) < 0.9 or (changed != value).any():
            continue
        if torch.equal(value.float().double(), value):
            raise trial.fault(
                "a result for float64 is computed in float32",
                f"{name} is the same, and each element of it is a number of float32",
                "convert only dtypes narrower than float32 to float32: look for .float(), torch.float32",
                expected="a result that changes where a float64 input changes by one part in 10,000,000,000",
            )


def _compare_default_dtypes(trial: Trial, wide: Trial, truth: Results) -> None:
    """Compare results for float64 with those where new tensors are of float64, which is more precise."""
    with kept_settings():
        torch.set_default_dtype(torch.float64)
        precise = attempt(wide) or {}
    for name, actual, value in _floats(truth, precise):
        differs = difference(actual, value, rtol=1e-10) if value.dtype is torch.float64 else None
        if differs:
            raise trial.fault(
                "a result for float64 has the precision of torch's default dtype",
                f"{name}, where that is {name_of(torch.get_default_dtype())}: {differs}",
                "give tables and constants the dtype of the input: torch.arange(n, dtype=x.dtype)",
                expected="the result that a default dtype of float64 gives",
            )


def check_stability(trial: Trial) -> None:
    """Raise CheckError for a result that is not finite in float32 or bfloat16, and an ordinary number for float64."""
    trial = trial.detached()
    steady_results(trial)
    floating = [tensor for tensor in trial.tensors if tensor.is_floating_point() and tensor.numel()]
    require(floating and all(map(is_dense, trial.tensors)), "no input is a plain tensor of floating point")
    if any(tensor.is_complex() for tensor in trial.tensors) or not all(bool(t.isfinite().all()) for t in floating):
        raise NotExercised("an input is complex, or not finite")
    _check_nothing(trial)
    tried = [_check_range(trial, *each) for each in _RANGES]
    require(any(tried), "the operator does not take float32 and float64, or has no floating-point results")


def _check_nothing(trial: Trial) -> None:
    """Raise CheckError if a quantization makes NaN of a row of zeros, as padding is, and numbers of tiny ones."""
    for tensor in trial.distinct:
        if not tensor.is_floating_point() or tensor.dim() < 2 or len(tensor) < 2:
            continue
        zeros, tiny = tensor.clone(), tensor.clone()
        zeros[0] = 0
        tiny[0] *= 1e-6
        nothing, little = (attempt(trial.replaced({id(tensor): x})) or {} for x in (zeros, tiny))
        if all(one.dtype.itemsize > 1 for one in tensors_in([*nothing.values()])):
            continue  # of others, 0 / 0 may be what they are to give
        for name, value, other in _floats(nothing, little):
            wrong = value.float().isnan()
            if wrong.any() and not other.float().isnan().any():
                raise trial.fault(
                    "a result is NaN for a row of zeros, and a number for a row of tiny numbers",
                    f"{name}: {_first(wrong, value, other)}",
                    "a quotient by the largest element, or by a norm, is 0 / 0: clamp the divisor from below",
                )


def _check_range(trial: Trial, dtype: torch.dtype, largest: float, ordinary: float, fix: str) -> bool:
    """Require results below `ordinary` to be finite for values up to `largest`; return whether there were some."""

    def enlarged(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.numel():
            return tensor
        return (tensor.double() * (largest / (float(tensor.double().abs().max()) or largest))).to(dtype)

    narrow = trial.map_floats(enlarged)
    wide, results = narrow.in_float64(), attempt(narrow)
    truths = None if results is None else attempt(wide)
    tried = False
    for name, actual, truth in _floats(results, truths):
        if actual.dtype is not dtype or truth.dtype is not torch.float64 or not truth.numel():
            continue
        tried = True
        if not (~actual.isfinite() & (truth.abs() < ordinary)).any():
            continue
        near = [found[name] for found in results_near(wide, dtype)]
        if not all(other.shape == truth.shape for other in near):
            continue
        wrong = ~actual.isfinite() & (torch.stack([truth, *near]).abs().amax(0) < ordinary)
        if wrong.any():
            raise trial.fault(
                f"a result for {name_of(dtype)} is not finite, and that for the same numbers in float64 is an ordinary "
                "one",
                expected="what float64 gives, but for rounding",
                got=f"{name}, for values up to {largest:g}: {_first(wrong, actual, truth)}",
                fix=fix,
            )
    return tried


def _check_integers(trial: Trial, expected: Results) -> bool:
    """Compare results that have room for more than the inputs with those of wider inputs."""
    narrow = {tensor.dtype for tensor in trial.tensors if tensor.dtype in _NARROW_INTS}
    if len(narrow) != 1:
        return False
    (dtype,) = narrow
    tried = _compare_with_wide_integers(trial, dtype, expected)
    large = with_large_integers(trial)
    results = None if large is None else attempt(large)
    if large is not None and results is not None:
        tried |= _compare_with_wide_integers(large, dtype, results)
    return tried


def _compare_with_wide_integers(trial: Trial, dtype: torch.dtype, expected: Results) -> bool:
    """Raise CheckError for a result that is not that of the same numbers in a wider dtype; was there one to compare?"""
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
        if found and _counts_bits(trial, dtype, wide_dtype, name):
            continue
        if found and not is_tie_of_indices(trial, value, actual) and difference(*whole, rtol=1e-3):
            raise trial.fault(
                f"a result for narrow integers differs from that for the same numbers in {name_of(wide_dtype)}",
                expected=f"the result for {name_of(wide_dtype)}, as it is returned in {value.dtype} for both",
                got=f"{name}, for {dtype}: {found}",
                fix="the numbers overflow, or are read as another type, on the way: convert to the dtype of the "
                "result first",
            )
    return tried


def _counts_bits(trial: Trial, dtype: torch.dtype, wider: torch.dtype, name: str) -> bool:
    """Return whether int32 and int64 differ for negative numbers alone, as the number of ones in their bits does."""
    if dtype is not torch.int32:
        return False
    positive = trial.map_tensors(lambda _, x: x.abs() if is_integer(x) else x)
    wide = positive.map_tensors(lambda _, x: x.to(wider) if x.dtype is dtype else x)
    one, other = attempt(positive), attempt(wide)
    return one is not None and other is not None and not difference(one[name], other[name], exact=True)


def _check_masks(trial: Trial, expected: Results) -> bool:
    """Compare a mask of uint8, where the operator takes one, with that of bools."""
    accepted = next(_accepted(trial, [torch.uint8], lambda tensor: tensor.dtype is torch.bool), None)
    if accepted is None or not any(tensor.dtype is torch.bool for tensor in trial.tensors):
        return False
    found = None
    if {name: _kind(value) for name, value in accepted[2].items()} == {n: _kind(v) for n, v in expected.items()}:
        found = first_difference(accepted[2], expected, rtol=trial.rtol)
    if found:
        raise trial.fault(
            "a mask of uint8 gives another result than the same one of bools",
            expected="the result for bools",
            got=f"{found[0]}: {found[1]}",
            fix="~mask of uint8 is no negation, and mask as an index picks rows 0 and 1: convert it, mask.bool(), or "
            "refuse it in kernel and fake impl, with torch._check(mask.dtype == torch.bool)",
        )
    return True


def _kind(value: Any) -> Any:
    return (value.shape, value.dtype) if isinstance(value, torch.Tensor) else type(value)


def _accepted(
    trial: Trial, dtypes: Sequence[torch.dtype], is_converted: Callable[[torch.Tensor], bool]
) -> Iterator[tuple[torch.dtype, Trial, Results]]:
    """Find the dtypes that the operator takes in the place of its own, with the calls and their results."""
    for dtype in dtypes:
        changed = trial.map_tensors(lambda _name, x, to=dtype: x.to(to) if is_converted(x) else x)  # type: ignore[misc]
        results = attempt(changed)
        if results is not None:
            yield dtype, changed, results


def _check_wider(trial: Trial, expected: Results) -> bool:
    """Compare results in a narrow dtype with those of a wider one."""
    dtypes = {tensor.dtype for tensor in trial.tensors if tensor.is_floating_point() or tensor.is_complex()}
    if len(dtypes) != 1 or not dtypes <= _STEPS.keys():
        return False
    if not all(map(is_dense, trial.tensors)):
        return False
    (dtype,) = dtypes
    tried = _compare_with_wider(trial, dtype, expected)
    if dtype is torch.float32 or not tried:
        return tried
    _check_zeros(trial.map_floats(torch.zeros_like), dtype)
    # One size is made large, by repetition, and elements lose their signs, so that sums grow.
    for old in sorted({size for tensor in trial.tensors for size in tensor.shape if 1 < size < _LARGE[0]}):
        for new in _large_sizes(trial, old):
            larger = functools.partial(_grown, old, new)
            # Gradients are sums, of more terms now, of which much may cancel.
            large, start = replace(trial.map_tensors(larger), scale=4 * trial.scale), time.thread_time()
            results = attempt(large) or {}
            if time.thread_time() - start > _SLOW:
                continue
            size = sum(x.numel() if isinstance(x, torch.Tensor) else 1 for x in results.values())
            if 0 < size <= _MOST_RESULTS:
                # Rounding is the same for all copies of an element, so it adds up as a change of them all does.
                _compare_with_wider(large, dtype, results, trial, larger)
            break
    return tried


def _grown(old: int, new: int, _name: str, tensor: torch.Tensor) -> torch.Tensor:
    tensor = repeated(tensor, {old: new})
    if not tensor.is_floating_point():  # lengths grow, too
        return torch.where(tensor == old, new, tensor).to(tensor.dtype) if is_integer(tensor) else tensor
    return tensor.abs()


def _large_sizes(trial: Trial, old: int) -> Iterator[int]:
    """Find the sizes to which a size may grow, the largest first."""
    counts = [(tensor.numel(), list(tensor.shape).count(old)) for tensor in trial.tensors]
    is_paired = sum(count > 0 for _, count in counts) > 1
    for new in _LARGE:
        most = max(numel // old**count * new**count for numel, count in counts)
        if most <= 300_000 and (not is_paired or most * new <= _MOST_PAIRS):
            yield new


def _check_zeros(zeros: Trial, dtype: torch.dtype) -> None:
    """Raise CheckError for a NaN of zeros that is a number in a wider dtype: a small constant may be zero here."""
    accepted = next(_accepted(zeros, (torch.float64, torch.float32), torch.Tensor.is_floating_point), None)
    for name, actual, truth in _floats(attempt(zeros), accepted[2]) if accepted is not None else ():
        wrong = actual.isnan() & truth.isfinite()
        if wrong.any():
            raise zeros.fault(
                f"a result for zeros in {dtype} is NaN, and a number in {name_of(accepted[0])}",  # type: ignore[index]
                expected="a number",
                got=f"{name}: {_first(wrong, actual, truth)}",
                fix="a constant such as 1e-8 is zero in float16: add it in float32, or torch.finfo(dtype).tiny",
            )


def _compare_with_wider(
    trial: Trial,
    dtype: torch.dtype,
    expected: Results,
    origin: Trial | None = None,
    then: Callable[[str, torch.Tensor], torch.Tensor] = lambda _, tensor: tensor,
) -> bool:
    """Raise CheckError for a result that is far off; was there one to compare? The call is `origin` with `then`."""
    wider = (torch.float64, torch.float32) if dtype.itemsize < torch.float32.itemsize else (torch.float64,)
    accepted = next(_accepted(trial, wider, torch.Tensor.is_floating_point), None)
    if accepted is None:
        return False
    wide_dtype, wide, truth = accepted
    compared = list(_floats(expected, truth))
    start = wide if origin is None else origin.map_floats(lambda x: x.to(wide_dtype))
    near = results_near(start, dtype, then) if compared else []
    for name, actual, right in compared:
        found = _beyond(actual, right, [results[name] for results in near], dtype, trial.scale)
        if found:
            raise trial.fault(
                f"a result for {dtype} is far from that for the same numbers in {name_of(wide_dtype)}",
                expected=f"what {name_of(wide_dtype)} gives, but for rounding",
                got=f"{name}: {found}",
                fix="accumulate in a wider dtype; or the kernel takes memory of one dtype for another, or has a branch "
                "for a dtype that does something else",
            )
    return bool(compared)


def _floats(results: Results | None, truths: Results | None) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Find the strided tensors of floating point among results, with the true ones, which have the same shape."""
    if results is None or truths is None:
        return
    for name, truth in truths.items():
        pair = results[name], truth
        if all(isinstance(x, torch.Tensor) and x.is_floating_point() and x.layout is torch.strided for x in pair):
            if pair[0].shape == truth.shape:
                yield name, *pair


def _beyond(
    actual: torch.Tensor, truth: torch.Tensor, near: list[torch.Tensor], dtype: torch.dtype, scale: float
) -> str | None:
    """Describe where a result is farther from the truth than the dtype and the steepness of the operator explain.

    `scale`: the size of numbers that results may be differences of.
    """
    actual, truth = actual.double(), truth.double()
    comparable = actual.isfinite() & truth.isfinite()
    if any(other.shape != truth.shape for other in near) or not comparable.any():
        return None
    # How much each element changes between results of inputs that are near each other.
    steepness = torch.zeros_like(truth)
    for other in near:
        change = (other.double() - truth).abs()
        steepness = torch.maximum(steepness, change.nan_to_num(float("inf"), posinf=float("inf")))
    # Elements without steepness of their own still take part in what the others are computed from.
    steepness = torch.maximum(steepness, steepness[steepness.isfinite()].mean().nan_to_num(0.0))
    largest = max(float(truth[comparable].abs().max()), scale)
    # What is as good as zero may differ: a clamp by finfo.tiny is smaller in a wider dtype.
    allowed = 4 * tolerance_of(dtype) * largest + _STEPS[dtype] * steepness + min(torch.finfo(dtype).tiny, 1e-30)
    wrong = comparable & ((actual - truth).abs() > allowed)
    return _first(wrong, actual, truth) if wrong.any() else None


def _first(wrong: torch.Tensor, actual: torch.Tensor, truth: torch.Tensor) -> str:
    at = tuple(wrong.nonzero()[0].tolist())
    count = f"{int(wrong.sum())} of {wrong.numel()} elements, the first at {at}: " if at else ""
    return count + told_apart(actual[at].item(), truth[at].item())
