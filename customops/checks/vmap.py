"""test_vmap: `torch.vmap` of the operator gives what a loop over the batch gives.

Each tensor is batched alone, and all together, along the first dimension, the last, and different ones; with a batch of
one; with the batch of results put last; in two levels; in chunks. The elements of a batch are the sample with its
elements in another order. Where the operator has a gradient, the gradients of the elements are compared, too.

The loop is the definition of vmap, so any difference beyond rounding is a fault of the vmap rule. A rule may refuse: an
exception that it raises on purpose is no finding. One that comes about in its code, on a batch that it should take, is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from customops import _torch
from customops.checks._inputs import quiet, seeded
from customops.checks._outcome import NotExercised, in_short, is_refusal
from customops.checks._runs import attempt, copied, difference, require_comparable, results_of
from customops.checks._trial import Trial, failed_call
from customops.checks._variants import are_plain, is_about_storages, reordered
from customops.errors import CheckError

_BATCH = 3


def check(trial: Trial, *, empty: bool = False) -> None:
    require_comparable(trial)
    if not trial.tensors or not are_plain(trial):
        raise NotExercised("no input is a plain strided tensor, which could be batched")
    if is_about_storages(trial):
        raise NotExercised("the operator works on storages, which the elements of a batch share")
    keys = ("FuncTorchBatched", "FuncTorchBatchedDecomposition", "CompositeImplicitAutograd")
    if not any(_torch.dispatcher.has_kernel(trial.name, key) for key in keys):
        raise NotExercised("the op has no vmap rule (register_vmap): torch loops over the batch, or refuses")
    plain = trial.detached()
    if torch.Tag.nondeterministic_seeded in trial.op.tags:
        _check_randomness(plain)
        return
    _require_same_again(plain)
    calls = _Calls(plain)
    if empty:
        _compare_all(calls, [_Plan("an empty batch", (0,) * len(calls.tensors), size=0)])
        return
    _compare_all(calls, _plans(calls))
    _compare_gradients(trial, calls)
    for call in _other_dims(plain):
        calls = _Calls(call)
        _compare_all(calls, [_Plan("all tensors batched", (0,) * len(calls.tensors))])


def _compare_all(calls: _Calls, plans: Iterable[_Plan]) -> None:
    tried, refused = 0, ""
    for plan in plans:
        refusal = _compare(calls, plan)
        tried, refused = tried + (refusal is None), refused or refusal or ""
    if not tried:
        raise NotExercised(f"vmap of the operator refuses: {refused}")


def _other_dims(trial: Trial) -> Iterator[Trial]:
    """The call with other dimensions, counted from the front and from the back, where an argument is named so."""
    for name, value in trial.arguments.items():
        if isinstance(value, int) and not isinstance(value, bool) and ("dim" in name or "axis" in name):
            for other in {-1, 0} - {value}:
                call = trial.with_arguments(**{name: other})
                if attempt(call) is not None:
                    yield call


def _check_randomness(trial: Trial) -> None:
    """With randomness="same" the elements of a batch are treated alike, with "different" each by itself."""
    calls = _Calls(trial)
    count = len(calls.tensors)
    batch = [torch.stack([tensor] * _BATCH) for tensor in calls.tensors]
    refused = ""
    with quiet(), torch.no_grad(), seeded((trial.args, trial.kwargs)):
        loops = [copied(calls(*calls.tensors)) for _ in range(2 * _BATCH)]
        if not all(difference(one, other) for one, other in itertools.combinations(loops, 2)):
            raise NotExercised("the random numbers do not show in the result, or not always")
        for randomness in ("same", "different"):
            try:
                runs = [torch.vmap(calls, (0,) * count, randomness=randomness)(*batch) for _ in range(2)]
            except Exception as error:
                refused = in_short(error, 200)
                continue
            are_same = [difference([r[1] for r in run], [r[0] for r in run]) is None for run in runs]
            if all(are_same) if randomness == "different" else not all(are_same):
                raise CheckError(
                    f'vmap with randomness="{randomness}" does otherwise',
                    op=trial.name,
                    got="all elements have the same random numbers" if all(are_same) else "the elements differ",
                    fix='in the vmap rule, look at info.randomness: for "same" draw once, and expand it; '
                    'for "different" draw for each element; for "error" raise',
                )
    if refused:
        raise NotExercised(f"vmap of the operator refuses: {refused}")


def _require_same_again(trial: Trial) -> None:
    """Raise NotExercised for operators that draw random numbers: a loop draws others than a batch."""
    copies = [trial.copy(), trial.copy()]
    with seeded((trial.args, trial.kwargs)), quiet(), torch.no_grad():
        results = [[copy.op(*copy.args, **copy.kwargs), list(copy.mutated.values())] for copy in copies]
    if difference(results[0], results[1]):
        raise NotExercised("two calls of the operator differ, and a loop makes several")


class _Calls:
    """The operator as a function of its tensors alone, which returns its results and copies of what it wrote."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.tensors = trial.distinct
        self._is_written = {id(tensor) for tensor in _torch.tensors.tree_leaves(trial.mutated)}
        self.elements = [self._elements(by) for by in range(_BATCH)]
        if any(attempt(self._with(element)) is None for element in self.elements[1:]):
            self.elements = [self.elements[0]] * _BATCH  # it does not take other values

    def _elements(self, by: int) -> list[torch.Tensor]:
        """Those of the call in another order, and floating-point ones smaller: else their means would be the same."""
        scale = 1 - 0.1 * by
        return [reordered(t * scale if t.is_floating_point() else t, by) for t in self.tensors]

    def _with(self, tensors: list[Any]) -> Trial:
        given = dict(zip(map(id, self.tensors), tensors, strict=True))
        return self.trial.map_tensors(lambda _, tensor: given[id(tensor)])

    def __call__(self, *tensors: Any) -> Any:
        # Inside of vmap a copy is batched as its original is.
        written = [id(tensor) in self._is_written for tensor in self.tensors]
        call = self._with([t.clone() if w else t for t, w in zip(tensors, written, strict=True)])
        outputs = call.by_return(call.op(*call.args, **call.kwargs))
        return [leaf for leaf in _torch.tensors.tree_leaves([outputs, list(call.mutated.values())])]

    def loop(self, which: tuple[bool, ...], rows: list[int]) -> list[list[Any]]:
        """The results for each element of a batch in which the tensors of `which` are batched."""
        results = []
        for row in rows:
            mixed = [self.elements[row if batched else 0][i] for i, batched in enumerate(which)]
            # Of copies: the next call may write there, which is another fault.
            results.append(_torch.tensors.tree_leaves(results_of(self._with(mixed))))
        return results


