"""test_aot_dispatch_*: an operator gives the same results and gradients in eager mode and traced by AOTDispatcher.

AOTDispatcher is the part of ``torch.compile`` below Dynamo: it traces the operator on fake tensors, with symbolic
sizes if dynamic, replaces its writes by copies, and derives a graph for the backward. The graphs are run as they are.

Each run gets its own copies of the inputs and the same seed. Arguments that the operator writes are compared like
outputs. Gradients are those of the sum of the magnitudes of the sums of all differentiable outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from customops import _torch
from customops.checks._derivatives import requiring_grad
from customops.checks._inputs import copy_tensors, is_plain, seeded
from customops.checks._outcome import NotExercised, in_short
from customops.checks._trial import Trial, failed_call, is_untraceable, resolve
from customops.errors import CheckError

CheckGradients = bool | Literal["auto"]

#: AOTAutograd refuses outputs of other kinds. They would be constants of the trace.
_RESULTS = (torch.Tensor, int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


def aot_dispatch_check(
    op: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    dynamic: bool,
    atol: float | None = None,
    rtol: float | None = None,
) -> None:
    """Raise CheckError if `op` has different results or gradients when AOTDispatcher traces it."""
    check(Trial(resolve(op), tuple(args), kwargs or {}, atol, rtol), dynamic=dynamic)


def check(trial: Trial, *, dynamic: bool) -> None:
    trial.require_data()
    if any(tensor.layout not in (torch.strided, torch.sparse_coo) for tensor in trial.tensors):
        raise NotExercised("an input is compressed and sparse, which torch does not trace")
    parameters = [argument.name for argument in trial.schema.positional]
    call = _Call(functools.partial(_results_of_op, trial.op), trial.args, trial.kwargs, parameters)
    try:
        _Comparison(call, dynamic, "auto", (trial.atol, trial.rtol), trial.name).run()
    except CheckError as error:
        is_about_data = error.__cause__ is not None and _torch.tensors.needs_data(error.__cause__)
        if dynamic and is_about_data and is_untraceable(trial.op):
            raise NotExercised("the operator is tagged as depending on data, and is left out of traces") from error
        raise


def check_backward(trial: Trial) -> None:
    """Compare gradients as well: if no input of the sample requires grad, those that may do."""
    if any(tensor.requires_grad for tensor in trial.tensors):
        raise NotExercised("an input requires grad, so test_aot_dispatch_dynamic compares gradients")
    try:
        check(requiring_grad(trial), dynamic=True)
    except CheckError as error:
        if isinstance(error.__cause__, NotImplementedError):
            raise NotExercised(f"backward refuses to be traced: {in_short(error.__cause__, 200)}") from error
        raise


def aot_autograd_check(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    dynamic: bool,
    *,
    check_gradients: CheckGradients = True,
    atol: float | None = None,
    rtol: float | None = None,
) -> None:
    """Raise CheckError if `func` has different results or gradients when AOTDispatcher traces it.

    Args:
        func: a function of tensors, lists of tensors and other values.
        args, kwargs: its inputs. It gets copies of them, which it may mutate.
        dynamic: if True, trace with symbolic sizes.
        check_gradients: whether to compare gradients; "auto" compares them if an input and an output require grad.
        atol, rtol: absolute and relative tolerance for results; by default those of `torch.testing.assert_close`.
    """
    call = _Call(functools.partial(_results_of_function, func), tuple(args), kwargs or {})
    _Comparison(call, dynamic, check_gradients, (atol, rtol), getattr(func, "__qualname__", None)).run()


def _results_of_function(func: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    return {"output": func(*args, **kwargs)}


def _results_of_op(op: _torch.library.OpOverload, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """All that a call of `op` leaves behind: what it returns, and the arguments it writes."""
    trial = Trial(op, args, kwargs)
    outputs = trial.by_return(op(*args, **kwargs))
    mutated = trial.mutated
    if hasattr(
        _torch.library.torch_op_of(trial.name), "_definition"
    ):  # one of ours: a backward through its writes raises
        mutated = {name: _detached(value) for name, value in mutated.items()}
    return {
        **{f"output {i}": value for i, value in enumerate(outputs)},
        **{f"argument {name} after the call": value for name, value in mutated.items()},
    }


def _detached(value: Any) -> Any:
    values, spec = _torch.tensors.tree_flatten(value)
    return _torch.tensors.tree_unflatten([v.detach() if isinstance(v, torch.Tensor) else v for v in values], spec)


class _Call:
    """A function and its inputs, in the form in which AOTAutograd takes functions: tensors in, a flat list out.

    The function is given copies, made as part of the trace. So it may write to its arguments, which it might not do
    to the inputs: leaves of autograd refuse to be written.
    """

    def __init__(
        self,
        results_of: Callable[..., dict[str, Any]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        parameters: Sequence[str] = (),
    ) -> None:
        names = [*parameters, *(f"args[{i}]" for i in range(len(parameters), len(args)))]
        leaves = _named_leaves([*zip(names, args, strict=False), *kwargs.items()])
        inputs = {id(leaf): (name, leaf) for name, leaf in leaves if isinstance(leaf, torch.Tensor)}
        self.input_names = [name for name, _ in inputs.values()]
        self.inputs = [tensor for _, tensor in inputs.values()]
        self.result_names: list[str] = []  #: of the latest call
        self.values, self._spec = _torch.tensors.tree_flatten((args, kwargs))
        self._results_of = results_of
        self._position = {key: i for i, key in enumerate(inputs)}
        self._copiers = [_copier(tensor) for tensor in self.inputs]

    def __call__(self, *inputs: torch.Tensor) -> list[Any]:
        copies = [copy(tensor) for copy, tensor in zip(self._copiers, inputs, strict=True)]
        values = [copies[self._position[id(v)]] if isinstance(v, torch.Tensor) else v for v in self.values]
        args, kwargs = _torch.tensors.tree_unflatten(values, self._spec)
        leaves = _named_leaves(self._results_of(*args, **kwargs).items())
        results = [(name, leaf) for name, leaf in leaves if isinstance(leaf, _RESULTS)]
        self.result_names = [name for name, _ in results]
        return [leaf for _, leaf in results]


def _named_leaves(named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    for name, tree in named:
        leaves = _torch.tensors.tree_leaves(tree)
        for i, leaf in enumerate(leaves):
            yield f"{name}[{i}]" if isinstance(tree, (list, tuple)) else name, leaf


def _copier(tensor: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that copies `tensor`, and fakes of it, and keeps the strides where torch can."""
    if not is_plain(tensor) or torch.empty_like(tensor, device="meta").stride() == tensor.stride():
        return torch.clone
    try:
        _copy_with_strides(tensor.detach())
    except RuntimeError:  # elements overlap in a way that cannot be written
        return torch.clone
    return _copy_with_strides


