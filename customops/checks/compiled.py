"""test_compiled, test_inductor and test_exported: torch.compile and torch.export of a function around the operator.

The function copies its arguments, calls the operator, and then writes to the copies: a compiler that was told of too
few aliases or writes puts things in another order. It is compiled once, with symbolic sizes and the backend
``aot_eager`` or ``inductor``, and called on the sample, on other elements, with other numbers and in other sizes. An
exported one is saved and loaded before it is called. Each result has to be that of the same function in eager mode.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable
from typing import Any

import torch

from customops import _torch
from customops.checks._inputs import quiet, seeded
from customops.checks._outcome import NotExercised, in_short, require
from customops.checks._runs import attempt, call, difference
from customops.checks._trial import Trial, failed_call, is_untraceable
from customops.checks._variants import are_plain, other_sizes, reordered_values
from customops.errors import CheckError

#: Of inductor: code is made anew, by this process, and draws the random numbers that eager mode draws.
_OPTIONS = {"fx_graph_cache": False, "compile_threads": 1, "fallback_random": True}
_FIX = (
    "compiled code is made once, from the schema and the fake impl, and used for other values and sizes: look for a "
    "fake impl that goes by how or how often it is called, and for what is read while tracing"
)


def check(trial: Trial, backend: str = "aot_eager", options: dict[str, Any] | None = None) -> None:
    trial = _prepared(trial)
    function = _torch.for_checks.fresh_copy(_around)
    compiled = torch.compile(function, fullgraph=True, backend=backend, dynamic=True, options=options)
    calls = [("", trial), ("on other elements", reordered_values(trial))]
    for name, value in trial.arguments.items():
        if isinstance(value, float | bool):
            other = not value if isinstance(value, bool) else value + 0.5
            calls.append(("with another number", trial.with_arguments(**{name: other})))
    for what, changed in itertools.chain(calls, (("with other sizes", each) for each in other_sizes(trial))):
        _compare(compiled, changed, "torch.compile", what)


def inductor_check(trial: Trial) -> None:
    """The function in the code that torch.compile makes unless it is told otherwise."""
    try:
        check(trial, "inductor", _OPTIONS)
    except CheckError as error:
        if not isinstance(error.__cause__, Exception):
            raise
        compiled: Callable[..., Any] = torch.compile(_torch.for_checks.fresh_copy(_plain))
        try:  # a function that does not call the operator: there may be no C++ compiler
            with quiet():
                compiled([tensor.detach() for tensor in trial.tensors])
        except Exception as reason:
            problem = f"inductor does not compile a function of plain PyTorch here: {in_short(reason, 200)}"
            raise NotExercised(problem) from error
        raise


def _plain(tensors: list[torch.Tensor]) -> Any:
    return [tensor.clone().mul_(2) for tensor in tensors]


def export_check(trial: Trial) -> None:
    """The function exported with dynamic sizes, saved and loaded."""
    trial = _prepared(trial)
    if any(isinstance(leaf, torch.Tensor) for leaf in _torch.trees.tree_leaves(trial.kwargs)):
        raise NotExercised("a keyword argument is a tensor")
    try:
        with quiet(), seeded((trial.args, trial.kwargs)):
            shapes = {"args": tuple(_dynamic(arg) for arg in trial.args)}
            function = _Around(trial.op, trial.kwargs)
            program = torch.export.export(function, trial.args, dynamic_shapes=shapes, strict=False)
            buffer = io.BytesIO()
            torch.export.save(program, buffer)
            buffer.seek(0)
            loaded = torch.export.load(buffer).module()
    except Exception as error:
        raise _not_traced(trial, "torch.export", error) from error
    for what, changed in (("", trial), ("on other elements", reordered_values(trial))):
        _compare(lambda _op, args, _kwargs: loaded(*args), changed, "torch.export", what)


def _dynamic(value: Any) -> Any:
    """Each size of two and more may be dynamic."""
    if isinstance(value, torch.Tensor):
        return {dim: torch.export.Dim.AUTO for dim, size in enumerate(value.shape) if size > 1}
    return [_dynamic(item) for item in value] if isinstance(value, (list, tuple)) else None


def _prepared(trial: Trial) -> Trial:
    trial.require_data()
    require(trial.tensors and are_plain(trial), "no input is a plain strided tensor")
    require(not is_untraceable(trial.op), "the operator is tagged as depending on data: a compiler leaves it out")
    if trial.schema.is_view and not trial.is_builtin:
        raise NotExercised("the operator returns a view, which AOTDispatcher does not take of operators outside aten")
    trial = trial.detached()
    first, again = attempt(trial), attempt(trial)
    if first is None or again is None or difference(first, again):
        raise NotExercised("two calls of the operator differ in eager mode")
    return trial


def _around(op: Any, args: Any, kwargs: Any) -> Any:
    copies = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
    result = op(*copies, **kwargs)
    return result, [copy.mul_(2) for copy in copies if isinstance(copy, torch.Tensor)]


class _Around(torch.nn.Module):
    def __init__(self, op: Any, kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.op, self.kwargs = op, kwargs

    def forward(self, *args: Any) -> Any:
        return _around(self.op, args, self.kwargs)


def _compare(function: Callable[..., Any], trial: Trial, how: str, what: str) -> None:
    eager = _run(_around, trial)
    if isinstance(eager, Exception):
        return  # the operator does not take this call
    with _torch.for_checks.ignoring_aliases():  # they are for test_schema to find
        result = _run(function, trial)
    if isinstance(result, Exception):
        raise _not_traced(trial, how, result) from result
    found = difference(result, eager)
    if found is not None:
        raise trial.finding(f"another result under {how} {what}".rstrip(), got=found, fix=_FIX)


def _run(function: Callable[..., Any], trial: Trial) -> Any:
    copy = trial.copy()
    try:
        with torch.no_grad():
            return call(copy, op=lambda *args, **kwargs: function(copy.op, args, kwargs))
    except Exception as error:
        return error


def _not_traced(trial: Trial, how: str, error: Exception) -> Exception:
    """The finding, or why it is none, for a function that cannot be compiled."""
    cause: BaseException | None = error
    while cause is not None and not _torch.fakes.needs_data(cause):
        cause = cause.__cause__
    if trial.is_builtin or cause is not None:
        return NotExercised(f"{how} does not take the operator: {in_short(error, 200)}")
    return failed_call(trial.name, f"{how} fails on a function that calls the operator", error, fix=_FIX)