@dataclass(frozen=True)
class _Plan:
    """One way to batch: for each tensor the dimension of the batch or None."""

    label: str
    dims: tuple[int | None, ...]
    size: int = _BATCH
    out_dim: int = 0
    chunk: int | None = None
    nested: bool = False  #: the first batched tensor in a second level, outside


def _plans(calls: _Calls) -> Iterator[_Plan]:
    count = len(calls.tensors)
    yield _Plan("all tensors batched", (0,) * count)
    if count > 1:
        for i in range(count):
            yield _Plan("one tensor batched, and others not", tuple(0 if j == i else None for j in range(count)))
    yield _Plan("batched along the last dimension", (-1,) * count)
    if count > 1:
        mixed = tuple(-1 if i % 2 else 0 for i in range(count))
        yield _Plan("batched along different dimensions", mixed)
        yield _Plan("batched along different dimensions", tuple(-1 - dim for dim in mixed))
    yield _Plan("batch of one", (0,) * count, size=1)
    yield _Plan("results batched along the last dimension", (0,) * count, out_dim=-1)
    yield _Plan("in chunks", (0,) * count, chunk=2)
    yield _Plan("two levels of vmap", (0,) * count, nested=True)


def _compare(calls: _Calls, plan: _Plan) -> str | None:
    """Compare one batch with a loop; what vmap says if it refuses."""
    which = tuple(dim is not None for dim in plan.dims)
    rows = list(range(max(plan.size, 1)))
    with quiet(), torch.no_grad():
        looped = calls.loop(which, rows)
        expected = _stacked(looped, plan.out_dim, plan.size)
        if expected is None:
            return "the sizes of the results differ from element to element"
        try:
            with seeded((calls.trial.args, calls.trial.kwargs)):
                batched = _run(calls, plan)
        except Exception as error:
            return _refusal(calls, plan, error)
    found = difference(batched, expected, scale=_ordinary_size(calls.trial))
    if found is not None:
        raise _finding(calls.trial, plan.label, found)
    return None


