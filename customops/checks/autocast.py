"""test_autocast: under autocast an operator does what its rule says, and its gradients fit its inputs.

An operator with a rule of customops, which casts inputs to one dtype, has to give what it gives for inputs that were
cast by hand. Of a kernel that was put at an autocast key, the rule is not known: its results have to be near those
without autocast, as near as the coarser of the dtypes allows. Gradients have the dtype of the inputs.

What an operator without a rule does under autocast is that of what it calls, which is not compared.
"""

from __future__ import annotations

import torch

from customops import _torch
from customops.checks._inputs import quiet, tensors_in
from customops.checks._outcome import NotExercised, in_short, require
from customops.checks._runs import Results, compare, difference, results_of, steady_results, tolerance_of
from customops.checks._trial import Trial


def check(trial: Trial) -> None:
    trial.require_data()
    devices = {tensor.device.type for tensor in trial.tensors}
    require(len(devices) == 1, "autocast is for tensors of one device")
    (device,) = devices
    if not _torch.dispatcher.has_kernel(trial.name, f"Autocast{_torch.dispatcher.device_key(device)}"):
        raise NotExercised(f"the operator has no autocast rule for {device}")
    if not any(_is_cast(tensor) for tensor in trial.tensors):
        raise NotExercised("no tensor that autocast would cast: it needs one of floating point, other than float64")
    detached = trial.detached()
    plain = steady_results(detached)
    op = trial.custom_op
    rule: torch.dtype | None = op._rules.autocast.values.get(device) if op is not None else None
    try:
        with torch.autocast(device):
            actual = results_of(detached)
    except Exception as error:
        raise trial.fault(
            "the operator fails under autocast",
            got=in_short(error),
            fix=f"the rule casts inputs to {rule or torch.get_autocast_dtype(device)}: have the kernel take that "
            f"dtype, or cast to another: register_autocast({device!r}, cast_inputs=torch.float32)",
        ) from error
    if rule is None:
        _compare_with_plain(trial, device, actual, plain)
    elif not tensors_in(trial.mutated):
        compare(
            trial,
            actual,
            results_of(detached.map_tensors(lambda _n, t: t.to(rule) if _is_cast(t) else t)),
            "results under autocast differ from those for inputs that were cast by hand",
            "the kernel asks whether autocast is on: let the rule do the casts",
            expected=f"the results for inputs of {rule}",
        )
    gradients = _gradients(trial)
    if not gradients:
        return
    try:
        with torch.autocast(device):
            found = _gradients(trial)
    except Exception as error:
        raise trial.finding(
            "the operator's backward fails under autocast",
            got=in_short(error),
            fix="under autocast the formula sees inputs and results of other dtypes than without; it has to return "
            "gradients of the dtype of the inputs that it saw",
        ) from error
    for name, gradient in found.items():
        if name in gradients and gradient.dtype != gradients[name].dtype:
            raise trial.finding(
                "a gradient has another dtype under autocast",
                argument=name,
                expected=str(gradients[name].dtype),
                got=str(gradient.dtype),
                fix="cast gradients to the dtype of the input",
            )


def _is_cast(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype is not torch.float64


def _compare_with_plain(trial: Trial, device: str, actual: Results, plain: Results) -> None:
    dtype, detached = torch.get_autocast_dtype(device), trial.detached()
    for name, value in plain.items():
        result = actual[name]
        if not isinstance(value, torch.Tensor) or not isinstance(result, torch.Tensor):
            continue
        if not value.is_floating_point() or value.shape != result.shape:
            continue
        coarse = max(map(tolerance_of, (value.dtype, result.dtype, dtype)))
        found = difference(result.double(), value.double(), rtol=trial.rtol or 4 * coarse)
        if not found:
            continue
        # Rounding the inputs by hand may change the result as much, where the operator is steep.
        rounded = detached.map_tensors(lambda _n, t: t.to(dtype).to(t.dtype) if _is_cast(t) else t)
        if difference(results_of(rounded)[name], results_of(detached)[name], rtol=coarse) is None:
            raise trial.finding(
                "results under autocast are far from those without",
                expected="the results without autocast, but for rounding",
                got=f"{name}: {found}",
                fix="the kernel at the autocast key has to cast its inputs, exclude the key, and call the operator "
                "again with all of its arguments",
            )


def _gradients(trial: Trial) -> dict[str, torch.Tensor]:
    """The gradients of the sums of the results, by argument; empty where the operator has none."""
    if trial.mutated or not any(tensor.requires_grad for tensor in trial.tensors):
        return {}
    copy = trial.copy(leaves=True)
    with quiet(), torch.enable_grad():
        outputs = [x for x in tensors_in(copy.op(*copy.args, **copy.kwargs)) if x.requires_grad]
        if not outputs:
            return {}
        leaves = {label: tensor for _, label, tensor in copy.named_tensors if tensor.requires_grad}
        sums = [output.sum().abs() for output in outputs]
        found = torch.autograd.grad(sums, list(leaves.values()), allow_unused=True)
    return {name: gradient for name, gradient in zip(leaves, found, strict=True) if gradient is not None}
