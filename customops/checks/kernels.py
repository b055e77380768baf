"""test_kernels: kernels of one operator agree, and with a plain function if there is one.

Compared are, where they exist: the operator and a reference function; the operator and what compilers take for it,
decompositions, lowerings and replacements; a device's kernel and the one for all devices, which it stands in for; the
kernels of two devices; the operator and its out variant, on tensors that hold NaN. For the kernels of one device, also
with other values: NaN, zeros, halves, negative and large ones, and other numbers and flags.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from customops import _torch
from customops._rules.out import Checked
from customops.checks import _memory
from customops.checks._outcome import NotExercised
from customops.checks._runs import Results, attempt, compare, results_of, steady_results, tolerance_of
from customops.checks._state import functions_of
from customops.checks._trial import Trial, failed_call
from customops.checks._variants import are_plain, other_numbers
from customops.errors import where

_FOR_ALL = ("CompositeExplicitAutograd", "CompositeImplicitAutograd", "CompositeExplicitAutogradNonFunctional")
_INTEGERS = (torch.int32, torch.int64)


def check(trial: Trial) -> None:
    trial.require_data()
    trial = trial.detached()
    expected = steady_results(trial)
    tried = [
        _check_reference(trial, expected),
        _check_for_compilers(trial, expected),
        _check_kernel_for_all(trial, expected),
        _check_devices(trial, expected),
        _check_out_variant(trial),
    ]
    if not any(tried):
        raise NotExercised(
            "there is one kernel for these inputs, no reference function, and nothing that compilers take for it: "
            "there is nothing to compare"
        )


def _judge(
    trial: Trial,
    actual: Results,
    right: Results,
    problem: str,
    fix: str = "one of the two is wrong for these inputs",
    **fields: Any,
) -> None:
    compare(trial, actual, right, problem, fix, ties=True, **fields)


def _check_reference(trial: Trial, expected: Results) -> bool:
    if trial.reference is None:
        return False
    right = results_of(trial, op=trial.reference)
    if trial.mutated and right.get("the output") is None:
        right.pop("the output", None)  # it writes as the operator does, and returns nothing
    _judge(
        trial,
        expected,
        {name: value for name, value in right.items() if name in expected},
        "the operator has other results than its reference function",
        expected=f"the results of {where(trial.reference)}",
    )
    return True


def _check_for_compilers(trial: Trial, expected: Results) -> bool:
    """Decompositions, lowerings and replacements: what compilers take for the operator."""
    tried = False
    for function in trial.custom_op._rules.equivalents() if trial.custom_op is not None else ():
        right = results_of(trial, op=function)
        if not any(value is NotImplemented for value in right.values()):
            tried = True
            _judge(
                trial,
                expected,
                right,
                "the operator has other results than what compilers take for it",
                expected="the results of its decomposition, lowering or replacement",
            )
    return tried


def _check_kernel_for_all(trial: Trial, expected: Results) -> bool:
    """A device's own kernel, and the one for all devices that it stands in for."""
    devices = {tensor.device.type for tensor in trial.tensors}
    if len(devices) != 1 or trial.is_builtin:
        return False
    (device,) = devices
    has_own = _torch.dispatcher.has_kernel(trial.name, _torch.dispatcher.device_key(device))
    if not has_own or not any(_torch.dispatcher.has_kernel(trial.name, key) for key in _FOR_ALL):
        return False
    tried = False
    for changed in (trial, *_other_values(trial)):
        own = expected if changed is trial else attempt(changed)
        general = attempt(changed, op=_torch.dispatcher.without_device_kernel(trial.op))
        if own is not None and general is not None:
            tried = True
            _judge(
                changed,
                own,
                general,
                f"the kernel for {device} has other results than the kernel for all devices",
                "one of the two is wrong for these inputs: both are the same operator",
                expected="the results of the kernel for all devices",
            )
    return tried


def _other_values(trial: Trial) -> Iterator[Trial]:
    """Other numbers and flags; one size made 1, wherever it is; special, larger and negative values."""
    yield from other_numbers(trial)
    for size in sorted({size for tensor in trial.tensors for size in tensor.shape if size > 1}):
        yield trial.map_tensors(functools.partial(_first_of, size))
    tensors = [tensor for tensor in trial.tensors if tensor.numel()]
    if any(tensor.layout is not torch.strided or tensor.is_quantized for tensor in tensors):
        return
    if any(tensor.is_floating_point() for tensor in tensors):
        for values in ((float("nan"),), (float("inf"),), (-float("inf"),), (0.0,), (0.5, 1.5, 2.5, -0.5, -1.5)):
            yield trial.map_tensors(functools.partial(_with_values, values))
        for factor in (-1.0, 8.0, 0.125):
            yield trial.map_tensors(functools.partial(_scaled, factor))
    if functions_of(trial) and any(tensor.dtype in _INTEGERS for tensor in tensors):
        for factor in (-1, 2**24 + 1, 2**29 + 1):
            yield trial.map_tensors(functools.partial(_scaled, factor))


