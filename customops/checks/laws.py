"""test_batches, test_permutations, test_symmetries and test_pointwise: laws of a sample hold for other calls, too.

A law says what a change of the inputs does to the results. Which laws an operator follows is learnt from the sample,
where each has to hold for several draws. Then it has to hold for other sizes, beside powers of two and beyond usual
blocks. An operator may depend on the size, as one that divides by it, so a law counts only if other sizes follow it.
Before a fault is reported, the law has to hold for values of other scales and signs, too.
"""

from __future__ import annotations

import itertools
import math
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from customops import _torch
from customops.checks._inputs import tensors_in
from customops.checks._memory import is_dense
from customops.checks._outcome import processor_time, require
from customops.checks._runs import Results, attempt, difference, first_difference, steady_results
from customops.checks._trial import Trial
from customops.checks._variants import are_plain, is_list, other_scales, redrawn, resized
from customops.checks.inputs.constants import constants_of
from customops.checks.inputs.derive import derive
from customops.checks.inputs.parts import is_integer, variation_of
from customops.errors import CheckError


@dataclass(frozen=True)
class _Rows:
    """Dimensions of one size, at most one of each tensor of a call, along which elements are exchanged."""

    trial: Trial
    dims: Mapping[int, int]  #: the dimension of a tensor, by the number of the tensor in `Trial.distinct`

    @property
    def tensors(self) -> dict[int, torch.Tensor]:
        return {i: self.trial.distinct[i] for i in self.dims}

    @property
    def size(self) -> int:
        i = next(iter(self.dims))
        return self.trial.distinct[i].shape[self.dims[i]]

    def picked(self, tensors: Mapping[int, torch.Tensor], index: torch.Tensor) -> dict[int, torch.Tensor]:
        """Return the elements at `index` of each tensor."""
        return {i: x.index_select(self.dims[i], index.to(x.device)) for i, x in tensors.items()}

    def call(self, elements: Mapping[int, torch.Tensor]) -> Results | None:
        """Return the results of a call with other elements; None if the operator does not take them."""
        return attempt(self.trial.replaced({id(self.trial.distinct[i]): x for i, x in elements.items()}))

    def largest(self, size: int) -> int:
        """Return the number of elements of the largest tensor of another size."""
        return max(x.numel() for x in self.tensors.values()) // self.size * size

    def fault(self, problem: str, expected: str, got: str, fix: str) -> CheckError:
        """Make a finding about these dimensions, which stand for ``{dims}`` in the texts."""
        names = {id(tensor): name for name, _, tensor in self.trial.named_tensors}
        arguments = [(names[id(x)], self.dims[i]) for i, x in self.tensors.items()]
        dims = ", ".join(f"dimension {dim} of {name}" for name, dim in arguments)
        argument = ", ".join(name for name, _ in arguments)
        expected, got = (text.format(dims=dims) for text in (expected, got))
        return self.trial.fault(problem, got, fix, argument=argument, expected=expected)


def _rows_of(trial: Trial) -> Iterator[_Rows]:
    """Find groups of dimensions of one size; those of most tensors first."""
    tensors = trial.distinct
    require(all(map(is_dense, tensors)), "an input is sparse or quantized")
    for size in sorted({size for tensor in tensors for size in tensor.shape if 1 < size <= 4096}):
        choices = [[None, *(dim for dim, s in enumerate(tensor.shape) if s == size)] for tensor in tensors[:6]]
        combinations = itertools.islice(itertools.product(*choices), 256)
        groups = [{i: dim for i, dim in enumerate(dims) if dim is not None} for dims in combinations]
        for dims in itertools.islice(sorted(filter(None, groups), key=lambda dims: -len(dims)), 8):
            yield _Rows(trial, dims)


def _holds_elsewhere(rows: _Rows, learn: Callable[[_Rows], object]) -> bool:
    """Return whether a law is learnt from other values as well. Those of the sample may not show what breaks it."""
    taken = [trial for trial in other_scales(rows.trial) if attempt(trial) is not None]
    return all(learn(_Rows(trial, rows.dims)) is not None for trial in taken)


# ----------------------------------------------------------------------------------------------------------------------
# test_batches: an element of a result depends on its own elements of the inputs alone.
#
# A group of dimensions is a batch if the operator, called with elements in another order, twice, or mixed with those of
# another call of the same size, gives each the result that it had. So it has to in batches of other sizes.

_SIZES = (2, 3, 5, 8, 16, 33, 64, 130, 1030, 66_000)  #: the last one is beyond what 16 bits count
_MOST_ELEMENTS = 300_000
_MOST_GROUPS = 16
_MANY_DRAWS = 12
_SLOW = 0.05  #: seconds of this thread; larger sizes are left out where a call takes longer


def check_batches(trial: Trial) -> None:
    trial = trial.detached()
    groups = list(itertools.islice(_rows_of(trial), _MOST_GROUPS))
    require(groups, "no tensor has a dimension of more than one element")
    expected = steady_results(trial)
    require(any(tensor.dim() for tensor in tensors_in(list(expected.values()))), "no result has a dimension")
    learnt = [batch for rows in groups if (batch := _batch_of(rows, expected)) is not None]
    require(learnt, "no dimension of the inputs is a batch of independent elements")
    tried = [_check_batches_of_sizes(batch) for batch in learnt]
    for batch in learnt:
        _check_integers(batch)
    require(any(tried), "the operator does not take other sizes of its batch dimensions, or depends on them")


