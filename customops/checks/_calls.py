"""Calls of an operator whose results are compared with each other.

A call runs on copies of its inputs, from the same seed, without warnings. Its results are what it returned and what it
left in the arguments that it writes; they are copied at once, so that no later call changes them.

Results are compared only where it means something: `steady_results` refuses operators whose results are random,
differ between equal calls, or are memory that nobody wrote.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from customops import _compat
from customops.checks._compare import difference
from customops.checks._inputs import quiet, seeded, tensors_in
from customops.checks._nudges import nudges
from customops.checks._outcome import NotExercised
from customops.checks._trial import Trial
from customops.errors import where

Results = dict[str, Any]

_ROUNDINGS = 32.0  #: Sums of many terms in another order differ by more than one change of each by rounding makes.

#: Operators of torch that return memory as it is, or resize what they are given.
_ALLOCATING = ("aten::empty", "aten::new_empty", "aten::resize", "aten::set_", "aten::_resize", "prims::empty")


def own_generators(trial: Trial) -> Trial:
    """The same call with copies of its generators, which a call moves on."""
    values, spec = _compat.tracing.tree_flatten((trial.args, trial.kwargs))
    if not any(isinstance(value, torch.Generator) for value in values):
        return trial
    copies = [value.clone_state() if isinstance(value, torch.Generator) else value for value in values]
    args, kwargs = _compat.tracing.tree_unflatten(copies, spec)
    return replace(trial, args=args, kwargs=kwargs)


def call(trial: Trial, *, moved: bool = False) -> Any:
    """Call the operator on these very tensors, from the same seed; with `moved`, from another."""
    trial = own_generators(trial)
    with quiet(), seeded((trial.args, trial.kwargs)):
        if moved:
            _move_generators(trial)
        return trial.op(*trial.args, **trial.kwargs)


def _move_generators(trial: Trial) -> None:
    torch.default_generator.manual_seed(12345)
    for device in {tensor.device for tensor in trial.tensors if tensor.device.type == "cuda"}:
        torch.rand(1, device=device)  # `seeded` puts the state back


def results_of(trial: Trial, *, moved: bool = False) -> Results:
    """The results of a call on copies of the inputs. Raises what the operator raises."""
    copy = trial.copy()
    return results_in(copy, call(copy, moved=moved))


def results_in(trial: Trial, outputs: Any) -> Results:
    """Copies of what a call returned, and of what it wrote."""
    outputs = trial.by_return(outputs)
    results = {f"output {i}" if len(outputs) > 1 else "the output": value for i, value in enumerate(outputs)}
    results |= {f"argument {name} after the call": value for name, value in trial.mutated.items()}
    return {name: _copied(value) for name, value in results.items()}


def attempt(trial: Trial, *, moved: bool = False) -> Results | None:
    """The results of a call, or None if the operator does not take these inputs."""
    try:
        return results_of(trial, moved=moved)
    except Exception:  # a derived input need not be accepted
        return None


def steady_results(trial: Trial) -> Results:
    """The results of a call, of an operator of which equal calls have equal results, whatever the seed.

    Raises:
        NotExercised: it is none, or has no results to compare.
    """
    require_comparable(trial)
    if torch.Tag.nondeterministic_seeded in trial.op.tags:
        raise NotExercised("the operator is tagged as random: the results of two calls cannot be compared")
    first, second = attempt(trial), attempt(trial, moved=True)
    if first is None or second is None:
        raise NotExercised("the operator does not take these inputs")
    if not first:
        raise NotExercised("the operator neither returns nor writes anything that could be compared")
    if difference(second, first):
        raise NotExercised("equal calls have different results: there is nothing to compare with")
    return first


def require_comparable(trial: Trial) -> None:
    """Raise NotExercised where results cannot be compared."""
    trial.require_data()
    if trial.name.startswith(_ALLOCATING):
        raise NotExercised("the operator returns uninitialized memory")
    if any(tensor.is_nested for tensor in trial.tensors):
        raise NotExercised("nested tensors are not compared")
    if has_effect(trial):
        raise NotExercised("the operator is registered with a side effect")


def has_effect(trial: Trial) -> bool:
    """Is the operator one of ours that was registered with a side effect?"""
    op = trial.custom_op
    if op is None:
        return False
    effects: dict[None, Any] = op._rules.effect.effects
    return bool(effects)


def is_rounding(trial: Trial, name: str, actual: Any, expected: Any) -> bool:
    """Is a result no further off than those for inputs that differ by rounding? Sums in which much cancels are not."""
    apart = _distance(actual, expected)
    if apart is None:
        return False
    eps = torch.finfo(expected.dtype).eps
    near = [attempt(_contiguous(trial.map_tensors(nudge))) for nudge in nudges(eps)]
    steps = [_distance(results[name], expected) for results in near if results is not None]
    return apart <= _ROUNDINGS * max((step for step in steps if step is not None), default=0.0)


def _contiguous(trial: Trial) -> Trial:
    return trial.map_tensors(lambda _name, tensor: tensor.contiguous() if tensor.layout is torch.strided else tensor)


def _distance(one: Any, other: Any) -> float | None:
    """How far apart the elements of two tensors are; None if they cannot be compared so."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor) or one.shape != other.shape:
        return None
    if not other.is_floating_point() or one.layout is not torch.strided or not one.numel():
        return None
    far = float((one.to(torch.float64) - other.to(torch.float64)).abs().max())
    return far if far < float("inf") else None


def first_difference(actual: Results, expected: Results, **options: Any) -> tuple[str, str] | None:
    """The name of the first result that differs, and how; see `difference`."""
    for name, value in expected.items():
        found = difference(actual[name], value, **options)
        if found:
            return name, found
    return None


def where_of(trial: Trial) -> str | None:
    """``file:line`` of the kernel that an operator runs for these inputs, where it is known."""
    op = trial.custom_op
    if op is None:  # of torch.library.custom_op?
        fn = getattr(_compat.registries.torch_op_of(trial.name), "_init_fn", None)
        return None if fn is None else where(fn)
    device = trial.tensors[0].device.type if trial.tensors else None
    kernels = op._rules.kernel.kernels
    fn = kernels.get(device) or kernels.get(None) or op._init_fn
    return None if fn is None else where(fn)


def _copied(value: Any) -> Any:
    values, spec = _compat.tracing.tree_flatten(value)
    copies = [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in values]
    return _compat.tracing.tree_unflatten(copies, spec)


def is_tie_of_indices(trial: Trial, *values: Any) -> bool:
    """May results of indices differ between two right calls, since an input has equal elements?"""
    tensors = tensors_in(list(values))
    most = max((tensor.numel() for tensor in trial.tensors), default=0)
    if not tensors or any(tensor.dtype is not torch.int64 for tensor in tensors):
        return False
    if any(tensor.numel() and not 0 <= int(tensor.min()) <= int(tensor.max()) < most for tensor in tensors):
        return False
    return any(_has_ties(tensor) for tensor in trial.tensors)


def _has_ties(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.dtype.is_complex:
        return True
    return int(tensor.detach().cpu().to(torch.float64).unique().numel()) < tensor.numel()
