"""test_batches: the elements of a batch have their own results, however many there are.

Which dimensions are batches is learnt. A group of dimensions, of one size and at most one of each tensor, is a batch
if the operator, called with elements in another order, twice, or mixed with those of another call of the same size,
gives each the result it had. Then the same has to hold for other sizes: what each element has to give is known from
the calls of the sample's size. Sizes lie beside powers of two and beyond usual blocks.

An operator may depend on the size, as one that divides by it: a dimension counts only if two other sizes agree.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from customops.checks._inputs import tensors_in
from customops.checks._outcome import NotExercised
from customops.checks._runs import Group, Results, attempt, chosen, difference, groups_of, steady_results, words_of
from customops.checks._trial import Trial
from customops.errors import CheckError

_SIZES = (2, 3, 5, 8, 16, 33, 64, 130, 1030)
_HUGE = 66_000  #: beyond what 16 bits count
_MOST_ELEMENTS = 300_000
_MOST_GROUPS = 16
_SLOW = 0.05  #: seconds of this thread; larger sizes are left out where a call takes longer


def check(trial: Trial) -> None:
    trial = trial.detached()
    tensors = trial.distinct
    if not all(tensor.layout is torch.strided and not tensor.is_quantized for tensor in tensors):
        raise NotExercised("an input is sparse or quantized")
    groups = list(itertools.islice(groups_of(tensors), _MOST_GROUPS))
    if not groups:
        raise NotExercised("no tensor has a dimension of more than one element")
    expected = steady_results(trial)
    if not any(tensor.dim() for tensor in tensors_in(list(expected.values()))):
        raise NotExercised("no result has a dimension")
    learnt = [batch for group in groups if (batch := _learn(trial, tensors, group, expected)) is not None]
    if not learnt:
        raise NotExercised("no dimension of the inputs is a batch of independent elements")
    tried = [_check_sizes(trial, batch) for batch in learnt]
    if not any(tried):
        raise NotExercised("the operator does not take other sizes of its batch dimensions, or depends on them")


@dataclass
class _Batch:
    """A batch dimension: elements to build batches of, and the result of each.

    Attributes:
        tensors: the inputs of the call.
        group: their batch dimensions.
        pools: by the number of a tensor, many elements along its batch dimension.
        results: what they gave, along the dimensions `dims`.
        dims: by the name of a result, its batch dimension, and how many rows of it one element makes.
    """

    tensors: list[torch.Tensor]
    group: Group
    size: int
    pools: dict[int, torch.Tensor]
    results: Results
    dims: dict[str, int]

    @property
    def count(self) -> int:
        return self.pools[self.group[0][0]].shape[self.group[0][1]]

    def trial(self, trial: Trial, index: torch.Tensor) -> Trial:
        """The call for the elements at `index`."""

        def choose(i: int, dim: int) -> torch.Tensor:
            return self.pools[i].index_select(dim, index.to(self.tensors[i].device))

        return chosen(trial, self.tensors, self.group, choose)

    def difference(self, actual: Results, index: torch.Tensor) -> tuple[str, str] | None:
        """How results differ from those of the elements at `index`; the name is empty where shapes differ."""
        for name, dim in self.dims.items():
            expected = _rows(self.results[name], dim, index, self.count)
            if not isinstance(actual[name], torch.Tensor) or actual[name].shape != expected.shape:
                return "", "the shapes differ"
            found = difference(actual[name], expected, rtol=_tolerance(expected))
            if found:
                return name, found
        return None


def _rows(results: torch.Tensor, dim: int, index: torch.Tensor, count: int) -> torch.Tensor:
    parts = results.unflatten(dim, (count, results.shape[dim] // count))
    chosen: torch.Tensor = parts.index_select(dim, index.to(results.device)).flatten(dim, dim + 1)
    return chosen


def _tolerance(tensor: torch.Tensor) -> float | None:
    """Devices may choose other algorithms for other sizes."""
    return None if tensor.device.type == "cpu" or not tensor.is_floating_point() else 1e-2


def _learn(trial: Trial, tensors: list[torch.Tensor], group: Group, expected: Results) -> _Batch | None:
    """The batch that a group of dimensions is, or None."""
    generator = torch.Generator().manual_seed(0)
    size = tensors[group[0][0]].shape[group[0][1]]
    if not all(isinstance(value, torch.Tensor) for value in expected.values()):
        return None
    own = {i: tensors[i] for i, _ in group}
    batch = _Batch(tensors, group, size, own, expected, {})
    # Each element of the result may move with one dimension only.
    order = torch.arange(size).roll(1)
    rolled = attempt(batch.trial(trial, order))
    if rolled is None:
        return None
    candidates = {name: _candidates(value, rolled[name], order, size) for name, value in expected.items()}
    if not all(candidates.values()):
        return None
    other = _other_values(trial, batch, generator)
    if other is None:
        return None
    pools, results = other
    for dims in itertools.islice(itertools.product(*candidates.values()), 4):
        found = dict(zip(candidates, dims, strict=True))
        joined = {name: torch.cat([expected[name], results[name]], dim) for name, dim in found.items()}
        both = {i: torch.cat([tensors[i], pools[i]], dim) for i, dim in group}
        batch = _Batch(tensors, group, size, both, joined, found)
        if _holds(trial, batch, generator):
            return batch
    return None


def _candidates(value: torch.Tensor, rolled: torch.Tensor, order: torch.Tensor, size: int) -> list[int]:
    """The dimensions along which a result moves as the input does."""
    if not isinstance(rolled, torch.Tensor) or rolled.shape != value.shape or value.layout is not torch.strided:
        return []
    dims = [dim for dim, length in enumerate(value.shape) if length and length % size == 0]
    return [dim for dim in dims if not difference(rolled, _rows(value, dim, order, size), rtol=_tolerance(value))]


def _other_values(
    trial: Trial, batch: _Batch, generator: torch.Generator
) -> tuple[dict[int, torch.Tensor], Results] | None:
    """Other inputs of the sample's size, and their results; the same elements in another order if need be."""
    index = torch.randperm(batch.size, generator=generator)
    moved = {i: batch.tensors[i].index_select(dim, index.to(batch.tensors[i].device)) for i, dim in batch.group}
    for pools in ({i: _shuffled(tensor, generator) for i, tensor in moved.items()}, moved):
        same = _Batch(batch.tensors, batch.group, batch.size, pools, {}, {})
        if _is_varied(same):
            results = attempt(same.trial(trial, torch.arange(batch.size)))
            if results is not None and _of_one_shape(results, batch.results):
                return pools, results
    return None


