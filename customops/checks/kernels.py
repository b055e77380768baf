"""test_kernels: kernels of one operator agree, and with a plain function if there is one.

Compared are, where they exist: the operator and a reference function; the operator and what compilers take for it,
decompositions, lowerings and replacements; a device's kernel and the one for all devices, which it stands in for; the
kernels of two devices; the operator and its out variant, on tensors that hold NaN. For the kernels of one device, also
with other values: NaN, zeros, halves, negative and large ones, and other numbers and flags.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from customops import _torch
from customops._rules.out import Checked
from customops.checks import _memory
from customops.checks._outcome import NotExercised
from customops.checks._runs import (
    Results,
    attempt,
    call,
    compare,
    first_difference,
    is_tie_of_indices,
    results_in,
    steady_results,
    tolerance_of,
)
from customops.checks._state import functions_of
from customops.checks._trial import Trial, failed_call
from customops.checks._variants import are_plain, other_numbers
from customops.errors import where


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


def _judge(trial: Trial, actual: Results, right: Results, problem: str, fix: str, **fields: str) -> None:
    def is_tie(_name: str, one: Any, other: Any) -> bool:
        return is_tie_of_indices(trial, other, one)

    compare(trial, actual, right, problem, fix, is_excused=is_tie, **fields)


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
        expected,
        named,
        "the operator has other results than its reference function",
        "one of the two is wrong for these inputs",
        expected=f"the results of {where(reference)}",
    )
    return True


def _check_for_compilers(trial: Trial, expected: Results) -> bool:
    """Decompositions, lowerings and replacements: what compilers take for the operator."""
    tried = False
    for function in trial.custom_op._rules.equivalents() if trial.custom_op is not None else ():
        copy = trial.copy()
        outputs = function(*copy.args, **copy.kwargs)
        if outputs is not NotImplemented:
            tried = True
            _judge(
                trial,
                expected,
                results_in(replace(copy, args=trial.args, kwargs=trial.kwargs), outputs),
                "the operator has other results than what compilers take for it",
                "one of the two is wrong for these inputs",
                expected="the results of its decomposition, lowering or replacement",
            )
    return tried


def _check_kernel_for_all(trial: Trial, expected: Results) -> bool:
    """A device's own kernel, and the one for all devices that it stands in for."""
    devices = {tensor.device.type for tensor in trial.tensors}
    if len(devices) != 1 or trial.op.namespace in ("aten", "prims"):
        return False
    (device,) = devices
    qualname, key = trial.name, _torch.dispatcher.device_key(device)
    if not _torch.dispatcher.has_kernel(qualname, key):
        return False
    if not any(_torch.dispatcher.has_kernel(qualname, alias) for alias in _FOR_ALL):
        return False
    tried = False
    for changed in (trial, *_other_values(trial)):
        own = attempt(changed) if changed is not trial else expected
        general = _attempt_for_all(changed)
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


_FOR_ALL = ("CompositeExplicitAutograd", "CompositeImplicitAutograd", "CompositeExplicitAutogradNonFunctional")


def _attempt_for_all(trial: Trial) -> Results | None:
    """The results of the kernel for all devices."""
    copy = trial.copy()
    aside: Any = _torch.dispatcher.without_device_kernel(trial.op)
    try:
        return results_in(copy, call(replace(copy, op=aside)))
    except Exception:  # it need not be made for these inputs
        return None


def _other_values(trial: Trial) -> Iterator[Trial]:
    """Other numbers and flags; special, larger and negative values."""
    yield from other_numbers(trial)
    yield from _narrowed(trial)
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
            yield trial.map_tensors(functools.partial(_integers_scaled, factor))


def _narrowed(trial: Trial) -> Iterator[Trial]:
    """One size made 1, in all tensors that have it."""
    for old in sorted({size for tensor in trial.tensors for size in tensor.shape if size > 1}):
        yield trial.map_tensors(functools.partial(_first_of, old))