@dataclass(frozen=True)
class _Batch:
    """A batch dimension: elements to build batches of, and the result of each."""

    rows: _Rows
    pools: dict[int, torch.Tensor]  #: by the number of a tensor, many elements along its batch dimension
    results: Results  #: what they gave, along the dimensions `along`
    along: dict[str, int]  #: by the name of a result, its batch dimension

    @property
    def count(self) -> int:
        i, dim = next(iter(self.rows.dims.items()))
        return self.pools[i].shape[dim]

    def call(self, index: torch.Tensor) -> Results | None:
        """Return the results of a call with the elements at `index`; None if the operator does not take them."""
        return self.rows.call(self.rows.picked(self.pools, index))

    def difference(self, actual: Results, index: torch.Tensor) -> tuple[str, str] | None:
        """Return how results differ from those of the elements at `index`; the name is empty where shapes differ."""
        for name, dim in self.along.items():
            expected = _rows_at(self.results[name], dim, index, self.count)
            if not isinstance(actual[name], torch.Tensor) or actual[name].shape != expected.shape:
                return "", "the shapes differ"
            found = difference(actual[name], expected, rtol=_tolerance(expected))
            if found:
                return name, found
        return None


def _rows_at(results: torch.Tensor, dim: int, index: torch.Tensor, count: int) -> torch.Tensor:
    parts = results.unflatten(dim, (count, results.shape[dim] // count))
    chosen: torch.Tensor = parts.index_select(dim, index.to(results.device)).flatten(dim, dim + 1)
    return chosen


def _tolerance(tensor: torch.Tensor) -> float | None:
    """Return a tolerance for devices, which may choose other algorithms for other sizes."""
    return None if tensor.device.type == "cpu" or not tensor.is_floating_point() else 1e-2


def _batch_of(rows: _Rows, expected: Results | None, draws: int = 3) -> _Batch | None:
    """Return the batch that a group of dimensions is, or None."""
    numbers = torch.Generator().manual_seed(0)
    if expected is None or not all(isinstance(value, torch.Tensor) for value in expected.values()):
        return None
    own = _Batch(rows, rows.tensors, expected, {})
    # Each element of the result may move with one dimension only: those along which it moves as the input does.
    order = torch.arange(rows.size).roll(1)
    rolled = own.call(order)
    if rolled is None:
        return None
    candidates: dict[str, list[int]] = {name: [] for name in expected}
    for name, value in expected.items():
        moved = rolled[name]
        if isinstance(moved, torch.Tensor) and moved.shape == value.shape and value.layout is torch.strided:
            dims = [dim for dim, length in enumerate(value.shape) if length and length % rows.size == 0]
            pairs = [(dim, _rows_at(value, dim, order, rows.size)) for dim in dims]
            candidates[name] = [dim for dim, row in pairs if not difference(moved, row, rtol=_tolerance(value))]
    others = _other_elements(own, numbers) if all(candidates.values()) else None
    if others is None:
        return None
    pools = {i: torch.cat([x, others.pools[i]], rows.dims[i]) for i, x in rows.tensors.items()}
    for combination in itertools.islice(itertools.product(*candidates.values()), 4):
        found = dict(zip(candidates, combination, strict=True))
        joined = {name: torch.cat([expected[name], others.results[name]], dim) for name, dim in found.items()}
        batch = _Batch(rows, pools, joined, found)
        for _ in range(draws):  # batches of the sample's size, of any elements, give each the result it had
            index = torch.randint(batch.count, (rows.size,), generator=numbers)
            actual = batch.call(index)
            if actual is None or batch.difference(actual, index) is not None:
                break
        else:
            return batch
    return None


def _other_elements(own: _Batch, numbers: torch.Generator) -> _Batch | None:
    """Return a batch of the sample's size of other elements; of the same ones in another order if need be."""
    moved = own.rows.picked(own.pools, torch.randperm(own.rows.size, generator=numbers))
    for pools in ({i: redrawn(tensor, numbers) for i, tensor in moved.items()}, moved):
        i, dim = next(iter(own.rows.dims.items()))
        first = pools[i].movedim(dim, 0)
        if not (first[1:] != first[:1]).any():
            continue  # no two elements differ
        results = own.rows.call(pools)
        if results is not None and all(
            isinstance(x, torch.Tensor) and (x.shape, x.dtype) == (own.results[name].shape, own.results[name].dtype)
            for name, x in results.items()
        ):
            return replace(own, pools=pools, results=results)
    return None


def _check_batches_of_sizes(batch: _Batch) -> bool:
    """Raise CheckError for a size with other results; False if the operator depends on the size, or takes no other."""
    numbers, own = torch.Generator().manual_seed(1), batch.rows.size
    of_results = max(x.numel() for x in batch.results.values())
    agreeing, differing = 0, []
    for size in sorted({*_SIZES, *constants_of(batch.rows.trial).sizes}):
        if size == own or max(batch.rows.largest(size), of_results * size // own) > _MOST_ELEMENTS:
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
    if differing and agreeing >= 2 and _is_batch_elsewhere(batch) and not _is_beyond_number(batch, differing[0][0]):
        (size, name, how), *_ = differing
        raise batch.rows.fault(
            "an element of a batch has another result in a batch of another size",
            expected=f"the result it has in a batch of {own}",
            got=f"{{dims}} of size {size}: {name}: {how}",
            fix="check how the kernel divides the elements: the rest after the last whole block, blocks of a fixed "
            "number, an index that overflows, a broadcast tensor that is indexed as if it were whole",
        )
    return agreeing >= 2


def _is_batch_elsewhere(batch: _Batch) -> bool:
    """Return whether it is a batch for other values. Small rows may all be below a threshold; flags have a pattern."""
    return _holds_elsewhere(batch.rows, lambda rows: _batch_of(rows, attempt(rows.trial), _MANY_DRAWS))


def _is_beyond_number(batch: _Batch, size: int) -> bool:
    """Return whether a size differs because it exceeds a number that was passed, as the k of the k largest."""
    index = torch.randint(batch.count, (size,), generator=torch.Generator().manual_seed(2))
    for name, value in batch.rows.trial.arguments.items():
        if type(value) is int and batch.rows.size <= value < size:
            rows = _Rows(batch.rows.trial.with_arguments(**{name: size + 1}), batch.rows.dims)
            other = _batch_of(rows, attempt(rows.trial), _MANY_DRAWS)
            actual = None if other is None else other.call(index)
            if other is not None and actual is not None and other.difference(actual, index) is None:
                return True
    return False


def _is_shown(batch: _Batch, but: int) -> bool:
    """Return whether elements differ, in a result and in all tensors `but` one, so that a batch shows as one."""

    def differs(x: torch.Tensor, dim: int) -> bool:
        first = torch.zeros(batch.count, dtype=torch.int64)
        return difference(_rows_at(x, dim, first, batch.count), x, exact=True) is not None

    differ = any(differs(batch.results[name], dim) for name, dim in batch.along.items())
    return differ and all(differs(batch.pools[i], dim) for i, dim in batch.rows.dims.items() if i != but)


def _check_integers(batch: _Batch) -> None:
    """Give the last element a smaller integer where all have equal ones, lengths perhaps, which need not be equal."""
    size = batch.rows.size
    for i, integers in batch.rows.tensors.items():
        if not is_integer(integers) or not size < int(integers.min()) == int(integers.max()):
            continue  # smaller ones may point to elements of the batch
        smaller = integers.clone()
        smaller.select(batch.rows.dims[i], -1).sub_(1)
        mixed = replace(batch, pools=batch.rows.tensors | {i: smaller})
        together = mixed.call(torch.arange(size))
        found = {}
        for element in (0, size - 1) if together is not None else ():
            alone = mixed.call(torch.tensor([element]))
            for name, along in batch.along.items() if alone is not None else ():
                whole, part = together[name], alone[name]  # type: ignore[index]
                if whole.shape[along] != size * part.shape[along]:
                    continue
                rows = [_rows_at(whole, along, torch.tensor([i]), size) for i in range(size)]
                own = rows[element]
                differs = difference(own, part, rtol=_tolerance(part)) if own.shape == part.shape else None
                # By such integers elements may be sorted.
                if differs and all(difference(row, part, rtol=_tolerance(part)) for row in rows):
                    found[element] = f"{name}: {differs}"
        # What is counted among all elements changes both.
        if len(found) == 1 and _is_shown(batch, i) and _is_batch_elsewhere(batch):
            ((element, differs),) = found.items()
            label = next(label for _, label, x in batch.rows.trial.named_tensors if x is integers)
            raise batch.rows.trial.fault(
                "an element of a batch has another result beside elements with other integers",
                argument=label,
                expected="the result that it has alone",
                got=f"element {element}, where {label} is smaller for the last one: {differs}",
                fix="look at what is taken from the first element for all, or is largest among all",
            )


# ----------------------------------------------------------------------------------------------------------------------
# test_permutations: where the order of elements has no part in a result, it has none for other sizes either.
#
# A group of dimensions is without order if results are the same (a sum, a maximum), or the same in that order
# (softmax), for several orders and values of the sample's size. An operator that works in blocks has an order for all
# sizes beyond a block. So a size counts as wrong only if a larger one is right, as for a kernel that forgets what is
# left over from whole blocks. Sums are compared in float64, where the operator takes it.

_ORDERED_SIZES = (5, 8, 17, 64, 130, 256)
_LONG = (1030, 4100, 70_000)  #: beyond what a block, a warp's rows or 16 bits count
_MOST_ORDERED = 200_000  #: elements
_MOST_ORDERED_GROUPS = 5
_SOON = 0.01  #: seconds of this thread that a call may take, to be made with many elements


def check_permutations(trial: Trial) -> None:
    trial = trial.detached()
    expected = steady_results(trial)
    wide = trial.in_float64()
    trial = wide if attempt(wide) is not None else trial
    groups = itertools.islice((rows for rows in _rows_of(trial) if not _is_limited(rows)), _MOST_ORDERED_GROUPS)
    found = [law for rows in groups if (law := _unordered(rows)) is not None]
    require(found, "no dimension of the inputs is without order")
    for law in found:
        if (fault := law.fault(expected)) is not None and _holds_elsewhere(law.rows, _unordered):
            raise fault


def _is_limited(rows: _Rows) -> bool:
    """Return whether other integers may say which elements count. Where all of them count, there may be no order."""
    integers = [tensor for tensor in rows.trial.distinct if is_integer(tensor)]
    inside = {id(tensor) for tensor in rows.tensors.values()}
    if integers and (len(integers) < len(rows.trial.distinct) or not {id(tensor) for tensor in integers} <= inside):
        return True
    numbers = _torch.trees.tree_leaves(list(rows.trial.arguments.values()))
    return any(type(number) is int and number == rows.size for number in numbers)


def _drawn_results(
    rows: _Rows,
    index: torch.Tensor,
    values: int = 0,
    order: torch.Tensor | None = None,
    put: tuple[int, float] | None = None,
    equal_ends: bool = False,
) -> Results | None:
    """Return the results for the elements at `index`, of which there are eight for each of the sample, in an order.

    `values` says which values they have; no two of floating point are equal, but for the first and the last if
    `equal_ends`. `put`: a place, and what is there.
    """
    chosen = rows.picked(rows.tensors, index // 8)
    for i, tensor in chosen.items():  # the elements of the sample, of floating point also scaled
        dim = rows.dims[i]
        if tensor.is_floating_point():
            numbers = torch.Generator().manual_seed(values + i)
            factor = 1 - torch.rand(tensor.shape, generator=numbers, dtype=torch.float64) / 2
            if equal_ends:
                factor.select(dim, -1).copy_(factor.select(dim, 0))
            factor = factor.to(tensor.device)
            largest = float(tensor.abs().nan_to_num(0.0, posinf=0.0).max()) if tensor.numel() else 0.0
            tensor = torch.where(tensor == 0, 1e-3 * largest * (1 - factor), tensor * factor).to(tensor.dtype)
        if order is not None:
            tensor = tensor.index_select(dim, order)
        if put is not None and tensor.is_floating_point():
            tensor.select(dim, put[0]).fill_(put[1])
        chosen[i] = tensor
    found = rows.call(chosen)
    # Results without elements, as of rows that are not kept, say nothing.
    return found if found is not None and any(x.numel() for x in tensors_in([*found.values()])) else None


def _agrees(first: object, second: object, dim: int | None, order: torch.Tensor) -> bool:
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        return difference(second, first, rtol=2e-2) is None
    if dim is not None:
        if first.dim() <= dim or first.shape[dim] != len(order):
            return True  # not comparable
        first = first.index_select(dim, order.to(first.device))
    wide = first.dtype in (torch.float64, torch.complex128) or not first.is_floating_point()
    return difference(second, first, rtol=1e-5 if wide else 2e-2) is None  # float64 may be summed in float32


def _unordered(rows: _Rows) -> _Unordered | None:
    """Return what moves with the order of a group, for several orders and values; None if something else does."""
    along: dict[str, int | None] = {}
    for attempts in range(3):
        generator = torch.Generator().manual_seed(attempts)
        # Of each element there are eight, which differ in floats alone.
        index = torch.randperm(8 * rows.size, generator=generator)[: rows.size]
        if not any(tensor.is_floating_point() for tensor in rows.tensors.values()):
            index = 8 * torch.randperm(rows.size, generator=generator)
        order = torch.arange(rows.size).roll(1) if attempts == 0 else torch.randperm(rows.size, generator=generator)
        first, second = (_drawn_results(rows, index, attempts, each) for each in (None, order))
        if first is None or second is None:
            return None
        for name, value in first.items() if attempts == 0 else ():
            shape = value.shape if isinstance(value, torch.Tensor) else ()
            choices = [None, *(dim for dim, each in enumerate(shape) if each == rows.size)]
            found = [dim for dim in choices if _agrees(value, second[name], dim, order)]
            if found:
                along[name] = found[-1]
        if along.keys() != first.keys() or not _Unordered(rows, along).all_agree(first, second, order):
            return None
    return _Unordered(rows, along)


@dataclass(frozen=True)
class _Unordered:
    """Dimensions whose order has no part in the results."""

    rows: _Rows
    along: dict[str, int | None]  #: by the name of a result, the dimension that has the order; None if none has

    def fault(self, expected: Results) -> CheckError | None:
        """Return the fault that other sizes and values show, if any."""
        try:
            self._check_sizes()
            index = torch.arange(self.rows.size)
            of_values = [_drawn_results(self.rows, index, values) for values in (0, 1)]
            if None in of_values or not any(map(difference, *(each.values() for each in of_values if each))):
                return None  # it does not depend on these elements, as a gradient on what is differentiated
            if all(isinstance(value, torch.Tensor) for value in expected.values()):  # others are compared loosely
                if not self.rows.trial.scale:  # a formula for gradients need not look for NaN
                    self._check_places_of_nan()
                self._check_ends()
        except CheckError as error:
            return error
        return None

    def all_agree(self, first: Results, second: Results, order: torch.Tensor) -> bool:
        return all(_agrees(first[name], second[name], dim, order) for name, dim in self.along.items())

    def _check_sizes(self) -> None:
        own, wrong = self.rows.size, None
        for size in _ORDERED_SIZES:
            if self.rows.largest(size) > _MOST_ORDERED:
                break
            holds = self._holds(torch.randint(8 * own, (size,), generator=torch.Generator().manual_seed(size)))
            if holds is False:
                wrong = wrong or size
            elif holds and wrong is not None and size != own:  # of an op on blocks, rows of one block are without order
                raise self.rows.fault(
                    "the result depends on the order of elements for some sizes, and not for others",
                    expected=f"a result that does not depend on the order, as for size {size}",
                    got=f"{{dims}} of size {wrong}: another result for the same elements in another order",
                    fix="check how the kernel divides the elements: the rest after the last whole block, halves of an "
                    "odd number",
                )

    def _holds(self, index: torch.Tensor) -> bool | None:
        """Return whether the result for elements in another order is as it has to be; None if sizes are not taken.

        None also if it has other sizes then, as rows that are kept for their first element have: it depends on data.
        """
        first = _drawn_results(self.rows, index)
        for shift in (1, len(index) // 2, len(index) - 2):
            order = torch.arange(len(index)).roll(shift)
            second = None if first is None else _drawn_results(self.rows, index, order=order)
            if first is None or second is None or _shapes(first) != _shapes(second):
                return None
            if not self.all_agree(first, second, order):
                return False
        return True

    def _check_places_of_nan(self) -> None:
        """Compare NaN in the last place with NaN in the first."""
        size, rows = self.rows.size, self.rows
        i = next((i for i, x in rows.tensors.items() if x.is_floating_point()), None)
        if i is None or len(rows.tensors[i].unique()) < 2:  # among equal elements the order showed nowhere
            return
        place = torch.zeros(size, dtype=torch.bool)
        place[0] = True
        order = torch.arange(size).roll(-1)

        def results(where: torch.Tensor, index: torch.Tensor, value: float) -> Results | None:
            chosen = rows.picked(rows.tensors, index)
            shape = [size if dim == rows.dims[i] else 1 for dim in range(chosen[i].dim())]
            return rows.call(chosen | {i: chosen[i].masked_fill(where.view(shape).to(chosen[i].device), value)})

        nowhere = torch.zeros_like(place)
        before, after = (results(where, torch.arange(size), 0.375) for where in (nowhere, place))
        if before is None or after is None or _shapes(before) != _shapes(after):
            return
        if not self._changes_elsewhere(after, before, 0):
            return  # each has its own result, whatever stands there
        for where, value in ((nowhere, 0.0), (place, float("inf")), (place, float("nan"))):
            first, last = results(where, torch.arange(size), value), results(where[order], order, value)
            agree = (
                first is None or last is None or _shapes(first) != _shapes(last) or self.all_agree(first, last, order)
            )
            if not agree and value == value:
                return  # here the order matters; or an element has no weight, but 0 * inf
        if not agree:
            raise rows.fault(
                "the result depends on where NaN is among elements whose order does not matter",
                expected="the same result for NaN in the first and in the last place of {dims}",
                got="another one: NaN is lost in one of them",
                fix="a comparison with NaN is False: use torch.maximum, torch.clamp and the like, or test x != x",
            )

    def _check_ends(self) -> None:
        """Change the last of many elements, where the first one counts."""
        named = [size for size in constants_of(self.rows.trial).sizes if size > 256]
        has_floats = any(x.is_floating_point() for x in self.rows.tensors.values())
        for size in sorted({*_LONG, *named}) if has_floats else ():
            if self.rows.largest(size) > _MOST_ORDERED:
                break
            index = torch.arange(size) % (8 * self.rows.size)
            index[-1] = index[0]  # both are masked, or none is
            start, seen = time.thread_time(), set[int]()
            before = _drawn_results(self.rows, index, equal_ends=True)
            if time.thread_time() - start > _SOON:
                return
            for at, value in itertools.product((0, -1), (1e3, -1e3)):
                after = _drawn_results(self.rows, index, put=(at, value), equal_ends=True)
                if before is None or after is None:
                    return
                seen |= {at} if self._changes_elsewhere(after, before, at) else set()
            if seen == {0}:
                raise self.rows.fault(
                    "the last of many elements is left out",
                    expected=f"a result that depends on the last of {size} elements, as it does on the first",
                    got=f"{{dims}} of size {size}: the same result, whatever the last element is",
                    fix="check the number of blocks or threads that are launched, and loops whose number of steps is "
                    "fixed",
                )

    def _changes_elsewhere(self, results: Results, others: Results, at: int) -> bool:
        """Return whether results differ, but for those at the place itself, if they have the order of the inputs."""
        for name, dim in self.along.items():
            after, before = results[name], others[name]
            if dim is not None and after.dim() > dim and after.shape == before.shape:
                rest = slice(1, None) if at == 0 else slice(None, -1)
                after, before = (value.movedim(dim, 0)[rest] for value in (after, before))
            if difference(after, before, exact=True) is not None:
                return True
        return False


def _shapes(results: Results) -> list[torch.Size]:
    return [tensor.shape for tensor in tensors_in([*results.values()])]


# ----------------------------------------------------------------------------------------------------------------------
# test_pointwise: an op that is tagged as pointwise computes each element from the elements at its place.
#
# Compilers fuse and split such ops as they like. One element of one input is changed: results may change at the places
# to which the element is broadcast, and nowhere else.


def check_pointwise(trial: Trial) -> None:
    require(torch.Tag.pointwise in trial.op.tags and not trial.is_builtin, "the operator is not tagged as pointwise")
    require(are_plain(trial), "an input is not a plain strided tensor")
    trial = trial.detached()
    expected = steady_results(trial)
    tried = False
    for _, label, tensor in trial.named_tensors:
        for place in (0, -1) if tensor.is_floating_point() and tensor.numel() > 1 else ():
            at = torch.zeros(tensor.shape, dtype=torch.bool, device=tensor.device)
            at.view(-1)[place] = True
            changed = trial.replaced({id(tensor): tensor.where(~at, tensor * 1.5 + 1)})
            for name, after in (attempt(changed) or {}).items():
                before = expected[name]
                try:
                    others = ~at.expand(before.shape)
                except (AttributeError, RuntimeError):  # a number, or of sizes to which the input is not broadcast
                    continue
                if after.shape != before.shape:
                    continue
                tried = True
                if found := difference(after[others], before[others], exact=True):
                    raise trial.fault(
                        "the operator is tagged as pointwise, and an element of the result depends on other elements",
                        argument=label,
                        expected=f"no change of {name} beside the place of the element that was changed",
                        got=found,
                        fix="leave out torch.Tag.pointwise",
                    )
    require(tried, "no input of floating point has several elements and the sizes of a result, but for broadcast")


# ----------------------------------------------------------------------------------------------------------------------
# test_symmetries: what a change of values does to the results of a sample, it does at other sizes.
#
# Three changes of one tensor of floats are tried: a constant is added to it, it is doubled, it is negated. Where the
# results of the sample, and of two other draws of values, follow by a simple law, such as f(x + c) = f(x) for a softmax
# and f(2x) = 2 f(x) for a sum, they have to at other sizes: what the rest of a block or an idle lane adds to a result
# does not follow. A constant that leaves the results as they are does so if it is large, too: a variance that is
# computed from sums of squares, or a mask of -10,000, does not.
#
# A number of 0.0 gives nearly the results of a tiny one, and not those of None.
#
# The members of a list are such a law as well: where each has the result that it has alone, so it has in a list of 40,
# and among tensors of other sizes.

_MOST_TENSORS = 4
_MOST_CASES = 10
_SECONDS = 0.5  #: of processor time, after which no further size is tried
_LEARNT, _HOLDS, _AT_EASE = 1e-4, 2e-3, 0.05  #: relative tolerances: at the sample, at other sizes, far away
_HOLDS_IN_FLOAT64 = 2e-6
_MOST_DRAWS = 16  #: of values for the sample, from the values of a call that breaks a law
_FAR = (2.0**12, -(2.0**12), 2.0**14, -(2.0**14))  #: A float32 holds these, and in addition a number to 2**-8.


def check_symmetries(trial: Trial) -> None:
    trial = trial.detached()
    require(are_plain(trial), "an input is no plain strided tensor")
    expected = steady_results(trial)
    tried = [_check_members(trial, expected), _check_values(trial), _check_zero(trial)]
    require(any(tried), "no change of values has a simple effect on the results of the sample")


# ----------------------------------------------------------------------------------------------------------------------
# A constant added, a factor, a sign


@dataclass(frozen=True, eq=False)
class _Change:
    """A change of a tensor, and the laws by which results may follow."""

    about: str
    make: Callable[[torch.Tensor, float], torch.Tensor]  #: of a tensor, and of a constant of its size
    laws: Mapping[str, Callable[[torch.Tensor, float], torch.Tensor]]  #: by what to say of them


_SAME = "leaves it as it is"
_SHIFTS = (
    _Change(
        "adding a constant to {}",
        lambda x, c: x + c,
        {_SAME: lambda y, c: y, "adds the constant to it": lambda y, c: y + c},
    ),
    _Change(
        "subtracting a constant from {}",
        lambda x, c: x - c,
        {_SAME: lambda y, c: y, "subtracts the constant from it": lambda y, c: y - c},
    ),
)
_CHANGES = (
    *_SHIFTS,
    _Change(
        "doubling {}",
        lambda x, c: x * 2,
        {_SAME: lambda y, c: y} | {f"multiplies it by {f:g}": lambda y, c, f=f: y * f for f in (2.0, 4.0, 0.5, 0.25)},
    ),
    _Change("negating {}", lambda x, c: -x, {_SAME: lambda y, c: y, "negates it": lambda y, c: -y}),
)


#: By the change and the name of a result: the law.
_Laws = dict[tuple[_Change, str], str]


def _check_values(trial: Trial) -> bool:
    labels = [label for _, label, x in trial.named_tensors if x.dtype in (torch.float32, torch.float64) and x.numel()]
    start, tried = processor_time(), False
    learnt = {label: laws for label in dict.fromkeys(labels[:_MOST_TENSORS]) if (laws := _laws_of(trial, label))}
    agreeing = {(label, *key): [trial] for label, laws in learnt.items() for key in laws}
    broken: list[tuple[Any, Trial, str, str]] = []
    for case in itertools.islice(_other_sizes(trial), _MOST_CASES) if learnt else ():
        if processor_time() - start > _SECONDS:
            break
        for label, laws in learnt.items():
            other = _with(case.trial, label, lambda x: _drawn(x, 0))  # sums of two are exact
            for key, differs in _compare(other, label, laws, _HOLDS):
                tried = True
                if differs is None:
                    agreeing[label, *key].append(other)
                else:
                    broken.append(((label, *key), other, case.label, differs))
    for of, other, sizes, differs in broken:
        label, change, name = of
        law: _Laws = {(change, name): learnt[label][change, name]}
        if len(agreeing[of]) > 2 and _is_law_of_all(agreeing[of], other) and _is_law_of_sizes(trial, other, label, law):
            raise trial.fault(
                "what a change of values does to a result at the sample's sizes, it does not at other sizes",
                argument=label,
                expected=f"{change.about.format(label)} {learnt[label][change, name]}, as for the sample",
                got=f"{name}, {sizes}: {differs}",
                fix="check what the kernel reads for the rest of a row after the last whole block, what idle lanes "
                "start from (-inf for a maximum, and not 0), and which size it divides by",
            )
    for label, laws in learnt.items():
        _check_far(trial, label, laws)
    return tried


def _is_law_of_all(agreeing: Sequence[Trial], broken: Trial) -> bool:
    """Return whether a law that some calls follow is one of the operator, which all calls should follow.

    A middle element depends on whether there is one, so that a call with the same parities has to follow. So has one
    as large in each dimension: the windows of a pooling have one element each in small tensors. A number of windows
    that is a size of the tensor makes windows of one element, too; and windows overlap that are longer than the step
    between them. So in that call, the integers that are passed have to be smaller than the same sizes, or equal, or
    larger.
    """

    def sizes(trial: Trial) -> list[int]:
        return [size for tensor in trial.tensors for size in tensor.shape]

    def parities(trial: Trial) -> list[int]:
        return [size % 2 for size in sizes(trial)]

    def beside_numbers(trial: Trial) -> list[tuple[bool, bool]]:
        numbers = [n for n in _torch.trees.tree_leaves(list(trial.arguments.values())) if type(n) is int]
        return [(n < size, n > size) for n, size in itertools.product(numbers, sizes(trial))]

    if all(parities(each) != parities(broken) for each in agreeing):
        return False
    alike = [each for each in agreeing if beside_numbers(each) == beside_numbers(broken)]
    return any(all(map(operator.ge, sizes(each), sizes(broken))) for each in alike)


def _is_law_of_sizes(sample: Trial, broken: Trial, label: str, law: _Laws) -> bool:
    """Return whether it is the sizes of a call that break a law, and neither its values nor its number of steps.

    Beside a threshold, the sample breaks the law with the values of that call. A filter follows a law nearly after many
    steps, which float64 shows.
    """
    floats = {name: x.reshape(-1) for _, name, x in broken.named_tensors if x.is_floating_point() and x.numel()}
    for start in range(_MOST_DRAWS):
        drawn = sample
        for _, name, x in sample.named_tensors:
            if x.is_floating_point() and x.numel() and name in floats:
                places = torch.arange(start * x.numel(), (start + 1) * x.numel(), device=x.device)
                values = floats[name][places % floats[name].numel()].reshape(x.shape).to(x.dtype)
                drawn = drawn.replaced({id(x): values})
        if any(differs for _, differs in _compare(drawn, label, law, _HOLDS)):
            return False
    wide = sample.in_float64()
    compared = _compare(wide, label, law, _HOLDS_IN_FLOAT64) if attempt(wide) is not None else ()
    return not any(differs and change in _SHIFTS for (change, _), differs in compared)


def _laws_of(trial: Trial, label: str) -> _Laws:
    """Return the laws that hold for the values of the sample, for two other draws, and for other signs and sizes."""
    draws = [_with(trial, label, lambda x, seed=seed: _drawn(x, seed)) for seed in (0, 1, 2)]  # type: ignore[misc]
    results = [attempt(draw) for draw in draws]
    if any(each is None for each in results):
        return {}
    first, *others = (each or {} for each in results)
    # Where a result is the same for all draws, nothing can be learnt.
    names = [n for n, y in first.items() if _is_float(y) and any(difference(o[n], y, rtol=1e-3) for o in others)]
    # A threshold may lie beyond these values.
    others_too = [_with(draws[0], label, change) for change in (torch.neg, lambda x: x * 64, lambda x: x / 64)]
    laws: _Laws = {}
    for change, name in itertools.product(_CHANGES, names):
        for law in change.laws:
            key = (change, name)
            outcomes = [dict(_compare(draw, label, {key: law}, _LEARNT)).get(key, "not compared") for draw in draws]
            if all(differs is None for differs in outcomes):
                if all(dict(_compare(draw, label, {key: law}, _LEARNT)).get(key) is None for draw in others_too):
                    laws[key] = law
                break
            if outcomes[0] == "not compared":
                break
    # A maximum with zero follows in one direction alone.
    one_way = [key for key in laws if key[0] in _SHIFTS and not all((change, key[1]) in laws for change in _SHIFTS)]
    return {key: law for key, law in laws.items() if key not in one_way}


def _compare(trial: Trial, label: str, laws: _Laws, rtol: float) -> Iterator[tuple[tuple[_Change, str], str | None]]:
    """Yield for each law None if it holds, or how the result differs. Results that are not finite are left out."""
    tensor = _tensor(trial, label)
    if tensor is None or not tensor.numel() or not bool(tensor.isfinite().all()):
        return
    constant = 4 * _unit(tensor)
    before = attempt(trial)
    for change in dict.fromkeys(change for change, _ in laws) if before is not None else ():
        after = attempt(_with(trial, label, lambda x, change=change: change.make(x, constant)))  # type: ignore[misc]
        for (of, name), law in laws.items() if after is not None else ():
            y, z = before[name], after[name]  # type: ignore[index]
            if of is change and _is_float(y) and _is_float(z) and y.shape == z.shape and bool(y.isfinite().all()):
                right = change.laws[law](y, constant)
                # Zeros that fill up rows depend on no tensor, nor does what an op that writes leaves as it was.
                if change in _SHIFTS or name.startswith("argument "):
                    right = right.where(z != y, y)
                tolerance = rtol if change in _SHIFTS else rtol**2  # powers of two round nothing
                yield (change, name), difference(z, right, rtol=tolerance, scale=float(y.abs().max()))


def _check_far(trial: Trial, label: str, laws: _Laws) -> None:
    """Raise CheckError if a small constant leaves a result as it is, and a large one does not."""
    names = [name for (change, name), law in laws.items() if change is _SHIFTS[0] and law == _SAME]
    tensor = _tensor(trial, label)
    if not names or tensor is None or tensor.dtype is not torch.float32:
        return
    unit = _unit(tensor)
    near = _with(trial, label, lambda x: (x / unit * 64).round() / 64 * unit)
    before = attempt(near) or {}
    for far in _FAR:
        after = attempt(_with(near, label, lambda x, far=far: x + far * unit)) or {}  # type: ignore[misc]
        for name in names if before and after else ():
            y, z = before[name], after[name]
            if y.shape != z.shape or not bool(y.isfinite().all()):
                continue
            differs = difference(z, y, rtol=_AT_EASE)
            if differs:
                raise trial.fault(
                    "a result is left as it is by adding a small constant to all elements, and not by a large one",
                    argument=label,
                    expected=f"the result without {far * unit:g} added to {label}, to {_AT_EASE:.0%}",
                    got=f"{name}: {differs}",
                    fix="digits are lost in a difference, as in mean(x**2) - mean(x)**2: subtract the mean (or the "
                    "largest element) first; or a mask has a finite value, such as -10,000, in the place of -inf",
                )


def _unit(tensor: torch.Tensor) -> float:
    """Return the smallest power of two that is as large as the largest element."""
    largest = float(tensor.abs().max())
    return 2.0 ** math.ceil(math.log2(largest)) if largest > 0 and math.isfinite(largest) else 1.0


def _drawn(x: torch.Tensor, seed: int) -> torch.Tensor:
    """Put elements in another order, a little smaller; without a seed, only round them, so that sums of two are exact.

    Rounding makes no zeros: -0 is 0, and an operator need not negate its result there.
    """
    unit = _unit(x)
    x = redrawn(x, torch.Generator().manual_seed(seed)) if seed else x
    rounded = (x / unit * 1024).round()
    return rounded.where(rounded != 0, x.sign()) / 1024 * unit


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.float32, torch.float64) and value.numel() > 0


def _tensor(trial: Trial, label: str) -> torch.Tensor | None:
    return next((x for _, each, x in trial.named_tensors if each == label), None)


def _with(trial: Trial, label: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Trial:
    tensor = _tensor(trial, label)
    return trial if tensor is None else trial.replaced({id(tensor): change(tensor)})


def _other_sizes(trial: Trial) -> Iterator[Any]:
    """Find the cases with other sizes, without those that make a size of two or more smaller than two."""
    least = min((size for tensor in trial.tensors for size in tensor.shape), default=0)
    for case in derive(trial, variation_of(trial.custom_op), "normal"):
        sizes = [size for tensor in case.trial.tensors for size in tensor.shape]
        if case.kind == "size" and min(sizes, default=0) >= min(least, 2) > 0:
            yield case


def _check_zero(trial: Trial) -> bool:
    """Raise CheckError if an optional number of 0.0 has the results of None, and not those of a tiny number."""
    tried = False
    for name in [argument.name for argument in trial.schema.arguments if argument.type == "float?"]:
        values = (None, 0.0, 1e-30, 5e-31, -1.0)
        absent, zero, tiny, half, negative = (attempt(trial.with_arguments(**{name: value})) for value in values)
        if absent is None or zero is None or tiny is None or half is None:
            continue
        if negative is not None and not first_difference(absent, negative, exact=True):
            continue  # what is not positive means that it is absent, as for scales of torch's upsampling
        tried = True
        scale = max((float(y.abs().max()) for y in absent.values() if _is_float(y)), default=0.0)
        if first_difference(absent, zero, exact=True) or first_difference(half, tiny, scale=scale):
            continue
        if differs := first_difference(zero, tiny, rtol=0.01, scale=scale):
            raise trial.fault(
                "an optional number of 0.0 has the result of None",
                argument=name,
                expected=f"{name}=0.0 gives nearly what {name}=1e-30 gives",
                got=": ".join(differs),
                fix=f"test `{name} is not None`: `{name} or default` takes zero for None, too",
            )
    return tried


# ----------------------------------------------------------------------------------------------------------------------
# Members of lists


def _check_members(trial: Trial, expected: Results) -> bool:
    """Put the members of lists, each of which has its own result, into other lists."""
    lists = {name: value for name, value in trial.arguments.items() if is_list(value)}
    counts = {len(value) for value in lists.values()}
    if len(counts) != 1 or not all(is_list(value) and len(value) in counts for value in expected.values()):
        return False
    (count,) = counts
    if count < 2 or _differing_member(trial, lists, range(count)) is not None:
        return False

    def grown(i: int) -> dict[str, torch.Tensor]:
        """Return member `i` with more elements than the members before it."""
        return {
            n: resized(v[i], (*v[i].shape[:-1], v[i].shape[-1] + i)) if v[i].dim() else v[i] for n, v in lists.items()
        }

    variants: dict[str, list[dict[str, torch.Tensor]]] = {
        "tensors of different sizes": [grown(i) for i in range(count)],
        "40 tensors": [{name: value[i % count].clone() for name, value in lists.items()} for i in range(40)],
        "100 tensors": [{name: value[i % count].clone() for name, value in lists.items()} for i in range(100)],
    }
    tried = False
    for about, members in variants.items():
        others = {name: [member[name] for member in members] for name in lists}
        other = trial.with_arguments(**others)
        if attempt(other) is None:
            continue
        tried = True
        found = _differing_member(other, others, range(len(members) - 1, -1, -max(1, len(members) // 8)))
        if found is not None:
            i, differs = found
            raise trial.fault(
                "a member of a list has another result than alone, where the list is another",
                expected=f"the result of a list with this member alone, as for the {count} members of the sample",
                got=f"a list of {about}, member {i}: {differs}",
                fix="look at sizes that are taken from the first member for all, and how many a launch takes at most",
            )
    return tried


def _differing_member(
    trial: Trial, lists: Mapping[str, Sequence[torch.Tensor]], numbers: Sequence[int]
) -> tuple[int, str] | None:
    """Return the first member whose result is not the one that it has alone, and how it differs."""
    results = attempt(trial)
    for i in numbers if results is not None else ():
        alone = attempt(trial.with_arguments(**{name: [value[i]] for name, value in lists.items()}))
        for name, value in (results or {}).items():
            if alone is None or not is_list(alone[name]) or len(value) <= i:
                return i, "a list with it alone is not taken"
            if differs := difference(value[i], alone[name][0]):
                return i, differs
    return None
