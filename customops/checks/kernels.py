"""test_kernels: kernels of one operator agree, and with a plain function if there is one.

Compared are, where they exist: the operator and a reference function; a device's kernel and the one for all devices,
which it stands in for; the kernels of two devices; integers and wider integers, where the result has room for both;
and a floating-point dtype and float64.

The comparison with float64 is the one for which a right kernel differs most. How much it may is learnt: the call in
float64 on inputs that are changed by what the narrower dtype resolves shows how steep the operator is there. Elements
that are not finite in the narrower dtype are left out, and results of integers, which may be steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from customops import _compat
from customops.checks._calls import (
    Results,
    attempt,
    call,
    detached,
    first_difference,
    is_tie_of_indices,
    results_in,
    steady_results,
    where_of,
)
from customops.checks._compare import difference, tolerance_of
from customops.checks._outcome import NotExercised
from customops.checks._trial import Trial
from customops.errors import CheckError, where

_NARROW = (torch.float16, torch.bfloat16, torch.float32)
_WIDER = {torch.uint8: torch.int64, torch.int8: torch.int64, torch.int16: torch.int64, torch.int32: torch.int64}
_STEPS = 64.0  #: how many times the error of the inputs that of a result may be


def check(trial: Trial) -> None:
    trial.require_data()
    trial = detached(trial)
    expected = steady_results(trial)
    tried = [
        _check_reference(trial, expected),
        _check_kernel_for_all(trial, expected),
        _check_devices(trial, expected),
        _check_integers(trial, expected),
        _check_float64(trial, expected),
    ]
    if not any(tried):
        raise NotExercised(
            "there is one kernel, no reference function, and no other dtype that it takes: there is nothing to compare"
        )


def _judge(trial: Trial, problem: str, actual: Results, right: Results, fix: str, **fields: str | None) -> None:
    for name, value in right.items():
        found = difference(actual[name], value, rtol=trial.rtol)
        if found and not is_tie_of_indices(trial, value):
            fields.setdefault("where", where_of(trial))
            raise CheckError(problem, op=trial.name, got=f"{name}: {found}", fix=fix, **fields)


# A plain function -------------------------------------------------------------------------------------------


def _check_reference(trial: Trial, expected: Results) -> bool:
    reference: Callable[..., Any] | None = trial.reference
    if reference is None:
        return False
    copy = trial.copy()
    outputs = reference(*copy.args, **copy.kwargs)
    if outputs is None and trial.mutated:
        values = results_in(copy, None)
        names = [name for name in expected if name.startswith("argument ")]
    else:
        values, names = results_in(replace(copy, args=trial.args, kwargs=trial.kwargs), outputs), list(expected)
        if trial.mutated:
            values |= {name: value for name, value in results_in(copy, None).items() if name.startswith("argument ")}
    named = {name: values[name] for name in names if name in values}
    _judge(
        trial,
        "the operator has other results than its reference function",
        expected,
        named,
        "one of the two is wrong for these inputs",
        expected=f"the results of {where(reference)}",
    )
    return True


# Other kernels ----------------------------------------------------------------------------------------------


def _check_kernel_for_all(trial: Trial, expected: Results) -> bool:
    """A device's own kernel, and the one for all devices that it stands in for."""
    devices = {tensor.device.type for tensor in trial.tensors}
    if len(devices) != 1 or trial.op.namespace in ("aten", "prims"):
        return False
    (device,) = devices
    qualname, key = trial.name, _compat.dispatch.device_key(device)
    if not _compat.dispatch.has_kernel(qualname, key):
        return False
    if not any(_compat.dispatch.has_kernel(qualname, alias) for alias in _FOR_ALL):
        return False
    tried = False
    for changed in (trial, *_other_values(trial)):
        own = attempt(changed) if changed is not trial else expected
        general = _attempt_for_all(changed)
        if own is not None and general is not None:
            tried = True
            _judge(
                changed,
                f"the kernel for {device} has other results than the kernel for all devices",
                own,
                general,
                "one of the two is wrong for these inputs: both are the same operator",
                expected="the results of the kernel for all devices",
            )
    return tried