def _ordinary_size(trial: Trial) -> float:
    """How large results are but for cancellation: without a rule, layout and rounding are all that may differ."""
    if trial.custom_op is None or trial.custom_op._rules.vmap.registered is not None:
        return 0.0
    finite = [x[x.isfinite()].abs() for x in trial.tensors if x.is_floating_point()]
    return max((float(x.max()) for x in finite if x.numel()), default=0.0)


def _run(calls: _Calls, plan: _Plan) -> Any:
    inputs = []
    for i, dim in enumerate(plan.dims):
        rows = [element[i] for element in calls.elements[: max(plan.size, 1)]]
        inputs.append(rows[0] if dim is None else torch.stack(rows, dim).narrow(dim, 0, plan.size))
    function = torch.vmap(calls, plan.dims, plan.out_dim, randomness="different", chunk_size=plan.chunk)
    if not plan.nested:
        return function(*inputs)
    # The outer level is over two equal batches, so the loop is the same.
    outer = torch.vmap(function, (0, *(None,) * (len(inputs) - 1)), randomness="different")
    return [result[1] for result in outer(torch.stack([inputs[0], inputs[0]]), *inputs[1:])]


def _stacked(looped: list[list[Any]], dim: int, size: int) -> list[Any] | None:
    """The results of a loop as vmap would give them."""
    stacked = []
    for values in zip(*looped, strict=True):
        if not all(isinstance(value, torch.Tensor) and value.shape == values[0].shape for value in values):
            return None
        stacked.append(torch.stack(values, dim).narrow(dim, 0, size))
    return stacked


def _refusal(calls: _Calls, plan: _Plan, error: Exception) -> str:
    """The words of a rule that refuses; raises a finding for one that fails by accident."""
    trial = calls.trial
    has_rule = _torch.dispatcher.has_kernel(trial.name, "FuncTorchBatched")
    if has_rule and not trial.is_builtin and not is_refusal(error):
        problem = f"the vmap rule fails: {plan.label}"
        raise failed_call(
            trial.name,
            problem,
            error,
            fix="in_dims has one entry for each argument, None where it is not batched: move the batch of each to the "
            "front, and do not count it as a dimension of an element; raise NotImplementedError for what the rule "
            "does not take",
        ) from error
    return in_short(error, 200)


def _finding(trial: Trial, label: str, found: str) -> CheckError:
    return CheckError(
        f"vmap gives another result than a loop: {label}",
        op=trial.name,
        got=found,
        expected="what a loop over the batch gives",
        fix="in the vmap rule: use the entry of in_dims of each argument, shift dimensions that are arguments "
        "by the batch, and return as out_dims where the batch is in each result",
    )


def _compare_gradients(trial: Trial, calls: _Calls) -> None:
    """Compare gradients of the elements of a batch with those of a loop."""
    wanted = tuple(i for i, tensor in enumerate(calls.tensors) if tensor.is_floating_point() and not trial.mutated)
    if not wanted or not any(tensor.requires_grad for tensor in trial.tensors):
        return
    count = len(calls.tensors)
    gradient = torch.func.grad(_weighted_sum(calls), wanted)
    batch = [torch.stack([element[i] for element in calls.elements]) for i in range(count)]
    with quiet(), seeded((trial.args, trial.kwargs)):
        try:
            looped = [gradient(*element) for element in calls.elements]
            batched = torch.vmap(gradient, (0,) * count, randomness="different")(*batch)
        except Exception:
            return  # no gradient, or none for this under vmap: not a wrong one
    expected = [torch.stack(grads) for grads in zip(*looped, strict=True)]
    found = difference(list(batched), expected, rtol=1e-4)
    if found is not None:
        raise _finding(trial, "gradients of the elements", found)


def _weighted_sum(calls: _Calls) -> Callable[..., Any]:
    def total(*tensors: Any) -> Any:
        results = [value for value in calls(*tensors) if isinstance(value, torch.Tensor) and value.is_floating_point()]
        return sum((value.sum() for value in results), start=torch.zeros(()))

    return total
