"""test_unchecked: what ``check="never"`` and ``bypass=True`` leave out makes no difference.

``check="never"`` trusts a kernel to return what the schema says; ``bypass=True`` calls it without the dispatcher. The
op is called past the dispatcher, and its kernels are given to a twin that does not check them, and to one that does if
the op does not; twins are gone after the check. A result that differs is a finding, and so is one that is refused
where it is checked, while the op itself takes it.
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
from customops._dispatch.options import CheckPolicy, Options
from customops._op.op import CustomOpDef
from customops._op.registry import Registry
from customops._rules.choice import REFERENCE
from customops.checks._outcome import NotExercised, in_short, require
from customops.checks._runs import Results, call, first_difference, results_in, steady_results
from customops.checks._trial import Trial
from customops.checks._variants import are_plain
from customops.errors import AliasError, CheckError, KernelError


def check(trial: Trial) -> None:
    op = trial.custom_op
    if op is None or op._definition.spec.fn is None:
        raise NotExercised("the operator was not made by customops.custom_op, which takes check= and bypass=")
    trial = trial.detached()
    require(are_plain(trial), "a tensor is not plain and strided, so kernels do not get it as it is")
    with torch.no_grad():
        expected = steady_results(trial)
        if op._definition.options.check != "always":
            _compare_checked(trial, op, expected)
        _compare(trial, "with bypass=True", op, expected, bypassing=op._definition.options.check)
        try:
            with _twin(op, "never") as twin:
                _compare(trial, 'with check="never"', twin, expected)
                _compare(trial, 'with check="never" and bypass=True', twin, expected, bypassing="never")
        except CheckError:
            _compare_checked(trial, op, expected)
            raise


@contextmanager
def _twin(op: CustomOpDef[Any, Any], when: CheckPolicy) -> Iterator[CustomOpDef[Any, Any]]:
    """An op with the same kernels, that is gone afterwards."""
    spec = op._definition.spec
    name = Name(spec.name.namespace, f"{spec.name.name}__{when}_checked", spec.name.overload)
    registry = Registry()
    twin = registry._define_op(replace(spec, name=name, signature=None, options=Options(when)))
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
        with _twin(op, "always") as twin:
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


def _compare(
    trial: Trial, how: str, op: CustomOpDef[Any, Any], expected: Results, bypassing: CheckPolicy | None = None
) -> None:
    function: Callable[..., Any] = op._opoverload
    if bypassing is not None:  # what an object of an op with ``bypass=True`` does when it is called
        if bypass.obstacle(op.schema) is not None:
            return
        function = functools.partial(bypass.call(op._definition.spec, bypassing), op)
    problem = f"the op does something else {how}"
    for _ in range(2):  # the first call of the two finds the way past the dispatcher
        try:
            found = first_difference(_results(trial, function), expected, rtol=trial.rtol)
            got = ": ".join(found) if found else None
        except Exception as error:
            got = in_short(error, 300)
        if got:
            fix = "have the kernel return the same, new tensors however it is called"
            raise trial.fault(problem, got, fix, expected="the results of an ordinary call")


def _results(trial: Trial, function: Callable[..., Any]) -> Results:
    """The results of a call with all positional arguments in their places, as `bypass` wants them."""
    given = trial.copy()
    values = {argument.name: argument.default for argument in trial.schema.positional} | given.arguments
    args = tuple(values.pop(argument.name) for argument in trial.schema.positional)
    return results_in(given, call(replace(given, op=function, args=args, kwargs=values)))  # type: ignore[arg-type]