_FOR_ALL = ("CompositeExplicitAutograd", "CompositeImplicitAutograd", "CompositeExplicitAutogradNonFunctional")


def _attempt_for_all(trial: Trial) -> Results | None:
    """The results of the kernel for all devices."""
    copy = trial.copy()
    aside: Any = _compat.dispatch.without_device_kernel(trial.op)
    try:
        return results_in(copy, call(replace(copy, op=aside)))
    except Exception:  # it need not be made for these inputs
        return None


def _other_values(trial: Trial) -> Iterator[Trial]:
    """NaN among the values; larger and smaller ones."""
    floating = [tensor for tensor in trial.tensors if tensor.is_floating_point() and tensor.numel()]
    if not floating or any(tensor.layout is not torch.strided for tensor in trial.tensors):
        return
    for change in (_with_nan, lambda tensor: tensor * 8, lambda tensor: tensor / 8):
        yield trial.map_tensors(lambda _n, t, change=change: change(t) if t.is_floating_point() else t)  # type: ignore[misc]


def _with_nan(tensor: torch.Tensor) -> torch.Tensor:
    changed = tensor.clone()
    if changed.numel():
        changed.view(-1)[0] = float("nan") if changed.is_contiguous() else changed.view(-1)[0]
    return changed


def _check_devices(trial: Trial, expected: Results) -> bool:
    """The kernels of two devices."""
    if any(tensor.device.type != "cpu" for tensor in trial.tensors) or not trial.tensors:
        return False
    tried = False
    for device in _compat.dispatch.devices_at_hand():
        if any(isinstance(value, torch.device) for value in trial.arguments.values()):
            return tried
        try:
            actual = attempt(trial.map_tensors(lambda _name, tensor, to=device: tensor.to(to)))  # type: ignore[misc]
        except Exception:  # a device that does not hold this dtype
            continue
        if actual is None:
            continue
        tried = True
        on_cpu = {name: _on_cpu(value) for name, value in actual.items()}
        found = first_difference(on_cpu, expected, rtol=trial.rtol or _device_tolerance(expected))
        if found and not is_tie_of_indices(trial, expected[found[0]]):
            raise CheckError(
                f"the operator has other results on {device} than on the CPU",
                op=trial.name,
                expected="the results on the CPU",
                got=": ".join(found),
                fix="one of the two kernels is wrong for these inputs",
            )
    return tried


def _on_cpu(value: Any) -> Any:
    values, spec = _compat.tracing.tree_flatten(value)
    return _compat.tracing.tree_unflatten([v.cpu() if isinstance(v, torch.Tensor) else v for v in values], spec)


def _device_tolerance(expected: Results) -> float:
    """Devices have functions of other precision, and sum in other orders."""
    floating = [value for value in expected.values() if isinstance(value, torch.Tensor)]
    return max([1e-3, *(10 * tolerance_of(value.dtype) for value in floating)]) if floating else 1e-3


# Other dtypes -----------------------------------------------------------------------------------------------


def _check_integers(trial: Trial, expected: Results) -> bool:
    """A result that has room for more than the inputs is that of wider inputs."""
    narrow = {tensor.dtype for tensor in trial.tensors if tensor.dtype in _WIDER}
    if len(narrow) != 1:
        return False
    (dtype,) = narrow
    wide = attempt(trial.map_tensors(lambda _name, tensor: tensor.long() if tensor.dtype is dtype else tensor))
    if wide is None:
        return False
    tried = False
    for name, value in wide.items():
        actual = expected[name]
        if not isinstance(value, torch.Tensor) or not isinstance(actual, torch.Tensor) or value.dtype != actual.dtype:
            continue
        if actual.shape != value.shape or actual.dtype is torch.bool:
            continue
        tried = True
        found = difference(actual, value, rtol=trial.rtol)
        if found and not is_tie_of_indices(trial, value):
            raise CheckError(
                "a result for narrow integers differs from that for the same numbers in int64",
                op=trial.name,
                expected=f"the result for int64, as it is returned in {value.dtype} for both",
                got=f"{name}, for {dtype}: {found}",
                where=where_of(trial),
                fix="the numbers overflow, or are read as another type, on the way: convert to the dtype of the "
                "result first",
            )
    return tried