def _first_of(old: int, _name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        return tensor
    for dim, size in enumerate(tensor.shape):
        tensor = tensor.narrow(dim, 0, 1) if size == old else tensor
    return tensor.clone()


_INTEGERS = (torch.int32, torch.int64)


def _with_values(values: tuple[float, ...], _name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The first elements replaced, in floating-point tensors."""
    if not tensor.is_floating_point():
        return tensor
    flat = tensor.reshape(-1).clone()
    new = torch.tensor(values[: tensor.numel()], dtype=torch.float64).to(tensor.device, tensor.dtype)
    flat[: len(new)] = new
    return flat.reshape(tensor.shape)


def _scaled(factor: float, _name: str, tensor: torch.Tensor) -> torch.Tensor:
    return (tensor * factor).to(tensor.dtype) if tensor.is_floating_point() else tensor


def _integers_scaled(factor: int, _name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor * factor + (factor > 0) if tensor.dtype in _INTEGERS else tensor


def _check_devices(trial: Trial, expected: Results) -> bool:
    """The kernels of two devices."""
    if any(tensor.device.type != "cpu" for tensor in trial.tensors) or not trial.tensors:
        return False
    tried = False
    for device in _torch.dispatcher.devices_at_hand():
        if any(isinstance(value, torch.device) for value in trial.arguments.values()):
            return tried
        try:
            moved = trial.map_tensors(lambda _name, tensor, to=device: tensor.to(to))  # type: ignore[misc]
        except Exception:  # a device that does not hold this dtype
            continue
        actual = attempt(moved)
        if actual is None:
            continue
        tried = True
        on_cpu = {name: _torch.tensors.tree_map(_on_cpu, value) for name, value in actual.items()}
        found = first_difference(on_cpu, expected, rtol=trial.rtol or _device_tolerance(expected))
        if found and not is_tie_of_indices(trial, expected[found[0]], on_cpu[found[0]]):
            raise moved.fault(
                f"the operator has other results on {device} than on the CPU",
                ": ".join(found),
                "one of the two kernels is wrong for these inputs",
                expected="the results on the CPU",
            )
    return tried


def _check_out_variant(trial: Trial) -> bool:
    """The operator and its out variant, which has to fill what it is given, whatever that held before."""
    variant: Any = trial.custom_op._rules.out_variant if trial.custom_op is not None else None
    if variant is None:
        return False
    tried = False
    for changed in (trial, *_other_values(trial)):
        right = attempt(changed)
        if right is None:
            continue
        tried = True
        outs = [_filled(value) for value in right.values() if isinstance(value, torch.Tensor)]
        _judge_out(variant, changed.copy(), outs, right, "write every element of out, and the same as the operator")
        for name, i in _in_place(variant, changed, outs):
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


def _in_place(variant: Any, trial: Trial, outs: list[torch.Tensor]) -> Iterator[tuple[str, int]]:
    """The arguments that are declared to serve as out, with the outs that they may be."""
    kernels = [kernel for kernel in variant._rules.kernel.kernels.values() if isinstance(kernel, Checked)]
    for name in sorted(frozenset().union(*(kernel.inplace for kernel in kernels))):
        given = trial.arguments[name]
        if not isinstance(given, torch.Tensor) or not are_plain(trial) or _memory.overlaps_itself(given):
            continue
        for i, out in enumerate(outs):
            if (given.shape, given.dtype, given.device) == (out.shape, out.dtype, out.device):
                yield name, i


def _filled(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like another, of values that no result has."""
    value = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 77
    return torch.full_like(tensor, value)


def _on_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value


def _device_tolerance(expected: Results) -> float:
    """Devices have functions of other precision, and sum in other orders."""
    floating = [value for value in expected.values() if isinstance(value, torch.Tensor)]
    return max([1e-3, *(10 * tolerance_of(value.dtype) for value in floating)]) if floating else 1e-3
