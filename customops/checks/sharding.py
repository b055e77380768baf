"""test_sharding: a call that is split over processes, as the op's sharding rule allows, has the results of a whole one.

The processes of a mesh are played one after the other: each gets its part of the inputs, and the parts of the results
are put together as the rule says they are placed. Replicated results have to be equal. Gradients go through DTensor, by
ranks that torch simulates in this process, where it can.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from customops import _torch
from customops._places import where
from customops._rules.sharding import ShardedCall, ShardingRule, Strategy
from customops.checks._inputs import quiet, tensors_in
from customops.checks._memory import is_dense
from customops.checks._outcome import NotExercised, in_short, require
from customops.checks._runs import difference, results_of, steady_results
from customops.checks._trial import Trial

#: Meshes, and of how many placements on them gradients are looked at.
_MESHES = {(2,): 3, (3,): 0, (2, 2): 1}
_MOST_PLACEMENTS = 24  #: on each mesh
_FIX = "list in the rule only placements for which the kernel, called with parts of the inputs, returns these parts"


def check(trial: Trial) -> None:
    rule: Any = None if trial.custom_op is None else trial.custom_op._rules._others.get(ShardingRule)
    require(rule is not None and rule.values, "the operator has no sharding rule")
    require(all(map(is_dense, trial.tensors)) and trial.tensors, "an input is no dense tensor, or there is none")
    trial = trial.detached()
    expected = steady_results(trial)
    tried, problem = 0, None
    for shape, gradients in _MESHES.items():
        sharded = _Sharded(trial, rule, shape)
        for i, combination in enumerate(sharded.combinations):
            sharded.compare(combination, expected)
            if i < gradients:
                problem = sharded.compare_gradients(combination) or problem
            tried += 1
    require(tried, "the rule splits no dimension of these inputs")
    require(problem is None, f"the calls are right; gradients could not be compared: {problem}")


class _Sharded:
    """The calls of an operator on a mesh."""

    def __init__(self, trial: Trial, rule: Any, shape: tuple[int, ...]) -> None:
        self.trial, self.rule, self.shape = trial, rule.values[None], shape
        self.ranks = list(itertools.product(*map(range, shape)))  # coordinates, in the order of ranks
        mesh = _torch.distributed.simulated_mesh(trial.tensors[0].device.type, shape)
        same = [_torch.distributed.public().Replicate()] * len(shape)
        placed = trial.map_tensors(lambda _name, tensor: _torch.distributed.placed(mesh, tensor, tensor, same))
        self.call = ShardedCall(trial.custom_op._definition, placed.args, placed.kwargs)
        order = {id(each): tensor for each, tensor in zip(placed.tensors, trial.tensors, strict=True)}
        self.tensors = [order[id(each)] for each in self.call.given]
        whole = rule.whole_results(self.call)
        combinations = itertools.product(self.rule.strategies(self.call, whole), repeat=len(shape))
        self.combinations = list(itertools.islice(filter(self._applies, combinations), _MOST_PLACEMENTS))

    def _applies(self, combination: Sequence[Strategy]) -> bool:
        """Is something split, and each part not empty, and partial in one way?"""
        is_split = False
        for i, tensor in enumerate(self.tensors):
            placed = [each.tensors[i] for each in combination]
            is_split |= any(not each.is_replicate() for each in placed)
            kinds = {each.reduce_op for each in placed if each.is_partial()}
            if len(kinds) > 1 or (kinds and not tensor.is_floating_point()):
                return False
            if any(not part.numel() for part in self._parts(i, tensor, placed)) and tensor.numel():
                return False
        return is_split

    def _parts(self, i: int, tensor: torch.Tensor, placed: Sequence[Any]) -> list[torch.Tensor]:
        """What each process has of a tensor."""
        parts = [tensor]
        for placement, size in zip(placed, self.shape, strict=True):
            parts = [each for part in parts for each in _split(part, placement, size, i)]
        return parts

    def _inputs(self, combination: Sequence[Strategy]) -> list[list[torch.Tensor]]:
        """The parts of each tensor."""
        placed = [[each.tensors[i] for each in combination] for i in range(len(self.tensors))]
        return [self._parts(i, *pair) for i, pair in enumerate(zip(self.tensors, placed, strict=True))]

    def compare(self, combination: Sequence[Strategy], expected: dict[str, Any]) -> None:
        inputs, results = self._inputs(combination), []
        for rank in range(len(self.ranks)):
            args, kwargs = self.call.with_tensors([parts[rank] for parts in inputs])
            try:
                results.append(results_of(replace(self.trial, args=args, kwargs=kwargs)))
            except Exception as error:
                raise self._fault(combination, f"process {rank} raises {in_short(error)}") from error
        placed = self._placements(combination)
        for name, value in expected.items():
            got = [each[name] for each in results]
            problem = self._put_together(got, value, placed[name])
            if problem:
                raise self._fault(combination, f"{name}: {problem}")

    def _placements(self, combination: Sequence[Strategy]) -> dict[str, list[Any]]:
        """The placements of each result, by its name."""
        returns = range(len(self.call.operator.schema.returns))
        named = ["the output"] if len(returns) == 1 else [f"output {i}" for i in returns]
        found = {name: [each.results[i] for each in combination] for i, name in enumerate(named)}
        for argument in self.call.arguments:
            own = [i for i, other in enumerate(self.call.arguments) if other is argument]
            is_list = isinstance(self.trial.arguments.get(argument.name), list | tuple)
            found[f"argument {argument.name} after the call"] = [
                [each.tensors[i] for i in own] if is_list else each.tensors[own[0]] for each in combination
            ]
        return found

    def _put_together(self, values: list[Any], expected: Any, placed: list[Any]) -> str | None:
        """What is wrong with the results of all processes."""
        if isinstance(expected, (list, tuple)):
            if any(len(value) != len(expected) for value in values):
                return f"lists of {sorted({len(value) for value in values})} and not {len(expected)}"
            for i, each in enumerate(expected):
                of_item = [of[i] if isinstance(of, list) else of for of in placed]
                found = self._put_together([value[i] for value in values], each, of_item)
                if found:
                    return f"item {i}: {found}"
            return None
        if not isinstance(expected, torch.Tensor):
            return next(filter(None, (difference(value, expected) for value in values)), None)
        for placement, size in reversed(list(zip(placed, self.shape, strict=True))):
            groups = [values[i : i + size] for i in range(0, len(values), size)]
            values = []
            for group in groups:
                whole, problem = _joined(group, placement, self.trial.rtol)
                if problem:
                    return problem
                values.append(whole)
        return difference(values[0], expected, rtol=self.trial.rtol, scale=1.0)

    def compare_gradients(self, combination: Sequence[Strategy]) -> str | None:
        """Of results that are weighted with random numbers, the gradients through DTensor against the plain ones.

        Returns why they cannot be compared, if the op has some.
        """
        schema, op = self.call.operator.schema, self.trial.op
        wanted = [i for i, each in enumerate(self.tensors) if each.is_floating_point()]
        has_backward = "backward" in self.trial.custom_op._rules.autograd.formulas
        is_simple = has_backward and not schema.mutated and not schema.is_view and wanted
        if not is_simple:
            return None
        if not _torch.distributed.ranks_can_be_simulated():
            return "there is a process group already, or torch has no LocalTensorMode"
        leaves = [each.detach().clone().requires_grad_(i in wanted) for i, each in enumerate(self.tensors)]
        try:
            args, kwargs = self.call.with_tensors(leaves)
            outputs = tensors_in(op(*args, **kwargs))
            weights = [_numbers(each, i) for i, each in enumerate(outputs)]  # outside of ranks, each with its own
            expected = _gradients(outputs, weights, [leaves[i] for i in wanted])
        except Exception:  # test_gradients says so
            return None
        inputs, device = self._inputs(combination), self.tensors[0].device.type
        with quiet(), _torch.distributed.simulated_ranks(device, self.shape) as mesh:
            distributed = []
            for i, parts in enumerate(inputs):
                local = _torch.distributed.rank_tensor([part.detach().clone() for part in parts])
                placements = [each.tensors[i] for each in combination]
                dtensor = _torch.distributed.placed(mesh, local, self.tensors[i], placements)
                distributed.append(dtensor.requires_grad_(i in wanted))
            try:
                args, kwargs = self.call.with_tensors(distributed)
                found = _gradients(tensors_in(op(*args, **kwargs)), weights, [distributed[i] for i in wanted])
            except Exception as error:  # DTensor has no rule for an op in the formula, say
                return in_short(error, 200)
            for i, got, value in zip(wanted, found, expected, strict=True):
                problem = None if got is None else difference(got, value, rtol=self.trial.rtol, scale=1.0)
                if problem or (got is None) != (value is None):
                    raise self._fault(combination, f"the gradient of {self.call.names[i]}: {problem or 'None'}")
        return None

    def _fault(self, combination: Sequence[Strategy], got: str) -> Exception:
        size = "x".join(map(str, self.shape))
        pairs = zip(self.call.names, zip(*(each.tensors for each in combination), strict=True), strict=True)
        inputs = ", ".join(f"{name} {_words(placed)}" for name, placed in pairs)
        results = ", ".join(_words(placed) for placed in zip(*(each.results for each in combination), strict=True))
        return self.trial.finding(
            "the sharding rule is wrong: split over processes, a call has another result",
            expected=f"on a mesh of {size}: {inputs} -> {results or 'no results'}",
            got=got,
            where=where(self.rule.fn),
            fix=_FIX,
        )


def _words(placed: Sequence[Any]) -> str:
    return " and ".join(str(each) for each in placed)


def _split(tensor: torch.Tensor, placement: Any, size: int, seed: int) -> list[torch.Tensor]:
    """The parts of a tensor along one dimension of a mesh."""
    parts = _torch.distributed.shards(tensor, placement, size)
    if parts is not None:
        return [part.clone() for part in parts]
    if not placement.is_partial():
        return [tensor] * size
    numbers = _numbers(tensor, seed)
    if placement.reduce_op in ("sum", "avg"):
        factor = 1 if placement.reduce_op == "sum" else size
        return [tensor * factor - numbers * (size - 1), *[numbers] * (size - 1)]
    further = -numbers if placement.reduce_op == "max" else numbers
    return [tensor + further * (numbers > 0.5), *[tensor + further * (numbers <= 0.5)] * (size - 1)]


def _numbers(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Random numbers of the shape, dtype and device of a tensor."""
    return torch.rand(tensor.shape, generator=torch.Generator().manual_seed(seed)).to(tensor)