def _of_one_shape(results: Results, others: Results) -> bool:
    return all(
        isinstance(value, torch.Tensor) and value.shape == others[name].shape and value.dtype == others[name].dtype
        for name, value in results.items()
    )


def _shuffled(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The same elements at other places; floating-point numbers also a little smaller, so that they differ."""
    order = torch.randperm(tensor.numel(), generator=generator).to(tensor.device)
    values = tensor.reshape(-1)[order].reshape(tensor.shape)
    if not tensor.is_floating_point():
        return values
    factor = 1 - torch.rand(tensor.shape, generator=generator) / 4
    return (values * factor.to(tensor.device, torch.float32)).to(tensor.dtype)


def _is_varied(batch: _Batch) -> bool:
    """Are there two elements that differ?"""
    i, dim = batch.group[0]
    rows = batch.pools[i].movedim(dim, 0)
    return bool((rows[1:] != rows[:1]).any())


def _holds(trial: Trial, batch: _Batch, generator: torch.Generator) -> bool:
    """Do batches of the sample's size, of any elements, give each the result it had?"""
    for _ in range(3):
        index = torch.randint(batch.count, (batch.size,), generator=generator)
        actual = attempt(batch.trial(trial, index))
        if actual is None or batch.difference(actual, index) is not None:
            return False
    return True


def _check_sizes(trial: Trial, batch: _Batch) -> bool:
    """Raise CheckError for a size with other results; False if the operator depends on the size, or takes no other."""
    generator = torch.Generator().manual_seed(1)
    agreeing, differing = 0, []
    for size in _affordable(batch):
        index = torch.randint(batch.count, (size,), generator=generator)
        start = time.thread_time()
        actual = attempt(batch.trial(trial, index))
        seconds = time.thread_time() - start
        if actual is not None:
            found = batch.difference(actual, index)
            agreeing += found is None
            differing += [(size, found)] if found and found[0] else []
        if seconds > _SLOW or (size >= 1000 and seconds > _SLOW / 10):
            break
    # Right only at the sample's size is what depends on the size.
    if differing and agreeing >= 2:
        raise _error(trial, batch, *differing[0])
    return agreeing >= 2


def _affordable(batch: _Batch) -> Iterator[int]:
    numels = [batch.tensors[i].numel() for i, _ in batch.group] + [value.numel() for value in batch.results.values()]
    for size in (*_SIZES, _HUGE):
        if size != batch.size and max(numels) * size // batch.size <= _MOST_ELEMENTS:
            yield size


def _error(trial: Trial, batch: _Batch, size: int, found: tuple[str, str]) -> CheckError:
    arguments, dims = words_of(trial, batch.tensors, batch.group)
    return trial.fault(
        "an element of a batch has another result in a batch of another size",
        argument=arguments,
        expected=f"the result it has in a batch of {batch.size}",
        got=f"{dims} of size {size}: {found[0]}: {found[1]}",
        fix="check how the kernel divides the elements: the rest after the last whole block, blocks of a fixed "
        "number, an index that overflows, a broadcast tensor that is indexed as if it were whole",
    )