def _check_float64(trial: Trial, expected: Results) -> bool:
    """A result in a narrow dtype is near that of float64."""
    dtypes = {tensor.dtype for tensor in trial.tensors if tensor.is_floating_point() or tensor.is_complex()}
    if len(dtypes) != 1 or not dtypes <= set(_NARROW):
        return False
    if any(tensor.layout is not torch.strided or tensor.is_quantized for tensor in trial.tensors):
        return False
    (dtype,) = dtypes
    wide = trial.map_tensors(lambda _name, tensor: tensor.double() if tensor.is_floating_point() else tensor)
    truth = attempt(wide)
    if truth is None:
        return False
    names = [name for name, value in truth.items() if _is_floating(value) and _is_floating(expected[name])]
    if not names:
        return False
    nudged = [attempt(wide.map_tensors(nudge)) for nudge in _nudges(torch.finfo(dtype).eps)]
    for name in names:
        near = [results[name] for results in nudged if results is not None]
        found = _beyond(expected[name], truth[name], near, dtype)
        if found:
            raise CheckError(
                f"a result for {dtype} is far from that for the same numbers in float64",
                op=trial.name,
                expected="what float64 gives, but for rounding",
                got=f"{name}: {found}",
                where=where_of(trial),
                fix="accumulate in a wider dtype; or the kernel takes memory of one dtype for another, or has a branch "
                "for a dtype that does something else",
            )
    return True


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.layout is torch.strided


def _nudges(eps: float) -> Iterator[Callable[[str, torch.Tensor], torch.Tensor]]:
    for seed, size in enumerate((eps, -eps, 4 * eps, -4 * eps)):
        yield _Nudge(size, None)
        yield _Nudge(size, seed)


class _Nudge:
    """Changes floating-point numbers a little, all in one direction or each in its own."""

    def __init__(self, size: float, seed: int | None) -> None:
        self.size, self.seed = size, seed

    def __call__(self, _name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        if self.seed is None:
            return tensor * (1 + self.size)
        signs = torch.randint(-1, 2, tensor.shape, generator=torch.Generator().manual_seed(self.seed))
        return tensor * (1 + self.size * signs.to(tensor.device))


def _beyond(actual: torch.Tensor, truth: torch.Tensor, near: list[torch.Tensor], dtype: torch.dtype) -> str | None:
    """Where a result is farther from the truth than the dtype and the steepness of the operator explain."""
    if actual.shape != truth.shape:
        return None  # of sizes that depend on data
    actual, truth = actual.double(), truth.double()
    comparable = actual.isfinite() & truth.isfinite()
    if any(other.shape != truth.shape for other in near) or not comparable.any():
        return None
    scale = truth[comparable].abs().max()
    steepness = torch.zeros_like(truth)
    for other in near:
        change = (other.double() - truth).abs()
        steepness = torch.maximum(steepness, change.nan_to_num(float("inf"), posinf=float("inf")))
    # Elements without steepness of their own still take part in what the others are computed from.
    steepness = torch.maximum(steepness, steepness[steepness.isfinite()].mean().nan_to_num(0.0))
    allowed = 4 * tolerance_of(dtype) * scale + _STEPS * steepness
    wrong = comparable & ((actual - truth).abs() > allowed)
    if not wrong.any():
        return None
    at = tuple(wrong.nonzero()[0].tolist())
    count = f"{int(wrong.sum())} of {wrong.numel()} elements, the first at {at}: "
    return f"{count if at else ''}{actual[at].item():.6g} and not {truth[at].item():.6g}"
