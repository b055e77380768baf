"""test_modes: the operator gives the same result however it is called.

As it is; under a dispatch mode and a function mode that only pass calls on; in inference mode; below ``no_grad``; from
another thread; on tensors that are parameters, instances of a subclass of Tensor, or wrapped by a subclass with
``__torch_dispatch__``; through ``torch.func.functionalize``. None of these is to change a value. The last two may be
refused: an operator need not know all subclasses. The others are met everywhere, and an exception there is a finding.

A rule for a dispatch mode (register_torch_dispatch) may do what it likes. But one that changes no result here has to
change none with other numbers or choices.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from customops import _torch
from customops.checks._inputs import quiet, seeded
from customops.checks._outcome import NotExercised
from customops.checks._runs import copied, difference
from customops.checks._trial import Trial, failed_call
from customops.checks._variants import are_plain, attempt_run, other_arguments
from customops.errors import CheckError, where


def check(trial: Trial) -> None:
    trial.require_data()
    if not are_plain(trial):
        raise NotExercised("an input is not a plain strided tensor")
    plain = trial.detached()
    with quiet():
        expected, again = attempt_run(plain), attempt_run(plain)
        if expected is None or again is None:
            raise NotExercised("the operator takes no inputs without gradients")
        wanted = copied(expected.results)
        if difference(copied(again.results), wanted) or difference(wanted, copied(again.results)):
            raise NotExercised("two calls of the operator differ as it is")
        for way, call, must_work in _WAYS:
            _compare(plain, way, call, wanted, must_work=must_work)
        for mode in _modes_with_rules(trial):
            _judge_rule(plain, mode, wanted)


def _modes_with_rules(trial: Trial) -> list[type]:
    rules = trial.custom_op._rules.torch_dispatch.rules if trial.custom_op is not None else {}
    return [cls for cls in rules if issubclass(cls, _torch.tensors.TorchDispatchMode)]


def _judge_rule(trial: Trial, mode: type, wanted: Any) -> None:
    results = _below(mode, trial)
    if results is None or difference(results, wanted) or difference(wanted, results):
        return
    for other in other_arguments(trial, "quick"):
        plain, again, results = attempt_run(other), attempt_run(other), _below(mode, other)
        if plain is None or again is None or results is None or difference(again.results, plain.results):
            continue
        found = difference(results, copied(plain.results))
        if found is not None:
            raise CheckError(
                "the rule for a dispatch mode changes no result with these arguments, and does with others",
                op=trial.name,
                got=f"under {mode.__name__}: {found}",
                where=where(trial.custom_op._rules.torch_dispatch.rules[mode]),
                fix="call func(*args, **kwargs) with all arguments that the rule is given",
            )


def _below(mode: type, trial: Trial) -> Any:
    """The results of a call under a mode of this class; None if one cannot be made, or refuses."""
    copy = trial.copy()
    try:
        with seeded((copy.args, copy.kwargs)), mode():
            return copied(_call(copy))
    except Exception:  # a mode may want arguments, or know no such call
        return None


def _compare(trial: Trial, way: str, call: Callable[[Trial], Any], wanted: Any, *, must_work: bool) -> None:
    copy = trial.copy()
    try:
        with seeded((copy.args, copy.kwargs)):
            results = call(copy)
    except _Skipped:
        return
    except Exception as error:
        if not must_work:
            return  # the operator need not know it
        raise failed_call(trial.name, f"the operator fails {way}", error, fix=_FIX) from error
    found = difference(copied(results), wanted)
    if found is not None:
        raise CheckError(f"the operator returns another result {way}", op=trial.name, got=found, fix=_FIX)


_FIX = "go by the values, sizes and dtypes of the arguments alone: not by Python types, nor by whether a mode is active"


class _Skipped(Exception):
    """This way is nothing for these inputs."""


def _call(trial: Trial) -> Any:
    outputs = trial.by_return(trial.op(*trial.args, **trial.kwargs))
    return [outputs, list(trial.mutated.values())]


def _within(mode: Callable[[], contextlib.AbstractContextManager[Any]]) -> Callable[[Trial], Any]:
    def call(trial: Trial) -> Any:
        with mode():
            return _call(trial)

    return call


def _in_inference_mode(trial: Trial) -> Any:
    with torch.inference_mode():
        return _call(trial.copy())  # inference tensors, as a model has them there


def _in_thread(trial: Trial) -> Any:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_call, trial).result()


def _on_parameters(trial: Trial) -> Any:
    if trial.mutated or not any(tensor.is_floating_point() for tensor in trial.tensors):
        raise _Skipped
    call = trial.map_tensors(
        lambda _, tensor: torch.nn.Parameter(tensor, requires_grad=False) if tensor.is_floating_point() else tensor
    )
    return _call(call)


def _on_subclass(trial: Trial) -> Any:
    return _call(trial.map_tensors(lambda _, tensor: tensor.as_subclass(_Named)))


def _on_wrappers(trial: Trial) -> Any:
    if trial.mutated or not trial.tensors:
        raise _Skipped
    results = _call(trial.map_tensors(lambda _, tensor: _torch.tensors.Wrapper(tensor)))
    leaves, spec = _torch.tensors.tree_flatten(results)
    unwrapped = [leaf.inner if isinstance(leaf, _torch.tensors.Wrapper) else leaf for leaf in leaves]
    return _torch.tensors.tree_unflatten(unwrapped, spec)


def _functionalized(trial: Trial) -> Any:
    tensors = trial.distinct

    def function(*given: torch.Tensor) -> Any:
        by_id = dict(zip(map(id, tensors), given, strict=True))
        return _call(trial.map_tensors(lambda _, tensor: by_id[id(tensor)]))

    return torch.func.functionalize(function)(*tensors)


class _Through(_torch.tensors.TorchDispatchMode):
    """Passes calls on."""

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


class _ThroughFunctions(torch.overrides.TorchFunctionMode):
    """Passes calls on."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


class _Named(torch.Tensor):
    """A subclass that adds nothing."""


_WAYS: tuple[tuple[str, Callable[[Trial], Any], bool], ...] = (
    ("under a dispatch mode that passes calls on", _within(_Through), True),
    ("under a function mode that passes calls on", _within(_ThroughFunctions), True),
    ("below torch.no_grad()", _within(torch.no_grad), True),
    ("in inference mode", _in_inference_mode, True),
    ("when called from another thread", _in_thread, True),
    ("on parameters", _on_parameters, True),
    ("on a subclass of Tensor", _on_subclass, True),
    ("on tensors that a subclass wraps", _on_wrappers, False),
    ("when functionalized", _functionalized, False),
)
