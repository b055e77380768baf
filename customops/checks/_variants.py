"""Calls like a given one: with other elements, with other sizes; and what an operator makes of them.

Elements are those of the given tensors in another order, repeated where there are more. So indices stay in range, and
what has to be positive stays so. Sizes only grow, for the same reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from customops.checks._check import Effort
from customops.checks._inputs import is_plain, quiet, seeded
from customops.checks._runs import attempt, difference
from customops.checks._trial import Trial
from customops.checks.inputs.derive import derive
from customops.checks.inputs.parts import variation_of

#: Operators of torch that are about storages, or that return memory as they find it.
_ABOUT_STORAGES = ("as_strided", "resize", "set_", "empty", "storage", "alias", "_reinterpret", "lift")


def is_about_storages(trial: Trial) -> bool:
    """Is it an operator of torch that goes by more than the elements of its tensors?"""
    return trial.is_builtin and any(word in trial.name for word in _ABOUT_STORAGES)


def are_plain(trial: Trial) -> bool:
    """Are all tensors strided ones, with data in a storage, and no subclass hides them?"""
    return all(is_plain(tensor) and not tensor.is_conj() for tensor in trial.tensors)


@dataclass
class Run:
    """A call that was made on copies of a trial's tensors.

    Attributes:
        trial: the call with the copies, as they are afterwards.
        outputs: one value for each return of the schema.
        written: the arguments that the schema says are written, by name.
    """

    trial: Trial
    outputs: list[Any]
    written: dict[str, Any] = field(default_factory=dict)

    @property
    def results(self) -> list[Any]:
        """All that the call left behind."""
        return [self.outputs, list(self.written.values())]


def attempt_run(trial: Trial) -> Run | None:
    """Call the operator on copies; None if it does not accept the call."""
    try:
        return perform(trial)
    except Exception:
        return None  # a call that was made up: no finding if the operator refuses it


def perform(trial: Trial) -> Run:
    """Call the operator on copies; what it raises is raised."""
    copy = trial.copy()
    with seeded((copy.args, copy.kwargs)), quiet():
        outputs = copy.by_return(copy.op(*copy.args, **copy.kwargs))
    return Run(copy, outputs, copy.mutated)


def reordered(tensor: torch.Tensor, by: int) -> torch.Tensor:
    """A tensor with the same rows, each `by` places further on, and the same strides; of one row, its elements.

    So indices stay in range, also where the columns of a row mean different things.
    """
    with torch.no_grad():
        rows = tensor.detach() if tensor.dim() > 1 and len(tensor) > 1 else tensor.detach().reshape(-1)
        return like(rows.roll(by, 0).reshape(tensor.shape), tensor)


def reordered_values(trial: Trial, by: int = 1) -> Trial:
    """The same call with the elements of each tensor in another order."""
    return trial.map_tensors(lambda _, tensor: reordered(tensor, by))


def resized(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of another shape with the same elements, repeated or cut, and dimensions in the same order in memory."""
    with torch.no_grad():
        count = 1
        for size in shape:
            count *= size
        flat = tensor.detach().reshape(-1)
        filled = flat[torch.arange(count, device=flat.device) % max(flat.numel(), 1)].reshape(shape)
        if len(shape) != tensor.dim():
            return filled
        order = sorted(range(len(shape)), key=tensor.stride, reverse=True)
        back = [order.index(dim) for dim in range(len(shape))]
        return filled.permute(order).contiguous().permute(back)


def like(values: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """`values` with the strides of `tensor`, and as a leaf or not that requires grad like it."""
    if any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)):
        return tensor.detach()  # an expanded tensor has but one element there
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(values).requires_grad_(tensor.requires_grad)


def other_sizes(trial: Trial) -> Iterator[Trial]:
    """The same call with other sizes: all doubled, and all sizes of one value made larger by one.

    Dimensions of one size stay of one size, since an operator may need that.
    """
    if not are_plain(trial) or any(tensor.numel() == 0 for tensor in trial.tensors):
        return
    sizes = sorted({size for tensor in trial.tensors for size in tensor.shape if size > 1})
    changes = [{size: 2 * size for size in sizes}, *({size: size + 1} for size in reversed(sizes))]
    for change in changes if sizes else []:
        yield trial.map_tensors(
            lambda _, tensor, change=change: resized(  # type: ignore[misc]
                tensor, tuple(change.get(size, size) for size in tensor.shape)
            )
        )


def other_values(trial: Trial) -> Trial | None:
    """The call with other values, which the operator takes; None if none were found.

    The rows of floating-point tensors are shuffled, and elements made smaller. Tensors of integers and bools are
    often indices or sizes: theirs are shuffled, where that is accepted and nothing else can change.
    """
    for change in (_scaled, _shuffled):
        other = trial.map_tensors(change)
        if difference([*other.tensors], [*trial.tensors], exact=True) and attempt(other) is not None:
            return other
    return None


def _scaled(_name: str, tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point() or tensor.layout is not torch.strided or tensor.is_quantized:
        return tensor
    factor = 1 - torch.rand(tensor.shape, generator=torch.Generator().manual_seed(2)) / 2
    return (_shuffled(_name, tensor) * factor.to(tensor.device)).to(tensor.dtype)


def _shuffled(_name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return tensor
    with torch.no_grad():
        # Rows stay together where there are several: what stands in one may mean different things.
        rows = tensor.detach() if tensor.dim() > 1 and len(tensor) > 2 else tensor.detach().reshape(-1)
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1)).to(tensor.device)
        return rows[order].reshape(tensor.shape)


def other_numbers(trial: Trial) -> Iterator[Trial]:
    """The call with another value for one of its numbers. It need not be accepted."""
    for name, value in trial.arguments.items():
        if type(value) is float:
            yield trial.with_arguments(**{name: value * 1.5 + 0.25})
            yield trial.with_arguments(**{name: value * 0.5})
        elif type(value) is int:
            yield trial.with_arguments(**{name: value + 1})
        elif type(value) is bool:
            yield trial.with_arguments(**{name: not value})


def other_arguments(trial: Trial, effort: Effort) -> Iterator[Trial]:
    """The same tensors with other numbers and choices, and with optional arguments given or absent.

    They need not be accepted. What the author said about inputs is kept to, and defaults count as given.
    """
    for case in derive(trial, variation_of(trial.custom_op), effort):
        if case.kind in ("number", "choice", "optional"):
            yield case.trial
