"""Calls like a given one: with other elements, sizes, numbers and choices.

Elements are those of the given tensors in another order, repeated where there are more. So indices stay in range, and
what has to be positive stays so. Sizes only grow, for the same reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from customops.checks._check import Effort
from customops.checks._inputs import is_plain
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


def _rows(tensor: torch.Tensor, least: int) -> torch.Tensor:
    """The rows of a tensor, where there are at least so many; else its elements.

    Where rows stay together, indices stay in range though the columns of a row mean different things.
    """
    return tensor.detach() if tensor.dim() > 1 and len(tensor) >= least else tensor.detach().reshape(-1)


def reordered(tensor: torch.Tensor, by: int) -> torch.Tensor:
    """A tensor with the same rows, each `by` places further on, and the same strides; of one row, its elements."""
    with torch.no_grad():
        return like(_rows(tensor, 2).roll(by, 0).reshape(tensor.shape), tensor)


def reordered_values(trial: Trial) -> Trial:
    """The same call with the elements of each tensor in another order."""
    return trial.map_tensors(lambda _, tensor: reordered(tensor, 1))


def resized(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of another shape with the same elements, repeated or cut, and dimensions in the same order in memory."""
    with torch.no_grad():
        flat = tensor.detach().reshape(-1)
        filled = flat[torch.arange(math.prod(shape), device=flat.device) % max(flat.numel(), 1)].reshape(shape)
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
        shapes = {id(tensor): tuple(change.get(size, size) for size in tensor.shape) for tensor in trial.tensors}
        yield trial.map_tensors(lambda _, tensor, to=shapes: resized(tensor, to[id(tensor)]))  # type: ignore[misc]


def other_values(trial: Trial) -> Trial | None:
    """The call with other values, which the operator takes; None if none were found.

    The rows of floating-point tensors are shuffled, and elements made smaller. Tensors of integers and bools are
    often indices or sizes: theirs are shuffled, where that is accepted and nothing else can change.
    """

    def shuffled(_name: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return tensor
        rows = _rows(tensor, 3)
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1)).to(tensor.device)
        return rows[order].reshape(tensor.shape)

    def scaled(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or tensor.layout is not torch.strided or tensor.is_quantized:
            return tensor
        factor = 1 - torch.rand(tensor.shape, generator=torch.Generator().manual_seed(2)) / 2
        return (shuffled(name, tensor) * factor.to(tensor.device)).to(tensor.dtype)

    for change in (scaled, shuffled):
        other = trial.map_tensors(change)
        if difference([*other.tensors], [*trial.tensors], exact=True) and attempt(other) is not None:
            return other
    return None


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
