"""test_permutations: where the order of elements has no part in a result, it has none for other sizes either.

Which dimensions are without order is learnt. A group of dimensions, of one size and at most one of each tensor, is
so if the operator, called with its elements in another order, gives the same results (a sum, a maximum) or the same
in that order (softmax), for several orders and values of the sample's size. Then the same has to hold for other sizes.

An operator may work in blocks, and has an order for all sizes beyond a block. So a size counts as wrong only if a
larger one is right, as for a kernel that forgets what is left over from whole blocks. Sums are compared in float64,
where the operator takes it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from customops.checks._inputs import tensors_in
from customops.checks._outcome import NotExercised
from customops.checks._runs import Group, Results, attempt, chosen, difference, groups_of, steady_results, words_of
from customops.checks._trial import Trial
from customops.errors import CheckError

_SIZES = (5, 8, 17, 64, 130, 256)
_MOST_ELEMENTS = 200_000
_MOST_GROUPS = 5


def check(trial: Trial) -> None:
    trial = trial.detached()
    steady_results(trial)
    wide = trial.in_float64()
    trial = wide if attempt(wide) is not None else trial
    tensors = trial.distinct
    if not all(tensor.layout is torch.strided and not tensor.is_quantized for tensor in tensors):
        raise NotExercised("an input is sparse or quantized")
    groups = itertools.islice(groups_of(tensors), _MOST_GROUPS)
    learnt = [found for group in groups if (found := _learn(trial, tensors, group)) is not None]
    if not learnt:
        raise NotExercised("no dimension of the inputs is without order")
    for symmetry in learnt:
        _check_sizes(trial, symmetry)


@dataclass
class _Symmetry:
    """Dimensions without order.

    Attributes:
        tensors: the inputs of the call.
        group: their dimensions.
        dims: by the name of a result, the dimension that has the order of the inputs; None if none has.
    """

    tensors: list[torch.Tensor]
    group: Group
    dims: dict[str, int | None] = field(default_factory=dict)

    def trial(self, trial: Trial, index: torch.Tensor, values: int) -> Trial:
        """The call for the elements at `index`; `values` says which values they have."""

        def choose(i: int, dim: int) -> torch.Tensor:
            return _pool(self.tensors[i], dim, values + i).index_select(dim, index)

        return chosen(trial, self.tensors, self.group, choose)

    def holds(self, trial: Trial, index: torch.Tensor, values: int) -> bool | None:
        """Is the result for elements in another order the one it has to be? None if the sizes are not taken."""
        first = attempt(self.trial(trial, index, values))
        if first is None:
            return None
        for shift in (1, len(index) // 2, len(index) - 2):
            order = torch.arange(len(index)).roll(shift)
            second = attempt(self.trial(trial, index[order], values))
            if second is None:
                return None
            if not all(_agrees(first[name], second[name], dim, order) for name, dim in self.dims.items()):
                return False
        return True


def _pool(tensor: torch.Tensor, dim: int, seed: int) -> torch.Tensor:
    """Many elements along a dimension: those of the sample, of floating point also scaled."""
    if not tensor.is_floating_point():
        return tensor.repeat_interleave(8, dim)
    shape = [8 * size if at == dim else size for at, size in enumerate(tensor.shape)]
    factor = 1 - torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) / 2
    return (tensor.repeat_interleave(8, dim) * factor.to(tensor.device)).to(tensor.dtype)


def _agrees(first: object, second: object, dim: int | None, order: torch.Tensor) -> bool:
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        return difference(second, first, rtol=2e-2) is None
    if dim is not None:
        if first.dim() <= dim or first.shape[dim] != len(order):
            return True  # not comparable
        first = first.index_select(dim, order.to(first.device))
    wide = first.dtype in (torch.float64, torch.complex128) or not first.is_floating_point()
    return difference(second, first, rtol=1e-5 if wide else 2e-2) is None  # float64 may be summed in float32


def _learn(trial: Trial, tensors: list[torch.Tensor], group: Group) -> _Symmetry | None:
    size = tensors[group[0][0]].shape[group[0][1]]
    symmetry = _Symmetry(tensors, group)
    for attempts in range(3):
        generator = torch.Generator().manual_seed(attempts)
        index = torch.randperm(8 * size, generator=generator)[:size]
        order = torch.arange(size).roll(1) if attempts == 0 else torch.randperm(size, generator=generator)
        first = attempt(symmetry.trial(trial, index, attempts))
        second = attempt(symmetry.trial(trial, index[order], attempts))
        if first is None or second is None or not any(tensors_in(value) for value in first.values()):
            return None
        if not symmetry.dims:
            symmetry.dims = dict(_dims(first, second, order))
        if symmetry.dims.keys() != first.keys():
            return None
        if not all(_agrees(first[name], second[name], dim, order) for name, dim in symmetry.dims.items()):
            return None
    return symmetry


def _dims(first: Results, second: Results, order: torch.Tensor) -> Iterator[tuple[str, int | None]]:
    """How each result moves with the order; a result that moves otherwise is left out."""
    for name, value in first.items():
        choices: list[int | None] = [None]
        if isinstance(value, torch.Tensor):
            choices += [dim for dim, size in enumerate(value.shape) if size == len(order)]
        found = [dim for dim in choices if _agrees(value, second[name], dim, order)]
        if found:
            yield name, found[-1]


def _check_sizes(trial: Trial, symmetry: _Symmetry) -> None:
    i, dim = symmetry.group[0]
    own = symmetry.tensors[i].shape[dim]
    wrong = None
    for size in _SIZES:
        numel = max(symmetry.tensors[j].numel() for j, _ in symmetry.group) // own * size
        if numel > _MOST_ELEMENTS:
            break
        index = torch.randint(8 * own, (size,), generator=torch.Generator().manual_seed(size))
        holds = symmetry.holds(trial, index, 0)
        if holds is False:
            wrong = wrong or size
        elif (
            holds and wrong is not None and size != own
        ):  # of an operator on blocks, rows of one block are without order
            raise _error(trial, symmetry, wrong, size)


def _error(trial: Trial, symmetry: _Symmetry, wrong: int, right: int) -> CheckError:
    arguments, dims = words_of(trial, symmetry.tensors, symmetry.group)
    return trial.fault(
        "the result depends on the order of elements for some sizes, and not for others",
        argument=arguments,
        expected=f"a result that does not depend on the order, as for size {right}",
        got=f"{dims} of size {wrong}: another result for the same elements in another order",
        fix="check how the kernel divides the elements: the rest after the last whole block, halves of an odd number",
    )
