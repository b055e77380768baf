"""test_batches: an element of a result depends on its own elements of the inputs alone.

Which dimensions are batches is learnt. A group of dimensions, of one size and at most one of each tensor, is a batch
if the operator, called with elements in another order, twice, or mixed with those of another call of the same size,
gives each the result it had. Then the same has to hold for other sizes, beside powers of two and beyond usual blocks.
An operator may depend on the size, as one that divides by it: a dimension counts only if two other sizes agree. Before
a fault is reported, it has to be a batch for values of other scales and signs, too.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, replace

import torch

from customops.checks._inputs import tensors_in
from customops.checks._outcome import require
from customops.checks._runs import Group, Results, attempt, difference, groups_of, steady_results, words_of
from customops.checks._trial import Trial
from customops.checks._variants import other_scales
from customops.checks.inputs.constants import constants_of
from customops.checks.inputs.parts import is_integer

_SIZES = (2, 3, 5, 8, 16, 33, 64, 130, 1030, 66_000)  #: the last one is beyond what 16 bits count
_MOST_ELEMENTS = 300_000
_MOST_GROUPS = 16
_MANY_DRAWS = 12
_SLOW = 0.05  #: seconds of this thread; larger sizes are left out where a call takes longer


def check(trial: Trial) -> None:
    trial = trial.detached()
    groups = list(itertools.islice(groups_of(trial), _MOST_GROUPS))
    require(groups, "no tensor has a dimension of more than one element")
    expected = steady_results(trial)
    require(any(tensor.dim() for tensor in tensors_in(list(expected.values()))), "no result has a dimension")
    learnt = [batch for group in groups if (batch := _learn(trial, group, expected)) is not None]
    require(learnt, "no dimension of the inputs is a batch of independent elements")
    tried = [_check_sizes(batch) for batch in learnt]
    for batch in learnt:
        _check_integers(batch)
    require(any(tried), "the operator does not take other sizes of its batch dimensions, or depends on them")


@dataclass(frozen=True)
class _Batch:
    """A batch dimension: elements to build batches of, and the result of each."""

    trial: Trial
    group: Group  #: the batch dimensions of its tensors, of one size
    size: int
    pools: dict[int, torch.Tensor]  #: by the number of a tensor, many elements along its batch dimension
    results: Results  #: what they gave, along the dimensions `dims`
    dims: dict[str, int]  #: by the name of a result, its batch dimension

    @property
    def count(self) -> int:
        return self.pools[self.group[0][0]].shape[self.group[0][1]]

    def call(self, index: torch.Tensor) -> Results | None:
        """The results of a call with the elements at `index`; None if the operator does not take them."""
        elements = {i: self.pools[i].index_select(dim, index.to(self.pools[i].device)) for i, dim in self.group}
        return attempt(self.trial.replaced({id(self.trial.distinct[i]): each for i, each in elements.items()}))

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


def _learn(trial: Trial, group: Group, expected: Results, draws: int = 3) -> _Batch | None:
    """The batch that a group of dimensions is, or None."""
    tensors, numbers = trial.distinct, torch.Generator().manual_seed(0)
    if not all(isinstance(value, torch.Tensor) for value in expected.values()):
        return None
    size = tensors[group[0][0]].shape[group[0][1]]
    own = _Batch(trial, group, size, {i: tensors[i] for i, _ in group}, expected, {})
    # Each element of the result may move with one dimension only: those along which it moves as the input does.
    order = torch.arange(own.size).roll(1)
    rolled = own.call(order)
    if rolled is None:
        return None
    candidates: dict[str, list[int]] = {name: [] for name in expected}
    for name, value in expected.items():
        moved = rolled[name]
        if isinstance(moved, torch.Tensor) and moved.shape == value.shape and value.layout is torch.strided:
            dims = [dim for dim, length in enumerate(value.shape) if length and length % own.size == 0]
            rows = [(dim, _rows(value, dim, order, own.size)) for dim in dims]
            candidates[name] = [dim for dim, row in rows if not difference(moved, row, rtol=_tolerance(value))]
    if not all(candidates.values()):
        return None
    others = _other_elements(own, numbers)
    if others is None:
        return None
    pools = {i: torch.cat([tensors[i], others.pools[i]], dim) for i, dim in group}
    for combination in itertools.islice(itertools.product(*candidates.values()), 4):
        found = dict(zip(candidates, combination, strict=True))
        joined = {name: torch.cat([expected[name], others.results[name]], dim) for name, dim in found.items()}
        batch = replace(own, pools=pools, results=joined, dims=found)
        for _ in range(draws):  # batches of the sample's size, of any elements, give each the result it had
            index = torch.randint(batch.count, (batch.size,), generator=numbers)
            actual = batch.call(index)
            if actual is None or batch.difference(actual, index) is not None:
                break
        else:
            return batch
    return None


def _other_elements(own: _Batch, numbers: torch.Generator) -> _Batch | None:
    """A batch of the sample's size of other elements; of the same ones in another order if need be."""
    index = torch.randperm(own.size, generator=numbers)
    moved = {i: own.pools[i].index_select(dim, index.to(own.pools[i].device)) for i, dim in own.group}

    def shuffled(tensor: torch.Tensor) -> torch.Tensor:
        """The same elements at other places; floating-point numbers also a little smaller, so that they differ."""
        order = torch.randperm(tensor.numel(), generator=numbers).to(tensor.device)
        values = tensor.reshape(-1)[order].reshape(tensor.shape)
        if not tensor.is_floating_point():
            return values
        factor = 1 - torch.rand(tensor.shape, generator=numbers) / 4
        return (values * factor.to(tensor.device, torch.float32)).to(tensor.dtype)

    for pools in ({i: shuffled(tensor) for i, tensor in moved.items()}, moved):
        i, dim = own.group[0]
        rows = pools[i].movedim(dim, 0)
        if not (rows[1:] != rows[:1]).any():
            continue  # no two elements differ
        batch = replace(own, pools=pools)
        results = batch.call(torch.arange(own.size))
        if results is not None and all(
            isinstance(x, torch.Tensor) and (x.shape, x.dtype) == (own.results[name].shape, own.results[name].dtype)
            for name, x in results.items()
        ):
            return replace(batch, results=results)
    return None


