"""test_modes: the operator gives the same result however it is called.

Below are the ways (`_WAYS`), and which of them may be refused, since an operator need not know all subclasses; the
others are met everywhere, and an exception there is a finding. A rule for a dispatch mode (register_torch_dispatch) may
do what it likes. But one that changes no result here has to change none with other numbers or choices.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from customops import _torch
from customops._places import where
from customops.checks._inputs import quiet, seeded
from customops.checks._outcome import NotExercised, require
from customops.checks._runs import Results, attempt, copied, difference
from customops.checks._trial import Trial, failed_call
from customops.checks._variants import are_plain, other_arguments

_FIX = "go by the values, sizes and dtypes of the arguments alone: not by Python types, nor by whether a mode is active"


def check(trial: Trial) -> None:
    trial.require_data()
    require(are_plain(trial), "an input is not a plain strided tensor")
    plain = trial.detached()
    expected, again = attempt(plain), attempt(plain)
    if expected is None or again is None:
        raise NotExercised("the operator takes no inputs without gradients")
    if difference(again, expected) or difference(expected, again):
        raise NotExercised("two calls of the operator differ as it is")
    for way, call_so, must_work in _WAYS:
        try:
            results = _under(plain, call_so)
        except Exception as error:
            if not must_work:
                continue  # the operator need not know it
            raise failed_call(trial.name, f"the operator fails {way}", error, fix=_FIX) from error
        found = difference(results, expected) if results is not None else None
        if found is not None:
            raise trial.finding(f"the operator returns another result {way}", got=found, fix=_FIX)
    rules = trial.custom_op._rules.torch_dispatch.values if trial.custom_op is not None else {}
    for mode, rule in rules.items():
        if issubclass(mode, _torch.dispatcher.TorchDispatchMode):
            _judge_rule(plain, mode, rule, expected)


def _judge_rule(trial: Trial, mode: type, rule: Callable[..., Any], expected: Results) -> None:
    def below(call: Trial) -> Any:
        try:
            return _under(call, _within(mode))
        except Exception:  # a mode may want arguments, or know no such call
            return None

    results = below(trial)
    if results is None or difference(results, expected) or difference(expected, results):
        return
    for other in other_arguments(trial, "quick"):
        plain, again, results = attempt(other), attempt(other), below(other)
        if plain is None or again is None or results is None or difference(again, plain):
            continue
        found = difference(results, plain)
        if found is not None:
            raise trial.finding(
                "the rule for a dispatch mode changes no result with these arguments, and does with others",
                got=f"under {mode.__name__}: {found}",
                where=where(rule),
                fix="call func(*args, **kwargs) with all arguments that the rule is given",
            )


def _under(trial: Trial, call_so: Callable[[Trial], Any]) -> Any:
    """Copies of what a call in some way leaves behind; None if this way is nothing for these inputs."""
    copy = trial.copy()
    with seeded((copy.args, copy.kwargs)), quiet():
        return copied(call_so(copy))


def _within(mode: Callable[[], contextlib.AbstractContextManager[Any]]) -> Callable[[Trial], Any]:
    def call_so(trial: Trial) -> Any:
        with mode():
            return trial.results()

    return call_so


def _in_inference_mode(trial: Trial) -> Any:
    with torch.inference_mode():
        return trial.copy().results()  # inference tensors, as a model has them there


def _in_thread(trial: Trial) -> Any:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(trial.results).result()


def _on_parameters(trial: Trial) -> Any:
    floating = [tensor for tensor in trial.tensors if tensor.is_floating_point()]
    if trial.mutated or not floating:
        return None
    return trial.replaced({id(x): torch.nn.Parameter(x, requires_grad=False) for x in floating}).results()


def _on_wrappers(trial: Trial) -> Any:
    if trial.mutated or not trial.tensors:
        return None
    results = trial.map_tensors(lambda _, tensor: _torch.for_checks.Wrapper(tensor)).results()
    return _torch.trees.tree_map(lambda x: x.inner if isinstance(x, _torch.for_checks.Wrapper) else x, results)


def _functionalized(trial: Trial) -> Any:
    tensors = trial.distinct

    def function(*given: torch.Tensor) -> Any:
        return trial.replaced(dict(zip(map(id, tensors), given, strict=True))).results()

    return torch.func.functionalize(function)(*tensors)


class _Through(_torch.dispatcher.TorchDispatchMode):
    """Passes calls on."""

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


class _Named(torch.Tensor):
    """A subclass that adds nothing."""


_WAYS: tuple[tuple[str, Callable[[Trial], Any], bool], ...] = (
    ("under a dispatch mode that passes calls on", _within(_Through), True),
    ("under a function mode that passes calls on", _within(torch.overrides.BaseTorchFunctionMode), True),
    ("below torch.no_grad()", _within(torch.no_grad), True),
    ("in inference mode", _in_inference_mode, True),
    ("when called from another thread", _in_thread, True),
    ("on parameters", _on_parameters, True),
    ("on a subclass of Tensor", lambda trial: trial.map_tensors(lambda _, x: x.as_subclass(_Named)).results(), True),
    ("on tensors that a subclass wraps", _on_wrappers, False),
    ("when functionalized", _functionalized, False),
)
