"""test_unchecked: what ``check=`` and ``bypass=True`` leave out makes no difference.

``check="never"`` trusts a kernel to return what the schema says, and so does ``check="first"`` after the first call;
``bypass=True`` calls it without the dispatcher. So the kernels of an op that is not checked are given to a twin that
is, which is gone after the check, and an op with ``bypass=True`` is called past the dispatcher. A result that differs
is a finding, and so is one that is refused where it is checked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from customops._codegen import bypass
from customops._dispatch.names import Name
from customops._dispatch.options import Options
from customops._op.op import CustomOpDef
from customops._op.registry import Registry
from customops._rules.choice import REFERENCE
from customops.checks._outcome import NotExercised, in_short, require
from customops.checks._runs import Results, call, first_difference, results_in, steady_results
from customops.checks._trial import Trial
from customops.checks._variants import are_plain
from customops.errors import AliasError, KernelError


def check(trial: Trial) -> None:
    op = trial.custom_op
    if op is None or op._definition.spec.fn is None:
        raise NotExercised("the operator was not made by customops.custom_op, which takes check= and bypass=")
    options = op._definition.options
    require(options.check != "always" or options.bypass, "the operator has neither check= nor bypass=True")
    trial = trial.detached()
    require(are_plain(trial), "a tensor is not plain and strided, so kernels do not get it as it is")
    with torch.no_grad():
        expected = steady_results(trial)
        if options.check != "always":
            _compare_checked(trial, op, expected)
        if options.bypass and bypass.obstacle(op.schema) is None:
            _compare_past_dispatcher(trial, op, expected)


@contextmanager
def _twin(op: CustomOpDef[Any, Any]) -> Iterator[CustomOpDef[Any, Any]]:
    """An op with the same kernels, whose results are checked, and that is gone afterwards."""
    spec = op._definition.spec
    name = Name(spec.name.namespace, f"{spec.name.name}__checked", spec.name.overload)
    registry = Registry()
    twin = registry._define_op(replace(spec, name=name, signature=None, options=Options("always")))
    registry._ops[str(name)] = twin
    try:
        for (device, _), each in op._rules.kernel.values.items():
            if each.name != REFERENCE:
                options: Any = {"name": each.name, "when": each.when, "priority": each.priority, "key": each.key}
                twin.register_kernel(device, each.fn, **options)
        yield twin
    finally:
        registry.clear()


def _compare_checked(trial: Trial, op: CustomOpDef[Any, Any], expected: Results) -> None:
    """Call the kernels with their results checked."""
    try:
        with _twin(op) as twin:
            checked = _results(trial, twin._opoverload)
    except (AliasError, KernelError) as error:
        raise trial.finding(
            'a kernel returns a result that check="always" refuses',
            argument=error.argument,
            expected=error.expected or 'a result that check="always" takes',
            got=error.problem,
            where=error.where,
            fix=error.fix,
        ) from error
    except Exception:  # at other keys of the dispatcher a twin has nothing
        checked = {}
    if not checked or first_difference(checked, expected):
        raise NotExercised("the operator does more than call the kernels registered with it")


def _compare_past_dispatcher(trial: Trial, op: CustomOpDef[Any, Any], expected: Results) -> None:
    """Call the op as an object of it does, with ``bypass=True``."""
    function = functools.partial(bypass.call(op._definition.spec, op._definition.options.check), op)
    for _ in range(2):  # the first call of the two finds the way past the dispatcher
        try:
            found = first_difference(_results(trial, function), expected, rtol=trial.rtol)
            got = ": ".join(found) if found else None
        except Exception as error:
            got = in_short(error, 300)
        if got:
            fix = "have the kernel return the same, new tensors however it is called"
            problem = "the op does something else with bypass=True"
            raise trial.fault(problem, got, fix, expected="the results of an ordinary call")


def _results(trial: Trial, function: Callable[..., Any]) -> Results:
    """The results of a call with all positional arguments in their places, as `bypass` wants them."""
    given = trial.copy()
    values = {argument.name: argument.default for argument in trial.schema.positional} | given.arguments
    args = tuple(values.pop(argument.name) for argument in trial.schema.positional)
    return results_in(given, call(replace(given, op=function, args=args, kwargs=values)))  # type: ignore[arg-type]
