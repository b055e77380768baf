"""test_vmap: `torch.vmap` of the operator gives what a loop over the batch gives.

The elements of a batch are the sample with its elements in another order; `_plans` lists the ways to batch them. Where
the operator has a gradient, the gradients of the elements are compared, too. The loop is the definition of vmap, so any
difference beyond rounding is a fault of the vmap rule. A rule may refuse: an exception that it raises on purpose is no
finding. One that comes about in its code, on a batch that it should take, is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from customops import _torch
from customops.checks._inputs import quiet, seeded
from customops.checks._outcome import NotExercised, in_short, is_refusal, require
from customops.checks._runs import attempt, copied, difference, require_comparable, results_of
from customops.checks._trial import Trial, failed_call
from customops.checks._variants import are_plain, is_about_storages, reordered

_BATCH = 3


def is_derived(trial: Trial) -> bool:
    """Is the rule none of the author's, but a loop, or torch's own of what the reference function calls?"""
    rule = None if trial.custom_op is None else trial.custom_op._rules.vmap
    return rule is not None and (rule.registered is None or bool(rule.is_derived(None)))


def check(trial: Trial, *, empty: bool = False) -> None:
    require_comparable(trial)
    require(trial.tensors and are_plain(trial), "no input is a plain strided tensor, which could be batched")
    require(not is_about_storages(trial), "the operator works on storages, which the elements of a batch share")
    keys = ("FuncTorchBatched", "FuncTorchBatchedDecomposition", "CompositeImplicitAutograd")
    if not any(_torch.dispatcher.has_kernel(trial.name, key) for key in keys):
        raise NotExercised("the op has no vmap rule (register_vmap): torch loops over the batch, or refuses")
    plain = trial.detached()
    if torch.Tag.nondeterministic_seeded in trial.op.tags:
        _check_randomness(plain)
        return
    copies = [plain.copy(), plain.copy()]
    with seeded((plain.args, plain.kwargs)), quiet(), torch.no_grad():
        results = [copy.results() for copy in copies]
    if difference(*results):  # by random numbers: a loop draws others than a batch
        raise NotExercised("two calls of the operator differ, and a loop makes several")
    calls = _Calls(plain)
    if empty:
        _compare_all(calls, [_Plan("an empty batch", calls.first, size=0)])
        return
    _compare_all(calls, _plans(calls, trial.is_sample))
    _compare_gradients(trial, calls)
    for name, value in plain.arguments.items():
        # Other dimensions, counted from the front and from the back.
        if isinstance(value, int) and not isinstance(value, bool) and ("dim" in name or "axis" in name):
            for other in {-1, 0} - {value}:
                call = plain.with_arguments(**{name: other})
                if attempt(call) is not None:
                    calls = _Calls(call)
                    _compare_all(calls, [_Plan("all tensors batched", calls.first)])


def _check_randomness(trial: Trial) -> None:
    """With randomness="same" the elements of a batch are treated alike, with "different" each by itself."""
    calls = _Calls(trial)
    batch = [torch.stack([tensor] * _BATCH) for tensor in calls.tensors]
    refused = ""
    with quiet(), torch.no_grad(), seeded((trial.args, trial.kwargs)):
        loops = [copied(calls(*calls.tensors)) for _ in range(2 * _BATCH)]
        if not all(difference(one, other) for one, other in itertools.combinations(loops, 2)):
            raise NotExercised("the random numbers do not show in the result, or not always")
        for randomness in ("same", "different"):
            try:
                runs = [torch.vmap(calls, calls.first, randomness=randomness)(*batch) for _ in range(2)]
            except Exception as error:
                refused = in_short(error, 200)
                continue
            are_same = [difference([r[1] for r in run], [r[0] for r in run]) is None for run in runs]
            if all(are_same) if randomness == "different" else not all(are_same):
                raise trial.finding(
                    f'vmap with randomness="{randomness}" does otherwise',
                    got="all elements have the same random numbers" if all(are_same) else "the elements differ",
                    fix='in the vmap rule, look at info.randomness: for "same" draw once, and expand it; '
                    'for "different" draw for each element; for "error" raise',
                )
    require(not refused, f"vmap of the operator refuses: {refused}")


class _Calls:
    """The operator as a function of its tensors alone, which returns its results and copies of what it wrote."""

    def __init__(self, trial: Trial) -> None:
        self.trial, self.tensors = trial, trial.distinct
        self.first = (0,) * len(self.tensors)  #: the dimensions of a batch where all are batched along the first
        written = {id(tensor) for tensor in _torch.trees.tree_leaves(trial.mutated)}
        self._are_written = [id(tensor) in written for tensor in self.tensors]
        # Those of the call in another order, and floating-point ones smaller: else their means would be the same.
        self.elements = [
            [reordered(t * (1 - 0.1 * by) if t.is_floating_point() else t, by) for t in self.tensors]
            for by in range(_BATCH)
        ]
        if any(attempt(self._with(element)) is None for element in self.elements[1:]):
            self.elements = [self.elements[0]] * _BATCH  # it does not take other values
        self._known: dict[Any, list[Any]] = {}  #: results, by element and which tensors are not batched

    def _with(self, tensors: list[Any]) -> Trial:
        return self.trial.replaced(dict(zip(map(id, self.tensors), tensors, strict=True)))

    def __call__(self, *tensors: Any) -> Any:
        # Inside of vmap a copy is batched as its original is.
        call = self._with([t.clone() if w else t for t, w in zip(tensors, self._are_written, strict=True)])
        return list(_torch.trees.tree_leaves(call.results()))

    def element(self, row: int, dims: tuple[int | None, ...]) -> list[Any]:
        """The results for one element of a batch along these dimensions; tensors without one are not batched."""
        key = row, tuple(dim is None for dim in dims)
        if key not in self._known:
            mixed = [self.elements[0 if dim is None else row][i] for i, dim in enumerate(dims)]
            # Copies: the next call may write there, which is another fault.
            self._known[key] = _torch.trees.tree_leaves(results_of(self._with(mixed)))
        return self._known[key]


class _Plan(NamedTuple):
    """One way to batch: for each tensor the dimension of the batch or None."""

    label: str
    dims: tuple[int | None, ...]
    size: int = _BATCH
    out_dim: int = 0
    chunk: int | None = None
    nested: bool = False  #: the first batched tensor in a second level, outside


def _plans(calls: _Calls, is_sample: bool) -> Iterator[_Plan]:
    first, count = calls.first, len(calls.tensors)
    yield _Plan("all tensors batched", first)
    for i in range(count) if count > 1 else ():
        yield _Plan("one tensor batched, and others not", tuple(0 if j == i else None for j in range(count)))
    mixed = tuple(-1 if i % 2 else 0 for i in range(count))
    if count > 1:
        yield _Plan("batched along different dimensions", mixed)
    if not is_sample:  # the others do not depend on what differs
        return
    yield _Plan("batched along the last dimension", (-1,) * count)
    if count > 1:
        yield _Plan("batched along different dimensions", tuple(-1 - dim for dim in mixed))
    yield _Plan("batch of one", first, size=1)
    yield _Plan("results batched along the last dimension", first, out_dim=-1)
    yield _Plan("in chunks", first, chunk=2)
    yield _Plan("two levels of vmap", first, nested=True)


def _compare_all(calls: _Calls, plans: Iterable[_Plan]) -> None:
    refusals = [_compare(calls, plan) for plan in plans]
    require(None in refusals, f"vmap of the operator refuses: {refusals[0]}")


def _compare(calls: _Calls, plan: _Plan) -> str | None:
    """Compare one batch with a loop; what vmap says if it refuses. A rule that fails by accident is a fault."""
    trial, rows = calls.trial, range(max(plan.size, 1))
    with quiet(), torch.no_grad():
        expected = []
        for values in zip(*(calls.element(row, plan.dims) for row in rows), strict=True):
            if not all(isinstance(value, torch.Tensor) and value.shape == values[0].shape for value in values):
                return "the sizes of the results differ from element to element"
            expected.append(torch.stack(values, plan.out_dim).narrow(plan.out_dim, 0, plan.size))
        try:
            with seeded((trial.args, trial.kwargs)):
                inputs = []
                for i, dim in enumerate(plan.dims):
                    elements = [calls.elements[row][i] for row in rows]
                    inputs.append(elements[0] if dim is None else torch.stack(elements, dim).narrow(dim, 0, plan.size))
                function = torch.vmap(calls, plan.dims, plan.out_dim, randomness="different", chunk_size=plan.chunk)
                if plan.nested:  # the outer level is over two equal batches, so the loop is the same
                    outer = torch.vmap(function, (0, *(None,) * (len(inputs) - 1)), randomness="different")
                    batched = [result[1] for result in outer(torch.stack([inputs[0], inputs[0]]), *inputs[1:])]
                else:
                    batched = function(*inputs)
        except Exception as error:
            has_rule = _torch.dispatcher.has_kernel(trial.name, "FuncTorchBatched")
            if not has_rule or is_derived(trial) or trial.is_builtin or is_refusal(error):
                return in_short(error, 200)
            raise failed_call(
                trial.name,
                f"the vmap rule fails: {plan.label}",
                error,
                fix="in_dims has one entry for each argument, None where it is not batched: move the batch of each to "
                "the front, and do not count it as a dimension of an element; raise NotImplementedError for what the "
                "rule does not take",
            ) from error
    scale = 0.0
    if trial.custom_op is not None and trial.custom_op._rules.vmap.registered is None:
        # Without a rule, layout and rounding are all that may differ, and results be zero by cancellation.
        scale = _largest(trial.tensors)
    _judge(trial, plan.label, batched, expected, scale=scale)
    return None


def _largest(tensors: Iterable[torch.Tensor]) -> float:
    """The largest finite number of floating point among the elements."""
    finite = [x.detach()[x.isfinite()].abs() for x in tensors if x.is_floating_point()]
    return max((float(x.max()) for x in finite if x.numel()), default=0.0)


def _judge(trial: Trial, label: str, batched: Any, looped: list[torch.Tensor], **options: float) -> None:
    found = difference(batched, looped, **options)  # type: ignore[arg-type]
    if found is not None:
        raise trial.finding(
            f"vmap gives another result than a loop: {label}",
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

    def total(*tensors: Any) -> Any:
        results = [value for value in calls(*tensors) if isinstance(value, torch.Tensor) and value.is_floating_point()]
        return sum((value.sum() for value in results), start=torch.zeros(()))

    gradient = torch.func.grad(total, wanted)
    batch = [torch.stack(tensors) for tensors in zip(*calls.elements, strict=True)]
    with quiet(), seeded((trial.args, trial.kwargs)):
        try:
            looped = [gradient(*element) for element in calls.elements]
            batched = torch.vmap(gradient, calls.first, randomness="different")(*batch)
        except Exception:
            return  # no gradient, or none for this under vmap: not a wrong one
    expected = [torch.stack(grads) for grads in zip(*looped, strict=True)]
    # A gradient may be zero by cancellation, and then is what rounding leaves of the numbers that it is made of.
    scale = max(_largest(trial.tensors), _largest(expected))
    _judge(trial, "gradients of the elements", list(batched), expected, rtol=1e-4, scale=scale)