def _first_of(old: int, _name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        return tensor
    for dim, size in enumerate(tensor.shape):
        tensor = tensor.narrow(dim, 0, 1) if size == old else tensor
    return tensor.clone()


def _with_values(values: tuple[float, ...], _name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The first elements replaced, in floating-point tensors."""
    if not tensor.is_floating_point():
        return tensor
    flat = tensor.reshape(-1).clone()
    new = torch.tensor(values[: tensor.numel()], dtype=torch.float64).to(tensor.device, tensor.dtype)
    flat[: len(new)] = new
    return flat.reshape(tensor.shape)


def _scaled(factor: int | float, _name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Floating-point tensors by a float, integers by an int."""
    if isinstance(factor, float):
        return (tensor * factor).to(tensor.dtype) if tensor.is_floating_point() else tensor
    return tensor * factor + (factor > 0) if tensor.dtype in _INTEGERS else tensor


def _check_devices(trial: Trial, expected: Results) -> bool:
    """The kernels of two devices."""
    if any(tensor.device.type != "cpu" for tensor in trial.tensors) or not trial.tensors:
        return False
    if any(isinstance(value, torch.device) for value in trial.arguments.values()):
        return False
    # Devices have functions of other precision, and sum in other orders.
    dtypes = [value.dtype for value in expected.values() if isinstance(value, torch.Tensor)]
    rtol = trial.rtol or max([1e-3, *(10 * tolerance_of(dtype) for dtype in dtypes)])
    tried = False
    for device in _torch.dispatcher.devices_at_hand():
        try:
            moved = trial.map_tensors(lambda _name, tensor, to=device: tensor.to(to))  # type: ignore[misc]
        except Exception:  # a device that does not hold this dtype
            continue
        actual = attempt(moved)
        if actual is None:
            continue
        tried = True
        compare(
            replace(moved, rtol=rtol),
            {name: _torch.tensors.tree_map(_on_cpu, value) for name, value in actual.items()},
            expected,
            f"the operator has other results on {device} than on the CPU",
            "one of the two kernels is wrong for these inputs",
            expected="the results on the CPU",
            ties=True,
        )
    return tried


def _on_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value


def _check_out_variant(trial: Trial) -> bool:
    """The operator and its out variant, which has to fill what it is given, whatever that held before."""
    variant: Any = trial.custom_op._rules.out_variant if trial.custom_op is not None else None
    if variant is None:
        return False
    kernels = [kernel for kernel in variant._rules.kernel.kernels.values() if isinstance(kernel, Checked)]
    in_place = sorted(frozenset().union(*(kernel.inplace for kernel in kernels)))  # arguments that may serve as out
    tried = False
    for changed in (trial, *_other_values(trial)):
        right = attempt(changed)
        if right is None:
            continue
        tried = True
        outs = [  # filled with what no result has
            torch.full_like(value, float("nan") if value.is_floating_point() or value.is_complex() else 77)
            for value in right.values()
            if isinstance(value, torch.Tensor)
        ]
        _judge_out(variant, changed.copy(), outs, right, "write every element of out, and the same as the operator")
        for name, (i, out) in itertools.product(in_place, enumerate(outs)):
            given = changed.arguments[name]
            if not isinstance(given, torch.Tensor) or not are_plain(changed) or _memory.overlaps_itself(given):
                continue
            if (given.shape, given.dtype, given.device) == (out.shape, out.dtype, out.device):
                copy = changed.copy()
                replaced = [*outs[:i], copy.arguments[name], *outs[i + 1 :]]
                fix = f"read each element of {name} before that of out is written; or leave {name} out of inplace="
                _judge_out(variant, copy, replaced, right, fix, f" where out is {name}")
    return tried


def _judge_out(variant: Any, copy: Trial, outs: list[Any], right: Results, fix: str, how: str = "") -> None:
    names = [argument.name for argument in variant.schema.mutated]
    try:
        variant._opoverload(*copy.args, **copy.kwargs, **dict(zip(names, outs, strict=True)))
    except Exception as error:
        raise failed_call(copy.name, f"the out variant fails{how} on inputs that the operator takes", error) from error
    _judge(
        copy,
        dict(zip(right, outs, strict=True)),
        right,
        f"the out variant writes other results than the operator returns{how}",
        fix,
        expected="the results of the operator",
        where=where(variant._init_fn),
    )
