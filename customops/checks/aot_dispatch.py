"""test_aot_dispatch_*: an operator gives the same results and gradients in eager mode and traced by AOTDispatcher.

AOTDispatcher is the part of ``torch.compile`` below Dynamo: it traces the operator on fake tensors, with symbolic
sizes if dynamic, replaces its writes by copies, and derives a graph for the backward. The graphs are run as they are.

Each run gets its own copies of the inputs and the same seed. Arguments that the operator writes are compared like
outputs. Gradients are those of the sum of the magnitudes of the sums of all differentiable outputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch

from customops import _torch
from customops.checks._derivatives import requiring_grad
from customops.checks._inputs import copy_tensors, is_plain, seeded, tensors_in, without_repeats
from customops.checks._outcome import NotExercised, in_short
from customops.checks._trial import Trial, failed_call, is_untraceable, resolve
from customops.errors import CheckError

CheckGradients = bool | Literal["auto"]

#: AOTAutograd refuses outputs of other kinds. They would be constants of the trace.
_RESULTS = (torch.Tensor, int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
_TRACED = "when traced by AOTDispatcher"


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

    def results_of(*args: Any, **kwargs: Any) -> dict[str, Any]:
        """All that a call leaves behind: what it returns, and the arguments it writes."""
        call = Trial(trial.op, args, kwargs)
        outputs = call.by_return(trial.op(*args, **kwargs))
        mutated = call.mutated
        if trial.custom_op is not None:  # one of ours: a backward through its writes raises
            mutated = _torch.trees.tree_map(lambda v: v.detach() if isinstance(v, torch.Tensor) else v, mutated)
        results = {f"output {i}": value for i, value in enumerate(outputs)}
        return results | {f"argument {name} after the call": value for name, value in mutated.items()}

    call = _Call(results_of, trial.args, trial.kwargs, trial.arguments)
    try:
        _compare(call, trial.name, dynamic, "auto", atol=trial.atol, rtol=trial.rtol)
    except CheckError as error:
        is_about_data = error.__cause__ is not None and _torch.fakes.needs_data(error.__cause__)
        if dynamic and is_about_data and is_untraceable(trial.op):
            raise NotExercised("the operator is tagged as depending on data, and is left out of traces") from error
        has_gradients = any(tensor.requires_grad for tensor in trial.tensors)
        if dynamic and error.problem.endswith(_TRACED) and has_gradients and _has_size_of_data(trial):
            check(trial.detached(), dynamic=dynamic)
            reason = "torch does not trace every backward of a size that depends on data; the forward agrees"
            raise NotExercised(f"{reason}: {in_short(error, 200)}") from error
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


def _has_size_of_data(trial: Trial) -> bool:
    """Does the fake impl say of a result that a size of it depends on data?"""
    with torch.no_grad(), _torch.fakes.fake_mode() as mode, _torch.fakes.quiet_fakes():
        try:
            results = tensors_in(trial.faked(mode).results())
        except Exception:  # for test_faketensor to find
            return False
        return any(isinstance(size, torch.SymInt) for result in results for size in result.shape)


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
    named = {f"args[{i}]": value for i, value in enumerate(args)} | (kwargs or {})
    call = _Call(lambda *args, **kwargs: {"output": func(*args, **kwargs)}, tuple(args), kwargs or {}, named)
    _compare(call, getattr(func, "__qualname__", None), dynamic, check_gradients, atol=atol, rtol=rtol)


def _compare(call: _Call, op: str | None, dynamic: bool, check_gradients: CheckGradients, **tolerance: Any) -> None:
    """Run a call in eager mode and through AOTDispatcher, and raise a CheckError if that makes a difference."""
    eager = _run(call, call, op, "in eager mode, on these inputs", "auto" if check_gradients else False)
    has_gradients = len(eager) > len(call.result_names)
    if check_gradients is True and not has_gradients:
        raise CheckError("there are no gradients to check: no input or no output requires grad", op=op)
    compiled = _torch.for_checks.aot_function(call, dynamic=dynamic)
    with _torch.for_checks.without_cache_of_fakes() if dynamic else contextlib.nullcontext():
        traced = _run(call, compiled, op, _TRACED, has_gradients)
    inputs = zip(call.input_names, call.inputs, strict=True)
    gradients = [f"the gradient of {name}" for name, tensor in inputs if has_gradients and tensor.requires_grad]
    for i, name in enumerate([*call.result_names, *gradients]):
        try:
            torch.testing.assert_close(traced[i], eager[i], equal_nan=True, **tolerance)
        except AssertionError as difference:
            again = _run(call, call, op, "when called again", i >= len(call.result_names))
            fix = (
                "a trace is made once, on fake tensors, and used for all calls: look for a fake impl that differs from "
                "the kernel, a write that is not declared, a value read while tracing"
            )
            try:
                torch.testing.assert_close(again[i], eager[i], equal_nan=True, **tolerance)
            except AssertionError:
                fix = (
                    "it differs between two calls in eager mode, too: look for a counter, a cache, uninitialised "
                    "memory, or randomness that torch.manual_seed does not govern"
                )
            raise CheckError(
                f"{name} differs in eager-mode PyTorch vs AOTDispatcher, so it is incorrect under torch.compile",
                op=op,
                got=" ".join(str(difference).split()),
                fix=fix,
            ) from difference


def _run(
    call: _Call, function: Callable[..., list[Any]], op: str | None, where: str, gradients: CheckGradients
) -> list[Any]:
    """The results of a run on copies of the inputs, and then the gradients, if they are asked for."""
    with seeded(call.values), _torch.for_checks.ignoring_aliases():  # they are for test_schema to find
        inputs = copy_tensors(call.inputs, leaves=True)
        try:
            results = list(function(*inputs))
        except Exception as error:
            raise failed_call(op, f"the operator fails {where}", error) from error
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        tracked = [result for result in results if isinstance(result, torch.Tensor) and result.requires_grad]
        if gradients is False or (gradients == "auto" and not (wanted and tracked)):
            return results
        found: Sequence[torch.Tensor | None] = [None] * len(wanted)
        try:
            if tracked:
                found = torch.autograd.grad([_magnitude(x) for x in tracked], wanted, allow_unused=True)
        except Exception as error:
            raise failed_call(op, f"the operator's backward fails {where}", error) from error
    # To have no gradient and to have one of zeros is the same to whoever minimises.
    return results + [torch.zeros_like(x) if grad is None else grad for x, grad in zip(wanted, found, strict=True)]


def _magnitude(tensor: torch.Tensor) -> torch.Tensor:
    """That of the sum, which is real if the tensor is complex."""
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    elif tensor.dtype.itemsize == 1:
        tensor = tensor.float()  # torch does not sum 8-bit floats
    return tensor.sum().abs()


class _Call:
    """A function and its inputs, in the form in which AOTAutograd takes functions: tensors in, a flat list out.

    The function is given copies, made as part of the trace: leaves of autograd refuse to be written.
    """

    def __init__(
        self, results_of: Callable[..., dict[str, Any]], args: Any, kwargs: dict[str, Any], named: dict[str, Any]
    ) -> None:
        leaves = _named_leaves(named)
        inputs = {id(leaf): (name, leaf) for name, leaf in leaves if isinstance(leaf, torch.Tensor)}
        self.input_names = [name for name, _ in inputs.values()]
        self.inputs = [tensor for _, tensor in inputs.values()]
        self.result_names: list[str] = []  #: of the latest call
        self.values, self._spec = _torch.trees.tree_flatten((args, kwargs))
        self._results_of = results_of
        self._position = {key: i for i, key in enumerate(inputs)}
        self._copiers = [_copy_with_strides if _has_other_strides(tensor) else torch.clone for tensor in self.inputs]

    def __call__(self, *inputs: torch.Tensor) -> list[Any]:
        copies = [copy(tensor) for copy, tensor in zip(self._copiers, inputs, strict=True)]
        values = [copies[self._position[id(v)]] if isinstance(v, torch.Tensor) else v for v in self.values]
        args, kwargs = _torch.trees.tree_unflatten(values, self._spec)
        leaves = _named_leaves(self._results_of(*args, **kwargs))
        results = [(name, leaf) for name, leaf in leaves if isinstance(leaf, _RESULTS)]
        self.result_names = [name for name, _ in results]
        return [leaf for _, leaf in results]


def _named_leaves(named: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, tree in named.items():
        for i, leaf in enumerate(_torch.trees.tree_leaves(tree)):
            yield f"{name}[{i}]" if isinstance(tree, (list, tuple)) else name, leaf


def _has_other_strides(tensor: torch.Tensor) -> bool:
    """Has a copy by `torch.clone`, and of fakes, other strides, which `_copy_with_strides` keeps?"""
    if not is_plain(tensor) or torch.empty_like(tensor, device="meta").stride() == tensor.stride():
        return False
    with contextlib.suppress(RuntimeError):  # elements overlap in a way that cannot be written
        _copy_with_strides(tensor.detach())
        return True
    return False


def _copy_with_strides(tensor: torch.Tensor) -> torch.Tensor:
    one_of_each = without_repeats(tensor)
    copy = one_of_each.new_empty_strided(one_of_each.shape, one_of_each.stride()).copy_(one_of_each)
    # An expand that expands nothing is not harmless: undoing it as a view adds and subtracts the old values.
    return copy if one_of_each is tensor else copy.expand(tensor.shape)