def _check_sizes(batch: _Batch) -> bool:
    """Raise CheckError for a size with other results; False if the operator depends on the size, or takes no other."""
    numbers = torch.Generator().manual_seed(1)
    most = max([batch.trial.distinct[i].numel() for i, _ in batch.group] + [x.numel() for x in batch.results.values()])
    agreeing, differing = 0, []
    for size in sorted({*_SIZES, *constants_of(batch.trial).sizes}):
        if size == batch.size or most * size // batch.size > _MOST_ELEMENTS:
            continue
        index = torch.randint(batch.count, (size,), generator=numbers)
        start = time.thread_time()
        actual = batch.call(index)
        seconds = time.thread_time() - start
        if actual is not None:
            found = batch.difference(actual, index)
            agreeing += found is None
            differing += [(size, *found)] if found and found[0] else []
        if seconds > _SLOW or (size >= 1000 and seconds > _SLOW / 10):
            break
    # Right only at the sample's size is what depends on the size.
    if differing and agreeing >= 2 and _is_believed(batch):
        (size, name, how), *_ = differing
        arguments, dims = words_of(batch.trial, batch.group)
        raise batch.trial.fault(
            "an element of a batch has another result in a batch of another size",
            argument=arguments,
            expected=f"the result it has in a batch of {batch.size}",
            got=f"{dims} of size {size}: {name}: {how}",
            fix="check how the kernel divides the elements: the rest after the last whole block, blocks of a fixed "
            "number, an index that overflows, a broadcast tensor that is indexed as if it were whole",
        )
    return agreeing >= 2


def _is_believed(batch: _Batch) -> bool:
    """Is it a batch for other values as well? Small rows may all be below a threshold, and flags have one pattern."""
    for change in other_scales(batch.trial):
        expected = attempt(change)
        if expected is not None and _learn(change, batch.group, expected, _MANY_DRAWS) is None:
            return False
    return True


def _is_shown(batch: _Batch, but: int) -> bool:
    """Do elements differ, in a result and in all tensors `but` one? Where all are equal, any dimension looks so."""

    def differs(x: torch.Tensor, dim: int) -> bool:
        first = torch.zeros(batch.count, dtype=torch.int64)
        return difference(_rows(x, dim, first, batch.count), x, exact=True) is not None

    differ = any(differs(batch.results[name], dim) for name, dim in batch.dims.items())
    return differ and all(differs(batch.pools[i], dim) for i, dim in batch.group if i != but)


def _check_integers(batch: _Batch) -> None:
    """Integers that are equal for all elements, lengths perhaps, need not be: the last element gets a smaller one."""
    tensors = batch.trial.distinct
    for i, dim in batch.group:
        integers = tensors[i]
        if not is_integer(integers) or not batch.size < int(integers.min()) == int(integers.max()):
            continue  # smaller ones may point to elements of the batch
        smaller = integers.clone()
        smaller.select(dim, -1).sub_(1)
        mixed = replace(batch, pools={**{j: tensors[j] for j, _ in batch.group}, i: smaller})
        together = mixed.call(torch.arange(batch.size))
        found = {}
        for element in (0, batch.size - 1) if together is not None else ():
            alone = mixed.call(torch.tensor([element]))
            for name, along in batch.dims.items() if alone is not None else ():
                whole, part = together[name], alone[name]  # type: ignore[index]
                if whole.shape[along] != batch.size * part.shape[along]:
                    continue
                rows = [_rows(whole, along, torch.tensor([i]), batch.size) for i in range(batch.size)]
                own = rows[element]
                differs = difference(own, part, rtol=_tolerance(part)) if own.shape == part.shape else None
                # By such integers elements may be sorted.
                if differs and all(difference(row, part, rtol=_tolerance(part)) for row in rows):
                    found[element] = f"{name}: {differs}"
        # What is counted among all elements changes both.
        if len(found) == 1 and _is_shown(batch, i) and _is_believed(batch):
            ((element, differs),) = found.items()
            label = next(label for _, label, x in batch.trial.named_tensors if x is integers)
            raise batch.trial.fault(
                "an element of a batch has another result beside elements with other integers",
                argument=label,
                expected="the result that it has alone",
                got=f"element {element}, where {label} is smaller for the last one: {differs}",
                fix="look at what is taken from the first element for all, or is largest among all",
            )
