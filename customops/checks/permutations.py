"""test_permutations: where the order of elements has no part in a result, it has none for other sizes either.

Which dimensions are without order is learnt: as in test_batches, but results are the same (a sum, a maximum), or the
same in that order (softmax), for several orders and values of the sample's size. Then the same has to hold for other
sizes. An operator that works in blocks has an order for all sizes beyond a block. So a size counts as wrong only if a
larger one is right, as for a kernel that forgets what is left over from whole blocks. Sums are compared in float64,
where the operator takes it. Before a fault is reported, the dimension has to be without order for values of other
scales and signs, too.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch

from customops import _torch
from customops.checks._inputs import tensors_in
from customops.checks._outcome import require
from customops.checks._runs import Group, Results, attempt, difference, groups_of, steady_results, words_of
from customops.checks._trial import Trial
from customops.checks._variants import other_scales
from customops.checks.inputs.constants import constants_of
from customops.checks.inputs.parts import is_integer
from customops.errors import CheckError

_SIZES = (5, 8, 17, 64, 130, 256)
_MOST_ELEMENTS = 200_000
_MOST_GROUPS = 5
_SLOW = 0.01  #: seconds of this thread that a call may take, to be made with many elements


#: For each result, by its name, the dimension that has the order of the inputs; None if none has.
_Dims = dict[str, int | None]


def check(trial: Trial) -> None:
    trial = trial.detached()
    expected = steady_results(trial)
    wide = trial.in_float64()
    trial = wide if attempt(wide) is not None else trial
    groups = itertools.islice((g for g in groups_of(trial) if not _is_limited(trial, g)), _MOST_GROUPS)
    found = [(group, dims) for group in groups if (dims := _learnt(trial, group)) is not None]
    require(found, "no dimension of the inputs is without order")
    for group, dims in found:
        if (fault := _judge(trial, group, dims, expected)) is not None and _is_believed(trial, group):
            raise fault


def _is_limited(trial: Trial, group: Group) -> bool:
    """Return whether other integers may say which elements count. Where all of them count, there may be no order."""
    integers = [tensor for tensor in trial.distinct if is_integer(tensor)]
    inside = {id(trial.distinct[i]) for i, _ in group}
    if integers and (len(integers) < len(trial.distinct) or not {id(tensor) for tensor in integers} <= inside):
        return True
    size = trial.distinct[group[0][0]].shape[group[0][1]]
    return any(type(n) is int and n == size for n in _torch.trees.tree_leaves(list(trial.arguments.values())))


def _judge(trial: Trial, group: Group, dims: _Dims, expected: Results) -> CheckError | None:
    """The fault that other sizes and values show of a group, if any."""
    try:
        _check_sizes(trial, group, dims)
        index = torch.arange(trial.distinct[group[0][0]].shape[group[0][1]])
        of_values = [_results(trial, group, index, values) for values in (0, 1)]
        if None in of_values or not any(map(difference, *(each.values() for each in of_values if each))):
            return None  # it does not depend on these elements, as a gradient on what is differentiated
        if all(isinstance(value, torch.Tensor) for value in expected.values()):  # others are compared loosely
            if not trial.scale:  # a formula for gradients need not look for NaN
                _check_places_of_nan(trial, group, dims)
            _check_ends(trial, group, dims)
    except CheckError as error:
        return error
    return None


def _is_believed(trial: Trial, group: Group) -> bool:
    """Is a dimension without order for other values as well? Those of the sample may not show it."""
    taken = [each for each in other_scales(trial) if attempt(each) is not None]
    return all(_learnt(each, group) is not None for each in taken)


def _results(
    trial: Trial,
    group: Group,
    index: torch.Tensor,
    values: int = 0,
    order: torch.Tensor | None = None,
    put: tuple[int, float] | None = None,
    equal_ends: bool = False,
) -> Results | None:
    """The results for the elements at `index`, of many along a group, in an order.

    `values` says which values they have; no two of floating point are equal, but for the first and the last if
    `equal_ends`. `put`: a place, and what is there.
    """
    chosen = {}
    for i, dim in group:  # the elements of the sample, of floating point also scaled
        tensor = trial.distinct[i].index_select(dim, index.to(trial.distinct[i].device) // 8)
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
        chosen[id(trial.distinct[i])] = tensor
    found = attempt(trial.replaced(chosen))
    # Results without elements, as of rows that are not kept, say nothing.
    return found if found is not None and any(x.numel() for x in tensors_in([*found.values()])) else None


def _all_agree(first: Results, second: Results, dims: _Dims, order: torch.Tensor) -> bool:
    return all(_agrees(first[name], second[name], dim, order) for name, dim in dims.items())


def _agrees(first: object, second: object, dim: int | None, order: torch.Tensor) -> bool:
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        return difference(second, first, rtol=2e-2) is None
    if dim is not None:
        if first.dim() <= dim or first.shape[dim] != len(order):
            return True  # not comparable
        first = first.index_select(dim, order.to(first.device))
    wide = first.dtype in (torch.float64, torch.complex128) or not first.is_floating_point()
    return difference(second, first, rtol=1e-5 if wide else 2e-2) is None  # float64 may be summed in float32


def _learnt(trial: Trial, group: Group) -> _Dims | None:
    """What moves with the order of a group, the same for several orders and values; None if something else does."""
    size = trial.distinct[group[0][0]].shape[group[0][1]]
    dims: _Dims = {}
    for attempts in range(3):
        generator = torch.Generator().manual_seed(attempts)
        # Of each element there are eight, which differ in floats alone.
        index = torch.randperm(8 * size, generator=generator)[:size]
        if not any(trial.distinct[i].is_floating_point() for i, _ in group):
            index = 8 * torch.randperm(size, generator=generator)
        order = torch.arange(size).roll(1) if attempts == 0 else torch.randperm(size, generator=generator)
        first, second = (_results(trial, group, index, attempts, each) for each in (None, order))
        if first is None or second is None:
            return None
        for name, value in first.items() if attempts == 0 else ():
            shape = value.shape if isinstance(value, torch.Tensor) else ()
            choices = [None, *(dim for dim, each in enumerate(shape) if each == size)]
            found = [dim for dim in choices if _agrees(value, second[name], dim, order)]
            if found:
                dims[name] = found[-1]
        if dims.keys() != first.keys() or not _all_agree(first, second, dims, order):
            return None
    return dims


def _check_sizes(trial: Trial, group: Group, of_results: _Dims) -> None:
    own = trial.distinct[group[0][0]].shape[group[0][1]]
    wrong = None
    for size in _SIZES:
        if max(trial.distinct[i].numel() for i, _ in group) // own * size > _MOST_ELEMENTS:
            break
        index = torch.randint(8 * own, (size,), generator=torch.Generator().manual_seed(size))
        holds = _holds(trial, group, of_results, index)
        if holds is False:
            wrong = wrong or size
        elif holds and wrong is not None and size != own:  # of an op on blocks, rows of one block are without order
            arguments, dims = words_of(trial, group)
            raise trial.fault(
                "the result depends on the order of elements for some sizes, and not for others",
                argument=arguments,
                expected=f"a result that does not depend on the order, as for size {size}",
                got=f"{dims} of size {wrong}: another result for the same elements in another order",
                fix="check how the kernel divides the elements: the rest after the last whole block, halves of an odd "
                "number",
            )


def _check_places_of_nan(trial: Trial, group: Group, dims: _Dims) -> None:
    """Is NaN in the last place what it is in the first?"""
    size = trial.distinct[group[0][0]].shape[group[0][1]]
    i, dim = next(((i, dim) for i, dim in group if trial.distinct[i].is_floating_point()), (None, 0))
    if i is None or len(trial.distinct[i].unique()) < 2:  # among equal elements the order showed nowhere
        return
    place = torch.zeros(size, dtype=torch.bool)
    place[0] = True
    order = torch.arange(size).roll(-1)

    def results(where: torch.Tensor, index: torch.Tensor, value: float) -> Results | None:
        chosen = {id(trial.distinct[k]): trial.distinct[k].index_select(d, index) for k, d in group}
        tensor = chosen[id(trial.distinct[i])]
        shape = [size if d == dim else 1 for d in range(tensor.dim())]
        chosen[id(trial.distinct[i])] = tensor.masked_fill(where.view(shape).to(tensor.device), value)
        return attempt(trial.replaced(chosen))

    nowhere = torch.zeros_like(place)
    before, after = (results(where, torch.arange(size), 0.375) for where in (nowhere, place))
    if before is None or after is None or _shapes(before) != _shapes(after):
        return
    if not any(_changes_elsewhere(after[name], before[name], dim, 0) for name, dim in dims.items()):
        return  # each has its own result, whatever stands there
    for where, value in ((nowhere, 0.0), (place, float("inf")), (place, float("nan"))):
        first, last = results(where, torch.arange(size), value), results(where[order], order, value)
        agree = first is None or last is None or _shapes(first) != _shapes(last) or _all_agree(first, last, dims, order)
        if not agree and value == value:
            return  # here the order matters; or an element has no weight, but 0 * inf
    if agree:
        return
    arguments, words = words_of(trial, group)
    raise trial.fault(
        "the result depends on where NaN is among elements whose order does not matter",
        argument=arguments,
        expected=f"the same result for NaN in the first and in the last place of {words}",
        got="another one: NaN is lost in one of them",
        fix="a comparison with NaN is False: use torch.maximum, torch.clamp and the like, or test x != x",
    )


#: Sizes beyond what a block, a warp's rows or 16 bits count.
_LONG = (1030, 4100, 70_000)


def _check_ends(trial: Trial, group: Group, dims: _Dims) -> None:
    """Does the last of many elements count?"""
    own = trial.distinct[group[0][0]].shape[group[0][1]]
    floats = [i for i, _ in group if trial.distinct[i].is_floating_point()]
    named = [size for size in constants_of(trial).sizes if size > 256]
    for size in sorted({*_LONG, *named}) if floats else ():
        if max(trial.distinct[i].numel() for i, _ in group) // own * size > _MOST_ELEMENTS:
            break
        index = torch.arange(size) % (8 * own)
        index[-1] = index[0]  # both are masked, or none is
        start, seen = time.thread_time(), dict[int, bool]()
        before = _results(trial, group, index, equal_ends=True)
        if time.thread_time() - start > _SLOW:
            return
        for at in (0, -1):
            for value in (1e3, -1e3):
                after = _results(trial, group, index, put=(at, value), equal_ends=True)
                if before is None or after is None:
                    return
                if any(_changes_elsewhere(after[name], before[name], dim, at) for name, dim in dims.items()):
                    seen[at] = True
        if seen.keys() == {0}:
            arguments, where = words_of(trial, group)
            raise trial.fault(
                "the last of many elements is left out",
                argument=arguments,
                expected=f"a result that depends on the last of {size} elements, as it does on the first",
                got=f"{where} of size {size}: the same result, whatever the last element is",
                fix="check the number of blocks or threads that are launched, and loops whose number of steps is fixed",
            )


def _changes_elsewhere(after: Any, before: Any, dim: int | None, at: int) -> bool:
    """Do results differ, but for those at the place itself, if they have the order of the inputs?"""
    if dim is not None and after.dim() > dim and after.shape == before.shape:
        rest = slice(1, None) if at == 0 else slice(None, -1)
        after, before = (value.movedim(dim, 0)[rest] for value in (after, before))
    return difference(after, before, exact=True) is not None


def _shapes(results: Results) -> list[torch.Size]:
    return [tensor.shape for tensor in tensors_in([*results.values()])]


def _holds(trial: Trial, group: Group, dims: _Dims, index: torch.Tensor) -> bool | None:
    """Is the result for elements in another order the one it has to be? None if the sizes are not taken.

    None also if it has other sizes then, as rows that are kept for their first element have: it depends on data.
    """
    first = _results(trial, group, index)
    for shift in (1, len(index) // 2, len(index) - 2):
        order = torch.arange(len(index)).roll(shift)
        second = None if first is None else _results(trial, group, index, order=order)
        if first is None or second is None or _shapes(first) != _shapes(second):
            return None
        if not _all_agree(first, second, dims, order):
            return False
    return True