def _joined(values: list[Any], placement: Any, rtol: float | None) -> tuple[Any, str | None]:
    """The whole of which these are the parts along one dimension of a mesh; or why they are none."""
    try:
        whole = _torch.distributed.joined(values, placement)
    except (RuntimeError, IndexError):
        return None, f"shapes {[tuple(each.shape) for each in values]}, to be joined in dimension {placement.dim}"
    if whole is not None:
        return whole, None
    differs = next(filter(None, (difference(each, values[0], rtol=rtol, scale=1.0) for each in values[1:])), None)
    if not placement.is_partial():
        return values[0], differs and f"it is said to be replicated, and differs between processes: {differs}"
    if len({each.shape for each in values}) > 1:
        return None, f"shapes {[tuple(each.shape) for each in values]}, to be reduced"
    stacked, way = torch.stack(values), placement.reduce_op
    if way in ("sum", "avg"):
        return (stacked.sum(0) if way == "sum" else stacked.mean(0)).to(values[0].dtype), None
    if way in ("product", "max", "min"):
        reduce: Any = {"product": torch.prod, "max": torch.amax, "min": torch.amin}[way]
        return reduce(stacked, 0), None
    raise NotExercised(f"it is not known how to reduce {placement}")


def _gradients(outputs: list[torch.Tensor], weights: list[torch.Tensor], leaves: list[Any]) -> list[Any]:
    """The gradients of the sum of the elements of all outputs, each times its weight."""
    pairs = [pair for pair in zip(outputs, weights, strict=True) if pair[0].requires_grad]
    total = sum((_torch.distributed.full(output) * weight).sum() for output, weight in pairs)
    found = torch.autograd.grad([total], leaves, allow_unused=True)
    return [None if each is None else _torch.distributed.whole_of(each) for each in found]