def _copy_with_strides(tensor: torch.Tensor) -> torch.Tensor:
    one_of_each = tensor
    for dim, step in enumerate(tensor.stride()):
        if step == 0:  # an expanded dimension
            one_of_each = one_of_each.narrow(dim, 0, 1)
    copy = one_of_each.new_empty_strided(one_of_each.shape, one_of_each.stride()).copy_(one_of_each)
    # An expand that expands nothing is not harmless: undoing it as a view adds and subtracts the old values.
    return copy if one_of_each is tensor else copy.expand(tensor.shape)


@dataclass
class _Run:
    """One run of a call: the inputs it was given, what it made of them, and gradients if they were asked for."""

    inputs: list[torch.Tensor]
    results: list[Any]
    gradients: list[torch.Tensor] | None = None

    def is_differentiable(self) -> bool:
        return bool(self._differentiable()) and any(tensor.requires_grad for tensor in self.inputs)

    def differentiate(self) -> None:
        wanted = [tensor for tensor in self.inputs if tensor.requires_grad]
        found: Sequence[torch.Tensor | None] = [None] * len(wanted)
        if self._differentiable():
            sums = [_summable(result).sum().abs() for result in self._differentiable()]  # real, if complex
            found = torch.autograd.grad(sums, wanted, allow_unused=True)
        # To have no gradient and to have one of zeros is the same to whoever minimises.
        pairs = zip(wanted, found, strict=True)
        self.gradients = [torch.zeros_like(tensor) if grad is None else grad for tensor, grad in pairs]

    def _differentiable(self) -> list[torch.Tensor]:
        return [result for result in self.results if isinstance(result, torch.Tensor) and result.requires_grad]


