"""test_autocast: under autocast an operator does what its rule says, and its gradients fit its inputs.

An operator with a rule of customops, which casts inputs to one dtype, has to give what it gives for inputs that were
cast by hand. Of a kernel that was put at an autocast key, the rule is not known: its results have to be near those
without autocast, as near as the coarser of the dtypes allows. Gradients have the dtype of the inputs.

What an operator without a rule does under autocast is that of what it calls, which is not compared.
"""

from __future__ import annotations

import torch

from customops import _torch
from customops.checks._derivatives import named_tensors
from customops.checks._inputs import quiet, tensors_in
from customops.checks._outcome import NotExercised, in_short
from customops.checks._runs import Results, compare, difference, results_of, steady_results, tolerance_of
from customops.checks._trial import Trial
from customops.errors import CheckError

_FIX_KERNEL = (
    "the rule casts inputs to {dtype}: have the kernel take that dtype, or cast to another: "
    "register_autocast({device!r}, cast_inputs=torch.float32)"
)


def check(trial: Trial) -> None:
    trial.require_data()
    devices = {tensor.device.type for tensor in trial.tensors}
    if len(devices) != 1:
        raise NotExercised("autocast is for tensors of one device")
    (device,) = devices
    if not _torch.dispatcher.has_kernel(trial.name, f"Autocast{_torch.dispatcher.device_key(device)}"):
        raise NotExercised(f"the operator has no autocast rule for {device}")
    if not any(_is_cast(tensor) for tensor in trial.tensors):
        raise NotExercised("no tensor that autocast would cast: it needs one of floating point, other than float64")
    plain = steady_results(trial.detached())
    rule = _rule_of(trial, device)
    actual = _under_autocast(trial, device, rule)
    if rule is not None:
        _compare_with_cast(trial, rule, actual)
    else:
        _compare_with_plain(trial, device, actual, plain)
    _check_gradients(trial, device)


def _is_cast(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype is not torch.float64


def _rule_of(trial: Trial, device: str) -> torch.dtype | None:
    op = trial.custom_op
    found: torch.dtype | None = op._rules.autocast.dtypes.get(device) if op is not None else None
    return found


def _under_autocast(trial: Trial, device: str, rule: torch.dtype | None) -> Results:
    try:
        with torch.autocast(device):
            return results_of(trial.detached())
    except Exception as error:
        dtype = rule or torch.get_autocast_dtype(device)
        raise trial.fault(
            "the operator fails under autocast",
            got=in_short(error),
            fix=_FIX_KERNEL.format(dtype=dtype, device=device),
        ) from error


def _compare_with_cast(trial: Trial, dtype: torch.dtype, actual: Results) -> None:
    if tensors_in(trial.mutated):
        return
    expected = results_of(trial.detached().map_tensors(lambda _n, t: t.to(dtype) if _is_cast(t) else t))
    compare(
        trial,
        actual,
        expected,
        "results under autocast differ from those for inputs that were cast by hand",
        "the kernel asks whether autocast is on: let the rule do the casts",
        expected=f"the results for inputs of {dtype}",
    )


def _compare_with_plain(trial: Trial, device: str, actual: Results, plain: Results) -> None:
    for name, value in plain.items():
        result = actual[name]
        if not isinstance(value, torch.Tensor) or not isinstance(result, torch.Tensor):
            continue
        if not value.is_floating_point() or value.shape != result.shape:
            continue
        coarse = max(map(tolerance_of, (value.dtype, result.dtype, torch.get_autocast_dtype(device))))
        found = difference(result.double(), value.double(), rtol=trial.rtol or 4 * coarse)
        if found and not _is_steep(trial, device, name, coarse):
            raise CheckError(
                "results under autocast are far from those without",
                op=trial.name,
                expected="the results without autocast, but for rounding",
                got=f"{name}: {found}",
                fix="the kernel at the autocast key has to cast its inputs, exclude the key, and call the operator "
                "again with all of its arguments",
            )


def _is_steep(trial: Trial, device: str, name: str, coarse: float) -> bool:
    """Does rounding the inputs by hand change the result as much?"""
    dtype = torch.get_autocast_dtype(device)
    rounded = trial.detached().map_tensors(lambda _n, t: t.to(dtype).to(t.dtype) if _is_cast(t) else t)
    one, other = results_of(rounded)[name], results_of(trial.detached())[name]
    return difference(one, other, rtol=coarse) is not None


def _check_gradients(trial: Trial, device: str) -> None:
    plain = _gradients(trial)
    if not plain:
        return
    try:
        with torch.autocast(device):
            found = _gradients(trial)
    except Exception as error:
        raise CheckError(
            "the operator's backward fails under autocast",
            op=trial.name,
            got=in_short(error),
            fix="under autocast the formula sees inputs and results of other dtypes than without; it has to return "
            "gradients of the dtype of the inputs that it saw",
        ) from error
    for name, gradient in found.items():
        if name in plain and gradient.dtype != plain[name].dtype:
            raise CheckError(
                "a gradient has another dtype under autocast",
                op=trial.name,
                argument=name,
                expected=str(plain[name].dtype),
                got=str(gradient.dtype),
                fix="cast gradients to the dtype of the input",
            )


def _gradients(trial: Trial) -> dict[str, torch.Tensor]:
    """The gradients of the sum of the first result, by argument; empty where the operator has none."""
    if trial.mutated or not any(tensor.requires_grad for tensor in trial.tensors):
        return {}
    copy = trial.copy(leaves=True)
    with quiet(), torch.enable_grad():
        outputs = tensors_in(copy.op(*copy.args, **copy.kwargs))
        differentiable = [output for output in outputs if output.requires_grad]
        if not differentiable:
            return {}
        leaves = {label: tensor for _, label, tensor in named_tensors(copy) if tensor.requires_grad}
        found = torch.autograd.grad(
            [output.sum().abs() for output in differentiable], list(leaves.values()), allow_unused=True
        )
    return {name: gradient for name, gradient in zip(leaves, found, strict=True) if gradient is not None}