def _summable(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        return tensor.to_dense()
    return tensor.float() if tensor.dtype.itemsize == 1 else tensor  # torch does not sum 8-bit floats


@dataclass(frozen=True)
class _Comparison:
    """Runs a call in eager mode and through AOTDispatcher, and raises a CheckError if that makes a difference."""

    call: _Call
    dynamic: bool
    check_gradients: CheckGradients
    tolerance: tuple[float | None, float | None]  #: atol, rtol
    name: str | None

    def run(self) -> None:
        eager = self._run(self.call, "in eager mode, on these inputs", self.check_gradients)
        if self.check_gradients is True and not eager.is_differentiable():
            raise CheckError("there are no gradients to check: no input or no output requires grad", op=self.name)
        compiled = _torch.tensors.aot_function(self.call, dynamic=self.dynamic)
        traced = self._run(compiled, "when traced by AOTDispatcher", eager.gradients is not None)
        self._compare(self.call.result_names, lambda run: run.results, eager, traced)
        if eager.gradients is not None:
            names = zip(self.call.input_names, self.call.inputs, strict=True)
            names_of_gradients = [f"the gradient of {name}" for name, tensor in names if tensor.requires_grad]
            self._compare(names_of_gradients, _gradients, eager, traced)

    def _run(self, function: Callable[..., list[Any]], where: str, gradients: CheckGradients) -> _Run:
        with seeded(self.call.values), _torch.tensors.ignoring_aliases():  # they are for test_schema to find
            inputs = copy_tensors(self.call.inputs, leaves=True)
            try:
                run = _Run(inputs, function(*inputs))
            except Exception as error:
                raise failed_call(self.name, f"the operator fails {where}", error) from error
            if gradients is True or (gradients == "auto" and run.is_differentiable()):
                try:
                    run.differentiate()
                except Exception as error:
                    raise failed_call(self.name, f"the operator's backward fails {where}", error) from error
        return run

    def _compare(self, names: list[str], values_of: Callable[[_Run], list[Any]], eager: _Run, traced: _Run) -> None:
        for i, name in enumerate(names):
            try:
                self._assert_close(values_of(traced)[i], values_of(eager)[i])
            except AssertionError as difference:
                again = self._run(self.call, "when called again", values_of is _gradients)
                raise CheckError(
                    f"{name} differs in eager-mode PyTorch vs AOTDispatcher, so it is incorrect under torch.compile",
                    op=self.name,
                    got=" ".join(str(difference).split()),
                    fix=self._remedy(values_of(again)[i], values_of(eager)[i]),
                ) from difference

    def _remedy(self, again: Any, before: Any) -> str:
        try:
            self._assert_close(again, before)
        except AssertionError:
            return (
                "it differs between two calls in eager mode, too: look for a counter, a cache, uninitialised memory, "
                "or randomness that torch.manual_seed does not govern"
            )
        return (
            "a trace is made once, on fake tensors, and used for all calls: look for a fake impl that differs from "
            "the kernel, a write that is not declared, a value read while tracing"
        )

    def _assert_close(self, actual: Any, expected: Any) -> None:
        atol, rtol = self.tolerance
        torch.testing.assert_close(actual, expected, atol=atol, rtol=rtol, equal_nan=True)


def _gradients(run: _Run) -> list[Any]:
    return run.gradients or []
